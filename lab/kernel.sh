#!/bin/sh
# kernel.sh PACKAGE FOLDER: unpacks the newest kernel that the distribution's PACKAGE stands for into FOLDER/vmlinux.
# Nothing is installed. The package is cached by its name, which carries the version; FOLDER/release says which it is.
set -eu
package=$1; folder=$2
mkdir -p "$folder"
# A new machine has no list of packages yet.
[ -n "$(apt-cache policy "$package")" ] || apt-get update -qq >&2 || true
# A meta package depends on the one with the kernel in it.
real=$(apt-cache depends "$package" 2>/dev/null | awk '/Depends: linux-(image|binary)-/ {print $2; exit}')
[ -n "$real" ] || real=$package
version=$(apt-cache policy "$real" | awk '/Candidate:/ {print $2}')
[ -n "$version" ] && [ "$version" != "(none)" ] || { echo "lab: no package $package; run: apt-get update" >&2; exit 1; }
if [ ! -e "$folder/vmlinux" ] || [ "$(cat "$folder/release" 2>/dev/null)" != "$real $version" ]; then
    echo "lab: fetching $real $version" >&2
    unpacked=$(mktemp -d "$folder/unpack.XXXXXX")
    trap 'rm -rf "$unpacked"' EXIT
    (cd "$unpacked" && apt-get download -qq "$real" 2>/dev/null && dpkg -x ./*.deb .)
    # A bzImage holds the kernel, compressed; the boot by PVH wants it as it is.
    python3 - "$unpacked"/boot/vmlinuz-* "$folder/vmlinux" <<'PY'
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
    echo "$real $version" >"$folder/release"
fi
cat "$folder/release"
