#!/bin/sh
# run.sh [PACKAGE|newest|sockets|large|dax_kmem|cxl|rack|rack:newest|kv|kv:KILLS]...: boots each kernel in QEMU with a fast node and a slow node without CPUs, and
# runs the scenario in it. With `sockets`, kernel 6.12 has two sockets with such a pair of nodes each. With `large`, it has 5 GB, and a
# service of 3 GB. With `dax_kmem`, kernel 6.1 brings the slow node online from an nvdimm. With `cxl`, kernel 6.12 does from a CXL Type-3
# device, which then reports poison; QEMU comes from the distribution's backports. With `rack`, boots two of kernel 6.12 on one memory
# device, and runs the pool's story between them: on an nvdimm, then once more on a CXL Type-3 device; with `rack:PACKAGE`, two of that
# kernel. With `kv`, kills 20 processes that share a cache of blocks between two of kernel 6.12, and twice one of the kernels; with
# `kv:KILLS`, so many and a tenth. Guests' logs stay in out/lab. Goes on after a guest that fails or says nothing, ends with a table, and
# with an error where one failed.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"
say() { printf 'lab: %s\n' "$*" >&2; }

missing=""
for tool in qemu-system-x86_64:qemu-system-x86 cpio:cpio zstd:zstd; do
    command -v "${tool%%:*}" >/dev/null || missing="$missing ${tool#*:}"
done
if [ -n "$missing" ]; then
    say "installing$missing"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
        { say "this needs root. Ask for: apt-get install$missing"; exit 1; }
fi

scripts/dev.sh
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# Also by Ctrl-C: a signal alone would end the script without the trap before.
trap 'exit 130' INT
trap 'exit 143' TERM HUP
polder=${POLDER:-.venv/bin/polder}

# put FOLDER PROGRAM...: the libraries that programs are linked to go to the paths where they look for them.
put() {
    folder=$1; shift
    for library in $(ldd "$@" | grep -o '/[^ ]*' | grep -v ':$' | sort -u); do
        mkdir -p "$folder$(dirname "$library")"
        cp -L "$library" "$folder$library"
    done
}
pack() { (cd "$1" && find . | cpio -o -H newc --quiet | gzip -1); }

mkdir -p "$root/guest/bin" out/lab
cp .cache/dev/bin/polder-guest "$root/guest/init"
cp "$polder" "$root/guest/bin/polder"
cp .cache/dev/polder-dev "$root/guest/bin"
put "$root/guest" "$root/guest/init" "$root/guest/bin/polder" "$root/guest/bin/polder-dev"
pack "$root/guest" >"$root/initrd.gz"

