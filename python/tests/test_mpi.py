"""A stock MPI library over the pool, through the libfabric provider."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS

import polder

ROOT = Path(__file__).parents[2]
MPICH = ROOT / ".cache/mpich/bin"
POLDER = Path(sys.prefix) / "bin/polder"
PROVIDER = Path(sys.prefix) / "lib/libfabric"

pytestmark = pytest.mark.mpi
if not MPICH.is_dir():
    pytest.skip("MPICH is not installed: run `make mpi`", allow_module_level=True)


def mpiexec(
    pool: Path, run: Path, ranks: list[int], program: str = "mpi.py", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program on MPICH, with so many ranks on each emulated host."""
    command: list[str | Path] = [MPICH / "mpiexec"]
    for host, count in enumerate(ranks):
        command += [":"] * (host > 0) + ["-n", str(count), "-env", "POLDER_HOST", str(host)]
        command += [MPICH / "python", RANKS / program]
    environment = {
        **os.environ,
        "FI_PROVIDER_PATH": str(PROVIDER),
        "FI_PROVIDER": "polder",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "MPIR_CVAR_NOLOCAL": "1",
        "OMP_NUM_THREADS": "1",
        "POLDER_POOL": str(pool),
        "POLDER_RUN": str(run),
        **environment,
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("wrap", [{}, {"POLDER_WRAP": "shadow"}])
@pytest.mark.parametrize("ranks", [[1, 1], [2, 1]])
def test_a_stock_mpich_runs_over_the_pool_and_leaves_nothing_in_it(
    scratch: Path, wrap: dict[str, str], ranks: list[int]
) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        done = mpiexec(scratch / "pool", scratch, ranks, POLDER_COHERENCE="software", **wrap)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == sum(ranks)
        assert pool.list() == []


def test_polder_mpi_run_starts_ranks_on_emulated_hosts_and_leaves_nothing_in_the_pool(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        command: list[str | Path] = [POLDER, "mpi", "run", "-n", "3", "--emulate", "2", "--pool", scratch / "pool"]
        command += ["--mpiexec", MPICH / "mpiexec", "--", MPICH / "python", RANKS / "mpi.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLDER_RUN": str(scratch)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == 3
        assert pool.list() == []


@pytest.mark.parametrize("call", ["receive", "probe"])
def test_a_dead_rank_is_named_on_stderr_and_is_an_error_where_errors_return(scratch: Path, call: str) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch):
        done = mpiexec(scratch / "pool", scratch, [1, 1], "mpi_death.py", CALL=call)
    assert "an error, not an end" in done.stdout, done.stderr
    line = re.compile(r"^polder: host 1 pid \d+ died or stopped", re.MULTILINE)
    assert len(line.findall(done.stderr)) == 1, done.stderr


def test_a_missing_pool_is_one_line_that_says_what_to_do(scratch: Path) -> None:
    done = mpiexec(scratch / "none", scratch, [1, 1])
    assert done.returncode != 0
    line = f"polder: {scratch / 'none'}: no such file or device; check the path, or create a pool there with"
    assert line in done.stderr
