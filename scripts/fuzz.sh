#!/bin/sh
# Fuzzes all that a peer can write: fuzz.sh TIME [TARGET...], each target for so long (30s, 5min, 1h). libFuzzer's feedback
# without a sanitizer, which stable Rust can build: pool has no unsafe code, and panics, overflows and hangs are found.
set -eu
cd "$(dirname "$0")/../fuzz"
PATH="$HOME/.cargo/bin:$PATH"
time=$1; shift
command -v c++ >/dev/null || { echo "fuzz: libFuzzer needs a C++ compiler; apt-get install g++" >&2; exit 1; }
case $time in
    *min) seconds=$((${time%min} * 60)) ;;
    *h) seconds=$((${time%h} * 3600)) ;;
    *) seconds=${time%s} ;;
esac
[ $# -gt 0 ] || set -- superblock pool ring group join endpoint window service storage kv note
host=$(rustc -vV | sed -n 's/^host: //p')
# As cargo-fuzz sets them, without what needs nightly. With --target they are not given to build scripts.
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1" \
    cargo build --quiet --release --target "$host"
for target in "$@"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    echo "== $target for $time"
    # Longer inputs only repeat what shorter ones do.
    "target/$host/release/$target" -max_total_time="$seconds" -timeout=10 -max_len=2000 -print_final_stats=1 -print_funcs=0 -verbosity=0 \
        -artifact_prefix="artifacts/$target/" "corpus/$target" || {
        echo "$target failed: see it again with target/$host/release/$target on the file in fuzz/artifacts/$target" >&2
        exit 1
    }
done
