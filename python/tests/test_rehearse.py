"""`polder rehearse`: Polder's own pool and MPI over it, between two hosts with caches of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS

import polder

MPICH = Path(__file__).parents[2] / ".cache/mpich/bin"
POLDER = Path(os.environ.get("POLDER", Path(sys.prefix) / "bin/polder"))
SEEDS = range(3)


class Rehearsal:
    """Runs a program on two hosts with a new pool, for at most half a minute."""

    def __init__(self, scratch: Path, options: list[str], program: list[str | Path]) -> None:
        self.pool = scratch / "pool"
        self.options = options
        self.program = program

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        self.pool.unlink(missing_ok=True)
        polder._core.format(self.pool, "64MiB", hosts=2, coherence="software")
        command = [POLDER, "rehearse", "--file", self.pool, *self.options, *options, "--", *self.program]
        # Hosts that miss each other's words end by themselves, or are told to.
        return subprocess.run(
            ["timeout", "30", *command],
            env={**os.environ, "POLDER_POOL": str(self.pool), "POLDER_TIMEOUT": "5s", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def most_reached(self, file: str) -> list[str]:
        """The flushes of a file that were reached most, each of which several lines depend on."""
        done = self.run("--sites")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [row.split() for row in done.stdout.splitlines()]
        flushes = [(int(row[0]), row[2]) for row in rows if row[1:2] == ["flush"] and row[2].startswith(file)]
        return [site for _, site in sorted(flushes, reverse=True)[:3]]

    def judge(self, file: str) -> None:
        for seed in SEEDS:
            done = self.run("--seed", str(seed))
            assert done.returncode == 0, done.stdout + done.stderr
        sites = self.most_reached(file)
        failed = next((site for site in sites if self.run("--skip-site", site).returncode != 0), None)
        print(f"{len(SEEDS)} seeds passed; without {failed} it failed")
        assert failed, f"none of {sites} is needed: a missing flush is not found"


def test_a_python_pool_passes_and_fails_without_a_flush(scratch: Path) -> None:
    Rehearsal(scratch, [], [sys.executable, RANKS / "rehearsed.py", "{host}"]).judge("_core")


@pytest.mark.mpi
def test_messages_and_windows_of_mpich_pass_and_fail_without_a_flush(scratch: Path) -> None:
    if not MPICH.is_dir():
        pytest.skip("MPICH is not installed: run `make mpi`")
    program = scratch / "program"
    words = ["-Wall", "-Wextra", "-Werror", "-O1", RANKS / "rehearsed.c", "-o", program]
    subprocess.run([MPICH / "mpicc", *words], check=True)
    launch: list[str | Path] = [POLDER, "mpi", "run", "-n", "2", "--emulate", "2", "--mpiexec", MPICH / "mpiexec"]
    Rehearsal(scratch, ["--launcher"], [*launch, "--", program]).judge("libpolder-fi.so")
