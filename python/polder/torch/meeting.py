"""How the ranks of a group meet: who is where, in which pool, and who could not."""

import atexit
import contextlib
import json
import os
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from polder import _core, errors
from polder.errors import ArgumentError, PeerTimeoutError, PolderError, RegionError

if TYPE_CHECKING:
    from polder.torch.backend import ProcessGroupPolder

_log = getLogger("polder.torch")

_FAREWELL_SECONDS = 5.0
_PROCESSES = 512
"""The most processes of a host that a pool can be made for."""
_ATTACHING = 0.75
"""The part of a timeout that a rank may wait for when it attaches."""


@dataclass
class Attachment:
    """A pool that this process has attached for its groups."""

    path: str
    pool: "_core.Pool"
    share: "_core.JobPool | None"
    """This process's share of a pool of the job's own."""
    messages: "_core.Messages"
    """Where the messages of this process's groups come and go."""
    groups: "list[ProcessGroupPolder]" = field(default_factory=list["ProcessGroupPolder"])

    def release(self, group: "ProcessGroupPolder") -> None:
        """Forgets a group; the last one closes the pool, and the last process removes a pool of its own."""
        if group not in self.groups:
            return
        self.groups.remove(group)
        self.close_unused()

    def close_unused(self) -> None:
        """Closes the pool when no group is over it."""
        if self.groups:
            return
        attachments.pop(self.path, None)
        try:
            self.messages.close()
        finally:
            self.pool.close()
            let_go(self.share)


attachments: dict[str, Attachment] = {}


@atexit.register
def _leave() -> None:
    """Leaves every pool when a program ends without destroy_process_group."""
    with contextlib.ExitStack() as groups:
        for attachment in attachments.values():
            for group in attachment.groups:
                groups.callback(group.shutdown)


def introduction(rank: int, size: int) -> dict[str, Any]:
    """What a rank says of itself."""
    settings = _core.settings()
    return {
        "machine": _machine(),
        "emulated": _emulated_host(rank, size),
        "host": settings["host"],
        "pool": settings["pool"],
        "attached": list(attachments),
    }


class _FollowsError(Exception):
    """This rank failed because another did, which tells why."""


_T = TypeVar("_T")