# Programs and drivers that bring up memory devices: busybox, ndctl with its libraries.
tools() {
    tools=.cache/lab/tools
    if [ ! -e "$tools/.ready" ]; then
        say "fetching busybox-static, and ndctl with its libraries"
        rm -rf "$tools" && mkdir -p "$tools"
        needs=$(apt-cache depends --recurse --no-suggests --no-recommends --no-conflicts --no-breaks --no-replaces --no-enhances ndctl |
            grep -E '^lib(daxctl|iniparser|json-c|keyutils|kmod|ndctl|udev|uuid)[0-9]+$')
        (cd "$tools" && apt-get download -qq busybox-static ndctl $needs 2>/dev/null &&
            for package in ./*.deb; do dpkg -x "$package" .; done && rm ./*.deb && : >.ready)
    fi
    mkdir -p "$1/bin" "$1/lib/x86_64-linux-gnu"
    cp "$tools/bin/busybox" "$tools/usr/bin/ndctl" "$1/bin"
    # Their libraries, the unpacked ones and those of this machine, to where the guest looks.
    found=$tools/usr/lib/x86_64-linux-gnu:$tools/lib/x86_64-linux-gnu
    for library in $(LD_LIBRARY_PATH=$found ldd "$1/bin/ndctl" | awk '$2 == "=>" {print $3}' | sort -u); do
        cp -L "$library" "$1/lib/x86_64-linux-gnu"
    done
}

# rack PACKAGE: what a rack has more: a shell, drivers, and where MPICH is installed an MPI program.
rack() {
    kernel=.cache/lab/$1
    say "a rack of two kernels $(lab/kernel.sh "$1" "$kernel" drivers)"
    rm -rf "$root/rack" && tools "$root/rack"
    bin=$root/rack/bin
    # Its hosts also play with an emulated cache each, for which the command and the provider need instruments.
    cp .cache/dev/bin/polder "$bin"
    for name in sh cat rm ip; do ln -s busybox "$bin/$name"; done
    cp -r "$kernel/drivers" "$root/rack/drivers"
    arguments=""
    if [ "${part%%:*}" = kv ]; then
        : # It runs no MPI program.
    elif [ -x .cache/mpich/bin/mpiexec ]; then
        arguments="--mpi"
        .cache/mpich/bin/mpicc examples/hello.c -o "$bin/hello"
        cp .cache/mpich/bin/mpiexec .cache/mpich/bin/hydra_pmi_proxy "$bin"
        # Programs find their libraries by the paths that they have here.
        case $PWD in /tmp/* | /run/*) say "a guest hides the libraries of MPI under ${PWD%"${PWD#/*/}"}: clone Polder to another folder"; exit 1 ;; esac
        mkdir -p "$root/rack/lib"
        cp -r .cache/dev/lib/libfabric .cache/dev/lib/polder "$root/rack/lib"
        put "$root/rack" "$bin/hello" "$bin/mpiexec" "$bin/hydra_pmi_proxy" "$root/rack/lib/libfabric/libpolder-fi.so"
        printf '#!/bin/sh\nexec /init rsh "$@"\n' >"$bin/rsh"
        chmod +x "$bin/rsh"
    else
        say "the rack runs no MPI program, because MPICH is not installed: make mpi"
    fi
    { cat "$root/initrd.gz"; pack "$root/rack"; } >"$root/rack.gz"
    # On another kernel than 6.12 without what is the pool's alone: kills, and all flushes but one.
    options=""
    case $part in
        rack) ;;
        kv:*) options="--what kv --kills ${part#kv:} --kernel-kills $((${part#kv:} / 10))"; RACK_DEVICES=nvdimm ;;
        kv) options="--what kv --kills 20 --kernel-kills 2"; RACK_DEVICES=nvdimm ;;
        *) options="--kills 0 --kernel-kills 0 --flushes 1" ;;
    esac
    logs=out/lab/$part
    rm -rf "$logs" && mkdir "$logs"
    for device in ${RACK_DEVICES:-nvdimm cxl}; do
        # RACK has options for it, such as --flushes 1. The story is told in full on the first device.
        rm -f "$root/failed"
        { .cache/dev/bin/polder-rack --device "$device" --logs "$logs" "$kernel/vmlinux" "$root/rack.gz" $arguments ${RACK:-$options} ||
            : >"$root/failed"; } | tee "$logs/$device.checks"
        [ ! -e "$root/failed" ] || { say "FAILED on the rack; its hosts' logs are $logs/${device}0.log and $logs/${device}1.log"; exit 1; }
    done
}

# boot NAME SECONDS QEMU...: boots a guest, and shows what its scenario says.
boot() {
    name=$1; seconds=$2; qemu=$3; shift 3
    log=out/lab/$name.log
    # no_timer_check: on a busy machine an emulated timer may miss the ticks that the kernel waits for, and the kernel panics.
    # --foreground: else Ctrl-C does not come to the guest.
    timeout --foreground -k 5 "$seconds" "$qemu" -nodefaults -nographic -serial stdio -no-reboot "$@" </dev/null >"$log" 2>&1 || {
        status=$?
        case $status in
            124 | 137) say "the guest $name was ended after $seconds s" ;;
            *) say "$qemu ended with $status" ;;
        esac
    }
    tr -d '\r' <"$log" | sed -n 's/.*\(lab: kernel\)/\1/;/^lab: kernel/,$p'
    grep -q '^lab: [0-9]* checks passed' "$log" || { say "FAILED on $name; the guest's log is $log"; return 1; }
}

