"""The process group that torch.distributed calls."""

import contextlib
import functools
import math
import operator
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from polder import _core, address
from polder.errors import ArgumentError, PeerDeadError, PeerError, PeerTimeoutError, PolderError
from polder.torch import averages, gpu
from polder.torch.meeting import (
    Attachment,
    Board,
    attach,
    attachments,
    expect_one_group,
    expect_one_pool,
    host_ids,
    hosts_to_emulate,
    introduction,
    is_under_torchrun,
    join,
    let_go,
    make,
    pool_path,
)
from polder.torch.trace import trace
from polder.torch.work import Done, Pending, Received, uncompiled

# What c10d calls has the names and arguments of its bindings, which its stubs do not follow.
# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false, reportUnknownMemberType=false
# pyright: reportAssignmentType=false, reportPrivateUsage=false

_UNTOLD_SECONDS = 1.0
"""A receive that waits for longer tells the other ranks, or after half of its timeout."""


_MOST_TAG = (1 << 31) - 1
"""The largest tag of a message: c10d's own backends have as many."""
_UNFINISHED = 16
"""So many works may wait for their copies before the next call looks which are over."""

_TORCHRUN = (
    "see that rank's output for the reason; torchrun ends this rank too, and with --max-restarts starts all again"
)
"""What users of torchrun ask of an error that names a dead rank."""
_RENAMED = " of the job"
"""What ends an error that has the job's rank."""

DEVICES = ("cpu", "cuda")
"""Where the tensors may be that the backend carries."""

_COLLECTIVES = {
    "barrier": "barrier",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
}
"""The pool's name of each call."""
_THROUGH_POOL = ("all-reduce", "broadcast", "all-gather", "reduce-scatter")

_OPS = {hash(op): name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
"""Reductions by what a `ReduceOp` of c10d has as its hash."""
_SUM, _AVG = hash(dist.ReduceOp.SUM), hash(dist.ReduceOp.AVG)
_UNSET = AllreduceOptions().timeout
"""The timeout of a call that names none."""


@uncompiled
class _Part(Backend):
    """What a group is to c10d's questions after the backend of a device: calls go to the group itself."""

    supports_coalescing = False
    supports_splitting = True

    def __init__(self, group: "ProcessGroupPolder") -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)

    def getBackendName(self) -> str:
        return "polder"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        group = self._group()
        if group is not None:
            group.set_timeout(timeout)


class _PartOfMixed(_Part):
    """The backend of one device in a group of c10d's own, as in ``cpu:polder,cuda:nccl``; it passes calls on."""

    supports_splitting = False

    def __init__(self, group: "ProcessGroupPolder") -> None:
        super().__init__(group)
        self.kept = group

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:
        return self.kept.allreduce(tensors, opts)

    def monitored_barrier(self, opts: BarrierOptions, wait_all_ranks: bool = False) -> None:
        self.kept.monitored_barrier(opts.timeout, wait_all_ranks)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: _PartOfMixed, *arguments: Any) -> Any:
        return getattr(self.kept, name)(*arguments)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "all_to_all_single", "alltoall"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("send", "recv", "recv_anysource", "barrier", "set_timeout", "shutdown", "abort"),
):
    setattr(_PartOfMixed, _name, _passed_on(_name))
uncompiled(_PartOfMixed)


