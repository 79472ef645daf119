#!/bin/sh
# Builds what develops Polder into .cache/dev: polder-dev, and programs and libraries that know all of POLDER_WRAP.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"

# Together: one invocation gives all of them the features that polder-dev has.
cargo build --quiet --release -p polder-dev -p polder-lab -p polder-cli -p polder-ofi -p polder-mpi-mpich
out=.cache/dev
mkdir -p $out/bin $out/lib/libfabric $out/lib/polder
cp -f target/release/polder-dev $out/
for name in polder polder-guest polder-rack; do cp -f target/release/$name $out/bin/; done
cp -f target/release/libpolder_fi.so $out/lib/libfabric/libpolder-fi.so
cp -f target/release/libpolder_mpich.so $out/lib/polder/libpolder-mpich.so
