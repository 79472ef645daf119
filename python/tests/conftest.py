"""What the tests share: scratch pools in memory, and ranks as threads or processes."""

import contextlib
import functools
import json
import os
import random
import select
import shutil
import signal
import socket
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
#: What `make dev` builds.
POLDER_DEV = Path(__file__).parents[2] / ".cache/dev/polder-dev"


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


class Rank:
    """A process of its own that runs a Python script, or a program given as text; used as `subprocess.Popen` is.

    The zygote forks it, so it has torch at once.
    """

    def __init__(self, program: Path | str, *arguments: object, **environment: str) -> None:
        name, code = ("-c", program) if isinstance(program, str) else (str(program), program.read_text())
        asked = {
            "code": code,
            "arguments": [name, *map(str, arguments)],
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
            "folder": str(Path.cwd()),
        }
        reads, output = os.pipe()
        tells, told = os.pipe()
        socket.send_fds(zygote()[1], [json.dumps(asked).encode()], [output, told])
        os.close(output)
        os.close(told)
        self.stdout = os.fdopen(reads)
        # Unbuffered, so that `select` sees what has not been read.
        self._told = os.fdopen(tells, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the rank of pid {self.pid}", timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended, and the zygote has not said so yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        until = None if timeout is None else time.monotonic() + timeout
        parts: list[bytes] = []
        while not parts or parts[-1]:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"the rank of pid {self.pid}", timeout or 0, b"".join(parts))
            parts.append(os.read(self.stdout.fileno(), 1 << 16))
        self.wait()
        return b"".join(parts).decode(), None


@functools.cache
def zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that forks ranks, and the socket that it reads; it ends when the socket closes."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        # Before torch loads OpenMP.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error", RANKS / "zygote.py"]
        return subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, env=environment), ours


def pytest_unconfigure() -> None:
    if zygote.cache_info().currsize:
        process, requests = zygote()
        requests.close()
        process.wait()


class Ranks:
    """Processes that run one script of tests/ranks, each with its rank as the first argument."""

    def __init__(self, script: str, count: int, *arguments: object, **environment: str) -> None:
        self.processes = [
            Rank(
                RANKS / script,
                rank,
                *arguments,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                **environment,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.__exit__()

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
    with Rank(program, *arguments) as process:
        last = int(process.stdout.readline())
        # Any moment is a good one: most of the time it is in the middle of a write.
        until = time.monotonic() + dice.uniform(0, seconds)
        while time.monotonic() < until:
            pass
        process.kill()
        return max([last, *map(int, process.stdout.read().split())])
