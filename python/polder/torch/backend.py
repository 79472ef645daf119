"""The process group that torch.distributed calls."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

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

from polder import _core
from polder.errors import ArgumentError
from polder.torch.meeting import (
    Attachment,
    Board,
    attach,
    host_ids,
    hosts_to_emulate,
    introduction,
    join,
    let_go,
    make,
    pool_path,
)
from polder.torch.work import Done, Pending

# What c10d calls has the names and arguments of its bindings, which its stubs do not follow.
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportUnknownMemberType=false
# pyright: reportAssignmentType=false


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

    def __init__(self, attachment: "Attachment", group: "_core.Group", rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._attachment = attachment
        self._core = group
        self._group_size = size
        self._names = [name, ""]
        self._done = Done()

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
        return self._run("all-reduce", flat, flat, opts, tensors, back, op=_op(opts))

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
        return self._run("all-gather", _contiguous(source, "all_gather"), whole, opts, targets, back_or_none)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: AllgatherOptions) -> Work:
        self._expect_count(output, self._group_size * source.numel(), source, "all_gather_into_tensor")
        flat, back = _out(output, "all_gather_into_tensor")
        return self._run("all-gather", _contiguous(source, "all_gather_into_tensor"), flat, opts, [output], back)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllgatherOptions
    ) -> Work:
        """`all_gather_into_tensor` of each pair."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: ReduceScatterOptions
    ) -> Work:
        """Rank r gets the reduction of everybody's r-th input."""
        output, parts = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        self._expect_one_each(parts, output, "reduce_scatter")
        whole = torch.cat([_contiguous(part, "reduce_scatter").flatten() for part in parts])
        flat, back = _out(output, "reduce_scatter")
        return self._run("reduce-scatter", whole, flat, opts, outputs, back, op=_op(opts))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: ReduceScatterOptions) -> Work:
        self._expect_count(source, self._group_size * output.numel(), output, "reduce_scatter_tensor")
        flat, back = _out(output, "reduce_scatter_tensor")
        whole = _contiguous(source, "reduce_scatter_tensor")
        return self._run("reduce-scatter", whole, flat, opts, [output], back, op=_op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: ReduceScatterOptions
    ) -> Work:
        """`reduce_scatter_tensor` of each pair."""
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Nobody leaves before all have entered."""
        empty = torch.empty(0, dtype=torch.uint8)
        return self._run("barrier", empty, empty, opts or BarrierOptions(), [], None)

    allgather_coalesced = _missing("all_gather_coalesced")
    alltoall = _missing("all_to_all")
    all_to_all_single = _missing("all_to_all_single")
    gather = _missing("gather")
    gather_single = _missing("gather_single")
    scatter = _missing("scatter")
    reduce = _missing("reduce")
    send = _missing("send")
    recv = _missing("recv")
    recv_anysource = _missing("recv from any source")
    monitored_barrier = _missing("monitored_barrier")

    # What torch before 2.15 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # The end.

    def shutdown(self) -> None:
        """Finishes what is on its way and leaves the pool; the last group of a process closes it."""
        try:
            self._core.close()
        finally:
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
        wait = not opts.asyncOp
        limit = opts.timeout.total_seconds()
        ticket = self._core.start(
            what,
            (source.data_ptr(), source.numel()),
            (target.data_ptr(), target.numel()),
            _dtype(source.dtype),
            op,
            root,
            limit if limit > 0 else None,
            wait,
            (source, target),
        )
        if ticket is not None:
            return Pending([ticket], tensors, back)
        if back is not None:
            back()
        return self._done

    def _together(self, works: list[Work], tensors: list[torch.Tensor]) -> Work:
        pending = [work for work in works if isinstance(work, Pending)]
        if not pending:
            return self._done

        def back() -> None:
            for work in pending:
                work.finish_once()

        tickets = [ticket for work in pending for ticket in work.tickets]
        return Pending(tickets, tensors, back)

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
    return _op_name(opts.reduceOp.op)


@functools.cache
def _op_name(op: Any) -> str:
    """The operation as torch spells it, in small letters: the pool's names have these beside them."""
    name: str = op.name
    return name.lower()


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    """The type as torch spells it, which is how the pool does."""
    return str(dtype).removeprefix("torch.")


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


def create(options: Any, _backend_options: object) -> ProcessGroupPolder:
    """Makes this rank's part of a group: c10d calls it on every rank of the group."""
    rank: int = options.group_rank
    size: int = options.group_size
    timeout: timedelta = options.timeout
    board = Board(options.store, rank, size, timeout)
    everyone = board.meet(lambda: introduction(rank, size))
    path: str = pool_path(everyone, board.round)
    host = host_ids(everyone)[rank]
    own = everyone[rank]["pool"] is None
    chosen = everyone[rank]["host"] is not None or hosts_to_emulate() > 1
    attachment: Attachment | None = None
    try:
        share = board.agree("make the pool", lambda: make(path, own, board), let_go)
        attachment = board.agree(
            "attach the pool",
            lambda: attach(path, own, share, host, chosen, timeout),
            Attachment.close_unused,
        )
        pool, name, seconds = (
            attachment.pool,
            f"/torch/{board.round}/{options.group_id}",
            timeout.total_seconds(),
        )
        group = board.agree(
            "join the group",
            lambda: join(pool, name, board, seconds),
            lambda group: group.close(),
        )
    except BaseException:
        if attachment is not None:
            attachment.close_unused()
        raise
    made = ProcessGroupPolder(attachment, group, rank, size, str(options.group_id))
    attachment.groups.append(made)
    return made
