"""Attempts: one start of a job, which numbers its snapshots after all that its ranks have found."""

import atexit
import contextlib
import functools
import json
import os
import secrets
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polder import _core
from polder.errors import CorruptError, PolderError
from polder.pool import Pool
from polder.torch import disk
from polder.torch.identity import Identity, Part, Seen, parts_of
from polder.torch.state import deserialize
from polder.torch.versions import read, store_of

# torch's stubs leave groups without types.
# pyright: reportUnknownMemberType=false

__all__ = ["IDENTITY", "STATE", "Attempt", "Here", "Job", "Look", "begin", "job_of", "look"]

STATE = "state"
"""What holds everything that is no tensor. The name of a tensor has a `/`."""
IDENTITY = "identity"
"""What says of which version a rank's part is."""


@dataclass(frozen=True)
class Here:
    """This rank among those that snapshot or restore together.

    Attributes
    ----------
    rank, size : int
        Its rank in the group, and the group's size.
    ranks : list of int
        The ranks of the group in the job.
    world : int
        The ranks of the job.
    """

    rank: int
    size: int
    ranks: list[int]
    world: int
    group: Any = field(compare=False)

    @staticmethod
    def of(group: Any) -> "Here":
        """In a group; in the job, if that is None."""
        if not dist.is_initialized():
            return Here(0, 1, [0], 1, None)
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        return Here(dist.get_rank(group), dist.get_world_size(group), ranks, dist.get_world_size(), group)

    def _gather(self, value: Any) -> list[Any]:
        if not dist.is_initialized():
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather(self, found: "Look") -> tuple[list[Seen], list[int]]:
        """What each rank has found, and a random word of each."""
        gathered = self._gather((found.seen, secrets.randbits(63) | 1))
        return [seen for seen, _ in gathered], [word for _, word in gathered]

    def gather_errors(self, error: BaseException | None) -> list[BaseException | None]:
        """The error of each rank. One that does not travel comes as its text."""
        made = None if error is None else (type(error).__name__, str(error))
        found: list[BaseException | None] = []
        for one in self._gather(made):
            found.append(None if one is None else getattr(_errors(), one[0], PolderError)(one[1]))
        return found


def _errors() -> Any:
    from polder import errors

    return errors


class Look:
    """What this rank has found of a name, with the versions in the pool held open."""

    def __init__(self) -> None:
        self.seen = Seen([], [], 0)
        self._versions: dict[tuple[int, int], _core.Version] = {}

    def hold(self, rank: int, version: _core.Version) -> None:
        """Keeps a version that is open."""
        self._versions[rank, version.number] = version

    def open(self, pool: Pool, name: str, part: Part, held: ExitStack) -> _core.Version:
        """The version of a part in the pool."""
        whose = part.identity.rank, part.number
        if whose not in self._versions:
            version = store_of(pool, name, part.identity.rank).open(part.number)
            held.callback(version.close)
            self._versions[whose] = version
        return self._versions[whose]


def look(pool: Pool, name: str, folder: Path | None, here: Here, held: ExitStack) -> Look:
    """Looks at a share of the parts that there are: this rank's own, and some of ranks that are not here."""
    found = Look()
    parts, damaged, highest, in_own = found.seen.parts, found.seen.damaged, 0, 0
    begin = len(f"/version/{name}/")
    stores = {entry.name[begin:].partition("/")[0] for entry in pool.list(f"/version/{name}/")}
    homes: set[str] = set()
    if folder is not None and (folder / name).is_dir():
        homes = {entry.name for entry in (folder / name).iterdir()}
    there = {int(rank) for rank in stores | homes if rank.isdecimal() and str(int(rank)) == rank}
    own = {here.rank, here.ranks[here.rank]}
    others = {rank for rank in there if rank >= here.size and rank % here.size == here.rank} - own
    for rank in sorted(own | others):
        if str(rank) in stores:
            versions, errors = store_of(pool, name, rank).kept()
            for version in versions:
                held.callback(version.close)
                highest = max(highest, version.number)
                try:
                    parts.append(Part(_identity_in_pool(version, rank), version.number))
                    found.hold(rank, version)
                except CorruptError as error:
                    damaged.append((version.number, str(error)))
            for number, error in errors:
                damaged.append(
                    (
                        number,
                        f"version {number} of the store {name}/{rank}: {error}" if number >> 63 == 0 else str(error),
                    )
                )
                highest = max(highest, number if number >> 63 == 0 else 0)
            if rank == here.rank:
                known = [version.number for version in versions] + [number for number, _ in errors if number >> 63 == 0]
                in_own = max(known, default=0)
        for number, _, at in disk.named(disk.home_of(folder, name, rank)) if folder is not None else []:
            highest = max(highest, number)
            try:
                parts.append(Part(disk.identity_of(at, rank)[0], number, at))
            except CorruptError as error:
                damaged.append((number, str(error)))
    # What is whole elsewhere is no damage.
    good = {(part.identity.rank, part.number) for part in parts}
    damaged[:] = [(number, why) for number, why in damaged if not any((rank, number) in good for rank in own)]
    found.seen = Seen(parts, sorted(damaged, reverse=True), highest, in_own, sorted(others))
    return found


