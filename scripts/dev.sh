#!/bin/sh
# Builds what develops Polder into .cache/dev: polder-dev, and programs and libraries that know all of POLDER_WRAP. They are optimised, but
# where PROFILE=dev asks for those of the tests' own build: `make test` would compile for minutes more otherwise.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PATH"

# Together: one invocation gives all of them the features that polder-dev has.
case ${PROFILE:-release} in
    release) cargo build --quiet --release -p polder-dev -p polder-lab -p polder-cli -p polder-ofi -p polder-mpi-mpich; built=target/release ;;
    dev) cargo build --quiet --workspace --lib --bins --tests; built=target/debug ;;
    *) echo "PROFILE=$PROFILE: expected release or dev" >&2; exit 1 ;;
esac
out=.cache/dev
mkdir -p $out/bin $out/lib/libfabric $out/lib/polder
# A file that a process has mapped is replaced, not written to: the lab builds again while tests run.
put() { strip -o "$out/$2.new" "$built/$1" && mv -f "$out/$2.new" "$out/$2"; }
put polder-dev polder-dev
for name in polder polder-guest polder-rack; do put $name bin/$name; done
put libpolder_fi.so lib/libfabric/libpolder-fi.so
put libpolder_mpich.so lib/polder/libpolder-mpich.so
