#!/bin/sh
# Builds the one wheel that installs Polder: the Python module, and as its data the command, the libraries and what C programs include.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"
out=${1:-dist}

say() { printf 'setup: %s\n' "$*" >&2; }

say "building the polder command and the Python module (minutes, the first time)"
# The oldest C library that every file of the wheel runs with; python/tests/test_install.py compares it with what they ask for.
wheel() {
    .venv/bin/maturin build --release --compatibility manylinux_2_34 --out "$1" >target/wheel/log 2>&1 || { cat target/wheel/log >&2; exit 1; }
}
# None of these has the model of the protocols or instruments, which `make dev` builds. The command's last pass takes one core for a
# minute, in a folder of its own: the libraries and the module are built meanwhile, the module as a wheel of which nothing else is taken.
build_command() {
    cargo build --profile dist -p polder-cli
}
build_command &
command=$!
cargo build --release -p polder-rehearse -p polder-ofi -p polder-mpi-mpich -p polder-mpi-openmpi -p polder-mpi-abi -p polder-capi -p polder-sim
# A wheel's data goes to these folders of the environment that it is installed into.
data=target/wheel/polder_memory.data
rm -rf "$data"
mkdir -p "$data/scripts" "$data/data/include" "$data/data/lib/libfabric" "$data/data/lib/pkgconfig" "$data/data/lib/polder"
wheel target/wheel
wait "$command"

cp target/dist/polder "$data/scripts/polder"
cp target/release/libpolder.so "$data/data/lib/"
cp target/release/libpolder_fi.so "$data/data/lib/libfabric/libpolder-fi.so"
for abi in mpich openmpi mpi-abi; do
    cp "target/release/libpolder_$(printf %s "$abi" | tr - _).so" "$data/data/lib/polder/libpolder-$abi.so"
done
cp target/release/libpolder_rehearse.so "$data/data/lib/polder/libpolder-rehearse.so"
cp crates/capi/include/polder.h "$data/data/include/"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
sed "s/@VERSION@/$version/" crates/capi/polder.pc.in >"$data/data/lib/pkgconfig/polder.pc"

rm -f "$out"/polder_memory-*.whl
wheel "$out"
