"""What the tests share: scratch pools in memory, and ranks as threads or processes."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import polder

RANKS = Path(__file__).parent / "ranks"


def python_of(framework: str) -> Path:
    """The Python of an environment that `make` makes."""
    folder = Path(__file__).parents[2] / ".cache" / framework
    if not (folder / ".ready").exists():
        pytest.skip(f"{framework} is not installed; `make .cache/{framework}/.ready` installs it")
    return folder / "bin" / "python"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory, for a pool and what lies beside it."""
    folder = Path(tempfile.mkdtemp(prefix="polder-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def pool(scratch: Path) -> Iterator[polder.Pool]:
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        yield pool


def in_ranks(scratch: Path, hosts: list[int], coherence: str, body: Callable[[polder.Group], None]) -> None:
    """Runs `body` as every rank at once, each a thread with a pool of its own on the given host."""

    def rank_body(rank: int) -> None:
        with (
            polder.Pool(scratch / "pool", size="128MiB", host=hosts[rank], coherence=coherence, run=scratch) as pool,
            polder.Group(pool, "/group", rank, len(hosts), timeout=20) as group,
        ):
            body(group)

    with ThreadPoolExecutor(len(hosts)) as threads:
        for future in [threads.submit(rank_body, rank) for rank in range(len(hosts))]:
            future.result()


class Ranks:
    """Processes that run one script of tests/ranks, each with its rank as the first argument."""

    def __init__(self, script: str, count: int, *arguments: object, **environment: str) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", RANKS / script, str(rank), *map(str, arguments)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count),
                    **environment,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    def outputs(self, timeout: float = 120) -> list[str]:
        """What each printed; all must end well."""
        outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert not any(codes), f"exit codes {codes}\n" + "\n".join(outputs)
        return outputs


def torchrun(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script of tests/ranks on two ranks of torchrun, which may start them again once; they must end well."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ended = subprocess.run(
        [sys.executable, *command, str(RANKS / script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def killed_after(program: str, dice: random.Random, seconds: float, *arguments: object) -> int:
    """Kills a Python program up to so many seconds after its first line: the highest number that it has printed."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = int(process.stdout.readline())
        # Any moment is a good one: most of the time it is in the middle of a write.
        until = time.monotonic() + dice.uniform(0, seconds)
        while time.monotonic() < until:
            pass
        process.kill()
        return max([said, *map(int, process.stdout.read().split())])
