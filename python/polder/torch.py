"""The backend ``polder`` of torch.distributed: collectives through a pool of shared memory.

Two lines make a data-parallel program use it::

    import polder.torch
    torch.distributed.init_process_group("polder")

With no configuration the ranks of one machine make a pool of their own in /dev/shm and remove it at the end.
``POLDER_POOL=/dev/dax0.0`` (or any path) uses that one. ``POLDER_HOST`` is the host id of a rank; without it ids come
from the pool's keeper, or where that gives none from the c10d store, one for each machine in the order of ranks.
``POLDER_EMULATE=2`` spreads the ranks of one machine over two host ids, to try what two machines would do.

It carries DDP, ``all_reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter`` and ``barrier``
on CPU tensors, with ``async_op`` too. A collective that it does not carry raises `NotImplementedError` with its name.
A collective that fails leaves its tensors with some of what they held and some of the result, as with other backends.

Errors are those of `polder.errors`: a rank that dies in an operation gives every other rank a `PeerDeadError`. In a
backward pass of DDP torch makes a RuntimeError of it, whose text is the same and names the host and the process. After
an error the group is broken; leave it with ``destroy_process_group`` and join anew, as torchrun does by restarting.
"""

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

# What c10d calls has the names and arguments of its bindings, which its stubs do not follow.
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportUnknownMemberType=false

try:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        BarrierOptions,
        BroadcastOptions,
        ReduceScatterOptions,
        Work,
    )
except ImportError as error:
    raise ImportError(f"polder.torch needs torch ({error}); install it with: pip install 'polder[torch]'") from error

from polder import _core, errors
from polder.errors import ArgumentError, PeerTimeoutError, PolderError, RegionError

__all__ = ["ProcessGroupPolder"]

_POOL_BYTES = 1 << 30
_DRAFT_SECONDS = 60
_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "average",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}
_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.uint16: "uint16",
    torch.int16: "int16",
    torch.uint32: "uint32",
    torch.int32: "int32",
    torch.uint64: "uint64",
    torch.int64: "int64",
}


