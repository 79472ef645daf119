"""A parameter service for data-parallel training: proxies sum gradients in the pool while the workers compute.

It is the COARSE system of the paper "COARSE: a disaggregated memory extension for distributed DL training", on a
pool. Section numbers below are the paper's.
"""

import atexit
import contextlib
import itertools
import math
import secrets
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from polder import _core, address
from polder.errors import ArgumentError, PeerDeadError, PolderError
from polder.torch.held import HeldOptimizer, TakenGradient
from polder.torch.meeting import Attachment, attachments
from polder.torch.snapshot import Restored, restore
from polder.torch.survivors import Survivors

# torch's stubs leave hooks and collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

__all__ = ["EmulatedLinks", "ParameterService", "ProxyCount", "SyncPlan"]

_SIZES = [1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22]
"""Sizes of shards that a profile tries, in bytes."""
_PROBE_BYTES = 8 << 20
_PROBES = 3
_LATENCY_BYTES = 64
_LATENCY_PROBES = 10
_SLACK = 0.05
"""A bandwidth within so much of the highest is full."""
_ALIKE = 0.2
"""Values within so much of each other are equal: repeated measurements differ by as much."""
_RECENT = 100
"""A profile rests on so many of the last passes."""
_APART = 1 << 20
"""Gradients of so many bytes are averaged where they are; smaller ones are copied together first."""


@dataclass(frozen=True)
class EmulatedLinks:
    """What links that are not here would take: token buckets let bytes through. What is timed so is emulated.

    Attributes
    ----------
    proxies : list of (float, float)
        The link of each proxy's device: seconds that it is busy with a shard besides the bytes, and bytes a second in
        each direction. All workers share it.
    workers : float
        Bytes a second of each worker's link in an all-reduce of the workers, by the ring's formula.
    """

    proxies: Sequence[tuple[float, float]]
    workers: float


@dataclass(frozen=True)
class _Profile:
    """What was measured: the same on every worker."""

    forward_s: float
    backward_s: float
    proxy_rate: float
    worker_rate: float
    copy_rate: float
    links: list[tuple[float, float]]
    shard_bytes: int
    arrivals: dict[int, float]

    def _is_like(self, other: "_Profile") -> bool:
        """Whether nothing differs by more than repeated measurements do."""
        pairs = [
            (self.forward_s, other.forward_s),
            (self.backward_s, other.backward_s),
            (self.proxy_rate, other.proxy_rate),
            (self.worker_rate, other.worker_rate),
            *((one[1], two[1]) for one, two in zip(self.links, other.links, strict=True)),
        ]
        return all(abs(one - two) <= _ALIKE * max(one, two) for one, two in pairs)


@dataclass(frozen=True)
class SyncPlan(_Profile):
    """What a profile found, and what follows from it; the same on every worker.

    Attributes
    ----------
    forward_s, backward_s : float
        Seconds of a forward and a backward pass without synchronisation: ``T_FP`` and ``T_BP`` (section III-F).
    proxy_rate, worker_rate : float
        ``BW_proxy`` and ``BW_worker`` (the paper's ``BW_GPU``) in bytes a second: ``2(p-1)/p`` times bytes, over
        seconds, of a push, sum and pull by all proxies, and of an all-reduce by the workers.
    copy_rate : float
        Bytes a second with which the training thread pushes.
    links : list of (float, float)
        Seconds of the least message and bytes a second of large ones, of each proxy.
    shard_bytes : int
        The smallest size of a shard that reaches full bandwidth (section III-E).
    arrivals : dict of int to float
        When each gradient, or bucket of DDP, is complete: seconds from the begin of the backward pass. Its key is the
        place of the parameter in the model, or of the bucket.
    total_bytes : int
        Bytes of all gradients: the paper's n.
    split_bytes : float
        The paper's m (section III-F). Its formula takes gradients for complete when the backward pass begins.
    predicted : list of (int, float)
        Of each number of tensors, from none to all: their bytes, and the seconds from the begin of the backward pass to
        the last average if the proxies take them. It knows when each gradient is complete.
    proxied_bytes : int
        Bytes that the proxies take: whole tensors, those whose gradients come first, so that `predicted` is least.
    threshold_bytes : float
        Shards of so many bytes go to the proxies of higher latency and bandwidth, smaller ones to that of the least
        latency (section III-E); 0 where one proxy is best for all.
    shards : list of (int, int, int, int)
        Of each shard its tensor, counted in the order of gradients, its first byte, its bytes, and its proxy. A
        tensor is a parameter's gradient, or what the proxies sum of a bucket of DDP.
    step : int
        After how many steps the plan was made.
    """

    total_bytes: int
    split_bytes: float
    predicted: list[tuple[int, float]]
    proxied_bytes: int
    threshold_bytes: float
    shards: list[tuple[int, int, int, int]]
    step: int


@dataclass(frozen=True)
class ProxyCount:
    """What a proxy has done since the plan began, in which process.

    Attributes
    ----------
    host, pid : int
        Its host id in the pool, and its process id.
    steps, shards, nbytes : int
        Steps and shards that it has summed, and bytes of the sums.
    alive : bool
        Whether the process lives.
    """

    host: int
    pid: int
    steps: int
    shards: int
    nbytes: int
    alive: bool


@dataclass
class _Run:
    """Gradients that come together and lie one behind the other: of a parameter, or of a bucket of DDP."""

    flat: torch.Tensor
    sizes: list[int]
    """Elements of each parameter in it."""


@dataclass
class _Route:
    """Which elements of a run the proxies sum: the first `count` of `total`, as tensor `tensor` of the exchange."""

    tensor: int
    count: int
    total: int


