"""A cache of attention keys and values that several serving engines share, on one host or on many.

Examples
--------
>>> import tempfile
>>> import polder
>>> from polder import kv
>>> folder = tempfile.TemporaryDirectory()
>>> with polder.Pool(f"{folder.name}/pool", size="64MiB") as pool:
...     with kv.Cache(pool, "llm", identity={"model": "tiny"}, block=4096) as cache:
...         put = cache.put([bytes(16)], [bytes(4096)])
...         print(put.stored, cache.lookup([bytes(16), b"x" * 16]))
1 [True, False]
>>> folder.cleanup()
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from polder import _core, arguments
from polder.errors import ArgumentError
from polder.pool import Pool

__all__ = ["Cache", "Done", "Part", "Put", "Stat", "remove"]


@dataclass(frozen=True)
class Put:
    """What came of a put: blocks that were stored, blocks that were there, and blocks that had no room."""

    stored: int
    present: int
    refused: int


@dataclass(frozen=True)
class Done:
    """What came of a job.

    `job` is its number. Either there is an `error`, or `put` says what a put did, or `found` what a get found. It ran
    for `seconds`.
    """

    job: int
    error: Exception | None
    put: Put | None
    found: list[bool] | None
    seconds: float


@dataclass(frozen=True)
class Part:
    """A host's part of a cache.

    `blocks` are those that this process knows of, and `claimed` the bytes of the host's slabs. `puts` and
    `evictions` count blocks since the cache was made.
    """

    host: int
    blocks: int
    claimed: int
    puts: int
    evictions: int


@dataclass(frozen=True)
class Stat:
    """What a process knows of a cache, and has done with it.

    `claimed` are the bytes that slabs take, of `budget` that they may take. `void` counts those of `misses` whose
    block made room for another while it was copied, or was damaged.
    """

    blocks: int
    claimed: int
    budget: int
    hits: int
    misses: int
    void: int
    hosts: list[Part]


class Cache:
    """Blocks of one identity in a cache of a pool, as a context manager or until `close`.

    All methods may be called by several threads at once, and let others run Python meanwhile.

    Parameters
    ----------
    pool : Pool
        It stays attached until the cache is closed too.
    name : str
        Of the cache, without ``/``. Caches of several identities share one budget.
    identity : mapping of str to str, int, float, bool or None
        All that changes a byte of a block: the model and its weights, dtype, layout, tokens a block, ranks, the
        engine, and the algorithm and seed of its hash. Blocks of two identities never meet.
    block : int
        Bytes of each block. It is part of the identity.
    budget : int or str, optional
        Bytes that all slabs of the cache may take, such as ``"64GiB"``. The process that makes the cache says how
        many; without it they are four fifths of what is free in the pool then. Whoever comes later gives the same or
        none.
    verify : bool
        Whether blocks get a checksum when they are put, and those with one are checked when they are read.

    Raises
    ------
    ArgumentError
        An identity with other names or values than these, blocks of no bytes, another budget than the cache has, or
        one that is not 0 and holds no block.
    CorruptError
        The cache's own lines are damaged.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        *,
        identity: Mapping[str, str | int | float | bool | None],
        block: int,
        budget: int | str | None = None,
        verify: bool = False,
    ) -> None:
        block = arguments.whole("block", block, 1, expected="a whole number of bytes")
        if not isinstance(identity, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"identity is a {type(identity).__name__}; give a mapping of names to values")
        if "block_bytes" in identity:
            raise ArgumentError("the identity says block_bytes, which block says; leave it out")
        digest, text = describe({**identity, "block_bytes": block})
        self._cache = _core.Cache(pool, name, digest, text, block, budget, verify)
        self._hash = digest.hex()

    @property
    def hash(self) -> str:
        """The SHA-256 of the identity as JSON, in hexadecimal digits."""
        return self._hash

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys, of 16 bytes each, have blocks. All that a `put` of any host has returned for is found.

        A block may make room for another before it is read: then `get` says so.
        """
        return self._cache.lookup(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[Any]) -> Put:
        """Stores blocks, each of `block` bytes, that are not there yet.

        Once this returns, every process finds them, also when this one is killed. The oldest blocks of this host make
        room where the budget has none.

        Raises
        ------
        ArgumentError
            A key of another length than 16 bytes, or a block of another size.
        NotFoundError
            The cache was removed.
        """
        return Put(*self._cache.put(keys, blocks))

    def get(self, keys: Sequence[bytes], into: Sequence[Any]) -> list[bool]:
        """Fills buffers, each of `block` bytes, with blocks; says of each whether it was there.

        Where it was not, what its buffer holds says nothing.
        """
        return self._cache.get(keys, into)

    def submit_put(self, keys: Sequence[bytes], blocks: Sequence[Any]) -> int:
        """As `put`, on a thread of its own that runs no Python; the number of the job.

        The blocks are the cache's until `drain` has told that the job has ended. Nobody changes them meanwhile. Puts
        run in the order of their submission.
        """
        return self._cache.submit_put(keys, blocks)

    def submit_get(self, keys: Sequence[bytes], into: Sequence[Any]) -> int:
        """As `get`, on another thread of its own, so that it waits for no put; the number of the job.

        Nobody touches the buffers until `drain` has told that the job has ended.
        """
        return self._cache.submit_get(keys, into)

    def event_fd(self) -> int:
        """A file descriptor for ``select`` and the like, readable when `drain` has something to tell.

        It is the cache's, and ends with it.
        """
        return self._cache.event_fd()

    def drain(self, *, wait: bool = False) -> list[Done]:
        """The jobs that have ended since the last call, each once. With `wait`, all that were submitted end first."""
        return [
            Done(job, error, None if put is None else Put(*put), found, seconds)
            for job, error, put, found, seconds in self._cache.drain(wait)
        ]

    def retire(self) -> None:
        """Removes what is written down of the identity, which no process will have again.

        Its blocks, which nobody will find, make room by and by. Raises `NotFoundError` when the cache was removed.
        """
        self._cache.retire()

    def stat(self) -> Stat:
        """What this process knows of the cache, and has done with it."""
        numbers, hosts = self._cache.stat()
        return Stat(*numbers, hosts=[Part(*host) for host in hosts])

    def close(self) -> None:
        """Lets all jobs end, and lets go of it; blocks stay. Closing twice is harmless."""
        self._cache.close()


def describe(identity: Mapping[str, str | int | float | bool | None]) -> tuple[bytes, str]:
    """The SHA-256 of an identity, and the JSON that it is of.

    Raises
    ------
    ArgumentError
        A name is no text, or a value is none of these. JSON would write different ones alike, such as 1 and "1" as a
        name.
    """
    said = dict(identity)
    for name, value in said.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"the identity has the name {name!r}; give names that are text")
        if isinstance(value, np.integer):
            said[name] = int(value)
        elif not (value is None or isinstance(value, str | int | float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(value).__name__
            raise ArgumentError(f"the identity says {name!r} by a {kind}; give text, a number, True, False or None")
    try:
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the identity is no JSON: {error}") from None
    return hashlib.sha256(text.encode()).digest(), text


def remove(pool: Pool, name: str) -> None:
    """Removes a cache with all its blocks. No engine may be using it.

    Raises
    ------
    NotFoundError
        There is none of this name.
    """
    _core.kv_remove(pool, name)
