#!/bin/sh
# kernel.sh PACKAGE FOLDER: unpacks the newest kernel that the distribution's PACKAGE stands for into FOLDER/vmlinux.
# PACKAGE newest is that of Debian's backports to trixie, by a configuration of apt of its own. Nothing is installed.
# apt checks what it fetches by the signed index. It is cached by its name, which carries the version; FOLDER/release
# says which it is. FOLDER/drivers has the drivers of memory devices (modules.py). Newer kernels have theirs in a large package of its
# own, which is fetched if a third argument says `drivers`.
set -eu
package=$1; folder=$2; also=${3:-}
mkdir -p "$folder"
options=""
if [ "$package" = newest ]; then
    private=$(realpath "$folder")/apt
    mkdir -p "$private/lists/partial" "$private/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie-backports main" >"$private/sources"
    : >"$private/status"
    options="-o Dir::State::lists=$private/lists -o Dir::State::status=$private/status -o Dir::Cache=$private -o Dir::Etc::SourceList=$private/sources -o Dir::Etc::SourceParts=/dev/null"
    package=linux-image-amd64
    apt-get $options update -qq >&2 || true
fi
# A new machine has no list of packages yet.
[ -n "$(apt-cache $options policy "$package")" ] || apt-get $options update -qq >&2 || true
# A meta package depends on the one with the kernel in it; from 6.19 on that is a stub, which depends on the kernel and on its modules.
real=$package; apart=""
for _ in 1 2; do
    depends=$(apt-cache $options depends "$real" 2>/dev/null)
    next=$(echo "$depends" | awk '/Depends: linux-(image|binary)-[0-9]/ {print $2; exit}')
    [ "$also" != drivers ] || apart=$apart$(echo "$depends" | awk '/Depends: linux-modules-[0-9]/ {print " " $2; exit}')
    [ -z "$next" ] || real=$next
done
version=$(apt-cache $options policy "$real" | awk '/Candidate:/ {print $2}')
[ -n "$version" ] && [ "$version" != "(none)" ] || { echo "lab: no package $package; run: apt-get update" >&2; exit 1; }
wanted="$(cksum <"$(dirname "$0")/modules.py")$apart"
# Modules that lie there and are not asked for are no reason to fetch anew.
case $(cat "$folder/drivers.of" 2>/dev/null) in "$wanted"*) has_drivers=yes ;; *) has_drivers=no ;; esac
if [ ! -e "$folder/vmlinux" ] || [ $has_drivers = no ] || [ "$(cat "$folder/release" 2>/dev/null)" != "$real $version" ]; then
    echo "lab: fetching $real $version$apart" >&2
    unpacked=$(mktemp -d "$folder/unpack.XXXXXX")
    trap 'rm -rf "$unpacked"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    (cd "$unpacked" && apt-get $options download -qq "$real" $apart 2>/dev/null &&
        for deb in ./*.deb; do dpkg -x "$deb" .; done)
    # A bzImage holds the kernel, compressed; the boot by PVH wants it as it is.
    python3 - "$(find "$unpacked" -name 'vmlinuz-*' -o -name vmlinuz -type f | head -1)" "$folder/vmlinux" <<'PY'
import subprocess
import sys

image = open(sys.argv[1], "rb").read()
for magic, tool in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\x00", "xz"), (b"\x1f\x8b\x08", "gzip")):
    at = image.find(magic)
    while at >= 0:
        kernel = subprocess.run([tool, "-dcq"], input=image[at:], capture_output=True).stdout
        if kernel.startswith(b"\x7fELF"):
            open(sys.argv[2], "wb").write(kernel)
            sys.exit()
        at = image.find(magic, at + 1)
sys.exit(f"lab: {sys.argv[1]} holds no kernel that zstd, xz or gzip unpacks")
PY
    rm -rf "$folder/drivers"
    mkdir "$folder/drivers"
    python3 "$(dirname "$0")/modules.py" "$unpacked" "$folder/drivers"
    echo "$wanted" >"$folder/drivers.of"
    echo "$real $version" >"$folder/release"
fi
cat "$folder/release"
