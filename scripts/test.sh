#!/bin/sh
# Every check, in order of how soon it fails. Stops at the first that does, and says which.
set -eu
cd "$(dirname "$0")/.."
PATH="$HOME/.cargo/bin:$PWD/.venv/bin:$PWD/.cache/dev:$PATH"
# The lab builds its guests as `make test` has.
export PATH RUSTDOCFLAGS="-D warnings" PROFILE=dev
# Of the make that started this: cargo and rustdoc would look in vain for its jobs.
unset MAKEFLAGS MFLAGS
# Packages come without bytecode (Makefile): whoever imports torch first writes it, or all of some hundred processes would compile it.
unset PYTHONDONTWRITEBYTECODE

step() {
    name=$1; shift
    printf '\n== %s\n' "$name"
    begin=$(date +%s)
    "$@" || { printf '\nFAILED: %s (%s)\n' "$name" "$*" >&2; exit 1; }
    printf '== %s: %s s\n' "$name" "$(($(date +%s) - begin))"
}

# A test that hangs ends and is named; libtest says which has been running for over a minute.
# A signal ends `wait` at once, but a program in the foreground has to end before the shell acts on it. What a shell starts in the
# background ignores Ctrl-C, unless `env` says otherwise.
limited() { timeout --verbose -k 10 40m env --default-signal=INT "$@" & wait $!; }

# What others have left before, and what of it goes meanwhile, is not ours: `find` fails where a file vanishes under it.
before=$(scripts/left_in_shm.sh || true)
nothing_new_in_shm() { new=$(scripts/left_in_shm.sh | grep -vxF -e "$before" || true); [ -z "$new" ] || { printf '%s\n' "$new"; return 1; }; }

# What setup has installed: stripped, and without the model of the protocols, which polder-dev has, or bytes that play hostile hosts.
libraries="libpolder.so libfabric/libpolder-fi.so polder/libpolder-mpich.so polder/libpolder-openmpi.so polder/libpolder-mpi-abi.so polder/libpolder-rehearse.so"
lean() {
    grep -qa corosensei .cache/dev/polder-dev || { echo ".cache/dev/polder-dev has no model: is this check blind?"; return 1; }
    for file in .venv/bin/polder $(printf '.venv/lib/%s ' $libraries) .venv/lib/python*/site-packages/polder/_core*.so; do
        for word in corosensei crates/mem/src/model crates/mem/src/wrapped hostile.rs .symtab; do
            ! grep -qaF -e "$word" "$file" || { echo "$file contains $word"; return 1; }
        done
    done
}

# What the model explores takes what the cores leave, until all else is done.
idle() { limited nice -n 19 polder-dev verify "$@"; }
verify_lane() {
    # Both fail where a schedule does. The first explores 3,000 of each suite, as their seeds draw memory, and on hdm-db; the second
    # learns the mutants of a suite from its 4,000 before those.
    step "sites" idle --sites --seed 7000 -n 3000
    # What is listed as harmless survives each schedule, and would take most of the time: `make verify` runs as many of those as of the
    # others.
    step "mutants" idle --mutants --seed 3000 -n 30000 --harmless 1000
    step "canaries" idle --canaries
}
mkdir -p out
verify_lane >out/verify-lane.log 2>&1 &
verify=$!
# Ends a process and all below it.
fell() { for below in $(pgrep -P "$1"); do fell "$below"; done; kill "$1" 2>/dev/null || :; }
trap 'for one in $(pgrep -P $$); do fell "$one"; done' EXIT
# Also by Ctrl-C: a signal alone would end the script without the trap before, and the lanes ignore it.
trap 'exit 130' INT
trap 'exit 143' TERM HUP
step "what is installed" lean
step "format" cargo fmt --all --check
step "format (fuzz)" cargo fmt --manifest-path fuzz/Cargo.toml --check
step "format (Python)" ruff format --check python examples scripts
step "lint (Python)" ruff check python examples scripts
step "types (Python)" pyright
step "lint" cargo clippy --quiet --workspace --all-targets -- -D warnings
# As users load them: without the model, which the lint above has in all crates.
step "lint (libraries)" cargo clippy --quiet -p polder-cli -p polder-rehearse -p polder-ofi -p polder-capi -p polder-mpi-mpich -p polder-mpi-openmpi -p polder-mpi-abi -p polder-python -- -D warnings
step "docs" cargo doc --quiet --workspace --no-deps
# Predictions and the agent by the installed command: that of `cargo test` takes several times as long.
step "tests" limited env POLDER="$PWD/.venv/bin/polder" cargo test --quiet --workspace --no-fail-fast
if grep -q ' hugetlbfs ' /proc/mounts; then
    step "huge pages" cargo test --quiet -p polder-mem --lib -- --ignored --nocapture huge_pages
else
    printf '\n== huge pages: skipped, hugetlbfs is not mounted\n'
fi
# What follows waits for much of its time, so it runs in three lanes. Tests look for what others leave in /dev/shm: each lane of them
# has one of its own.
files() { printf " $1python/tests/test_%s.py" torch sync doors snapshot mpi group recovery; }
first_lane() { step "tests (Python, groups of ranks and doors)" limited $own_shm pytest $(files ""); }
second_lane() { step "tests (Python, all others)" limited $own_shm pytest $(files "--ignore="); }
lab_lane() {
    if command -v qemu-system-x86_64 >/dev/null || [ "$(id -u)" = 0 ]; then
        step "lab" lab/run.sh
    else
        printf '\n== lab: skipped, QEMU is not installed and this is not root: apt-get install qemu-system-x86 cpio zstd\n'
    fi
}
own_shm=scripts/own_shm.sh
failed=""
if $own_shm true 2>/dev/null; then
    first_lane >out/first-lane.log 2>&1 &
    first=$!
    lab_lane >out/lab-lane.log 2>&1 &
    lab=$!
    second_lane &
    second=$!
    wait "$second" || failed="the second lane, above the first; "
    wait "$first" || failed="${failed}the first lane, above the lab's; "
    wait "$lab" || failed="${failed}the lab's lane, above the model's; "
    cat out/first-lane.log out/lab-lane.log
else
    printf '\n== one lane, because this user may not mount a /dev/shm of its own\n'
    own_shm=""
    first_lane
    second_lane
    lab_lane
fi
wait "$verify" || failed="${failed}the model's lane, just above"
trap - EXIT
cat out/verify-lane.log
[ -z "$failed" ] || { printf '\nFAILED: %s\n' "$failed" >&2; exit 1; }
step "nothing is left in /dev/shm" nothing_new_in_shm
printf '\nall checks passed\n'
