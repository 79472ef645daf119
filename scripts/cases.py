#!/usr/bin/env python3
"""Runs the programs of python/cases, which are too long for `make test`, and says which went wrong.

A program is right if it ends with exit status 0 within its time, and leaves no pool. It runs in an empty folder that is
then removed, with a /dev/shm of its own where this user may mount one, and `polder`, torchrun and Python of .venv first
in PATH. Each has a row in the table below.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import limited

HOME = Path(__file__).resolve().parent.parent
CASES = HOME / "python" / "cases"
#: Gives a command a /dev/shm of its own, and fails if it leaves a pool there.
OWN_SHM = str(HOME / "scripts/own_shm.sh")

#: Environments that a program runs in, one after the other: memory that hardware keeps coherent, and other memory.
ONE = [{}]
BOTH = [{}, {"POLDER_EMULATE": "2", "POLDER_COHERENCE": "software"}]


class Start(NamedTuple):
    """How a program is started: what its path is put into, in which environments, and the seconds that it may take.

    What a right program has said is shown only if it `measures`.
    """

    command: str
    environments: list[dict[str, str]] = ONE
    seconds: int = 600
    measures: bool = False


def ranks(count: int) -> str:
    """The command for so many ranks of torchrun."""
    return f"torchrun --standalone --nproc-per-node {count} {{}}"


#: MPICH, which `make mpi` installs.
MPICH = HOME / ".cache/mpich/bin"
LARGE = (
    f"{MPICH}/mpicc {{}} -o large && for how in 0 1 2 3; do polder mpi run -np 2 --emulate 2 --mpiexec {MPICH}/mpiexec"
)

#: Files that a program of the table uses.
PARTS = {"mpi_connect.c"}

#: Every program, by its name in the folder.
TABLE = {
    "mpi_connect.sh": Start(f"sh {{}} {MPICH}/mpicc {MPICH}/mpiexec"),
    "mpi_crowded.sh": Start(f"sh {{}} {MPICH}/mpicc {MPICH}/mpiexec", measures=True),
    "mpi_many.sh": Start(f"sh {{}} {MPICH}/mpicc {MPICH}/mpiexec", seconds=1800, measures=True),
    "mpi_suite.sh": Start(f"sh {{}} {HOME}/.venv/bin/python", seconds=3600),
    "mpi_large.c": Start(f"sh -c '{LARGE} ./large $how || exit 1; done'"),
    "torch_compiled.py": Start(ranks(2)),
    "torch_elastic.py": Start("python {}", seconds=1200),
    "torch_groups.py": Start(ranks(8), seconds=1800),
    "torch_overlap.py": Start(ranks(3), BOTH),
}


def run(name: str, start: Start, environment: dict[str, str], own_shm: list[str]) -> bool:
    """Runs a program once, by the command `own_shm`, and prints a line.

    Then the end of what a program said that went wrong, or all that one said that measures.
    """
    command = own_shm + [part.format(CASES / name) for part in shlex.split(start.command)]
    path = os.pathsep.join([str(HOME / ".venv" / "bin"), os.environ["PATH"]])
    set_here = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        ended = limited.run(start.seconds, 30, command, cwd=folder, env=set_here, **piped)
    outcome = {0: "right", 124: f"LATE, over {start.seconds} s"}.get(
        ended.returncode, f"WRONG, exit {ended.returncode}"
    )
    settings = " ".join(f"{variable}={value}" for variable, value in environment.items())
    print(f"{outcome:16} {time.monotonic() - began:4.0f} s  {name} {settings}", flush=True)
    said = ended.stdout.splitlines()
    for line in said[-30:] if ended.returncode else said if start.measures else []:
        print(f"    {line}", flush=True)
    return ended.returncode == 0


def main() -> int:
    """Runs all programs, or those with a word in their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names have this in them")
    only = parser.parse_args().only
    if unlisted := {path.name for path in CASES.iterdir() if path.is_file()} ^ set(TABLE) ^ PARTS:
        sys.exit(f"{sorted(unlisted)}: a program without a row in {__file__}, or a row without a program")
    limited.end_when_told()
    may_mount = subprocess.run([OWN_SHM, "true"], capture_output=True, check=False).returncode == 0
    own_shm = [OWN_SHM] if may_mount else []
    runs = [(name, start, it) for name, start in sorted(TABLE.items()) if only in name for it in start.environments]
    return 0 if all([run(*each, own_shm) for each in runs]) else 1


if __name__ == "__main__":
    sys.exit(main())
