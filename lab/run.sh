#!/bin/sh
# run.sh [PACKAGE...|newest]: boots each kernel in QEMU with a fast node and a slow node without CPUs, and runs the scenario
# in it. The guest's log stays in out/lab. Ends with an error when a check fails, or when the guest says nothing.
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
mkdir -p "$root/guest/bin"
cp target/release/polder-guest "$root/guest/init"
cp "${POLDER:-.venv/bin/polder}" "$root/guest/bin/polder"
# The libraries that the two are linked to, at the paths where they look for them.
for library in $(ldd target/release/polder-guest "$root/guest/bin/polder" | grep -o '/[^ ]*' | grep -v '^target' | grep -v ':$' | sort -u); do
    mkdir -p "$root/guest$(dirname "$library")"
    cp -L "$library" "$root/guest$library"
done
(cd "$root/guest" && find . | cpio -o -H newc --quiet | gzip -1) >"$root/initrd.gz"

# 6.1 makes one tier of both nodes, and is refused.
[ $# -gt 0 ] || set -- linux-image-6.12-amd64 linux-image-amd64
mkdir -p out/lab
for package in "$@"; do
    kernel=.cache/lab/$package
    say "kernel $(lab/kernel.sh "$package" "$kernel")"
    log=out/lab/$package.log
    timeout -k 5 170 qemu-system-x86_64 -accel tcg -M q35,hmat=on -cpu max -smp 2 -m 768M \
        -nodefaults -nographic -serial stdio -no-reboot \
        -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=256M \
        -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1,initiator=0 \
        -numa dist,src=0,dst=1,val=20 -numa dist,src=1,dst=0,val=20 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=10 \
        -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=50 \
        -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=5G \
        -kernel "$kernel/vmlinux" -initrd "$root/initrd.gz" -append "console=ttyS0 panic=-1 quiet psi=1" \
        </dev/null >"$log" 2>&1 || say "the guest of $package was ended after 170 s"
    tr -d '\r' <"$log" | sed -n 's/.*\(lab: kernel\)/\1/;/^lab: kernel/,$p'
    grep -q '^lab: [0-9]* checks passed' "$log" || { say "FAILED on $package; the guest's log is $log"; exit 1; }
done
