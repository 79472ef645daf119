#!/bin/sh
# Every command of docs/plan*.md prints what its page shows, also the one that is too long for `make test`.
cd "$(dirname "$0")/../.." || exit 1
PATH="$HOME/.cargo/bin:$PATH" POLDER="$PWD/.venv/bin/polder" POLDER_CASES=1 exec cargo test --locked -p polder-plan --test plan pages_show_what_commands_print
