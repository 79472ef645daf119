"""What the tests share: scratch pools in memory, and ranks as threads or processes."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import polder

RANKS = Path(__file__).parent / "ranks"


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