class _Done(Work):
    """An operation that was over when its call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Pending(Work):
    """An operation on its way, on the group's own thread.

    Parameters
    ----------
    tickets : list
        What it waits for, the last one last.
    tensors : list
        What it gives.
    finish : callable, optional
        Run once, after the last ticket and before anybody sees the tensors: copies out of staging tensors.
    """

    def __init__(
        self,
        tickets: "list[_core.Ticket]",
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._tickets = tickets
        self._tensors = tensors
        self._finish = finish
        self._finishing = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Waits for the operation; raises what went wrong with it."""
        seconds = timeout.total_seconds()
        for ticket in self._tickets:
            if not ticket.wait(seconds if seconds > 0 else None):
                raise PeerTimeoutError(f"the operation is not done after {seconds} s; it goes on in the background")
        self._finish_once()
        return True

    def _finish_once(self) -> None:
        # Whoever comes second, on another thread, waits until the copies are made.
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def is_completed(self) -> bool:
        """Whether the tensors hold the result, or the operation failed."""
        done = all(ticket.done() for ticket in self._tickets)
        if done and self.exception() is None:
            self._finish_once()
        return done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for ticket in self._tickets if (error := ticket.error()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the tensors, which DDP's reducer waits for. A failure is a RuntimeError with the text of ours."""
        if self._future is None:
            over: torch.futures.Future[BaseException | None] = torch.futures.Future()
            # What set_exception leaves is an error for Python alone, which the reducer takes for tensors: it crashed.
            self._future = over.then(self._outcome)
            self._tickets[-1].when_done(over.set_result)
        return self._future

    def _outcome(self, over: "torch.futures.Future[BaseException | None]") -> list[torch.Tensor]:
        error = over.value() or self.exception()
        if error is not None:
            raise error
        self._finish_once()
        return self._tensors


def _missing(name: str) -> Callable[..., NoReturn]:
    def method(self: "ProcessGroupPolder", *_arguments: object, **_options: object) -> NoReturn:
        raise NotImplementedError(
            f"the backend polder does not carry {name} yet; use a second group: "
            'torch.distributed.new_group(backend="gloo")'
        )

    method.__name__ = name
    method.__doc__ = f"Says that {name} is not carried."
    return method


class ProcessGroupPolder(dist.ProcessGroup):
    """A c10d process group over a pool. Made by ``init_process_group`` and ``new_group``, not by hand."""

    def __init__(self, attachment: "_Attachment", group: "_core.Group", rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._attachment = attachment
        self._core = group
        self._group_size = size
        self._names = [name, ""]
        self._done = _Done()

    # What c10d asks by these names.

    def getBackendName(self) -> str:
        return "polder"

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupDesc(self, desc: str) -> None:
        self._names[1] = desc

    def getGroupDesc(self) -> str:
        return self._names[1]

    # The collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:
        """Every rank gets the reduction, the same bits on each."""
        tensor = _one(tensors, "all_reduce")
        flat, back = _in_and_out(tensor, "all_reduce")
        return self._run("all_reduce", flat, flat, opts, tensors, back, op=_op(opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: AllreduceCoalescedOptions) -> Work:
        """`allreduce` of each tensor."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self._together(works, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> Work:
        """Every rank gets the root's bytes."""
        tensor = _one(tensors, "broadcast")
        flat, back = _in_and_out(tensor, "broadcast")
        return self._run("broadcast", flat, flat, opts, tensors, back, root=opts.rootRank)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: AllgatherOptions) -> Work:
        """Every rank gets the input of each."""
        source, targets = _one(inputs, "all_gather"), _one(outputs, "all_gather")
        self._expect_one_each(targets, source, "all_gather")
        whole = torch.empty(self._group_size * source.numel(), dtype=source.dtype)

        def back() -> None:
            for target, part in zip(targets, whole.chunk(self._group_size), strict=True):
                target.copy_(part.view(target.shape))

        back_or_none = back if source.numel() else None
        return self._run("all_gather", _contiguous(source, "all_gather"), whole, opts, targets, back_or_none)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: AllgatherOptions) -> Work:
        self._expect_count(output, self._group_size * source.numel(), source, "all_gather_into_tensor")
        flat, back = _out(output, "all_gather_into_tensor")
        return self._run("all_gather", _contiguous(source, "all_gather_into_tensor"), flat, opts, [output], back)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllgatherOptions
    ) -> Work:
        """`all_gather_into_tensor` of each pair."""
        works = [self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: ReduceScatterOptions
    ) -> Work:
        """Rank r gets the reduction of everybody's r-th input."""
        output, parts = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        self._expect_one_each(parts, output, "reduce_scatter")
        whole = torch.cat([_contiguous(part, "reduce_scatter").flatten() for part in parts])
        flat, back = _out(output, "reduce_scatter")
        return self._run("reduce_scatter", whole, flat, opts, outputs, back, op=_op(opts))

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: ReduceScatterOptions) -> Work:
        self._expect_count(source, self._group_size * output.numel(), output, "reduce_scatter_tensor")
        flat, back = _out(output, "reduce_scatter_tensor")
        whole = _contiguous(source, "reduce_scatter_tensor")
        return self._run("reduce_scatter", whole, flat, opts, [output], back, op=_op(opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: ReduceScatterOptions
    ) -> Work:
        """`reduce_scatter_tensor` of each pair."""
        works = [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Nobody leaves before all have entered."""
        empty = torch.empty(0, dtype=torch.uint8)
        return self._run("barrier", empty, empty, opts or BarrierOptions(), [], None)

    allgather_coalesced = _missing("all_gather_coalesced")
    alltoall = _missing("all_to_all")
    alltoall_base = _missing("all_to_all_single")
    gather = _missing("gather")
    scatter = _missing("scatter")
    reduce = _missing("reduce")
    send = _missing("send")
    recv = _missing("recv")
    recv_anysource = _missing("recv from any source")
    monitored_barrier = _missing("monitored_barrier")

    # The end.

    def shutdown(self) -> None:
        """Finishes what is on its way and leaves the pool; the last group of a process closes it."""
        self._core.close()
        self._attachment.release(self)

    def abort(self) -> None:
        """As `shutdown`: an operation that waits for a rank ends by its timeout."""
        self.shutdown()

    # How.

    def _run(
        self,
        what: str,
        source: torch.Tensor,
        target: torch.Tensor,
        opts: Any,
        tensors: list[torch.Tensor],
        back: Callable[[], None] | None,
        op: str = "sum",
        root: int = 0,
    ) -> Work:
        """Runs `what` at once when the caller waits for it anyway, queues it otherwise."""
        dtype = _DTYPES.get(source.dtype)
        if dtype is None:
            raise ArgumentError(f"{what} of {source.dtype} is not carried; convert the tensor first")
        wait = not opts.asyncOp
        limit = opts.timeout.total_seconds()
        ticket = self._core.start(
            what,
            (source.data_ptr(), source.numel()),
            (target.data_ptr(), target.numel()),
            dtype,
            op,
            root,
            limit if limit > 0 else None,
            wait,
            (source, target),
        )
        if ticket is not None:
            return _Pending([ticket], tensors, back)
        if back is not None:
            back()
        return self._done

    def _together(self, works: list[Work], tensors: list[torch.Tensor]) -> Work:
        pending = [work for work in works if isinstance(work, _Pending)]
        if not pending:
            return self._done

        def back() -> None:
            for work in pending:
                work._finish_once()  # pyright: ignore[reportPrivateUsage]

        tickets = [ticket for work in pending for ticket in work._tickets]  # pyright: ignore[reportPrivateUsage]
        return _Pending(tickets, tensors, back)

    def _expect_one_each(self, parts: list[torch.Tensor], like: torch.Tensor, what: str) -> None:
        if len(parts) != self._group_size:
            raise ArgumentError(f"{what} got {len(parts)} tensors for {self._group_size} ranks; give one for each")
        for part in parts:
            self._expect_count(part, like.numel(), like, what)

    def _expect_count(self, tensor: torch.Tensor, count: int, like: torch.Tensor, what: str) -> None:
        if tensor.numel() != count or tensor.dtype != like.dtype:
            raise ArgumentError(
                f"{what} got {tensor.numel()} elements of {tensor.dtype} where {count} of {like.dtype} belong"
            )


def _one(items: list[Any], what: str) -> Any:
    if len(items) != 1:
        raise ArgumentError(f"{what} got {len(items)} tensors; give one for each process")
    return items[0]


def _op(opts: Any) -> str:
    op = _OPS.get(opts.reduceOp.op)
    if op is None:
        raise ArgumentError(f"reductions by {opts.reduceOp.op} are not carried; there are {', '.join(_OPS.values())}")
    return op


def _contiguous(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if not tensor.is_cpu:
        raise ArgumentError(f"{what} got a tensor on {tensor.device}; polder carries CPU tensors: call .cpu() first")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{what} got a tensor of layout {tensor.layout}; call .to_dense() first")
    return tensor.contiguous()


def _in_and_out(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """What to send and receive in, and how it gets back into a tensor that is not contiguous."""
    flat = _contiguous(tensor, what)
    return flat, None if flat is tensor else lambda: _copy_back(tensor, flat)


def _out(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Callable[[], None] | None]:
    return _in_and_out(tensor, what)


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.copy_(flat)


# Meeting: who is where, and in which pool.


@dataclass
class _Attachment:
    """A pool that this process has attached for its groups."""

    path: str
    pool: "_core.Pool"
    lock: int | None
    """The descriptor that holds the lock on a pool of the job's own."""
    groups: list[ProcessGroupPolder] = field(default_factory=list[ProcessGroupPolder])

    def release(self, group: ProcessGroupPolder) -> None:
        """Forgets a group; the last one closes the pool, and the last process removes a pool of its own."""
        if group not in self.groups:
            return
        self.groups.remove(group)
        if not self.groups:
            self.close()

    def close(self) -> None:
        """Closes the pool."""
        _attachments.pop(self.path, None)
        self.pool.close()
        lock, self.lock = self.lock, None
        _let_go(self.path, lock)


_attachments: dict[str, _Attachment] = {}


@atexit.register
def _leave() -> None:
    """Leaves every pool when a program ends without destroy_process_group."""
    for attachment in list(_attachments.values()):
        for group in list(attachment.groups):
            group.shutdown()


def _create(options: Any, _backend_options: object) -> ProcessGroupPolder:
    """Makes this rank's part of a group: c10d calls it on every rank of the group."""
    rank, size, store = options.group_rank, options.group_size, options.store
    settings = _core.settings()
    board = _Board(store, rank, size, options.timeout)
    me = {
        "machine": _machine(),
        "emulated": _emulated_host(rank, size),
        "host": settings["host"],
        "pool": settings["pool"],
        "attached": list(_attachments),
    }
    everyone = board.meet(me)
    hosts = _host_ids(everyone)
    attachment = board.agree("attach", lambda: _attach(everyone, hosts, board, settings))
    name = f"/torch/{board.round}/{options.group_id}"
    try:
        group = _core.Group(attachment.pool, name, rank, size, timeout=options.timeout.total_seconds())
    except PolderError:
        if not attachment.groups:
            attachment.close()
        raise
    made = ProcessGroupPolder(attachment, group, rank, size, str(options.group_id))
    attachment.groups.append(made)
    return made


class _Board:
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

    def meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says of itself, in the order of ranks."""
        mine = {**mine, "draw": secrets.token_hex(8)}
        if self.rank == 0:
            self.store.set("polder/round", self.round)
            everyone = self.exchange("hello", mine)
            self.tell("everyone", everyone)
            return everyone
        while True:
            self.round = self.store.get("polder/round").decode()
            self.tell(f"hello/{self.rank}", mine)
            while not self.store.check([self._key("everyone")]):
                if self.store.get("polder/round").decode() != self.round:
                    break
                self._pause()
            else:
                everyone = json.loads(self.store.get(self._key("everyone")))
                if everyone[self.rank]["draw"] == mine["draw"]:
                    return everyone
            self._pause()

    def exchange(self, topic: str, mine: Any) -> list[Any]:
        """Everybody's word on `topic`, in the order of ranks."""
        self.tell(f"{topic}/{self.rank}", mine)
        return [self.hear(f"{topic}/{rank}") for rank in range(self.size)]

    def hear(self, topic: str) -> Any:
        """What was told on `topic`, once it is."""
        return json.loads(self.store.get(self._key(topic)))

    def tell(self, topic: str, word: Any) -> None:
        """Tells every rank."""
        self.store.set(self._key(topic), json.dumps(word))

    def _key(self, topic: str) -> str:
        return f"polder/{self.round}/{topic}"

    def _pause(self) -> None:
        if time.monotonic() > self.deadline:
            raise PeerTimeoutError(
                "rank 0 has not opened this attempt in the c10d store; see its log, or raise timeout="
            )
        time.sleep(0.005)

    def agree(self, topic: str, attempt: Callable[[], _Attachment]) -> _Attachment:
        """Makes an attempt on every rank; when one of them fails, all raise, naming it."""
        failure: Exception | None = None
        made: _Attachment | None = None
        try:
            made = attempt()
        except Exception as error:
            failure = error
        outcomes = self.exchange(topic, None if failure is None else _told(failure))
        if failure is None and made is not None and not any(outcomes):
            return made
        if made is not None and not made.groups:
            made.close()
        if failure is not None:
            raise failure
        rank, told = next((rank, told) for rank, told in enumerate(outcomes) if told)
        raise _retold(f"rank {rank} could not join the pool", told)


def _told(error: Exception) -> list[str]:
    """An error as other ranks hear of it: its class and its text."""
    return [type(error).__name__, str(error)]


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
    locals_ = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local * _hosts_to_emulate() // max(locals_, local + 1)


def _hosts_to_emulate() -> int:
    hosts = os.environ.get("POLDER_EMULATE", "1")
    if not hosts.isdecimal() or int(hosts) == 0:
        raise ArgumentError(f"POLDER_EMULATE={hosts}: expected a number of hosts, 1 or more")
    return int(hosts)


def _host_ids(everyone: list[dict[str, Any]]) -> list[int]:
    """The host id of each rank: its own choice, else one for each machine in the order of ranks.

    Examples
    --------
    >>> at = lambda machine, host=None: {"machine": [machine, "boot"], "emulated": 0, "host": host}
    >>> _host_ids([at("a"), at("b"), at("a")])
    [0, 1, 0]
    >>> _host_ids([at("a"), at("b", host=0)])
    [1, 0]
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
    return ids


def _attach(everyone: list[dict[str, Any]], hosts: list[int], board: _Board, settings: "_core.Settings") -> _Attachment:
    """Attaches the pool that the group agrees on: the named one, the one that all have, or a new one."""
    named = {each["pool"] for each in everyone}
    if len(named) > 1:
        raise ArgumentError(f"ranks name different pools: {sorted(map(str, named))}; set POLDER_POOL alike on all")
    path = named.pop() or _common(everyone) or _private_path(everyone, board.round)
    if path in _attachments:
        return _attachments[path]
    own = settings["pool"] is None
    lock: int | None = None
    if board.rank == 0:
        try:
            lock = _make_own_pool(path, len(everyone)) if own else _make_named_pool(path, len(everyone))
            board.tell("made", None)
        except (PolderError, OSError) as error:
            board.tell("made", _told(error))
            raise
    elif told := board.hear("made"):
        raise _retold("rank 0 could not make the pool", told)
    elif own:
        lock = _share(path)
    # An id that nobody chose gives way to the one that a keeper has given this machine.
    chosen = settings["host"] is not None or _hosts_to_emulate() > 1
    place = hosts[board.rank]
    try:
        pool = _core.Pool(path, host=place) if chosen else _core.Pool(path, launched=place)
        attachment = _Attachment(path, pool, lock)
    except PolderError:
        _let_go(path, lock)
        raise
    _attachments[path] = attachment
    return attachment


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
            f"the ranks run on {len(machines)} machines ({names}), which share no default pool; set POLDER_POOL to a "
            "dax device or a file that all of them map"
        )
    return f"/dev/shm/polder-{os.getuid()}-{job}.pool"


def _make_named_pool(path: str, ranks: int) -> None:
    """Makes a pool in a new file at `path`; what is there, or comes there meanwhile, stays as it is."""
    if Path(path).exists():
        return
    try:
        _format(path, ranks)
    except PolderError:
        if not Path(path).exists():
            raise


def _make_own_pool(path: str, ranks: int) -> int:
    """Makes a pool for this job and returns the lock on it, which no sweep can slip in before."""
    _sweep()
    draft = f"{path}.draft"
    _format(draft, ranks)
    lock = _share(draft)
    Path(draft).rename(path)
    return lock


def _format(path: str, ranks: int) -> None:
    """A pool that takes memory only as it is used, of 1 GiB where there is room for it."""
    try:
        room = os.statvfs(Path(path).parent)
    except OSError as error:
        raise RegionError(f"{path}: no pool can be made there, {error.strerror}; make the folder first") from None
    size = min(_POOL_BYTES, room.f_bavail * room.f_frsize // 2 >> 21 << 21)
    _core.format(path, size, processes=min(max(ranks, 16), 64))


def _share(path: str) -> int:
    """Takes the lock that keeps others from removing a pool in use."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _let_go(path: str, lock: int | None) -> None:
    """Gives a lock back; the last one who holds it removes the pool."""
    if lock is not None:
        if _is_sole(lock):
            Path(path).unlink(missing_ok=True)
        os.close(lock)


def _is_sole(descriptor: int) -> bool:
    """Whether no other process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep() -> None:
    """Removes the pools of this user's jobs that were killed before they could, and drafts that were given up."""
    for path in Path("/dev/shm").glob(f"polder-{os.getuid()}-*.pool*"):
        with contextlib.suppress(OSError):
            if path.suffix == ".pool":
                _let_go(str(path), os.open(path, os.O_RDWR | os.O_CLOEXEC))
            elif time.time() - path.stat().st_mtime > _DRAFT_SECONDS:
                path.unlink()


dist.Backend.register_backend("polder", _create, extended_api=True, devices=["cpu"])
