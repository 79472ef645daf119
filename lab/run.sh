#!/bin/sh
# run.sh [PACKAGE...|newest] [rack]: boots each kernel in QEMU with a fast node and a slow node without CPUs, and runs the
# scenario in it. With `rack`, boots two of kernel 6.12 on one memory device, and runs the pool's story between them: on an
# nvdimm, then once more on a CXL Type-3 device. Guests' logs stay in out/lab. Ends with an error when a check fails, or when
# a guest says nothing.
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

cargo build --quiet --release -p polder-lab
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
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

mkdir -p "$root/guest/bin" "$root/rack/bin" out/lab
cp target/release/polder-guest "$root/guest/init"
cp "$polder" "$root/guest/bin/polder"
put "$root/guest" "$root/guest/init" "$root/guest/bin/polder"
pack "$root/guest" >"$root/initrd.gz"

# What a rack has more: a shell, drivers, and where MPICH is installed an MPI program.
rack() {
    kernel=.cache/lab/linux-image-6.12-amd64
    say "a rack of two kernels $(lab/kernel.sh linux-image-6.12-amd64 "$kernel")"
    tools=.cache/lab/tools
    if [ ! -e "$tools/.ready" ]; then
        say "fetching busybox-static, and ndctl with its libraries"
        rm -rf "$tools" && mkdir -p "$tools"
        needs=$(apt-cache depends --recurse --no-suggests --no-recommends --no-conflicts --no-breaks --no-replaces --no-enhances ndctl |
            grep -E '^lib(daxctl|iniparser|json-c|keyutils|kmod|ndctl|udev|uuid)[0-9]+$')
        (cd "$tools" && apt-get download -qq busybox-static ndctl $needs 2>/dev/null &&
            for package in ./*.deb; do dpkg -x "$package" .; done && rm ./*.deb && : >.ready)
    fi
    bin=$root/rack/bin
    cp "$tools/bin/busybox" "$tools/usr/bin/ndctl" "$bin"
    mkdir -p "$root/rack/lib/x86_64-linux-gnu"
    # Their libraries, the unpacked ones and those of this machine, to where the guest looks.
    found=$tools/usr/lib/x86_64-linux-gnu:$tools/lib/x86_64-linux-gnu
    for library in $(LD_LIBRARY_PATH=$found ldd "$bin/ndctl" | awk '$2 == "=>" {print $3}' | sort -u); do
        cp -L "$library" "$root/rack/lib/x86_64-linux-gnu"
    done
    for name in sh cat rm ip; do ln -s busybox "$bin/$name"; done
    cp -r "$kernel/drivers" "$root/rack/drivers"
    arguments=""
    if [ -x .cache/mpich/bin/mpiexec ]; then
        arguments="--mpi"
        .cache/mpich/bin/mpicc examples/hello.c -o "$bin/hello"
        cp .cache/mpich/bin/mpiexec .cache/mpich/bin/hydra_pmi_proxy "$bin"
        mkdir -p "$root/rack/lib"
        cp -r .venv/lib/libfabric .venv/lib/polder "$root/rack/lib"
        put "$root/rack" "$bin/hello" "$bin/mpiexec" "$bin/hydra_pmi_proxy" "$root/rack/lib/libfabric/libpolder-fi.so"
        printf '#!/bin/sh\nexec /init rsh "$@"\n' >"$bin/rsh"
        chmod +x "$bin/rsh"
    else
        say "the rack runs no MPI program, because MPICH is not installed: make mpi"
    fi
    { cat "$root/initrd.gz"; pack "$root/rack"; } >"$root/rack.gz"
    for device in ${RACK_DEVICES:-nvdimm cxl}; do
        rm -f out/lab/"$device"[01].log
        # RACK has options for it, such as --flushes 1. The story is told in full on the first device.
        target/release/polder-rack --device "$device" "$kernel/vmlinux" "$root/rack.gz" $arguments ${RACK:-} ||
            { say "FAILED on the rack; its hosts' logs are out/lab/${device}0.log and out/lab/${device}1.log"; exit 1; }
    done
}

# 6.1 makes one tier of both nodes, and is refused.
[ $# -gt 0 ] || set -- linux-image-6.12-amd64 linux-image-amd64
for package in "$@"; do
    if [ "$package" = rack ]; then
        rack
        continue
    fi
    kernel=.cache/lab/$package
    say "kernel $(lab/kernel.sh "$package" "$kernel")"
    log=out/lab/$package.log
    # no_timer_check: on a busy machine an emulated timer may miss the ticks that the kernel waits for, and the kernel panics.
    timeout -k 5 170 qemu-system-x86_64 -accel tcg -M q35,hmat=on -cpu max -smp 2 -m 768M \
        -nodefaults -nographic -serial stdio -no-reboot \
        -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=256M \
        -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,initiator=0 \
        -numa dist,src=0,dst=1,val=20 -numa dist,src=1,dst=0,val=20 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=10 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=50 \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=5G \
        -kernel "$kernel/vmlinux" -initrd "$root/initrd.gz" -append "console=ttyS0 panic=-1 quiet psi=1 no_timer_check" \
        </dev/null >"$log" 2>&1 || say "the guest of $package was ended after 170 s"
    tr -d '\r' <"$log" | sed -n 's/.*\(lab: kernel\)/\1/;/^lab: kernel/,$p'
    grep -q '^lab: [0-9]* checks passed' "$log" || { say "FAILED on $package; the guest's log is $log"; exit 1; }
done
