#!/bin/sh
# Brings what a build needs to a fresh Debian or Ubuntu: a Python with venv, a C linker and Rust. Says what it does;
# without root it says what to ask for.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo "$@"
    else return 1
    fi
}

# install WHAT PACKAGE...: from the distribution, or one line that says who can.
install() {
    what=$1; shift
    command -v apt-get >/dev/null || { say "$what is missing; install it with your package manager ($*)"; exit 1; }
    say "$what is missing: apt-get install $*"
    as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null || {
        say "this needs root. Ask for: apt-get install $*"
        say "without root: a Python from pyenv or conda with a compiler from conda (gcc_linux-64), first in PATH"
        exit 1
    }
}

# A Python of 3.11 or later that can make a virtual environment with pip in it.
python() {
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        command -v "$name" >/dev/null || continue
        "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$name"; return; }
    done
    return 1
}

command -v cc >/dev/null || install "a C linker" gcc libc6-dev
if [ ! -x .venv/bin/python ]; then
    if ! python=$(python); then
        if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then install "venv of Python 3.11 or later" python3-venv
        else install "Python 3.11 or later" python3.11 python3.11-venv
        fi
        python=$(python) || { say "still no Python of 3.11 or later with venv; set PYTHON=/path/to/python"; exit 1; }
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

PATH="$HOME/.cargo/bin:$PATH"
if ! command -v cargo >/dev/null; then
    command -v curl >/dev/null || install curl curl ca-certificates
    say "Rust is missing: installing rustup into $HOME/.cargo (no root needed; https://rustup.rs)"
    installer=$(mktemp)
    { curl --proto '=https' --tlsv1.2 -sSf -o "$installer" https://sh.rustup.rs &&
        sh "$installer" -y --profile minimal --default-toolchain none >/dev/null; } || {
        rm -f "$installer"
        say "rustup could not be installed; get it from https://rustup.rs or with apt-get install rustup, then run this again"
        exit 1
    }
    rm -f "$installer"
fi
rust=$(cargo --version) || { say "cargo does not run; Polder needs Rust 1.90 or later, best from https://rustup.rs"; exit 1; }
case $rust in
    "cargo 1."[0-8][0-9].* | "cargo 1."[0-9].*) say "$rust is too old; Polder needs 1.90 or later, best from https://rustup.rs"; exit 1 ;;
esac

.venv/bin/python -c 'import maturin' 2>/dev/null || .venv/bin/pip install -q --disable-pip-version-check 'maturin>=1.9,<2' numpy
