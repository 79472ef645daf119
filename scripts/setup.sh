#!/bin/sh
# Builds the command, the libraries and the Python module, and installs them into .venv, which machine.sh has made.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"

say() { printf 'setup: %s\n' "$*" >&2; }

say "building the polder command and the Python module (minutes, the first time)"
# The command apart: one build would unify features, and give the libraries the model of the protocols, which only it needs.
cargo build --release -p polder-ofi -p polder-capi -p polder-mpi-mpich -p polder-mpi-openmpi -p polder-sim
# The distribution's former name, and that of another project.
for stale in .venv/lib/python*/site-packages/polder-[0-9]*.dist-info; do
    [ ! -d "$stale" ] || .venv/bin/pip uninstall -q -y --disable-pip-version-check polder
done
VIRTUAL_ENV="$PWD/.venv" .venv/bin/maturin develop --release >.venv/setup.log 2>&1 || { cat .venv/setup.log >&2; exit 1; }
cargo build --release -p polder-cli
cp -f target/release/polder .venv/bin/polder.new && mv -f .venv/bin/polder.new .venv/bin/polder
mkdir -p .venv/lib/libfabric .venv/lib/pkgconfig .venv/lib/polder .venv/include
cp -f target/release/libpolder_fi.so .venv/lib/libfabric/new && mv -f .venv/lib/libfabric/new .venv/lib/libfabric/libpolder-fi.so
for abi in mpich openmpi; do
    cp -f target/release/libpolder_$abi.so .venv/lib/polder/new && mv -f .venv/lib/polder/new .venv/lib/polder/libpolder-$abi.so
done
cp -f target/release/libpolder.so .venv/lib/new && mv -f .venv/lib/new .venv/lib/libpolder.so
cp -f crates/capi/include/polder.h .venv/include/polder.h
sed "s/@VERSION@/$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)/" crates/capi/polder.pc.in >.venv/lib/pkgconfig/polder.pc
.venv/bin/python -c 'import polder'
say "ready: .venv/bin/polder, and 'import polder' in .venv/bin/python"