# pair NAME SECONDS MEMORY FAST SLOW KERNEL WORD...: boots with a fast node and a slow one that the firmware's tables tell of.
pair() {
    name=$1; seconds=$2; memory=$3; fast=$4; slow=$5; kernel=$6; shift 6
    boot "$name" "$seconds" qemu-system-x86_64 -accel tcg -M q35,hmat=on -cpu max -smp 2 -m "$memory" \
        -object memory-backend-ram,id=m0,size="$fast" -object memory-backend-ram,id=m1,size="$slow" \
        -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,initiator=0 \
        -numa dist,src=0,dst=1,val=20 -numa dist,src=1,dst=0,val=20 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=10 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=50 \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=5G \
        -kernel "$kernel/vmlinux" -initrd "$root/initrd.gz" -append "console=ttyS0 panic=-1 quiet psi=1 no_timer_check $*"
}

# A slow node that the firmware's tables tell of. 6.1 makes one tier of both nodes, and is refused.
tiers() {
    kernel=.cache/lab/$1
    say "kernel $(lab/kernel.sh "$1" "$kernel")"
    pair "$1" 600 768M 512M 256M "$kernel"
}

# A service of 3 GB, which the agent's default settings bring to its share. It has this machine fill 4 GB, so that it is run by name.
large() {
    kernel=.cache/lab/linux-image-6.12-amd64
    say "a service of 3 GB, kernel $(lab/kernel.sh linux-image-6.12-amd64 "$kernel")"
    pair large 900 5120M 3712M 1408M "$kernel" large=1
}

