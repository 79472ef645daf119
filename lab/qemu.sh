#!/bin/sh
# qemu.sh FOLDER: unpacks the QEMU of the distribution's backports into FOLDER, which knows more of CXL than its own. Nothing is installed.
# Says the command by which to start it.
set -eu
folder=$1
mkdir -p "$folder"
folder=$(realpath "$folder")
if [ ! -e "$folder/.ready" ]; then
    echo "lab: fetching QEMU from bookworm-backports" >&2
    private=$folder/apt
    mkdir -p "$private/lists/partial" "$private/archives/partial"
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    for suite in bookworm bookworm-backports bookworm-updates; do
        echo "deb [signed-by=$key] http://deb.debian.org/debian $suite main"
    done >"$private/sources"
    echo "deb [signed-by=$key] http://deb.debian.org/debian-security bookworm-security main" >>"$private/sources"
    # The machine's own packages count as there, so that what is fetched is what they lack.
    options="-o Dir::State::lists=$private/lists -o Dir::Cache=$private -o Dir::Etc::SourceList=$private/sources -o Dir::Etc::SourceParts=/dev/null"
    apt-get $options update -qq >&2
    apt-get $options install -qq -y --download-only --no-install-recommends -t bookworm-backports qemu-system-x86 >&2
    for package in "$private"/archives/*.deb; do dpkg -x "$package" "$folder"; done
    rm -r "$private"
    : >"$folder/.ready"
fi
libraries=$folder/usr/lib/x86_64-linux-gnu:$folder/lib/x86_64-linux-gnu
cat >"$folder/qemu" <<SH
#!/bin/sh
LD_LIBRARY_PATH=$libraries QEMU_MODULE_DIR=$folder/usr/lib/x86_64-linux-gnu/qemu exec $folder/usr/bin/qemu-system-x86_64 -L $folder/usr/share/qemu -L $folder/usr/share/seabios "\$@"
SH
chmod +x "$folder/qemu"
echo "$folder/qemu"
