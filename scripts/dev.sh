#!/bin/sh
# Builds what develops Polder into .cache/dev: polder-dev, and programs and libraries that know all of POLDER_WRAP.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"

# Together: one invocation gives all of them the features that polder-dev has.
cargo build --quiet --release -p polder-dev -p polder-lab -p polder-cli -p polder-ofi -p polder-mpi-mpich
out=.cache/dev
mkdir -p $out/bin $out/lib/libfabric $out/lib/polder
# A file that a process has mapped is replaced, not written to: the lab builds again while tests run.
put() { cp "target/release/$1" "$out/$2.new" && mv -f "$out/$2.new" "$out/$2"; }
put polder-dev polder-dev
for name in polder polder-guest polder-rack; do put $name bin/$name; done
put libpolder_fi.so lib/libfabric/libpolder-fi.so
put libpolder_mpich.so lib/polder/libpolder-mpich.so