class ParameterService:
    """Averages the gradients of data-parallel workers: the first by proxies, the last by the workers themselves.

    All workers of a group construct it, attach it, and close it. It needs the backend ``polder``.

    The first ``profile_steps`` steps average all gradients by an all-reduce that blocks, and measure. Then the plan
    is made: which gradients go to the proxies, in which shards, and over which proxy. Every ``replan_steps`` steps the
    service measures again, and plans again if anything has changed by more than 20%.

    When a proxy dies, the workers average what it has not summed, and go on with the proxies that are left. If
    nothing is awaited of it, they notice when the next plan is made, or never.

    Parameters
    ----------
    proxies : int, optional
        How many proxies the job has, one for each worker by default. Worker ``r`` starts the proxies ``p`` with ``p
        mod workers = r``, as children on its host. They end when it closes the service, or dies.
    group : ProcessGroup, optional
        The workers; all by default.
    profile_steps : int
        Steps that measure, at least 2: the first one is not counted.
    replan_steps : int
        Steps between two profiles while training goes on; 0 keeps the first plan.
    timeout : float
        Seconds that a worker waits for one sum.
    split : float, optional
        The part of all bytes that the proxies sum, from 0 to 1, in place of the planned one.
    shard_bytes : int, optional
        The least bytes of a shard, in place of the measured size.
    first_layers_first : bool
        Whether a proxy sums the shards of the first layers first; else they go as they come.
    overlap : bool
        Whether gradients are pushed while the backward pass goes on; else after it.
    emulated : EmulatedLinks, optional
        Links to emulate.
    optimizer : str
        Where the optimizer steps: on each ``"worker"``, or on the ``"proxy"``. There the proxies keep its state, and
        the workers pull parameters. A worker frees each gradient when it is pushed. What reads or clips ``.grad`` after
        the backward pass gets an ArgumentError, and the optimizer's own ``step()`` does nothing. Its settings count as
        they are when the first gradient comes. There is no profile, and the proxies take all bytes.
    on_death : str
        What the others do when a worker dies: ``"raise"`` the error that names it, or ``"shrink"``. Then they form a
        smaller group, `group`, go back to the newest version of `snapshots`, and go on. The gradients of the step in
        which it died are None, so that the optimizer does nothing in it. With the optimizer on the ``"proxy"`` they do
        so when a proxy dies too, in a group of as many workers.
    snapshots : str, optional
        The name of the snapshots of `polder.torch.snapshot` that ``"shrink"`` goes back to.

    Attributes
    ----------
    group : ProcessGroup
        The workers that are left.
    restored : Restored or None
        What was restored after the last death that ``"shrink"`` went on from.
    split, shard_bytes, first_layers_first, emulated
        As given. A change, alike on all workers, holds from the next plan on; `replan` makes one.

    Raises
    ------
    ArgumentError
        When the group is none of the backend ``polder``, or a number is none or out of its range.
    PeerTimeoutError
        When a worker or a proxy does not come.

    Examples
    --------
    >>> service = polder.torch.ParameterService()  # doctest: +SKIP
    >>> service.attach(model, optimizer)  # doctest: +SKIP
    """

    def __init__(
        self,
        proxies: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        profile_steps: int = 3,
        replan_steps: int = 500,
        timeout: float = 60,
        split: float | None = None,
        shard_bytes: int | None = None,
        first_layers_first: bool = True,
        overlap: bool = True,
        emulated: EmulatedLinks | None = None,
        optimizer: str = "worker",
        on_death: str = "raise",
        snapshots: str | None = None,
    ) -> None:
        numbers = (proxies, profile_steps, replan_steps, timeout, split, shard_bytes)
        _expect_numbers(dict(zip(_NUMBERS, numbers, strict=True)))
        _expect_links(emulated)
        self._group = group or dist.group.WORLD
        if self._group is None:
            raise ArgumentError('there is no process group; call init_process_group("polder") first')
        _expect_places(optimizer, split, overlap, on_death, snapshots)
        self._snapshots = snapshots
        self.restored: Restored | None = None
        self._attachment = _attachment(self._group)
        self._survivors = None if snapshots is None else Survivors(self._group)
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._proxies = self._size if proxies is None else proxies
        self._has_proxy_each = proxies is None
        self._is_held, self._overlap = optimizer == "proxy", overlap
        self.split, self.shard_bytes = split, shard_bytes
        self.first_layers_first, self.emulated = first_layers_first, emulated
        self._profile_steps, self._timeout = profile_steps, float(timeout)
        self._replan_steps = 0 if optimizer == "proxy" else replan_steps
        self._replans = False
        self._held: HeldOptimizer | None = None
        """The optimizer, where the proxies keep its state."""
        self._hooks: list[Any] = []
        self._ddp: DistributedDataParallel | None = None
        self._is_accumulating = False
        self._plan: SyncPlan | None = None
        self._profile: _Profile | None = None
        self._routes: dict[int, _Route] = {}
        """Of each run that has any, what the proxies sum of it."""
        self._order: list[int] = []
        """The runs in the order of their gradients, the same on all workers."""
        self._came: dict[int, _Run] = {}
        """The runs of this backward pass, in the order in which they came."""
        self._error: BaseException | None = None
        """What went wrong in this backward pass; raised at its end."""
        self._steps = 0
        self._profiled_from = 0
        self._planned_at = 0
        self._blocked_s = 0.0
        self._busy_until = 0.0
        """When the emulated link of this worker is free."""
        self._failed = False
        self._closed = False
        self._client: _core.ServiceClient | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._open_service()
        _open.add(self)

    @property
    def split(self) -> float | None:
        """The part of all bytes that the proxies sum, or None for the planned one."""
        return self._split

    @split.setter
    def split(self, value: float | None) -> None:
        _expect_numbers({"split": value})
        if self._is_held:
            _expect_places("proxy", value, self._overlap, "raise", None)
        self._split = value

    @property
    def shard_bytes(self) -> int | None:
        """The least bytes of a shard, or None for the measured size."""
        return self._shard_bytes

    @shard_bytes.setter
    def shard_bytes(self, value: int | None) -> None:
        _expect_numbers({"shard_bytes": value})
        self._shard_bytes = value

    @property
    def emulated(self) -> EmulatedLinks | None:
        """Links to emulate."""
        return self._emulated

    @emulated.setter
    def emulated(self, value: EmulatedLinks | None) -> None:
        _expect_links(value)
        if value is not None and len(value.proxies) != self._proxies:
            raise ArgumentError(f"{len(value.proxies)} emulated links for {self._proxies} proxies; give one each")
        self._emulated = value

    @classmethod
    def central(cls, **options: Any) -> Self:
        """The paper's baseline DENSE: one server on one device sums whole tensors after the backward pass.

        Parameters
        ----------
        **options
            Those of the constructor that this leaves open: ``group``, ``profile_steps``, ``timeout``, ``emulated``.

        Returns
        -------
        ParameterService
            A service of one proxy for all gradients, which pushes them after the backward pass, as they came.
        """
        return cls(
            1,
            split=1.0,
            shard_bytes=1 << 40,
            first_layers_first=False,
            overlap=False,
            replan_steps=0,
            **options,
        )

    # Use.

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Averages the gradients of `model` from now on, before its backward pass returns. All workers call it.

        The model is one of DDP, or a plain module. Of DDP the service is the communication hook: everything else is as
        DDP has it, such as ``no_sync`` and unused parameters. A plain module gets the weights of worker 0; each of its
        parameters needs a gradient in each backward pass, and `no_sync` of the service accumulates. The parameters
        are contiguous CPU tensors of one floating type.

        Parameters
        ----------
        model : Module
            What is trained, the same on all workers.
        optimizer : Optimizer
            What steps it. A step after an error of the service is an error too.

        Raises
        ------
        ArgumentError
            When the service does not carry the model: parameters of other types, layouts or devices, DTensors (as
            those of FSDP2), sparse gradients, DDP with another hook, other ranks, or ``mixed_precision``. With the
            optimizer on the proxies: DDP, types other than float32, and optimizers other than SGD, Adam and AdamW.
            When a service has a model already, or another one that is not closed has parameters of this model.
        """
        if self._hooks:
            raise ArgumentError("the service has a model already; make another service")
        if not (
            isinstance(model, torch.nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
            and isinstance(optimizer, torch.optim.Optimizer)  # pyright: ignore[reportUnnecessaryIsInstance]
        ):
            raise ArgumentError(
                f"attach got a {type(model).__name__} and a {type(optimizer).__name__}; give a Module and its Optimizer"
            )
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _expect_carried(model, self._parameters)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped.isdisjoint(map(id, self._parameters)):
            raise ArgumentError("the optimizer has no parameter of the model; give it model.parameters()")
        _expect_unattached(self._parameters)
        held = None
        if self._is_held:
            if isinstance(model, DistributedDataParallel):
                raise ArgumentError("DDP keeps all gradients; with the optimizer on the proxies attach its module")
            held = HeldOptimizer(optimizer, self._parameters)
        if self._snapshots is not None and isinstance(model, DistributedDataParallel):
            raise ArgumentError('DDP keeps its group; with on_death="shrink" attach its module')
        self._model, self._optimizer = model, optimizer
        self._type = self._parameters[0].dtype
        self._dtype = str(self._type).removeprefix("torch.")
        self._last_gradient = 0.0
        self._pushing_s = self._backward_s = 0.0
        self._forward = [0.0, 0.0]
        self._arrivals: dict[int, float] = {}
        self._passes: deque[tuple[float, float, dict[int, float]]] = deque(maxlen=_RECENT)
        if isinstance(model, DistributedDataParallel):
            self._join_ddp(model)
        else:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), group_src=0, group=self._group)
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._note_of(number))
                for number, parameter in enumerate(self._parameters)
            ]
        self._hooks += [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward),
            optimizer.register_step_pre_hook(self._before_step),
        ]
        if held is not None:
            self._hold(held)
            self._hooks += [
                *(parameter.register_hook(self._forget_of(parameter)) for parameter in self._parameters),
                model.register_load_state_dict_post_hook(self._loaded),
                optimizer.register_load_state_dict_post_hook(lambda _: self._hand_over()),
                optimizer.register_state_dict_post_hook(self._write_state),
            ]

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside of it accumulate gradients and average nothing, as DDP's ``no_sync``."""
        with contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync():
            before, self._is_accumulating = self._is_accumulating, True
            try:
                yield
            finally:
                self._is_accumulating = before

    def replan(self) -> None:
        """Plans again at the end of the next backward pass, from the last profile. All workers call it.

        Raises
        ------
        ArgumentError
            When the optimizer is on the proxies, which would lose its state.
        """
        if self._is_held:
            raise ArgumentError("the proxies keep the optimizer's state, so their plan stays; make another service")
        self._replans = True

    @property
    def group(self) -> dist.ProcessGroup:
        """The workers; those that are left, once one has died."""
        assert self._group is not None
        return self._group

    @property
    def plan(self) -> SyncPlan | None:
        """What the last profile found; None before the first is over."""
        return self._plan

    @property
    def blocked_s(self) -> float:
        """Seconds of the last step that the training thread waited: from its last gradient to the last average."""
        return self._blocked_s

    def proxies(self) -> list[ProxyCount]:
        """What each proxy says that it has done since the plan began. None are left once all have died."""
        if self._client is None and not self._closed:
            return []
        return [ProxyCount(*count) for count in self._service().stat()]

    def close(self) -> None:
        """Detaches from the model and ends the proxies. All workers call it; harmless when it was closed before.

        The state of an optimizer on the proxies becomes the optimizer's own.

        A model of DDP keeps the hook, as torch has it: from now on the workers average its gradients.
        """
        _open.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget_taken()
        held, self._held = self._held, None
        try:
            if held is not None and not self._failed:
                with self._guarded():
                    held.give_back(self._moments(held))
        finally:
            self._closed = True
            self._routes = {}
            self._close_service()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The other workers may never come to the end.
        self._failed = self._failed or error is not None
        self.close()

    # Hooks.

    def _begin_forward(self, *_: object) -> None:
        if self._came:
            # A backward pass has not come to its end: what it pushed is in the way of the next.
            self._came, self._failed = {}, True
        self._forward[0] = time.perf_counter()

    def _end_forward(self, *_: object) -> None:
        self._forward[1] = time.perf_counter()

    def _before_step(self, *_: object) -> None:
        if self._failed:
            raise ArgumentError("the service has failed, and the gradients are no averages; make another service")
        self._forget_taken()

    def _forget_taken(self) -> None:
        """Parameters whose gradients the proxies took have none."""
        if self._held is not None:
            for parameter in self._parameters:
                TakenGradient.forget(parameter)

    def _join_ddp(self, ddp: DistributedDataParallel) -> None:
        """Becomes the communication hook of `ddp`."""
        ranks = dist.get_process_group_ranks(self._group)
        theirs = dist.get_process_group_ranks(ddp.process_group)
        if theirs != ranks:
            raise ArgumentError(f"DDP averages over the ranks {theirs}, the service over {ranks}; give both one group")
        if ddp._comm_hooks:
            raise ArgumentError("DDP has a communication hook already, and it takes only one")
        if ddp.mixed_precision is not None:
            raise ArgumentError("DDP with mixed_precision has a hook of its own; use torch.autocast")
        ddp.register_comm_hook(None, self._take_bucket)
        self._ddp = ddp

    def _take_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook. The future has the bucket itself: its averages are there before DDP reads it."""
        del state
        flat = bucket.buffer()
        if self._ddp is not None and self._ddp._join_config.enable:
            self._error = ArgumentError("the service does not carry uneven inputs of Join; give all workers as many")
        self._take(bucket.index(), flat, [gradient.numel() for gradient in bucket.gradients()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    def _note_of(self, number: int) -> Callable[[torch.Tensor], None]:
        """What a parameter of a plain module calls when its gradient is complete."""

        def note(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if self._is_accumulating or gradient is None:
                return
            if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
                self._failed = True
                raise ArgumentError(
                    f"the gradient of parameter {number} is {gradient.dtype} of layout {gradient.layout}; the service "
                    f"carries dense gradients of the parameters' type, here {parameter.dtype}: leave grad_dtype alone"
                )
            if not address.is_plain(gradient):
                # The bytes of a negated view are not its numbers.
                with torch.no_grad():
                    gradient = parameter.grad = gradient.resolve_neg().contiguous()
            self._take(number, gradient.view(-1), [gradient.numel()])
            if self._held is not None:
                parameter.grad = TakenGradient.of(parameter)

        return note

    def _forget_of(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What a parameter calls before its next gradient comes, which is not added to one that was taken."""

        def forget(_: torch.Tensor) -> None:
            TakenGradient.forget(parameter)

        return forget

    def _take(self, key: int, flat: torch.Tensor, sizes: list[int]) -> None:
        """A run of gradients is complete."""
        if not self._came:
            # At the end of the backward pass, before DDP reads its buckets.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._pushing_s = 0.0
        self._last_gradient = time.perf_counter()
        # Without the pushes so far. That of this run comes after the pass.
        self._backward_s = self._last_gradient - self._forward[1] - self._pushing_s
        self._arrivals[key] = self._backward_s
        # The gradients of an optimizer on the proxies go when they have been pushed.
        self._came[key] = _Run(flat if self._held is None else self._parameters[key].detach().view(-1), sizes)
        if self._overlap:
            try:
                if self._held is not None and len(self._came) == 1:
                    self._service().order_step(self._held.number + 1, self._held.settings())
                self._push(key, flat)
            except BaseException as error:
                self._error = self._error or error

    def _push(self, key: int, flat: torch.Tensor) -> None:
        """Pushes what the proxies sum of a run, and pulls sums that have come."""
        route = self._routes.get(key)
        if route is None or self._failed or self._error is not None:
            return
        if route.total != flat.numel():
            raise ArgumentError(
                f"the gradients that come as number {key} are {flat.numel()} elements, {route.total} when the plan was "
                "made; make the service after what changes the buckets of DDP"
            )
        began = time.perf_counter()
        # Parameters are pulled when no gradient depends on them any more; their versions go up then.
        into = None if self._held is None else self._span(self._parameters[key], route.count, writable=False)
        gradients = self._span(flat[: route.count], route.count, writable=self._held is None)
        self._service().push(route.tensor, gradients, self._dtype, into)
        self._pushing_s += time.perf_counter() - began

    def _span(self, tensor: torch.Tensor, count: int, *, writable: bool) -> tuple[int, int]:
        """Where `count` elements lie that are pushed, or pulled to."""
        what = "the parameter service"
        return address.of(tensor, dtype=self._type, count=count, writable=writable, what=what), count

    def _end_backward(self) -> None:
        came, self._came = self._came, {}
        error, self._error = self._error, None
        try:
            with self._guarded(), torch.no_grad():
                if error is not None:
                    raise error
                self._expect_all(came)
                self._synchronise(came)
                self._blocked_s = time.perf_counter() - self._last_gradient
                if not self._closed:
                    self._count_step(came)
        except PolderError as error:
            # A proxy that has died takes a part of the optimizer's state with it.
            has_lost_state = self._held is not None and isinstance(error, PeerDeadError)
            if self._survivors is None or not (self._survivors.have_lost(error) or has_lost_state):
                raise
            self._shrink(self._survivors)

    def _expect_all(self, came: dict[int, _Run]) -> None:
        if self._failed:
            raise ArgumentError("the service has failed; make another service")
        # DDP knows by itself.
        if self._ddp is None and len(came) != len(self._parameters):
            raise ArgumentError(
                f"{len(self._parameters) - len(came)} of {len(self._parameters)} parameters got no gradient in this "
                "step; the service needs one for each: freeze those that are not used, or attach a model of DDP with "
                "find_unused_parameters=True"
            )

    def _count_step(self, came: dict[int, _Run]) -> None:
        """Notes how long the passes took, and plans where it is time to."""
        self._steps += 1
        arrivals, self._arrivals = self._arrivals, {}
        self._passes.append((self._forward[1] - self._forward[0], self._backward_s, arrivals))
        if self._plan is None:
            if self._steps - self._profiled_from == self._profile_steps:
                self._passes.popleft()
                self._make_plan(came, self._measure(came, None))
            return
        self._report()
        if self._client is None:
            return
        try:
            self._plan_again(came)
        except PeerDeadError as error:
            # A proxy of which nothing was awaited, so that nobody knew of it.
            self._fall_back(came, error, [])

    def _plan_again(self, came: dict[int, _Run]) -> None:
        """Plans anew where it is time to."""
        assert self._plan is not None
        if self._replans and self._profile is not None:
            self._make_plan(came, self._profile)
        elif self._replan_steps and self._steps - self._planned_at >= self._replan_steps:
            profile = self._measure(came, self._profile)
            if self._profile is not None and profile._is_like(self._profile):
                self._planned_at = self._steps
                self._passes.clear()
                self._begin(self._plan.shards)
            else:
                self._make_plan(came, profile)

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """Remembers a failure: then the service is not ended together."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    # Averages.

    def _synchronise(self, came: dict[int, _Run]) -> None:
        """Averages by the proxies and by the workers at once."""
        order = self._order if len(self._order) == len(came) else list(came)
        if not self._overlap:
            for key in order:
                self._push(key, came[key].flat)
        counts = {key: route.count for key, route in self._routes.items()}
        rest = [came[key].flat[counts.get(key, 0) :] for key in order]
        finish = self._average([flat for flat in rest if flat.numel()])
        lost: PeerDeadError | None = None
        if self._routes:
            try:
                self._service().wait()
            except PeerDeadError as error:
                lost = error
        finish()
        if self._held is not None:
            if lost is not None:
                raise lost
            self._held.number += 1
            for parameter in self._parameters:
                torch.autograd.graph.increment_version(parameter)
        elif lost is not None:
            self._fall_back(came, lost, self._service().unsummed())

    def _average(self, flats: list[torch.Tensor]) -> Callable[[], None]:
        """Begins to average `flats` by the workers; what it returns waits for it."""
        if not flats:
            return lambda: None
        small = [flat for flat in flats if flat.nbytes < _APART]
        together = [torch.cat(small)] if small else []
        reduced = [*together, *(flat for flat in flats if flat.nbytes >= _APART)]
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in reduced]
        nbytes = sum(flat.nbytes for flat in reduced)
        until = self._reserve(nbytes)

        def finish() -> None:
            for work in works:
                assert work is not None
                work.wait()
            time.sleep(max(until - time.perf_counter(), 0))
            for flat in reduced:
                flat.div_(self._size)
            for whole in together:
                for flat, part in zip(small, whole.split([flat.numel() for flat in small]), strict=True):
                    flat.copy_(part)

        return finish

    def _reserve(self, nbytes: int) -> float:
        """When an all-reduce of so many bytes would be over, where links are emulated."""
        if self.emulated is None:
            return 0.0
        ring = 2 * (self._size - 1) / self._size
        self._busy_until = max(self._busy_until, time.perf_counter()) + ring * nbytes / self.emulated.workers
        return self._busy_until

    def _fall_back(self, came: dict[int, _Run], error: PeerDeadError, missing: list[tuple[int, int, int, int]]) -> None:
        """A proxy has died: the workers average what is `missing` of its sums, and go on with the other proxies.

        What it had published counts for every worker, and the others have summed the rest of theirs. So all workers
        miss the same shards of the same step; they compare that first.
        """
        counts, plan = self._service().stat(), self._plan
        if plan is None or (error.host, error.pid) not in {count[:2] for count in counts}:
            raise error
        mine = torch.tensor([self._steps, len(missing), *(value for shard in missing[:1] for value in shard)])
        facts = torch.zeros(6, dtype=torch.int64)
        facts[: len(mine)] = mine
        everyones = [torch.empty_like(facts) for _ in range(self._size)]
        dist.all_gather(everyones, facts, group=self._group)
        if any(not torch.equal(facts, other) for other in everyones):
            raise error
        keys = {route.tensor: key for key, route in self._routes.items()}
        width = self._parameters[0].element_size()
        pieces = [
            came[keys[tensor]].flat[start // width : (start + nbytes) // width] for tensor, start, nbytes, _ in missing
        ]
        self._average(pieces)()
        dead = torch.tensor([not count[5] for count in counts], dtype=torch.uint8)
        dist.all_reduce(dead, op=dist.ReduceOp.MAX, group=self._group)
        is_left = [not gone for gone in dead.tolist()]
        if self.emulated is not None:
            links = [link for link, left in zip(self.emulated.proxies, is_left, strict=True) if left]
            self.emulated = EmulatedLinks(links, self.emulated.workers)
        self._abandon()
        self._proxies = sum(is_left)
        self._routes = {}
        if self._proxies:
            self._open_service()
            self._make_plan(came, self._measure(came, self._profile))
        else:
            self._plan = replace(plan, proxied_bytes=0, split_bytes=0.0, shards=[], links=[], step=self._steps)

    # After the death of a worker, or of a proxy that has kept a part of the optimizer's state.

    def _shrink(self, survivors: Survivors) -> None:
        """Goes on without the dead from the newest snapshot, in a group of its own and with other proxies."""
        for parameter in self._parameters:
            parameter.grad = None
        held, self._held = self._held, None
        while True:
            self._abandon()
            self._leave_smaller(survivors)
            try:
                with self._guarded(), torch.no_grad():
                    self._go_on_in(survivors.regroup(), held)
                return
            except PolderError as error:
                self._held = None
                if not survivors.have_lost(error):
                    raise

    def _leave_smaller(self, survivors: Survivors) -> None:
        """Leaves a group of survivors in which another worker has died: those that still wait in it are told."""
        if self._group is not survivors.whole:
            with contextlib.suppress(PolderError):
                dist.destroy_process_group(self._group)
        self._group = survivors.whole

    def _go_on_in(self, group: dist.ProcessGroup, held: HeldOptimizer | None) -> None:
        """Starts the service anew in a smaller group, with what `snapshots` has."""
        assert self._snapshots is not None
        self._group, self._attachment = group, _attachment(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._has_proxy_each:
            self._proxies = self._size
            if self.emulated is not None:
                self.emulated = replace(self.emulated, proxies=list(self.emulated.proxies)[: self._size])
        self._plan, self._profile, self._routes, self._order = None, None, {}, []
        self._passes.clear()
        self._profiled_from = self._steps
        self._failed = False
        self._open_service()
        if held is not None:
            self._hold(held)
        self.restored = restore(self._snapshots, self._model, self._optimizer, group=group)

    # The optimizer on the proxies.

    def _hold(self, held: HeldOptimizer) -> None:
        """Gives the proxies the parameters and the optimizer's state."""
        with self._guarded(), torch.no_grad():
            sizes = [parameter.nbytes for parameter in reversed(self._parameters)]
            measured = self._probe_sizes(sum(sizes), [self.shard_bytes] if self.shard_bytes else _SIZES)
            shard_bytes = _core.service_shard_bytes([(size, rate) for size, rate, _ in measured], _SLACK)
            ring = max(2 * (self._size - 1) / self._size, 1e-9)
            rate, copies, links = self._probe_links(measured, shard_bytes, sum(sizes))
            shard_bytes = self.shard_bytes or shard_bytes
            threshold, shards = _core.service_shards(sizes, shard_bytes, links, _ALIKE)
            # About the order in which gradients come.
            self._order = list(range(len(self._parameters)))[::-1]
            counts = [self._parameters[key].numel() for key in self._order]
            self._routes = {key: _Route(at, counts[at], counts[at]) for at, key in enumerate(self._order)}
            self._begin(shards, [held.group_of(self._order[shard[0]]) for shard in shards])
            total = sum(sizes)
            measured_rates = (0.0, 0.0, ring * rate, 0.0, copies, links, shard_bytes, {})
            self._plan = SyncPlan(*measured_rates, total, total, [], total, threshold, shards, 0)
            self._held = held
            self._hand_over()

    def _hand_over(self) -> None:
        """Brings the proxies the parameters and the optimizer's state, both as worker 0 has them."""
        held = self._held
        assert held is not None
        with self._guarded(), torch.no_grad():
            number, moments = held.taken()
            said = torch.tensor([number])
            dist.broadcast(said, group_src=0, group=self._group)
            had_none, held.number = held.number == 0, int(said.item())
            self._load_parameters()
            # Proxies begin with zeros.
            if held.number or not had_none:
                for slot, tensors in enumerate(moments, 1):
                    self._move(slot, tensors, is_load=True)

    def _loaded(self, *_: object) -> None:
        self._load_parameters()

    def _load_parameters(self) -> None:
        with self._guarded(), torch.no_grad():
            self._move(0, [parameter.detach() for parameter in self._parameters], is_load=True)

    def _write_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """What ``optimizer.state_dict()`` returns has the proxies' state. All workers call it."""
        held = self._held
        if held is not None:
            held.write(state_dict, self._moments(held))

    def _moments(self, held: HeldOptimizer) -> list[list[torch.Tensor]]:
        """The moments of each parameter, from the proxies."""
        if held.number == 0:
            return []
        moments = [[torch.empty_like(parameter.detach()) for parameter in self._parameters] for _ in held.moments]
        for slot, tensors in enumerate(moments, 1):
            self._move(slot, tensors, is_load=False)
        return moments

    def _move(self, slot: int, tensors: list[torch.Tensor], *, is_load: bool) -> None:
        """Brings an array of each parameter to the proxies as worker 0 has it, or from them; all workers get it."""
        service = self._service()
        service.order_move(slot, is_load)
        for key in self._order:
            span = self._span(tensors[key], self._routes[key].count, writable=True)
            service.push(self._routes[key].tensor, span, self._dtype, span)
        service.wait()

    # The profile.

    def _measure(self, came: dict[int, _Run], before: _Profile | None) -> _Profile:
        """Measures the passes that were noted, the workers' all-reduce and the way over the proxies."""
        total = sum(run.flat.nbytes for run in came.values())
        # After a fault there may be no pass with a plan yet.
        passes = list(self._passes)
        if before is not None and not passes:
            passes = [(before.forward_s, before.backward_s, before.arrivals)]
        forward_s = statistics.median(each[0] for each in passes)
        backward_s = statistics.median(each[1] for each in passes)
        # DDP may have changed its buckets since the first passes.
        seen = [[each[2][key] for each in passes if key in each[2]] or [backward_s] for key in sorted(came)]
        forward_s, backward_s, *ready_s = self._agreed([forward_s, backward_s, *map(statistics.median, seen)])
        ring = max(2 * (self._size - 1) / self._size, 1e-9)
        worker_rate = ring * total / self._probe_workers(total)
        fixed = self.shard_bytes or (before.shard_bytes if before else None)
        measured = self._probe_sizes(total, [fixed] if fixed else _SIZES)
        shard_bytes = _core.service_shard_bytes([(size, rate) for size, rate, _ in measured], _SLACK)
        proxy_rate, copy_rate, links = self._probe_links(measured, shard_bytes, total)
        return _Profile(
            forward_s,
            backward_s,
            ring * proxy_rate,
            worker_rate,
            copy_rate,
            links,
            fixed or shard_bytes,
            dict(zip(sorted(came), ready_s, strict=True)),
        )

    def _make_plan(self, came: dict[int, _Run], profile: _Profile) -> None:
        order = torch.tensor(list(came))
        dist.broadcast(order, group_src=0, group=self._group)
        self._order = order.tolist()
        runs = [came[key] for key in self._order]
        width = self._parameters[0].element_size()
        sizes = [size * width for run in runs for size in run.sizes]
        rates = (profile.forward_s, profile.backward_s, profile.proxy_rate, profile.worker_rate)
        shard_bytes = self.shard_bytes or profile.shard_bytes
        split, taken = _core.service_split(sizes, self._size, *rates, self.split)
        best, seconds = self._predict(runs, profile, shard_bytes)
        if self.split is None:
            taken = best
        proxied = sum(sizes[:taken])
        ends = itertools.accumulate(run.flat.nbytes for run in runs)
        counts = [
            max(min(proxied - (end - run.flat.nbytes), run.flat.nbytes), 0) for run, end in zip(runs, ends, strict=True)
        ]
        tensors = [count for count in counts if count]
        threshold, shards = _core.service_shards(tensors, shard_bytes, profile.links, _ALIKE)
        self._routes = {
            key: _Route(tensor, count // width, run.flat.numel())
            for tensor, (key, run, count) in enumerate(zip(self._order, runs, counts, strict=True))
            if count
        }
        self._begin(shards)
        self._profile = profile
        self._replans = False
        self._planned_at = self._steps
        self._passes.clear()
        self._plan = SyncPlan(
            *rates,
            profile.copy_rate,
            profile.links,
            shard_bytes,
            profile.arrivals,
            sum(sizes),
            split,
            list(zip(itertools.accumulate(sizes, initial=0), seconds, strict=True)),
            proxied,
            threshold,
            shards,
            self._steps,
        )

    def _predict(self, runs: list[_Run], profile: _Profile, shard_bytes: int) -> tuple[int, list[float]]:
        """How many tensors the proxies should take, and the seconds of each number."""
        width = self._parameters[0].element_size()
        gradients = [
            (size * width, profile.arrivals.get(key, profile.backward_s))
            for key, run in zip(self._order, runs, strict=True)
            for size in run.sizes
        ]
        # Proxies that share memory or cores are slower together than each alone.
        ring = max(2 * (self._size - 1) / self._size, 1e-9)
        together = min(profile.proxy_rate / ring / sum(rate for _, rate in profile.links), 1.0)
        links = [(latency, rate * together) for latency, rate in profile.links]
        rates = (profile.copy_rate, profile.worker_rate)
        return _core.service_predict(gradients, self._size, profile.backward_s, rates, shard_bytes, links, _ALIKE)

    def _begin(self, shards: list[tuple[int, int, int, int]], groups: Sequence[int] = ()) -> None:
        links = [] if self.emulated is None else list(self.emulated.proxies)
        self._service().begin(shards, self._proxies, self._dtype, self.first_layers_first, links, groups)

    def _report(self) -> None:
        if self._client is not None and self._plan is not None:
            plan = self._plan
            self._client.report(
                self._steps, self._blocked_s, plan.proxied_bytes, plan.total_bytes, plan.threshold_bytes
            )

    def _probe_workers(self, total: int) -> float:
        """Seconds of an all-reduce of all gradients by workers that have nothing else to do."""
        dummy = torch.zeros(total // self._parameters[0].element_size(), dtype=self._parameters[0].dtype)
        times: list[float] = []
        for _ in range(_PROBES + 1):
            dist.barrier(group=self._group)
            began = time.perf_counter()
            self._average([dummy])()
            times.append(time.perf_counter() - began)
        return self._agreed([statistics.median(times[1:])])[0]

    def _probe_sizes(self, total: int, sizes: Iterable[int]) -> list[tuple[int, float, float]]:
        """For each size of shards: bytes a second that all proxies together sum, and that a worker pushes."""
        nbytes = max(min(_PROBE_BYTES, total), _SIZES[0]) // _SIZES[0] * _SIZES[0]
        measured: list[tuple[int, float, float]] = []
        for size in sizes:
            piece = max(min(size, nbytes) // _LATENCY_BYTES, 1) * _LATENCY_BYTES
            count = nbytes // piece
            if count < self._proxies and measured:
                break
            shards = [(0, index * piece, piece, index % self._proxies) for index in range(count)]
            seconds, pushing = self._probe(shards, _PROBES)
            measured.append((piece, count * piece / seconds, count * piece / pushing))
        return measured

    def _probe_links(
        self, measured: list[tuple[int, float, float]], shard_bytes: int, total: int
    ) -> tuple[float, float, list[tuple[float, float]]]:
        """Bytes a second that all proxies sum and that a worker pushes, in shards of this size; and the links."""
        together, copies = next((rate, copies) for size, rate, copies in measured if size == shard_bytes)
        links = [self._probe_link(proxy, shard_bytes, total) for proxy in range(self._proxies)]
        # What is too short to fill the way there and back says too little, of all together as of each.
        filled = sum(rate for _, rate, _ in links) / sum(rate for _, _, rate in links)
        return together * filled, copies, [(latency, rate) for latency, rate, _ in links]

    def _probe_link(self, proxy: int, shard_bytes: int, total: int) -> tuple[float, float, float]:
        """Of one proxy: seconds of the least shard, and bytes a second of large ones, with a full way and as measured.

        The way there and back of `n` shards takes as long as that of `n + 1` shards one way. So the time of one shard
        is taken off.
        """
        latency, _ = self._probe([(0, 0, _LATENCY_BYTES, proxy)], _LATENCY_PROBES)
        count = max(min(_PROBE_BYTES, total) // shard_bytes // self._proxies, 1)
        shards = [(0, index * shard_bytes, shard_bytes, proxy) for index in range(count)]
        seconds, _ = self._probe(shards, _PROBES)
        one, _ = self._probe(shards[:1], _PROBES)
        rate = count * shard_bytes / seconds
        full = (count - 1) * shard_bytes / max(seconds - one, 1e-9)
        return latency, min(max(full, rate), rate * (count + 1) / count), rate

    def _probe(self, shards: list[tuple[int, int, int, int]], rounds: int) -> tuple[float, float]:
        """Seconds of a step that pushes and pulls these shards of one tensor and does nothing else, and of its push."""
        self._begin(shards)
        service, first = self._service(), self._parameters[0]
        dummy = torch.zeros(sum(shard[2] for shard in shards) // first.element_size(), dtype=first.dtype)
        times: list[float] = []
        pushes: list[float] = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            service.push(0, self._span(dummy, dummy.numel(), writable=True), self._dtype)
            pushes.append(time.perf_counter() - began)
            service.wait()
            times.append(time.perf_counter() - began)
        seconds, pushing = self._agreed([statistics.median(times[1:]), statistics.median(pushes[1:])])
        return seconds, pushing

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The mean of what all workers measured, the same bits on each."""
        means = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(means, group=self._group)
        return means.div_(self._size).tolist()

    # Parts.

    def _open_service(self) -> None:
        """Starts this worker's proxies and joins the service with them."""
        name = f"/sync/{self._token()}"
        self._children = [
            _start(self._attachment, name, proxy, self._proxies, self._size, self._timeout)
            for proxy in range(self._rank, self._proxies, self._size)
        ]
        try:
            self._client = _core.ServiceClient(
                self._attachment.pool,
                name,
                self._rank,
                self._size,
                self._proxies,
                timeout=self._timeout,
                given_up=self._has_lost_one,
            )
        except BaseException:
            self._failed = True
            self._close_service()
            raise

    def _close_service(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.abandon() if self._failed else client.close()
        finally:
            children, self._children = self._children, []
            for child in children:
                _end(child)

    def _abandon(self) -> None:
        """Leaves a service that has lost a proxy, which can agree on nothing any more."""
        failed, self._failed = self._failed, True
        try:
            self._close_service()
        finally:
            self._failed = failed

    def _token(self) -> str:
        """A word that worker 0 draws."""
        token = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(token, group_src=0, group=self._group)
        return bytes(token.tolist()).hex()

    def _service(self) -> "_core.ServiceClient":
        if self._client is None:
            raise ArgumentError("the service is closed; make another one")
        return self._client

    def _has_lost_one(self) -> bool:
        """Whether a proxy that this worker has started is gone, or a worker without which the others could go on."""
        has_lost_worker = self._survivors is not None and self._survivors.have_lost()
        return has_lost_worker or any(child.poll() is not None for child in self._children)


_open: "WeakSet[ParameterService]" = WeakSet()


# Runs before the groups are left, because it was registered after that.
@atexit.register
def _close_all() -> None:
    """Leaves every service when a program ends without closing it: the other workers may not come."""
    for service in list(_open):
        service.__exit__(None, SystemExit(), None)


def _attachment(group: dist.ProcessGroup) -> Attachment:
    for attachment in attachments.values():
        if group in attachment.groups:
            return attachment
    raise ArgumentError('the group is none of the backend polder; make it with backend="polder"')


_NUMBERS: dict[str, tuple[type, float, float, str]] = {
    "proxies": (Integral, 1, 1024, "a whole number from 1 to 1024, or None for one of each worker"),
    "profile_steps": (Integral, 2, math.inf, "a whole number from 2 on, because the first step is not counted"),
    "replan_steps": (Integral, 0, math.inf, "a whole number from 0 on"),
    "timeout": (Real, 1e-9, 1e9, "seconds from 1e-9 to 1e9"),
    "split": (Real, 0, 1, "a number from 0 to 1, or None for the planned part"),
    "shard_bytes": (Integral, 1, 1 << 62, "a whole number of bytes from 1 on, or None for the measured size"),
}
"""What each number of the constructor may be: its kind, the least, the highest, and both in words."""


def _is_number(value: object, kind: type, least: float, most: float = math.inf) -> bool:
    # A bool is a whole number too, and never meant as one. What is not a number is between no two.
    return isinstance(value, kind) and not isinstance(value, bool) and least <= cast(float, value) <= most


def _expect_numbers(given: dict[str, object]) -> None:
    for name, value in given.items():
        kind, least, most, expected = _NUMBERS[name]
        is_left_out = value is None and "None" in expected
        if not is_left_out and not _is_number(value, kind, least, most):
            raise ArgumentError(f"{name} is {value!r}; give {expected}")


def _expect_links(emulated: object) -> None:
    if emulated is None:
        return
    if not isinstance(emulated, EmulatedLinks):
        raise ArgumentError(f"emulated is {emulated!r}; give EmulatedLinks or None")
    try:
        are_links = all(
            _is_number(busy, Real, 0, 1e9) and _is_number(rate, Real, 1, 1e18) for busy, rate in emulated.proxies
        )
    except (TypeError, ValueError):
        are_links = False
    if not are_links or not _is_number(emulated.workers, Real, 1, 1e18):
        raise ArgumentError(
            f"emulated is {emulated!r}; give seconds from 0 to 1e9 and bytes a second from 1 to 1e18 of each proxy, "
            "and bytes a second of the workers"
        )


def _expect_places(optimizer: str, split: float | None, overlap: bool, on_death: str, snapshots: str | None) -> None:
    if optimizer not in ("worker", "proxy"):
        raise ArgumentError(f'optimizer is {optimizer!r}; give "worker" or "proxy"')
    if optimizer == "proxy" and (split not in (None, 1.0) or not overlap):
        raise ArgumentError(
            f"split {split} and overlap {overlap} with the optimizer on the proxies; leave both out, because the "
            "proxies take all gradients as they come"
        )
    if on_death not in ("raise", "shrink") or (on_death == "shrink") != (snapshots is not None):
        raise ArgumentError(
            f'on_death is {on_death!r} and snapshots {snapshots!r}; give "shrink" and the name of the snapshots to go '
            'back to, or "raise" and none'
        )


def _expect_carried(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    if not parameters:
        raise ArgumentError("the model has no parameters to train")
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise ArgumentError("the parameters are DTensors, as those of FSDP2; the service carries plain ones")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ArgumentError(
                f"{name or 'the model'} has sparse gradients; the service carries dense ones: give it sparse=False"
            )
    first = parameters[0]
    for parameter in parameters:
        is_carried = parameter.is_cpu and parameter.is_contiguous() and parameter.numel() > 0
        if not is_carried or parameter.dtype != first.dtype or not parameter.is_floating_point():
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} on {parameter.device}; the "
                f"service carries contiguous CPU tensors of one floating type, here {first.dtype}"
            )


def _expect_unattached(parameters: list[torch.nn.Parameter]) -> None:
    ours = {id(parameter) for parameter in parameters}
    for service in _open:
        if service._hooks and not ours.isdisjoint(map(id, service._parameters)):
            raise ArgumentError(
                "another ParameterService averages parameters of the model already, and one of them alone may; "
                "call close() of it first"
            )


def _start(
    attachment: Attachment, name: str, proxy: int, proxies: int, clients: int, timeout: float
) -> "subprocess.Popen[bytes]":
    """Starts a proxy on this worker's host; it ends when this process does, because its standard input does."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "polder.proxy",
        "--pool",
        attachment.path,
        "--host",
        str(attachment.pool.host),
    ]
    command += ["--service", name, "--proxy", str(proxy), "--proxies", str(proxies), "--clients", str(clients)]
    command += ["--timeout", str(timeout), "--tied", *(["--own"] if attachment.share is not None else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Waits for a proxy that has been told to end, and ends one that does not."""
    with contextlib.suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