# Two sockets, each with a fast and a slow node. The first has more memory.
sockets() {
    kernel=.cache/lab/linux-image-6.12-amd64
    say "two sockets and four nodes, kernel $(lab/kernel.sh linux-image-6.12-amd64 "$kernel")"
    set -- -numa dist,src=0,dst=1,val=21 -numa dist,src=1,dst=0,val=21 -numa dist,src=2,dst=3,val=40 -numa dist,src=3,dst=2,val=40
    for socket in 0 1; do
        other=$((1 - socket))
        for near in "$socket $((socket + 2)) 17" "$socket $((other + 2)) 30"; do
            from=${near%% *}; to=${near#* }; to=${to%% *}; far=${near##* }
            set -- "$@" -numa "dist,src=$from,dst=$to,val=$far" -numa "dist,src=$to,dst=$from,val=$far"
        done
        for target in "$socket 10 20G" "$((socket + 2)) 50 5G"; do
            of="hmat-lb,initiator=$socket,target=${target%% *},hierarchy=memory"
            latency=${target#* }; latency=${latency% *}
            set -- "$@" -numa "$of,data-type=access-latency,latency=$latency" -numa "$of,data-type=access-bandwidth,bandwidth=${target##* }"
        done
    done
    boot sockets 600 qemu-system-x86_64 -accel tcg -M q35,hmat=on -cpu max -smp 4,sockets=2,cores=2,threads=1 -m 1024M \
        -object memory-backend-ram,id=m0,size=448M -object memory-backend-ram,id=m1,size=256M \
        -object memory-backend-ram,id=m2,size=160M -object memory-backend-ram,id=m3,size=160M \
        -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,cpus=2-3 \
        -numa node,nodeid=2,memdev=m2,initiator=0 -numa node,nodeid=3,memdev=m3,initiator=1 "$@" \
        -kernel "$kernel/vmlinux" -initrd "$root/initrd.gz" -append "console=ttyS0 panic=-1 quiet psi=1 no_timer_check sockets=2"
}

# drivers KERNEL: the first file system of a guest that brings up its slow memory itself.
drivers() {
    rm -rf "$root/drivers"
    tools "$root/drivers"
    ln -s busybox "$root/drivers/bin/sh"
    cp -r "$1/drivers" "$root/drivers/drivers"
    { cat "$root/initrd.gz"; pack "$root/drivers"; } >"$root/drivers.gz"
}

dax_kmem() {
    kernel=.cache/lab/linux-image-amd64
    say "slow memory through dax_kmem, kernel $(lab/kernel.sh linux-image-amd64 "$kernel" drivers)"
    drivers "$kernel"
    boot dax_kmem 600 qemu-system-x86_64 -accel tcg -M q35,nvdimm=on -cpu max -smp 2 -m 576M,slots=1,maxmem=2G \
        -object memory-backend-ram,id=m0,size=576M -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1 \
        -object memory-backend-ram,id=m1,size=384M -device nvdimm,id=slow,memdev=m1,node=1 \
        -kernel "$kernel/vmlinux" -initrd "$root/drivers.gz" -append "console=ttyS0 panic=-1 quiet psi=1 no_timer_check slow=nvdimm"
}

# The second serial line leads to QEMU's monitor, by which the guest has its device report poison.
cxl() {
    kernel=.cache/lab/linux-image-6.12-amd64
    qemu=$(lab/qemu.sh .cache/lab/qemu)
    say "slow memory on a CXL Type-3 device, kernel $(lab/kernel.sh linux-image-6.12-amd64 "$kernel" drivers), $("$qemu" --version | head -1)"
    drivers "$kernel"
    boot cxl 1800 "$qemu" -accel tcg -M q35,cxl=on -cpu max,hypervisor=off -smp 2 -m 640M \
        -object memory-backend-ram,id=m0,size=640M -numa node,nodeid=0,memdev=m0,cpus=0-1 \
        -object memory-backend-ram,id=m1,size=256M \
        -device pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1 -device cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2 \
        -device cxl-rp,port=1,bus=cxl.1,id=rp1,chassis=0,slot=3 -device cxl-type3,bus=rp0,volatile-memdev=m1,id=cxl0,sn=0x1 \
        -M cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G \
        -chardev "socket,id=monitor,path=$root/monitor,server=on,wait=off" -mon chardev=monitor,mode=control \
        -chardev "socket,id=line,path=$root/monitor" -serial chardev:line \
        -kernel "$kernel/vmlinux" -initrd "$root/drivers.gz" -append "console=ttyS0 panic=-1 quiet psi=1 no_timer_check slow=cxl"
}

[ $# -gt 0 ] || set -- linux-image-6.12-amd64 linux-image-amd64 sockets kv
ends=0
for part in "$@"; do
    rm -rf "out/lab/$part.log" "out/lab/$part"
    begin=$(date +%s)
    case $part in
        sockets | large | dax_kmem | cxl) run=$part ;;
        rack | kv | kv:*) run="rack linux-image-6.12-amd64" ;;
        rack:*) run="rack ${part#rack:}" ;;
        *) run="tiers $part" ;;
    esac
    # Not as a condition: there a command that fails would not end it.
    set +e
    (set -e; $run)
    [ $? = 0 ] && outcome=passed || { outcome=FAILED; ends=1; }
    set -e
    checks=$(cat "out/lab/$part.log" "out/lab/$part"/*.checks 2>/dev/null | tr -d '\r' |
        sed -n 's/^lab: \([0-9]*\) checks passed.*/\1/p' | paste -sd+ -)
    printf '%-24s %8s %6s s  %s\n' "$part" "${checks:-0}" "$(($(date +%s) - begin))" "$outcome" >>"$root/table"
done
printf '%-24s %8s %8s\n' part checks time && cat "$root/table"
exit $ends