_watch: ContextVar[Callable[[], None] | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def watching(look: Callable[[], None]) -> Generator[None]:
    """Inside of it, a rank that meets others calls `look` while it waits; an error of it ends the meeting."""
    before = _watch.set(look)
    try:
        yield
    finally:
        _watch.reset(before)


class Board:
    """What the ranks of one group tell each other through the c10d store.

    The store may hold what ranks of an earlier attempt have left under the same names, because torchrun keeps it over
    restarts. So rank 0 opens a round under a name that it has just drawn, and a rank is in a round only when the list
    that closes it has the number that this rank has just drawn.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.round = secrets.token_hex(8)
        self._watch = _watch.get()

    def meet(self, introduce: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What every rank says of itself, in the order of ranks; when one of them cannot, all raise, naming it."""
        mine: dict[str, Any] = {"draw": secrets.token_hex(8)}
        failure: Exception | None = None
        try:
            mine.update(introduce())
        except Exception as error:
            failure = error
            mine["failure"] = _told(error)
        everyone = self._everyone(mine)
        self._settle("meet the others", failure, [each.get("failure") for each in everyone])
        return everyone

    def _everyone(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if self.rank == 0:
            self._store("set", "polder/round", self.round)
            everyone = self.exchange("hello", mine)
            self.tell("everyone", everyone)
            return everyone
        while True:
            self._await("polder/round", "rank 0")
            self.round = self._store("get", "polder/round").decode()
            self.tell(f"hello/{self.rank}", mine)
            while not self._store("check", [self._key("everyone")]):
                if self._store("get", "polder/round").decode() != self.round:
                    break
                self._pause()
            else:
                everyone = self.hear("everyone")
                if everyone[self.rank]["draw"] == mine["draw"]:
                    return everyone
            self._pause()

    def exchange(self, topic: str, mine: Any) -> list[Any]:
        """Everybody's word on `topic`, in the order of ranks."""
        self.tell(f"{topic}/{self.rank}", mine)
        return [self.hear(f"{topic}/{rank}", rank) for rank in range(self.size)]

    def hear(self, topic: str, rank: int = 0) -> Any:
        """What `rank` told on `topic`, once it has."""
        self._await(self._key(topic), f"rank {rank}")
        return json.loads(self._store("get", self._key(topic), f"rank {rank}"))

    def tell(self, topic: str, word: Any) -> None:
        """Tells every rank."""
        self._store("set", self._key(topic), json.dumps(word))

    def has_failed(self) -> bool:
        """Whether a rank has failed in this round; asked while this rank waits in the pool for others."""
        try:
            if self._watch is not None:
                self._watch()
            return bool(self._store("check", [self._key("failed")]))
        except PolderError:
            return True

    def _key(self, topic: str) -> str:
        return f"polder/{self.round}/{topic}"

    def _store(self, method: str, key: Any, *word: str) -> Any:
        """Asks the store, whose own errors name no rank: with `get`, the word says whose word it is that is awaited."""
        whose = word[0] if method == "get" and word else "rank 0"
        try:
            return getattr(self.store, method)(key, *(word if method == "set" else ()))
        except (RuntimeError, OSError) as error:
            text = str(error).splitlines()[0]
            # A store in a file has no error of its own for that.
            if isinstance(error, dist.DistStoreError) or text.startswith("Timeout waiting"):
                raise PeerTimeoutError(
                    f"{whose} has not met rank {self.rank} in the c10d store in time ({text}); "
                    "see its log, or raise timeout="
                ) from error
            raise PolderError(
                f"rank {self.rank} lost the c10d store while it waited for {whose} ({type(error).__name__}: {text}); "
                "rank 0 or the launcher, which keeps the store, has ended: see its log"
            ) from error

    def _await(self, key: str, whose: str) -> None:
        """Waits for a key with an eye on the ranks where they are watched. Elsewhere the store waits."""
        while self._watch is not None and not self._store("check", [key]):
            self._pause(f"{whose} has not met rank {self.rank}")

    def _pause(self, late: str = "rank 0 has not opened this attempt") -> None:
        if self._watch is not None:
            self._watch()
        if time.monotonic() > self.deadline:
            raise PeerTimeoutError(f"{late} in the c10d store; see its log, or raise timeout=")
        time.sleep(0.005)

    def agree(self, what: str, attempt: Callable[[], _T], undo: Callable[[_T], None] = lambda _: None) -> _T:
        """Makes an attempt on every rank; when one of them fails, what was made is undone and all raise, naming it."""
        try:
            made = attempt()
        except Exception as error:
            self.tell("failed", self.rank)
            self._settle(what, error, self.exchange(what, _told(error)))
            raise
        try:
            self._settle(what, None, self.exchange(what, None))
        except Exception:
            undo(made)
            raise
        return made

    def _settle(self, what: str, failure: Exception | None, outcomes: list[list[str] | None]) -> None:
        """Raises the failure of the rank that failed first, on every rank, if one did."""
        failed = [(rank, told) for rank, told in enumerate(outcomes) if told]
        if not failed:
            return
        self._leave_together()
        # A rank that gave up because another failed is not the cause.
        rank, told = next((each for each in failed if each[1][0] != _FollowsError.__name__), failed[0])
        if rank == self.rank and failure is not None:
            if isinstance(failure, PolderError):
                raise failure
            raise PolderError(f"rank {rank} could not {what}: {_words(failure)}") from failure
        raise _retold(f"rank {rank} could not {what}", told) from failure

    @contextlib.contextmanager
    def failing_alike(self) -> Generator[None]:
        """For what fails on every rank if on one: none leaves before all have come so far, because the store may go."""
        try:
            yield
        except PolderError:
            self._leave_together()
            raise

    def _leave_together(self) -> None:
        """Stays until every rank has heard of the failure: the store may end with this process."""
        self.tell(f"heard/{self.rank}", None)
        heard = [self._key(f"heard/{rank}") for rank in range(self.size)]
        until = min(self.deadline, time.monotonic() + _FAREWELL_SECONDS)
        with contextlib.suppress(PolderError):
            while time.monotonic() < until and not self._store("check", heard):
                if self._watch is not None:
                    self._watch()
                time.sleep(0.005)


def _told(error: Exception) -> list[str]:
    """An error as other ranks hear of it: its class and its text."""
    return [type(error).__name__, str(error)]


def _words(error: Exception) -> str:
    return ": ".join(_told(error))


def _retold(before: str, told: list[str]) -> PolderError:
    """What another rank was told, in the same class where that is one of Polder's."""
    kind, text = told
    if kind not in errors.__all__:
        return PolderError(f"{before}: {kind}: {text}")
    retold: PolderError = getattr(errors, kind)(f"{before}: {text}")
    return retold


def _machine() -> list[str]:
    """What tells this machine from others, a rebooted one included."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [os.uname().nodename, boot]


def _emulated_host(rank: int, size: int) -> int:
    """Which of the POLDER_EMULATE hosts of this machine the rank plays; 0 when there is only the machine itself."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    locals_ = max(int(os.environ.get("LOCAL_WORLD_SIZE", size)), local + 1)
    hosts = hosts_to_emulate()
    if hosts > locals_ and "LOCAL_WORLD_SIZE" in os.environ:
        raise ArgumentError(f"POLDER_EMULATE={hosts}: this machine has {locals_} ranks, and each host needs one")
    return local * hosts // locals_


def hosts_to_emulate() -> int:
    """How many hosts the ranks of one machine play."""
    hosts = os.environ.get("POLDER_EMULATE", "1")
    if not hosts.isdecimal() or int(hosts) == 0:
        raise ArgumentError(f"POLDER_EMULATE={hosts}: expected a number of hosts, 1 or more")
    return int(hosts)


def host_ids(everyone: list[dict[str, Any]]) -> list[int]:
    """The host id of each rank: its own choice, else one for each machine in the order of ranks.

    Examples
    --------
    >>> at = lambda machine, host=None: {"machine": [machine, "boot"], "emulated": 0, "host": host}
    >>> host_ids([at("a"), at("b"), at("a")])
    [0, 1, 0]
    >>> host_ids([at("a"), at("b", host=0)])
    [1, 0]
    >>> host_ids([at("a")] * 513)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    polder.errors.ArgumentError: 513 ranks are too many for host a: a pool has places for 512 processes of a host; ...
    """
    places = [(*each["machine"], each["emulated"]) for each in everyone]
    chosen: dict[int, tuple[Any, ...]] = {}
    for rank, (place, each) in enumerate(zip(places, everyone, strict=True)):
        host = each["host"]
        if host is not None and chosen.setdefault(host, place)[:2] != place[:2]:
            raise ArgumentError(
                f"rank {rank} on {place[0]} has POLDER_HOST={host}, which {chosen[host][0]} has too; "
                "give each machine its own"
            )
    free = (host for host in range(1 << 16) if host not in chosen)
    given: dict[tuple[Any, ...], int] = {}
    ids: list[int] = []
    for place, each in zip(places, everyone, strict=True):
        if each["host"] is None and place not in given:
            given[place] = next(free)
        ids.append(each["host"] if each["host"] is not None else given[place])
    host, ranks = Counter(ids).most_common(1)[0]
    if ranks > _PROCESSES:
        raise ArgumentError(
            f"{ranks} ranks are too many for host {places[ids.index(host)][0]}: a pool has places for {_PROCESSES} "
            "processes of a host; start fewer on it, or let them play several hosts with POLDER_EMULATE"
        )
    return ids


def expect_one_group(everyone: list[dict[str, Any]]) -> None:
    """That those that meet under one name make the same group: torch counts the groups that a rank makes.

    Examples
    --------
    >>> expect_one_group([{"ranks": [0, 1]}, {"ranks": [0, 2]}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    polder.errors.ArgumentError: rank 0 makes a group of the ranks [0, 1] where rank 2 makes one of [0, 2]; call ...
    """
    ours = everyone[0]["ranks"]
    for at, each in enumerate(everyone):
        if each["ranks"] != ours:
            raise ArgumentError(
                f"rank {ours[0]} makes a group of the ranks {ours} where rank {each['ranks'][at]} makes one of "
                f"{each['ranks']}; call new_group on all ranks in one order"
            )


def pool_path(everyone: list[dict[str, Any]], job: str) -> str:
    """The pool that the group agrees on: the named one, the one that all have, or a new one."""
    named = {each["pool"] for each in everyone}
    if len(named) > 1:
        raise ArgumentError(f"ranks name different pools: {sorted(map(str, named))}; set POLDER_POOL alike on all")
    return named.pop() or _common(everyone) or _private_path(everyone, job)


def make(path: str, own: bool, board: Board) -> "_core.JobPool | None":
    """Makes the job's own pool, on rank 0, and returns its share. A pool that was named has to be there."""
    if board.rank != 0 or path in attachments:
        return None
    if own:
        return _core.JobPool.make(path, board.size)
    if not Path(path).exists():
        raise RegionError(
            f"{path}: there is no pool; make one with `polder pool format --pool {shlex.quote(path)} --size 1GiB`, "
            "or leave POLDER_POOL unset, and the job makes one of its own"
        )
    return None


def attach(
    path: str, own: bool, share: "_core.JobPool | None", host: int, chosen: bool, timeout: timedelta
) -> Attachment:
    """Attaches the pool, or takes the one that is attached.

    The wait for other processes ends within `timeout`, so that this rank can tell the others in time. torch's default
    is nobody's choice: the pool's holds then.
    """
    if path in attachments:
        return attachments[path]
    if own and share is None:
        try:
            share = _core.JobPool.share(path)
        except FileNotFoundError:
            # Rank 0 has made it, could not attach it, and has taken it away again.
            raise _FollowsError from None
    try:
        # An id that nobody chose gives way to the one that a keeper has given this machine.
        seconds = None if timeout == default_pg_timeout else timeout.total_seconds() * _ATTACHING
        place, launched = (host, None) if chosen else (None, host)
        pool = _core.Pool(path, host=place, launched=launched, timeout=seconds)
        try:
            attachment = Attachment(path, pool, share, _core.Messages(pool))
        except BaseException:
            pool.close()
            raise
    except BaseException:
        let_go(share)
        raise
    attachments[path] = attachment
    whose = "made for this job" if own else "named by POLDER_POOL or a config file"
    _log.info("torch.distributed runs over %s (%s, %s memory) as host %d", path, whose, pool.coherence, pool.host)
    return attachment


def is_under_torchrun() -> bool:
    """Whether an agent of torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def expect_one_pool(path: str, board: Board, everyone: list[dict[str, Any]], uuid: str) -> None:
    """That ranks of several machines have attached one pool: a file of the same name on each machine is none.

    Raises
    ------
    RegionError
        Names two hosts and the path.
    """
    pools = board.exchange("uuid", uuid)
    other = next((rank for rank, each in enumerate(pools) if each != pools[0]), None)
    if other is not None:
        first, second = everyone[0]["machine"][0], everyone[other]["machine"][0]
        raise RegionError(
            f"{path} is one pool on host {first} (rank 0, {pools[0]}) and another on host {second} (rank {other}, "
            f"{pools[other]}); set POLDER_POOL to a device or a file that both hosts map"
        )


def join(attachment: Attachment, name: str, board: Board, seconds: float) -> "tuple[_core.Group, _core.Channel]":
    """Joins the group in the pool, and gives up when another rank cannot."""
    try:
        group = _core.Group(attachment.pool, name, board.rank, board.size, timeout=seconds, given_up=board.has_failed)
    except PolderError as error:
        if board.has_failed():
            raise _FollowsError from error
        raise
    try:
        return group, _core.Channel(attachment.messages, group)
    except BaseException:
        group.close()
        raise


def _common(everyone: list[dict[str, Any]]) -> str | None:
    """A pool that every rank has attached already."""
    shared = set(everyone[0]["attached"]).intersection(*(each["attached"] for each in everyone))
    return min(shared, default=None)


def _private_path(everyone: list[dict[str, Any]], job: str) -> str:
    """Where a pool of this job's own goes, if its ranks share a machine."""
    machines = {tuple(each["machine"]) for each in everyone}
    if len(machines) > 1:
        names = ", ".join(sorted(name for name, _ in machines))
        raise ArgumentError(
            f"the ranks run on {len(machines)} machines ({names}), which share no default pool: a job's own, such as "
            f"{_core.JobPool.place(job)}, lies in one machine's memory; set POLDER_POOL to a dax device or a file that "
            "all of them map"
        )
    return str(_core.JobPool.place(job))


def let_go(share: "_core.JobPool | None") -> None:
    """Gives a share of the job's own pool back; the last process removes the pool."""
    if share is not None:
        share.release()