def _identity_in_pool(version: _core.Version, rank: int) -> Identity:
    sizes = dict(version.tensors())
    if version.attempt == 0 and IDENTITY not in sizes:
        return Identity.of_before(deserialize(read(version, STATE))["step"], rank)
    try:
        said = json.loads(read(version, IDENTITY, sizes[IDENTITY]))
        said.pop("plain")
        identity = Identity.parse(said)
        if (identity.attempt, identity.number, identity.rank) != (version.attempt, version.number, rank):
            raise ValueError(f"it is of version {identity.number} of rank {identity.rank}")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CorruptError(f"the identity of version {version.number} cannot be read ({error})") from error
    return identity


class Attempt:
    """One start of a job, as one rank sees it.

    Parameters
    ----------
    pool : Pool
        Where it publishes.
    name : str
        Its name.
    here : Here
        This rank in it.
    like : Identity
        Its word, generation, first number, base, and floor.
    base : int
        The number of its base in this rank's store; 0 if that is not in the pool.
    seen : Seen
        What this rank has found.
    """

    def __init__(self, pool: Pool, name: str, here: Here, like: Identity, base: int, seen: Seen) -> None:
        self.here, self.word, self.first, self.floor = here, like.attempt, like.number, like.floor
        self.terms = self.word, self.first, base, self.floor, seen.own
        self._name, self._left, self._left_on_disk = name, seen.others, seen.others
        self.store_name = f"{name}/{here.rank}"
        self.others = [f"{name}/{rank}" for rank in range(here.size) if rank != here.rank]
        self.world = dist.group.WORLD if dist.is_initialized() else None
        self.pool = pool
        self._like = like
        self._calls = 0
        self._published = like.number - 1
        self._whole = like.whole

    def next_number(self) -> int:
        """The number of the next version. Alone, a process counts those that it has published; ranks count calls."""
        self._calls += 1
        return self._published + 1 if self.here.size == 1 else self.first + self._calls - 1

    def has_published(self, number: int) -> None:
        """A version of this rank is in the pool."""
        self._published = number
        if self.here.size == 1:
            self._whole = number

    def has_flushed(self, home: Path, identity: Identity) -> None:
        """A version of this rank is on disk: what nobody needs any more goes."""
        self._left_on_disk = disk.prune(home, identity, self.first, self._left_on_disk)

    def left(self) -> list[str]:
        """The stores of ranks that the job has no more and that this one clears, as long as they are there."""
        if self._left:
            begin = len(f"/version/{self._name}/")
            there = {entry.name[begin:].partition("/")[0] for entry in self.pool.list(f"/version/{self._name}/")}
            self._left = [rank for rank in self._left if str(rank) in there]
        return [f"{self._name}/{rank}" for rank in self._left]

    def identity(self, step: int, number: int, store: _core.Store | None) -> Identity:
        """That of a version. `store` tells what is whole now."""
        if store is not None and self.here.size > 1:
            self._whole = max(self._whole, store.whole_in(self.terms, self.others) or 0)
        like = self._like
        return Identity(
            like.attempt,
            like.generation,
            number,
            step,
            self.here.size,
            self.here.rank,
            like.base,
            like.base_attempt,
            like.floor,
            self._whole,
        )


class Job:
    """What this process is of a name in a pool."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._attempt: Attempt | None = None

    def attempt_now(self) -> Attempt | None:
        """The attempt, unless that was one of another process group."""
        attempt = self._attempt
        world = dist.group.WORLD if dist.is_initialized() else None
        return attempt if attempt is not None and attempt.world is world else None

    def enter(self, attempt: Attempt) -> None:
        """Begins an attempt; a store that the one before owned is free."""
        before, self._attempt = self._attempt, attempt
        if before is not None and before.store_name != attempt.store_name:
            _disown(before)

    def leave(self) -> None:
        """Gives up what it owns."""
        if self._attempt is not None:
            _disown(self._attempt)


def _disown(attempt: Attempt) -> None:
    with contextlib.suppress(PolderError):
        _core.Store(attempt.pool, attempt.store_name).disown()


def begin(
    pool: Pool,
    name: str,
    here: Here,
    words: list[int],
    all_seen: list[Seen],
    parts: dict[int, Part],
    *,
    is_foreign: bool,
) -> Attempt:
    """An attempt after all that was seen. All ranks of a group begin the same.

    Parameters
    ----------
    pool, name, here
        Where, and which rank this is.
    words : list of int
        A random word of each rank; the first one's is that of the attempt.
    all_seen : list of Seen
        What each rank has found.
    parts : dict of int to Part
        The version that counts until one of this attempt is whole.
    is_foreign : bool
        Whether there is what this job could not read.
    """
    first = 1 + max(seen.highest for seen in all_seen)
    generation = 1 + max((part.identity.generation for seen in all_seen for part in seen.parts), default=0)
    identity = next(iter(parts.values())).identity if parts else None
    own = parts_of(all_seen, identity.key).get(here.rank) if identity else None
    number, attempt, floor = (identity.number, identity.attempt, identity.floor) if identity else (0, 0, 0)
    like = Identity(
        words[0],
        generation,
        first,
        0,
        here.size,
        here.rank,
        base=number,
        base_attempt=attempt,
        floor=first if is_foreign else floor,
        whole=number,
    )
    in_pool = own.number if own is not None and own.folder is None else 0
    return Attempt(pool, name, here, like, in_pool, all_seen[here.rank])


@functools.cache
def _jobs() -> dict[tuple[str, str], Job]:
    return {}


def job_of(pool: Pool, name: str) -> Job:
    """What this process is of a name in a pool."""
    return _jobs().setdefault((pool.uuid, name), Job())


def _leave_all() -> None:
    for job in _jobs().values():
        job.leave()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_jobs.cache_clear)
