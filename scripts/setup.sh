#!/bin/sh
# Builds the wheel and installs it into .venv, which machine.sh has made.
set -eu
cd "$(dirname "$0")/.."

scripts/dist.sh dist
sum=$(sha256sum dist/polder_memory-*.whl)
if [ "$sum" != "$(cat .venv/.wheel 2>/dev/null)" ]; then
    .venv/bin/pip install -q --disable-pip-version-check --no-deps --no-index --force-reinstall dist/polder_memory-*.whl
    printf '%s\n' "$sum" >.venv/.wheel
fi
.venv/bin/python -c 'import polder'
printf "setup: ready: .venv/bin/polder, and 'import polder' in .venv/bin/python\n" >&2