@uncompiled
class ProcessGroupPolder(dist.ProcessGroup):
    """A c10d process group over a pool. Made by ``init_process_group`` and ``new_group``, not by hand."""

    def __init__(
        self,
        attachment: "Attachment",
        joined: "tuple[_core.Group, _core.Channel]",
        rank: int,
        size: int,
        name: str,
        store: Store,
        timeout: timedelta,
        global_ranks: list[int],
    ) -> None:
        super().__init__(rank, size)
        self._attachment = attachment
        self._core, self._channel = joined
        self._start = self._core.start
        self._rank, self._group_size = rank, size
        # Of each rank, its number in the job.
        self._global_ranks = global_ranks or list(range(size))
        self.processes = [(host, pid) for host, pid, _ in self._core.members()]
        """The host id and process id of each rank."""
        self._names = [name, ""]
        self._store = store
        self._seconds = timeout.total_seconds()
        self.agreements = store
        """Where its ranks agree on what concerns this group alone."""
        self._done = Done()
        # Of a call without a tensor. The program may have another default device.
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Works whose results have to be copied to their tensors, in the order of their calls.
        self._unfinished: list[Pending] = []
        self._exchanges = 0
        self._watches = 0
        self._trace = trace()
        # Where long tensors of a GPU go through the pool, once there was one.
        self._pinned: gpu.PinnedPool | None = None
        self._is_shut = False
        kind = dist.ProcessGroup.BackendType.CUSTOM
        # torch 2.12 constructs no backend in Python; monitored_barrier and split_group ask for one.
        with contextlib.suppress(TypeError):
            part = _Part(self)
            for device in DEVICES:
                self._register_backend(torch.device(device), kind, part)
            self._set_default_backend(kind)

    # What c10d asks by these names.

    def getBackendName(self) -> str:
        return "polder"

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupDesc(self, desc: str) -> None:
        self._names[1] = desc

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._group_size

    def get_group_store(self) -> Store:
        return self._store

    @property
    def seconds(self) -> float:
        """How long an operation may wait for a rank, where it has no timeout of its own."""
        return self._seconds

    def members(self) -> list[tuple[int, int, bool]]:
        """The host id and process id of each rank, and whether the process lives. A broken group knows it too."""
        return self._core.members()

    def give_up(self) -> None:
        """Ends the group for this rank: others that wait for it fail. `members` goes on."""
        self._core.give_up()

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes how long an operation may wait for a rank, where it has no timeout of its own."""
        self._seconds = timeout.total_seconds()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> "ProcessGroupPolder | None":
        """A group of some ranks of this one, in the order of `new_ranks`; None on a rank that is not among them."""
        del opts, device_types
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._names[0]}:{'-'.join(map(str, new_ranks))}"
        asked = _Asked(
            PrefixStore(f"split/{name}", self._store),
            new_ranks.index(self._rank),
            len(new_ranks),
            timeout or timedelta(seconds=self._seconds),
            name,
            [self._global_ranks[rank] for rank in new_ranks],
        )
        made = _create(asked)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or f"{self._names[1]}:split")
        return made

    def getGroupDesc(self) -> str:
        return self._names[1]

    # The collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Every rank gets the reduction, the same bits on each."""
        opts = opts or AllreduceOptions()
        if tensors[0].is_sparse:
            # In whatever mode the program is: what comes into the tensor is of its kind, and no part of a graph.
            with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
                return self._sum_sparse(_one(tensors, "all_reduce"), opts)
        return self._reduce("all_reduce", tensors, tensors, opts, op=hash(opts.reduceOp))

    def _sum_sparse(self, tensor: torch.Tensor, opts: AllreduceOptions) -> Work:
        """The sum of sparse tensors, over when this returns: every rank gets all entries and adds them up."""
        op = _OPS.get(hash(opts.reduceOp), "")
        if op not in ("sum", "avg"):
            raise ArgumentError(f"all_reduce got {op} of a sparse tensor; it takes sum and avg")
        if op == "avg" and tensor.itemsize < 4 and not tensor.dtype.is_floating_point:
            # As of a dense one: the sum of two ranks may be too large already.
            raise ArgumentError(f"all_reduce got avg of a sparse tensor of {tensor.dtype}; convert it to a float")
        own, gathering = tensor.coalesce(), AllgatherOptions()
        gathering.timeout, gathering.asyncOp = opts.timeout, False
        shape = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape], device="cpu")
        shapes = [torch.empty_like(shape) for _ in range(self._group_size)]
        self.allgather([shapes], [shape], gathering)
        for rank, other in enumerate(shapes):
            if not torch.equal(other[1:], shape[1:]):
                raise ArgumentError(
                    f"all_reduce got a sparse tensor with sparse dimensions and shape {shape[1:].tolist()} on rank "
                    f"{self._rank} and {other[1:].tolist()} on rank {rank}; give all ranks the same"
                )
        counts = [int(other[0]) for other in shapes]

        def everyones(entries: torch.Tensor) -> torch.Tensor:
            # Entries along the first dimension, as many as the rank with the most has.
            padded = entries.new_zeros((max(counts), *entries.shape[1:]))
            padded[: len(entries)] = entries
            parts = [torch.empty_like(padded) for _ in counts]
            self.allgather([parts], [padded], gathering)
            return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

        if max(counts):
            indices, values = everyones(own.indices().t().contiguous()).t(), everyones(own.values())

            def total(of: torch.Tensor, at: torch.Tensor = indices) -> torch.Tensor:
                return torch.sparse_coo_tensor(at, of, tensor.shape, check_invariants=True).coalesce()

            if op == "sum":
                tensor.copy_(total(values))
            elif values.dtype in averages.HALVES:
                tensor.copy_(total(values * (1 / self._group_size)))
            elif values.dtype in averages.WHOLES:
                halves = averages.divided(values.cpu(), self._group_size)[0]
                sums = [total(half.view(values.shape).to(values.device)) for half in halves]
                means = averages.mean_of(torch.stack([it.values().cpu() for it in sums]), self._group_size)
                tensor.copy_(total(means.to(values.device), sums[0].indices()))
            else:
                tensor.copy_(total(values) / self._group_size)
        return Done([tensor])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: AllreduceCoalescedOptions | None = None) -> Work:
        """`allreduce` of each tensor."""
        opts = opts or AllreduceCoalescedOptions()
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self._together(works, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions | None = None) -> Work:
        """Every rank gets the root's bytes."""
        opts = opts or BroadcastOptions()
        _one(tensors, "broadcast")
        root = opts.rootRank
        sources, targets = (tensors, []) if root == self._rank else ([], tensors)
        return self._run("broadcast", sources, targets, opts, tensors, root=root)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Every rank gets the input of each."""
        opts = opts or AllgatherOptions()
        source, targets = _one(inputs, "all_gather"), _one(outputs, "all_gather")
        self._expect_one_each(targets, source, "all_gather", own=self._rank)
        return self._run("all_gather", inputs, targets, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        self._expect_count(output, self._group_size * source.numel(), source, "all_gather_into_tensor")
        return self._run("all_gather_into_tensor", [source], [output], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """`all_gather_into_tensor` of each pair."""
        opts = opts or AllgatherOptions()
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Rank r gets the reduction of everybody's r-th input."""
        opts = opts or ReduceScatterOptions()
        output, parts = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        self._expect_one_each(parts, output, "reduce_scatter", own=self._rank)
        return self._reduce("reduce_scatter", parts, outputs, opts, op=hash(opts.reduceOp))

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        self._expect_count(source, self._group_size * output.numel(), output, "reduce_scatter_tensor")
        return self._reduce("reduce_scatter_tensor", [source], [output], opts, op=hash(opts.reduceOp))

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """`reduce_scatter_tensor` of each pair."""
        opts = opts or ReduceScatterOptions()
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Nobody leaves before all have entered."""
        return self._run("barrier", [self._nothing], [], opts or BarrierOptions(), [])

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """`all_gather` of each input; `outputs` has a list of tensors for each rank."""
        opts = opts or AllgatherOptions()
        works = [
            self.allgather([[of_rank[at] for of_rank in outputs]], [source], opts) for at, source in enumerate(inputs)
        ]
        return self._together(works, [tensor for of_rank in outputs for tensor in of_rank])

    def reduce(self, tensors: list[torch.Tensor], opts: ReduceOptions | None = None) -> Work:
        """The root gets the reduction; what the others' tensors hold stays."""
        opts = opts or ReduceOptions()
        _one(tensors, "reduce")
        root = opts.rootRank
        targets = tensors if root == self._rank else []
        return self._reduce("reduce", tensors, targets, opts, tensors, hash(opts.reduceOp), root)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: GatherOptions | None = None
    ) -> Work:
        """The root gets the input of each rank."""
        opts = opts or GatherOptions()
        source, root = _one(inputs, "gather"), opts.rootRank
        targets: list[torch.Tensor] = []
        if root == self._rank:
            targets = _one(outputs, "gather")
            self._expect_one_each(targets, source, "gather")
        return self._run("gather", inputs, targets, opts, root=root)

    def gather_single(
        self, output: torch.Tensor | None, source: torch.Tensor, opts: GatherOptions | None = None
    ) -> Work:
        """As `gather`, into one tensor."""
        opts = opts or GatherOptions()
        if opts.rootRank != self._rank or output is None:
            return self.gather([], [source], opts)
        self._expect_count(output, self._group_size * source.numel(), source, "gather_single")
        return self._run("gather_single", [source], [output], opts, root=opts.rootRank)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: ScatterOptions | None = None
    ) -> Work:
        """Rank r gets the root's r-th input."""
        opts = opts or ScatterOptions()
        output, root = _one(outputs, "scatter"), opts.rootRank
        parts: list[torch.Tensor] = []
        if root == self._rank:
            parts = _one(inputs, "scatter")
            self._expect_one_each(parts, output, "scatter")
        return self._run("scatter", parts, outputs, opts, root=root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Rank r gets every rank's r-th part; the splits are lengths of parts along the first dimension."""
        opts = opts or AllToAllOptions()
        if source.dtype != output.dtype:
            raise ArgumentError(f"all_to_all_single got an output of {output.dtype} for an input of {source.dtype}")
        if not output_splits and not input_splits:
            self._expect_even_rows(source, "input")
            self._expect_even_rows(output, "output")
            return self._run("all_to_all_single", [source], [output], opts)
        self._await_copies([source, output])
        inputs, outputs, bring, back = _staged([source], [output], "all_to_all_single")
        sources = self._parts(inputs[0], input_splits, "input")
        targets = self._parts(outputs[0], output_splits, "output")
        self._expect_own(sources, targets, "all_to_all_single")
        ready = _in_turn(bring, _leaving(opts.asyncOp))
        return self._run("all_to_all_single", sources, targets, opts, [output], back=back, ready=ready)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        """Rank r gets every rank's r-th tensor."""
        opts = opts or AllToAllOptions()
        for tensors, what in ((outputs, "outputs"), (inputs, "inputs")):
            if len(tensors) != self._group_size:
                raise ArgumentError(
                    f"all_to_all got {len(tensors)} {what} for {self._group_size} ranks; give one for each"
                )
        for tensor in (*outputs, *inputs):
            self._expect_count(tensor, tensor.numel(), inputs[0], "all_to_all")
        self._expect_own(inputs, outputs, "all_to_all")
        return self._run("all_to_all", inputs, outputs, opts)

    # Messages.

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Work:
        """Sends a tensor to one rank. A short one may be gone before the rank receives it."""
        flat = _contiguous(_one(tensors, "send"), "send")
        return self._begun([self._message("send", tag, flat, to)], tensors, None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        """Receives the next tensor of one rank that has this tag."""
        flat, back = _out(_one(tensors, "recv"), "recv")
        message = self._message("receive", tag, flat, source, receives=True)
        tells = self._tells_of(flat, f"from rank {source}")
        return self._begun([message], tensors, back, tells)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Receives the next tensor of any rank that has this tag; the work's `source_rank` says whose it was."""
        flat, back = _out(_one(tensors, "recv"), "recv")
        message = self._message("receive from any rank", tag, flat, None, receives=True)
        return self._begun([message], tensors, back, self._tells_of(flat, "from any rank"), Received)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that tells every rank which one did not come within `timeout`, or which ones with `wait_all_ranks`.

        Raises
        ------
        PeerTimeoutError
            Names the ranks. A rank that comes later is told too.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self._seconds if seconds is None else seconds
        self._watches += 1
        verdict = torch.zeros(self._group_size, dtype=torch.bool, device="cpu")
        if self._rank == 0:
            verdict = self._missing_ranks(seconds, wait_all_ranks)
            for rank in range(1, self._group_size):
                with contextlib.suppress(PolderError):
                    self._watch(verdict, seconds, rank).wait()
        else:
            self._watch(verdict[:1], seconds, 0).wait()
            # Rank 0 waits for the last one before it tells.
            self._watch(verdict, 2 * seconds, 0, receives=True).wait()
        missing = [rank for rank in range(self._group_size) if verdict[rank]]
        if missing:
            raise PeerTimeoutError(_late(self._rank, missing, seconds))

    def _missing_ranks(self, seconds: float, wait_all_ranks: bool) -> torch.Tensor:
        """On rank 0: which ranks have not come, as a flag for each. A dead one does not come either."""
        missing, words = torch.zeros((2, self._group_size), dtype=torch.bool, device="cpu")
        ranks = range(1, self._group_size)
        comes = [self._watch(words[rank : rank + 1], seconds, rank, receives=True) for rank in ranks]
        for rank, message in zip(ranks, comes, strict=True):
            try:
                message.wait()
            except PolderError:
                missing[rank] = True
                if not wait_all_ranks:
                    break
        return missing

    def _watch(self, words: torch.Tensor, seconds: float, rank: int, receives: bool = False) -> "_core.Message":
        what = "monitored barrier"
        return self._message(what, self._watches, words, rank, receives, kind=what, seconds=seconds)

    def _message(
        self,
        what: str,
        tag: int,
        flat: torch.Tensor,
        rank: int | None,
        receives: bool = False,
        kind: str = "message",
        seconds: float | None = None,
    ) -> "_core.Message":
        """Starts a message of a contiguous tensor to `rank`, or from there, or from any rank."""
        if not 0 <= tag <= _MOST_TAG:
            raise ArgumentError(f"{what} got the tag {tag}; give one from 0 to {_MOST_TAG}")
        _leaving(is_async=False)
        began = time.time_ns() if self._trace is not None else 0
        message = self._channel.start(
            what,
            kind,
            tag,
            rank,
            (address.of(flat, writable=receives, what=what), flat.nbytes),
            receives,
            _dtype(flat.dtype),
            self._seconds if seconds is None else seconds,
            flat,
        )
        if self._trace is not None:
            self._ends(message, what, began, [flat], ranks=[0 if rank is None else rank], tag=tag)
        return message

    def _tells_of(self, flat: torch.Tensor, source: str) -> tuple[float, Callable[[bool], None]]:
        """When a receive tells the others that it waits, and how: it has put nothing into the pool for them to see."""
        text = f"receive of {flat.nbytes} bytes ({_dtype(flat.dtype)}) {source}"

        def tell(waits: bool) -> None:
            # It is for the errors of others alone.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"polder/receives/{self._rank}", text if waits else "")

        return self._untold(), tell

    def _untold(self) -> float:
        """Seconds that a receive waits before it tells the others."""
        return min(self._seconds / 2, _UNTOLD_SECONDS)

    def _receiving(self, rank: int) -> str | None:
        """The receive that `rank` says it waits in. One that has just begun has some time to say so."""
        key = f"polder/receives/{rank}"
        until = time.monotonic() + 1.5 * self._untold()
        with contextlib.suppress(RuntimeError):
            while True:
                if self._store.check([key]) and (said := self._store.get(key).decode()):
                    return said
                if time.monotonic() >= until:
                    break
                time.sleep(0.01)
        return None

    def _explain(self, error: PolderError, asks: bool = True) -> None:
        """Adds to an error which rank of the job is meant, and what it has called instead if it did not come.

        Without `asks` that is left out, because it takes time to find.
        """
        if asks and isinstance(error, PeerTimeoutError) and (rank := error.rank) is not None:
            with contextlib.suppress(PolderError):
                called = self._core.called_ahead(rank) or self._channel.unreceived(rank) or self._receiving(rank)
                if called is not None:
                    error.args = (f"{error}; rank {rank} has called {called}, which this rank has not matched",)
        self._rename(error)
        if isinstance(error, PeerDeadError) and is_under_torchrun() and _TORCHRUN not in str(error):
            error.args = (f"{error}; {_TORCHRUN}",)

    def _rename(self, error: BaseException) -> None:
        """Gives an error of this group, and its cause, the rank of the job. Once: a second time changes nothing."""
        if not isinstance(error, PeerError) or _RENAMED in str(error):
            return
        rank = self._rank_elsewhere(error) if error.rank is None else self._global_ranks[error.rank]
        if rank is not None and rank != error.rank:
            meant = f"host {error.host} pid {error.pid}" if error.rank is None else f"rank {error.rank} of this group"
            error.args = (f"{error}; {meant} is rank {rank}{_RENAMED}",)
            error.rank = rank
        if error.__cause__ is not None:
            self._rename(error.__cause__)

    def _rank_elsewhere(self, error: PeerError) -> int | None:
        """The rank of the job of a process that is not of this group, if it is of another group of this process."""
        process = (error.host, error.pid)
        found = (group for group in self._attachment.groups if process in group.processes)
        return next((group._global_ranks[group.processes.index(process)] for group in found), None)

    def _ends(
        self,
        ticket: "_core.Ticket | _core.Message | None",
        what: str,
        began: int,
        tensors: Sequence[torch.Tensor],
        **facts: object,
    ) -> None:
        """Writes an operation into the trace that was asked for, when it is done."""
        if self._trace is not None:
            nbytes, dtype = sum(tensor.nbytes for tensor in tensors), _dtype(tensors[0].dtype) if tensors else ""
            place = (self._rank, self._names[0])
            self._trace.ends(ticket, what, began, place, bytes=nbytes, dtype=dtype, **facts)

    def _expect_own(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], what: str) -> None:
        """That a rank has as much for itself as it expects of itself."""
        own = inputs[self._rank]
        self._expect_count(outputs[self._rank], own.numel(), own, what)

    def _expect_even_rows(self, tensor: torch.Tensor, what: str) -> None:
        """That the rows of a tensor without splits can be shared out."""
        rows = len(tensor) if tensor.dim() else 1
        if rows % self._group_size:
            raise ArgumentError(
                f"all_to_all_single got an {what} of {rows} rows for {self._group_size} ranks; give a whole number for "
                f"each, or {what}_split_sizes"
            )

    def _parts(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[torch.Tensor]:
        """Views of a contiguous tensor's parts; without splits they are equal."""
        rowed = tensor if tensor.dim() else tensor.view(1)
        rows = len(rowed)
        if not splits:
            self._expect_even_rows(tensor, what)
            splits = [rows // self._group_size] * self._group_size
        if len(splits) != self._group_size or sum(splits) != rows or min(splits) < 0:
            raise ArgumentError(
                f"all_to_all_single got {what}_split_sizes {list(splits)} for {rows} rows; "
                f"give one for each of {self._group_size} ranks, 0 or more, which add up to the rows"
            )
        parts: list[torch.Tensor] = []
        for length in splits:
            parts.append(rowed.narrow(0, sum(map(len, parts)), length))
        return parts

    # What torch before 2.15 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    # The end.

    def shutdown(self) -> None:
        """Finishes what is on its way and leaves the pool; the last group of a process closes it."""
        self._is_shut = True
        try:
            self._channel.close()
            self._core.close()
            self._settle()
        finally:
            pinned, self._pinned = self._pinned, None
            try:
                if pinned is not None:
                    pinned.close()
            finally:
                self._attachment.release(self)
                if not attachments:
                    gpu.forget()

    def abort(self) -> None:
        """As `shutdown`: an operation that waits for a rank ends by its timeout."""
        self.shutdown()

    # How.

    def _reduce(
        self,
        what: str,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        opts: Any,
        results: list[torch.Tensor] | None = None,
        op: int = _SUM,
        root: int = 0,
    ) -> Work:
        """As `_run`. Of an average whose sum may be too large for its type, ranks sum what they have divided."""
        dtype = sources[0].dtype
        if op != _AVG or self._group_size == 1 or dtype not in (*averages.HALVES, *averages.WHOLES):
            return self._run(what, sources, targets, opts, results, op, root)
        for source in sources:
            _expect_carried(source, what)
        results = targets if results is None else results
        if dtype in averages.WHOLES:
            return self._average_wholes(what, sources, targets, opts, results, root)
        self._await_copies(sources)
        inputs, fill = averages.scaled(sources, self._group_size)
        if not sources[0].is_cpu:
            # In the order of its stream; what lies in memory of the host is read when the operation has its turn.
            fill()
        return self._run(what, inputs, targets, opts, results, root=root, ready=fill if sources[0].is_cpu else None)

    def _average_wholes(
        self,
        what: str,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        opts: Any,
        results: list[torch.Tensor],
        root: int,
    ) -> Work:
        size, chunks = self._group_size, self._group_size if what == "reduce_scatter_tensor" else 1
        self._await_copies([*sources, *targets])
        inputs, outputs, bring, back = _staged(sources, targets, what)
        pairs = [torch.empty((2 * it.numel(),), dtype=it.dtype, device="cpu") for it in inputs]
        sums = [torch.empty((2, it.numel()), dtype=it.dtype, device="cpu") for it in outputs]

        def divide() -> None:
            for pair, it in zip(pairs, inputs, strict=True):
                _copy(pair, averages.divided(it, size, chunks).view(-1))

        def complete() -> None:
            for output, it in zip(outputs, sums, strict=True):
                _copy(output, averages.mean_of(it, size).view(output.shape))

        ready = _in_turn(_in_turn(bring, _leaving(opts.asyncOp)), divide)
        return self._run(what, pairs, sums, opts, results, root=root, back=_in_turn(complete, back), ready=ready)

    def _run(
        self,
        what: str,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        opts: Any,
        results: list[torch.Tensor] | None = None,
        op: int = _SUM,
        root: int = 0,
        back: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Work:
        """Runs a collective of c10d's at once when the caller waits for it anyway, queues it otherwise.

        Each side is one tensor, or one for each rank. The same list of one twice means in place. A side that this rank
        does not use is empty. The work's results are the targets, unless others are given. `ready` returns once copies
        of tensors have come, and `back` copies results to where they belong.
        """
        operation = _operation(what, (sources or targets)[0].dtype, op, root)
        is_async, timeout = opts.asyncOp, opts.timeout
        seconds = self._seconds if timeout == _UNSET else self._limit(opts)
        began = time.time_ns() if self._trace is not None else 0
        given = ready
        if self._unfinished:
            # This operation may use what earlier ones have still to copy to its place.
            ready = _in_turn(self._settle, ready)
        try:
            ticket = self._start(operation, sources, targets, seconds, is_async, ready)
        except PolderError as error:
            self._explain(error)
            raise
        if ticket is NotImplemented:
            return self._run_staged(operation, sources, targets, opts, results, (op, root), given)
        if self._trace is not None:
            self._ends_call(ticket, operation, began, sources or targets)
        if ticket is None and back is None and not self._unfinished:
            return self._done
        return self._over(ticket, targets if results is None else results, back)

    def _run_staged(
        self,
        operation: "_core.Operation",
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        opts: Any,
        results: list[torch.Tensor] | None,
        facts: tuple[int, int],
        given: Callable[[], None] | None,
    ) -> Work:
        """As `_run`, of tensors that are not contiguous in memory of the host, by copies that are."""
        what, results = operation.call, (targets if results is None else results)
        self._await_copies([*sources, *targets])
        if self._goes_through_pool(operation, sources, targets):
            return self._run_in_pool(operation, sources, targets, opts, results)
        inputs, outputs, bring, back = _staged(sources, targets, what)
        ready = _in_turn(_in_turn(given, bring), _leaving(opts.asyncOp))
        return self._run(what, inputs, outputs, opts, results, *facts, back, ready)

    def _over(
        self, ticket: "_core.Ticket | None", tensors: list[torch.Tensor], back: Callable[[], None] | None
    ) -> Work:
        """The work of a call that is over, if it has no ticket, or on its way."""
        if ticket is not None:
            return self._begun([ticket], tensors, back)
        if self._unfinished:
            self._settle()
        if back is not None:
            back()
        return self._done

    def _begun(
        self,
        tickets: "list[_core.Ticket | _core.Message]",
        tensors: list[torch.Tensor],
        back: Callable[[], None] | None,
        tells: tuple[float, Callable[[bool], None]] | None = None,
        kind: type[Pending] = Pending,
    ) -> Pending:
        """The work of a call that is on its way. The caller may drop it: then a later call of the group finishes it."""
        work = kind(tickets, tensors, back, self._settle, self._explain, tells)
        if back is not None:
            if len(self._unfinished) >= _UNFINISHED:
                self._settle()
            self._unfinished.append(work)
        return work

    def _await_copies(self, tensors: list[torch.Tensor]) -> None:
        """Waits for earlier operations that have still to copy to the memory of these tensors, if a GPU reads it now.

        A tensor in memory of the host is read when its operation has its turn.
        """
        if not self._unfinished or all(it.is_cpu for it in tensors):
            return
        memory = {_memory(it) for it in tensors}
        for work in list(self._unfinished):
            if work.is_collective() and not memory.isdisjoint(map(_memory, work.tensors)):
                # Its own caller hears of its error, and so does this operation.
                with contextlib.suppress(PolderError):
                    work.wait()

    def _settle(self) -> None:
        """Finishes the works that are over: operations of a group end in the order of their calls."""
        for work in list(self._unfinished):
            if work.is_settled():
                with contextlib.suppress(ValueError):
                    self._unfinished.remove(work)

    def _limit(self, opts: Any) -> float:
        """Seconds that an operation may wait for a rank."""
        limit: float = opts.timeout.total_seconds()
        return limit if limit > 0 else self._seconds

    def _goes_through_pool(
        self, operation: "_core.Operation", sources: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> bool:
        """Whether a message goes through the pool itself. All ranks of a call say the same."""
        tensors = [*sources, *targets]
        if tensors[0].is_cpu or self._is_shut or operation.collective not in _THROUGH_POOL:
            return False
        if not _are_on_gpus(tensors, operation.call):
            return False
        are_even = all(len({it.numel() for it in side}) < 2 for side in (sources, targets))
        return are_even and max(sum(it.nbytes for it in side) for side in (sources, targets)) >= gpu.SHORT

    def _run_in_pool(
        self,
        operation: "_core.Operation",
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        opts: Any,
        results: list[torch.Tensor],
    ) -> Work:
        """As `_run`, through memory of the pool that the GPU copies to and from, piece by piece."""
        _expect_apart(targets, operation.call)
        inputs, outputs = [gpu.dense(it) for it in sources], [gpu.dense(it) for it in targets]
        pieces, nbytes = self._pieces(operation, inputs, outputs)
        seconds, is_async = self._limit(opts), opts.asyncOp
        began = time.time_ns() if self._trace is not None else 0
        agreeing: _core.Ticket | None = None
        passage: gpu.Passage | None = None
        is_begun = self._pinned is None
        try:
            pinned = self._pinned
            if pinned is None:
                pinned = self._pinned = gpu.PinnedPool(self._attachment.pool)
                has_memory = pinned.pooled is not None
                agreeing = self._core.agree(pinned.agreed, has_memory, nbytes, seconds, is_async)
                is_begun = False
            passage = gpu.Passage(pinned, pieces)
            for begin, place, bring in passage.places():
                piece = (pinned.agreed, pinned.pooled, begin, nbytes)
                ticket = self._start(operation, place, place, seconds, is_async, bring, piece)
                if isinstance(ticket, _core.Ticket):
                    passage.tickets.append(ticket)
                is_begun = True
        except BaseException as error:
            if passage is not None and self._pinned is not None:
                self._pinned.drop(passage)
            if is_begun:
                # The others wait for the pieces that do not come.
                self._core.give_up()
            if isinstance(error, PolderError):
                self._explain(error)
            raise

        def back() -> None:
            passage.finish()
            for target, output in zip(targets, outputs, strict=True):
                if output is not target:
                    gpu.copy_in([target], [output])

        pending = [agreeing, *passage.tickets] if agreeing is not None else passage.tickets
        if self._trace is not None:
            self._ends_call(pending[-1] if pending else None, operation, began, inputs or outputs)
        return self._begun(pending, results, back) if pending else self._over(None, results, back)

    def _pieces(
        self, operation: "_core.Operation", inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> tuple[list[gpu.Piece], int]:
        """The pieces of a message between contiguous tensors, and the bytes that ranks compare: those of a chunk."""
        what = operation.collective
        is_chunked = what in ("all-gather", "reduce-scatter")
        chunks, own = (self._group_size, self._rank) if is_chunked else (1, 0)

        def numbered(tensors: list[torch.Tensor], is_whole: bool) -> list[tuple[int, torch.Tensor]]:
            parts = [gpu.flat(it) for it in tensors]
            if not is_whole:
                return [(own, part) for part in parts]
            if len(parts) == 1:
                length = len(parts[0]) // chunks
                parts = [parts[0][chunk * length : (chunk + 1) * length] for chunk in range(chunks)]
            return list(enumerate(parts))

        leave, enter = numbered(inputs, what == "reduce-scatter"), numbered(outputs, what == "all-gather")
        return gpu.cut(gpu.unaliased(leave, enter), enter, chunks), len((*leave, *enter)[0][1])

    def _ends_call(
        self, ticket: "_core.Ticket | None", operation: "_core.Operation", began: int, tensors: list[torch.Tensor]
    ) -> None:
        facts = {"op": operation.reduction, "root": operation.root}
        self._ends(ticket, operation.collective, began, tensors, **facts)

    def _together(self, works: list[Work], tensors: list[torch.Tensor]) -> Work:
        pending = [work for work in works if isinstance(work, Pending)]
        if not pending:
            return self._done

        def back() -> None:
            for work in pending:
                work.finish_own()

        tickets = [ticket for work in pending for ticket in work.tickets]
        return self._begun(tickets, tensors, back)

    def _expect_one_each(
        self, parts: list[torch.Tensor], like: torch.Tensor, what: str, own: int | None = None
    ) -> None:
        """That there is a part for each rank, as long as `like`, or the `own` one is."""
        if len(parts) != self._group_size:
            raise ArgumentError(f"{what} got {len(parts)} tensors for {self._group_size} ranks; give one for each")
        count, dtype = like.numel(), like.dtype
        for rank, part in enumerate(parts):
            # Without a call for each part: this runs for every operation.
            if part.dtype is not dtype or (part.numel() != count and own in (None, rank)):
                self._expect_count(part, count, like, what)

    def _expect_count(self, tensor: torch.Tensor, count: int, like: torch.Tensor, what: str) -> None:
        if tensor.numel() != count or tensor.dtype != like.dtype:
            raise ArgumentError(
                f"{what} got {tensor.numel()} elements of {tensor.dtype} where {count} of {like.dtype} belong"
            )


def _late(rank: int, missing: list[int], seconds: float) -> str:
    """What a monitored barrier says on `rank` of those that did not come, in words that gloo uses too.

    Examples
    --------
    >>> print(_late(1, [2, 3], 0.5).partition(": ")[2])
    Ranks 2, 3 failed to pass monitoredBarrier in 500 ms; look at those processes, or raise timeout=
    """
    ranks = "Rank " if len(missing) == 1 else "Ranks "
    text = f"{ranks}{', '.join(map(str, missing))} failed to pass monitoredBarrier in {round(seconds * 1000)} ms"
    if rank == 0:
        text += ": Rank 0 timed out in monitoredBarrier"
    elif rank not in missing:
        text = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {text}"
        )
    return f"{text}; look at those processes, or raise timeout="


def _one(items: list[Any], what: str) -> Any:
    if len(items) != 1:
        raise ArgumentError(f"{what} got {len(items)} tensors; give one for each process")
    return items[0]


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    """The type as torch spells it, which is how the pool does."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("q"):
        raise ArgumentError(
            f"polder carries no tensor of type {name}; send its int_repr(), its scale and its zero point"
        )
    return name


_KNOWN = ("float64", "float32", "float16", "bfloat16", "bool")


@functools.cache
def _operation(what: str, dtype: torch.dtype, op: int = _SUM, root: int = 0) -> "_core.Operation":
    """A call of c10d's as the pool has it: the one place that translates its name, its type and its reduction."""
    collective, name = _COLLECTIVES[what], _dtype(dtype)
    if "reduce" not in collective and name not in _KNOWN and not name.startswith(("int", "uint")):
        # Types that the pool does not know go as bytes.
        name = "uint8"
    return _core.Operation(what, collective, name, _OPS.get(op, str(op)), root)


def _staged(
    sources: list[torch.Tensor], targets: list[torch.Tensor], what: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], Callable[[], None] | None, Callable[[], None] | None]:
    """What takes the place of tensors whose bytes are not their values in order, and what brings values there and back.

    Values of tensors in memory of the host are there once the first has run, in the turn of their operation: an earlier
    one may still write to them. Those of a GPU are on their way.
    """
    if sources is targets and len(targets) == 1:
        if _are_on_gpus(targets, what):
            _expect_apart(targets, what)
            flats = gpu.copied_out(targets)
            return flats, flats, None, lambda: gpu.copy_in(targets, flats)
        flats, back = _all_out(targets, what)
        return flats, flats, _bring(targets, flats), back
    are_on_gpus = _are_on_gpus(sources, what)
    inputs = gpu.copied_out(sources) if are_on_gpus else [_room(tensor, what) for tensor in sources]
    outputs, back = _all_out(targets, what)
    return inputs, outputs, _bring(sources, inputs), back


def _bring(tensors: list[torch.Tensor], flats: list[torch.Tensor]) -> Callable[[], None] | None:
    """What copies the values of tensors in memory of the host to those that take their places."""
    pairs = [(flat, it) for flat, it in zip(flats, tensors, strict=True) if flat is not it and it.is_cpu]

    def bring() -> None:
        for flat, it in pairs:
            _copy(flat, it)

    return bring if pairs else None


def _in_turn(first: Callable[[], None] | None, then: Callable[[], None] | None) -> Callable[[], None] | None:
    """One call that makes both, as far as there are both."""
    if first is None or then is None:
        return first or then

    def both() -> None:
        first()
        then()

    return both


def _expect_carried(tensor: torch.Tensor, what: str) -> None:
    if tensor.is_nested:
        raise ArgumentError(f"{what} got a nested tensor; give its values() and its offsets()")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{what} got a tensor of layout {tensor.layout}; call .to_dense() first")
    if tensor.device.type not in DEVICES:
        carried = " and ".join(DEVICES)
        raise ArgumentError(
            f"{what} got a tensor on {tensor.device}; polder carries tensors on {carried}: call .cpu() first"
        )
    address.expect_memory(tensor, what)


def _contiguous(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """What to send of a tensor: itself, or a copy if it lies on a GPU or its bytes are not its values in order."""
    if _are_on_gpus([tensor], what):
        return gpu.copied_out([tensor])[0]
    if address.is_plain(tensor):
        return tensor
    _expect_carried(tensor, what)
    return gpu.dense(tensor)


def _room(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """As `_contiguous`, for a tensor in memory of the host without its values, where it is no tensor itself."""
    if not tensor.is_cpu or address.is_plain(tensor):
        return _contiguous(tensor, what)
    _expect_carried(tensor, what)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _are_on_gpus(tensors: list[torch.Tensor], what: str) -> bool:
    if not tensors or tensors[0].is_cpu:
        return False
    for tensor in tensors:
        _expect_carried(tensor, what)
        if tensor.is_cpu:
            raise ArgumentError(f"{what} got tensors on {tensors[0].device} and {tensor.device}; give one device")
    return True


def _leaving(is_async: bool) -> Callable[[], None] | None:
    """What an asynchronous call waits for before it reads: copies out of GPUs. For any other they are over here."""
    wait = gpu.leaving()
    if wait is None or is_async:
        return wait
    wait()
    return None


def _out(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Where to receive a tensor, and how its values get there, if it takes part by a copy."""
    if not tensor.is_cpu:
        flats, back = _all_out([tensor], what)
        return flats[0], back
    flat = _room(tensor, what)
    if flat is tensor:
        return flat, None
    _expect_apart([tensor], what)
    return flat, lambda: _copy(tensor, flat)


def _all_out(tensors: list[torch.Tensor], what: str) -> tuple[list[torch.Tensor], Callable[[], None] | None]:
    """`_out` of each tensor, with one call that brings all of them back."""
    if _are_on_gpus(tensors, what):
        _expect_apart(tensors, what)
        rooms = gpu.room_for(tensors)
        return rooms, lambda: gpu.copy_in(tensors, rooms)
    if len(tensors) > 1:
        _expect_apart(tensors, what)
    staged = [_out(tensor, what) for tensor in tensors]
    copies = [back for _, back in staged if back is not None]

    def back() -> None:
        for copy in copies:
            copy()

    return [flat for flat, _ in staged], back if copies else None


def _expect_apart(tensors: list[torch.Tensor], what: str) -> None:
    """That no two elements of outputs are one, before other ranks are at work: a copy back would overwrite another."""
    shared = next((it for it in tensors if not _is_apart(it)), None)
    if shared is not None:
        raise ArgumentError(
            f"{what} got an output of shape {list(shared.shape)} with strides {list(shared.stride())}, whose elements "
            "share memory; call .clone() first"
        )
    for numbers in _interleaved(tensors):
        many = [tensors[number] for number in numbers]
        if not _are_apart_by_strides(many) and (found := _first_overlap(many)) is not None:
            one, two = sorted(numbers[at] for at in found)
            raise ArgumentError(f"{what} got outputs {one} and {two} that share memory; give each its own")


def _interleaved(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Tensors of which each begins before another's last element; by number, in the order of their first elements."""
    groups: list[list[int]] = []
    end = 0
    for begin, number in sorted((_begin(it), number) for number, it in enumerate(tensors) if it.numel()):
        if not groups or begin >= end:
            groups.append([])
        groups[-1].append(number)
        end = max(end, begin + _extent(tensors[number]) * tensors[number].element_size())
    return [numbers for numbers in groups if len(numbers) > 1]


def _are_apart_by_strides(tensors: list[torch.Tensor]) -> bool:
    """Whether strides say that no two of these share an element, as those of columns do. False says nothing.

    Tensors of the same strides, in the order of their first elements, are apart where their short strides reach none of
    the next one's elements, and each long stride passes all of them.
    """
    if len({it.dim() for it in tensors}) > 1:
        return False
    steps: list[tuple[int, int]] = []
    for at in range(tensors[0].dim()):
        strides = {it.stride(at) for it in tensors if it.shape[at] > 1}
        if len(strides) > 1:
            return False
        steps += [(stride, at) for stride in strides]
    steps.sort()
    width, begins = tensors[0].element_size(), [_begin(it) for it in tensors]
    for cut in range(len(steps) + 1):
        reaches = [sum(stride * (it.shape[at] - 1) for stride, at in steps[:cut]) for it in tensors]
        ends = [begin + (reach + 1) * width for begin, reach in zip(begins, reaches, strict=True)]
        long = [(stride * width, max(it.shape[at] for it in tensors)) for stride, at in steps[cut:]]
        if all(map(operator.le, ends, begins[1:])) and _is_nested(ends[-1] - begins[0], long):
            return True
    return False


def _is_nested(width: int, steps: list[tuple[int, int]]) -> bool:
    """Whether each stride passes what lies within `width` and what shorter ones reach, of pairs of it and a length."""
    reach = width - 1
    for stride, length in sorted(steps):
        if length > 1 and stride <= reach:
            return False
        reach += stride * (length - 1)
    return True


def _first_overlap(tensors: list[torch.Tensor]) -> tuple[int, int] | None:
    """The first tensor that shares an element with one before, and that one; a flag for each place says so."""
    first, width = _begin(tensors[0]), tensors[0].element_size()
    unit = math.gcd(width, *(_begin(it) - first for it in tensors))
    per = width // unit
    places = [(_begin(it) - first) // unit for it in tensors]
    ends = [place + _extent(it) * per for place, it in zip(places, tensors, strict=True)]
    marks = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    flags = [
        marks.as_strided((*it.shape, per), (*(stride * per for stride in it.stride()), 1), place)
        for place, it in zip(places, tensors, strict=True)
    ]
    for number, own in enumerate(flags):
        if own.any():
            marks.zero_()
            own.fill_(True)
            return next(other for other in range(number) if flags[other].any()), number
        own.fill_(True)
    return None


def _begin(tensor: torch.Tensor) -> int:
    """Where the first element of a tensor lies, also on a GPU."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie from the first to the last of a tensor that has some."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_apart(tensor: torch.Tensor) -> bool:
    """Whether no two elements of a tensor are one."""
    if not tensor.numel():
        return True
    steps = [(stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    if _is_nested(1, steps):
        return True
    if not all(stride for stride, _ in steps):
        return False
    marks = torch.zeros(_extent(tensor), dtype=torch.bool, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marks.sum()) == tensor.numel()


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copies between tensors in memory of the host, in whatever mode the program is: a parameter is like any other."""
    with torch.inference_mode():
        to.copy_(of)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


@dataclass
class _Asked:
    """What `create` reads of c10d's options."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def create(options: Any, _backend_options: object) -> "ProcessGroupPolder | _PartOfMixed":
    """Makes this rank's part of a group: c10d calls it on every rank of the group.

    What it returns takes the place of c10d's own group, unless that has another backend for another device.
    """
    around: dist.ProcessGroup | None = getattr(options, "process_group", None)
    made = _create(options)
    # Its name is that of the backend for the accelerator, and ours is a custom one.
    if around is None or around._get_backend_name() == "custom":
        return made
    try:
        return _PartOfMixed(made)
    except TypeError as error:
        made.shutdown()
        raise ArgumentError(
            f"polder beside another backend needs torch 2.15, which constructs a Backend from Python ({error}); name "
            "polder alone, or the other one for both devices"
        ) from error


def _create(options: Any) -> ProcessGroupPolder:
    rank: int = options.group_rank
    size: int = options.group_size
    timeout: timedelta = options.timeout
    global_ranks: list[int] = options.global_ranks_in_group
    board = Board(options.store, rank, size, timeout)
    everyone = board.meet(lambda: {**introduction(rank, size), "ranks": global_ranks})
    with board.failing_alike():
        expect_one_group(everyone)
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
        if len({tuple(each["machine"]) for each in everyone}) > 1:
            with board.failing_alike():
                expect_one_pool(path, board, everyone, attachment.pool.uuid)
        there, name, seconds = attachment, f"/torch/{board.round}/{options.group_id}", timeout.total_seconds()
        joined = board.agree(
            "join the group",
            lambda: join(there, name, board, seconds),
            lambda joined: joined[0].close(),
        )
    except BaseException:
        if attachment is not None:
            attachment.close_unused()
        raise
    name = str(options.group_id)
    made = ProcessGroupPolder(attachment, joined, rank, size, name, options.store, timeout, global_ranks)
    # A launcher's store keeps the keys of earlier attempts.
    made.agreements = PrefixStore(f"polder/{board.round}", options.store)
    attachment.groups.append(made)
    return made
