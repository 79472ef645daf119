"""A parameter service for data-parallel training: proxies sum gradients in the pool while the workers compute.

It is the COARSE system of the paper "COARSE: a disaggregated memory extension for distributed DL training", on a
pool. Section numbers below are the paper's.
"""

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from polder import address
from polder.errors import ArgumentError, PeerDeadError, PolderError
from polder.torch.averages import scale_of
from polder.torch.exchange import Run, attachment_of, name_of
from polder.torch.expect import (
    NUMBERS,
    EmulatedLinks,
    expect_alike,
    expect_carried,
    expect_kinds,
    expect_links,
    expect_numbers,
    expect_places,
    expect_sharded,
)
from polder.torch.held import HeldOptimizer, TakenGradient, mark_of
from polder.torch.planner import RECENT, SyncPlan
from polder.torch.sharded import Sharder
from polder.torch.survivors import Survivors

# torch's stubs leave hooks and collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

__all__ = ["EmulatedLinks", "ParameterService", "ProxyCount", "SyncPlan"]


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


class ParameterService(Sharder):
    """Averages the gradients of data-parallel workers: the first by proxies, the last by the workers themselves.

    All workers of a group construct it, attach it, and close it. It needs the backend ``polder``.

    The first ``profile_steps`` steps average all gradients by an all-reduce that blocks, and measure. Then the plan
    is made: which gradients go to the proxies, in which shards, and over which proxy. Every ``replan_steps`` steps the
    service measures again, and plans again if anything has changed by more than 20%.

    When a proxy dies, the workers average what it has not summed, and go on with the proxies that are left. If
    nothing is awaited of it, they notice when the next plan is made, or never. If it keeps an optimizer's state, other
    proxies take that over from the pool, and the weights are those of a job in which none died. With ``clips``, every
    worker raises `PeerDeadError` then; with ``on_death="shrink"`` they go back to a snapshot.

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
    clips : bool
        With the optimizer on the ``"proxy"``: whether gradients are read, clipped by their norm or unscaled between the
        backward pass and the step. Then the proxies keep the averages until `step` of the optimizer, and step in it.
        What reads ``.grad`` gets the average from the pool. All gradients take the same factors.
    early : bool
        With the optimizer on the ``"proxy"``: whether the next forward pass begins before all parameters have come.
        Each module waits for its own, and those of the first layers come first. What reads parameters otherwise has to
        call `wait` before; ``state_dict()`` of the model and the optimizer do so.
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
        When the group is none of the backend ``polder``, or a number is none or out of its range. On all workers, when
        their options differ.
    PeerTimeoutError
        When a worker or a proxy does not come.

    Examples
    --------
    >>> service = polder.torch.ParameterService()  # doctest: +SKIP
    >>> service.attach(model, optimizer)  # doctest: +SKIP
    """

    _task: int
    """Autograd's number of the pass in which the first of the runs in `_came` came."""

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
        clips: bool = False,
        early: bool = False,
        on_death: str = "raise",
        snapshots: str | None = None,
    ) -> None:
        numbers = (proxies, profile_steps, replan_steps, timeout, split, shard_bytes)
        expect_numbers(dict(zip(NUMBERS, numbers, strict=True)))
        expect_links(emulated)
        flags = {"first_layers_first": first_layers_first, "overlap": overlap, "clips": clips, "early": early}
        expect_kinds(flags, snapshots)
        self._group = group or dist.group.WORLD
        if self._group is None:
            raise ArgumentError('there is no process group; call init_process_group("polder") first')
        expect_places(optimizer, split, overlap, clips, early, on_death, snapshots)
        self._snapshots = snapshots
        self.restored = None
        self._attachment = attachment_of(self._group)
        words = {"optimizer": optimizer, "emulated": emulated, "on_death": on_death, "snapshots": snapshots}
        expect_alike(self._group, {**dict(zip(NUMBERS, numbers, strict=True)), "timeout": None, **flags, **words})
        self._survivors = None if snapshots is None else Survivors(self._group)
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._proxies = self._size if proxies is None else proxies
        self._has_proxy_each = proxies is None
        self._is_held, self._overlap, self._keeps = optimizer == "proxy", overlap, clips
        self._is_early, self._is_pulling = early, False
        self._awaits_step, self._has_means, self._noted = False, False, {}
        self.split, self.shard_bytes = split, shard_bytes
        self.first_layers_first, self.emulated = first_layers_first, emulated
        self._profile_steps, self._timeout = profile_steps, float(timeout)
        self._replan_steps = 0 if optimizer == "proxy" else replan_steps
        self._replans = False
        self._held = None
        self._hooks: list[Any] = []
        self._ddp: DistributedDataParallel | None = None
        self._is_accumulating = False
        self._plan, self._profile = None, None
        self._routes, self._order = {}, []
        self._came: dict[int, Run] = {}
        """The runs of this backward pass, in the order in which they came."""
        self._error: BaseException | None = None
        """What went wrong in this backward pass; raised at its end."""
        self._leaving, self._entering = [], {}
        self._unpushed: list[torch.Tensor] = []
        """Gradients of this backward pass that are freed once the proxies have room for them."""
        self._groups, self._lost = {}, None
        self._steps = 0
        self._profiled_from = 0
        self._planned_at = 0
        self._blocked_s = 0.0
        self._busy_until = 0.0
        self._failed = False
        self._closed = False
        self._client, self._children = None, []
        self._open_service()
        _open.add(self)

    @property
    def split(self) -> float | None:
        """The part of all bytes that the proxies sum, or None for the planned one."""
        return self._split

    @split.setter
    def split(self, value: float | None) -> None:
        expect_numbers({"split": value})
        if self._is_held:
            expect_places("proxy", value, self._overlap, self._keeps, self._is_early, "raise", None)
        self._split = value

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
        DDP has it, such as ``no_sync`` and unused parameters. Of FSDP2 it is the custom reduce-scatter. A plain module
        gets the weights of worker 0; each of its parameters needs a gradient in each backward pass, and `no_sync` of
        the service accumulates. The parameters are contiguous tensors of floating types, on the CPU or on one GPU.

        Parameters
        ----------
        model : Module
            What is trained, the same on all workers.
        optimizer : Optimizer
            What steps it. A step after an error of the service is an error too.

        Raises
        ------
        ArgumentError
            When the service does not carry the model: parameters of other types, layouts or devices, DTensors of other
            models than FSDP2's, sparse gradients, DDP with another hook, other ranks, or ``mixed_precision``. With the
            optimizer on the proxies: DDP, FSDP2, types other than float32, and optimizers other than SGD, Adam and
            AdamW. When a service has a model already, or another one that is not closed has parameters of this model.
            On all workers, when they differ in the kind of model or optimizer, or in what is trained.
        """
        self._parameters = self._expected(model, optimizer)
        held = None
        if self._is_held:
            if isinstance(model, DistributedDataParallel):
                raise ArgumentError("DDP keeps all gradients; with the optimizer on the proxies attach its module")
            held = HeldOptimizer(optimizer, self._parameters)
        if self._snapshots is not None and isinstance(model, DistributedDataParallel):
            raise ArgumentError('DDP keeps its group; with on_death="shrink" attach its module')
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ours = zip(self._names, self._parameters, strict=True)
        facts = {f"parameter {at}": f"{name}, {tuple(it.shape)} of {it.dtype}" for at, (name, it) in enumerate(ours)}
        expect_alike(self.group, {"attach": f"{type(model).__name__} and {type(optimizer).__name__}", **facts})
        stepped = {id(it) for group in optimizer.param_groups for it in group["params"]}
        self._stepped = len(stepped)
        self._frozen = (
            []
            if isinstance(model, FSDPModule)
            else [(name, it) for name, it in model.named_parameters() if not it.requires_grad and id(it) in stepped]
        )
        self._model, self._optimizer = model, optimizer
        self._last_gradient = 0.0
        self._pushing_s = self._backward_s = 0.0
        self._forward = [0.0, 0.0]
        self._arrivals: dict[int, float] = {}
        self._passes = deque(maxlen=RECENT)
        if isinstance(model, DistributedDataParallel):
            self._join_ddp(model)
        elif isinstance(model, FSDPModule):
            self._join_sharded(model)
        else:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), group_src=0, group=self._group)
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._note_of(number))
                for number, parameter in enumerate(self._parameters)
            ]
        self._hooks += [
            model.register_forward_pre_hook(_Hook(self._begin_forward)),
            model.register_forward_hook(_Hook(self._end_forward)),
            optimizer.register_step_pre_hook(self._before_step),
        ]
        if not isinstance(model, FSDPModule):
            self._hooks += [
                module.register_load_state_dict_post_hook(_Hook(self._expect_own))
                for module in ([model, model.module] if isinstance(model, DistributedDataParallel) else [model])
            ]
        if held is not None:
            self._hold(held)
            self._hooks += [
                *(parameter.register_hook(self._forget_of(parameter)) for parameter in self._parameters),
                model.register_load_state_dict_post_hook(_Hook(self._loaded)),
                optimizer.register_load_state_dict_post_hook(lambda _: self._hand_over()),
                optimizer.register_state_dict_post_hook(self._write_state),
            ]
            if self._is_early:
                self._hooks += [
                    model.register_state_dict_pre_hook(_Hook(self._before_state)),
                    *self._waits_of(model),
                ]

    def _expected(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """What `attach` trains; an ArgumentError for what the service does not carry."""
        if self._hooks:
            raise ArgumentError("the service has a model already; make another service")
        if self._closed:
            raise ArgumentError("the service is closed; make another one")
        if not (
            isinstance(model, torch.nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
            and isinstance(optimizer, torch.optim.Optimizer)  # pyright: ignore[reportUnnecessaryIsInstance]
        ):
            raise ArgumentError(
                f"attach got a {type(model).__name__} and a {type(optimizer).__name__}; give a Module and its Optimizer"
            )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if isinstance(model, FSDPModule):
            if self._is_held or self._snapshots is not None or self.split not in (None, 1.0):
                raise ArgumentError(
                    'FSDP2 shards gradients and state; with it leave out optimizer="proxy", on_death="shrink" and split'
                )
            expect_sharded(model, parameters, dist.get_process_group_ranks(self._group))
        else:
            expect_carried(model, parameters)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped.isdisjoint(map(id, parameters)):
            raise ArgumentError("the optimizer has no parameter of the model; give it model.parameters()")
        _expect_unattached(parameters)
        return parameters

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside of it accumulate gradients and average nothing, as DDP's ``no_sync``."""
        with contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync():
            before, self._is_accumulating = self._is_accumulating, True
            if self._sharded is not None:
                self._sharded.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self._is_accumulating = before
                if self._sharded is not None:
                    self._sharded.set_requires_gradient_sync(not before)

    def replan(self) -> None:
        """Plans again at the end of the next backward pass, from the last profile. All workers call it.

        Raises
        ------
        ArgumentError
            When the optimizer is on the proxies, which would lose its state.
        """
        if self._is_held:
            raise ArgumentError("the proxies keep the optimizer's state, so their plan stays; make another service")
        if self._sharded is not None:
            raise ArgumentError("the proxies take all of FSDP2's gradients, so their plan stays; make another service")
        self._replans = True

    def wait(self) -> None:
        """Waits until all parameters of the last step have come; at once unless the service is an ``early`` one."""
        if self._is_pulling:
            began = time.perf_counter()
            with self._surviving():
                self._pull(None)
            self._is_pulling = False
            self._blocked_s += time.perf_counter() - began

    def _pull(self, numbers: list[int] | None) -> None:
        """Waits for these parameters of the last step, or for all."""
        for number in range(len(self._parameters)) if numbers is None else numbers:
            if self._noted[number] != mark_of(self._parameters[number]):
                raise ArgumentError(
                    f"parameter {number} was changed before its value of the last step had come; call service.wait() "
                    "before parameters are changed or read, but by a forward pass"
                )
        try:
            for number in numbers or []:
                self._service().wait_for(self._routes[number].tensor)
            if numbers is None:
                self._service().wait()
            self._enter(numbers)
        except PeerDeadError as error:
            assert self._held is not None
            self._take_over(self._held, error, is_step=not self._keeps)
        self._note_parameters(numbers)

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
        """Seconds of the last step that the training thread waited: from its last gradient to the last average.

        Of an ``early`` service those that modules waited for their parameters, which ends with the next forward pass.
        """
        return self._blocked_s

    def proxies(self) -> list[ProxyCount]:
        """What each proxy says that it has done since the plan began. None are left once all have died."""
        if self._client is None and not self._closed:
            return []
        return [ProxyCount(*count) for count in self._service().stat()]

    def close(self) -> None:
        """Detaches from the model and ends the proxies. All workers call it; harmless when it was closed before.

        The state of an optimizer on the proxies becomes the optimizer's own.

        A model of DDP or FSDP2 keeps the hook, as torch has it: from now on the workers average its gradients.
        """
        _open.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget_taken()
        try:
            if self._held is not None and not self._failed:
                self.wait()
                held, self._held = self._held, None
                with self._guarded():
                    held.give_back(self._moments(held))
        finally:
            if self._held is not None and self._held.number == 0:
                self._held.give_back([])
            self._held, self._closed = None, True
            self._routes = {}
            self._leaving, self._entering, self._unpushed = [], {}, []
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

    def _expect_own(self, *_: object) -> None:
        """That the model still has the parameters that were attached."""
        theirs = set(map(id, self._model.parameters()))
        if not theirs.issuperset(map(id, self._parameters)):
            self._failed = True
            raise ArgumentError(
                "load_state_dict(assign=True) has put other parameters in the place of those that were attached, and "
                "their gradients would be no averages; leave assign out, or make another optimizer and service"
            )

    def _before_state(self, *_: object) -> None:
        self.wait()

    def _waits_of(self, model: torch.nn.Module) -> list[Any]:
        """Hooks by which each module waits for its own parameters."""
        number_of = {id(parameter): number for number, parameter in enumerate(self._parameters)}

        def wait_for(numbers: list[int]) -> Callable[..., None]:
            def wait(*_: object) -> None:
                if self._is_pulling:
                    began = time.perf_counter()
                    with self._surviving():
                        self._pull(numbers)
                    self._blocked_s += time.perf_counter() - began

            return wait

        hooks: list[Any] = []
        for module in model.modules():
            own = [id(parameter) for parameter in module.parameters(recurse=False)]
            if numbers := [number_of[it] for it in own if it in number_of]:
                hooks.append(module.register_forward_pre_hook(_Hook(wait_for(numbers))))
        return hooks

    def _begin_forward(self, *_: object) -> None:
        if self._came or self._groups:
            # A backward pass has not come to its end: what it pushed is in the way of the next.
            self._came, self._groups, self._failed = {}, {}, True
            self._leaving = []
        self._forward[0] = time.perf_counter()

    def _end_forward(self, *_: object) -> None:
        self._forward[1] = time.perf_counter()

    def _before_step(self, _: object, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> None:
        if self._came or self._groups:
            self._failed = True
            raise ArgumentError(
                "step() after a backward pass that has not come to its end, because it raised or DDP found no gradient "
                "of a parameter (find_unused_parameters=True): the gradients are no averages; make another service"
            )
        if self._failed:
            raise ArgumentError("the service has failed, and the gradients are no averages; make another service")
        self._expect_averaged()
        self._awaits_step, held = False, self._held
        if held is not None:
            held.expect_as_ordered((named or {}).get("closure", given[1] if len(given) > 1 else None))
            self._expect_taken()
        if held is not None and self._keeps and (factors := self._factors(self._optimizer)) is not None:
            with self._surviving():
                self._step_with_averages(held, factors)
        self._forget_taken()

    def _expect_taken(self) -> None:
        """That the step of an optimizer on the proxies has no gradients of this worker alone."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and not isinstance(parameter.grad, TakenGradient):
                raise ArgumentError(
                    f"step() with a gradient of {name} that the proxies do not have: end accumulation with a backward "
                    "pass outside service.no_sync(), and leave .grad alone"
                )

    def _expect_averaged(self) -> None:
        """That the optimizer steps no parameters of the model that have joined since `attach`."""
        thawed = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if thawed is None and sum(len(group["params"]) for group in self._optimizer.param_groups) <= self._stepped:
            return
        ours = {id(parameter) for parameter in self._parameters}
        stepped = {id(it) for group in self._optimizer.param_groups for it in group["params"] if it.requires_grad}
        joined = (name for name, it in self._model.named_parameters() if id(it) in stepped - ours)
        if (name := thawed or next(joined, None)) is not None:
            raise ArgumentError(
                f"the parameter {name} was frozen or not there when the model was attached, so its gradients are no "
                "averages; make another service after such a change"
            )

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
        if ddp.static_graph and self._profile_steps < 3:
            raise ArgumentError(
                f"profile_steps is {self._profile_steps}; DDP with static_graph makes its buckets in the third step: "
                "give 3 or more"
            )
        ddp.register_comm_hook(None, self._take_bucket)
        self._ddp = ddp

    def _take_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook. The future has the bucket itself: its averages are there before DDP reads it."""
        del state
        flat = bucket.buffer()
        if self._ddp is not None and self._ddp._join_config.enable:
            self._error = ArgumentError("the service does not carry uneven inputs of Join; give all workers as many")
        self._take(bucket.index(), flat, [gradient.numel() for gradient in bucket.gradients()])
        if bucket.is_last():
            # DDP may read its buckets right after, and an inner pass of a checkpoint may have been the first.
            self._end_backward()
        devices: list[Any] = [flat.device] if flat.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
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
            if self._held is None:
                self._came[number].gradient, self._came[number].version = gradient, gradient._version
            else:
                parameter.grad = self._kept(number, parameter)

        return note

    def _take(self, key: int, flat: torch.Tensor, sizes: list[int]) -> None:
        """A run of gradients is complete."""
        task = torch._C._current_graph_task_id()
        if not self._came:
            self.wait()
            if self._held is not None and not self._failed:
                self._expect_step_was_called()
                self._expect_own_parameters()
            if self._ddp is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._task = task
            self._pushing_s = 0.0
        elif key in self._came or (self._ddp is None and task != self._task):
            self._failed = True
            raise ArgumentError("a backward pass before this one has not come to its end; make another service")
        self._last_gradient = time.perf_counter()
        # Without the pushes so far. That of this run comes after the pass.
        self._backward_s = self._last_gradient - self._forward[1] - self._pushing_s
        self._arrivals[key] = self._backward_s
        # The gradients of an optimizer on the proxies go when they have been pushed.
        self._came[key] = Run(flat if self._held is None else self._parameters[key].detach().view(-1), sizes)
        if self._overlap and not self._failed:
            try:
                if self._held is not None and len(self._came) == 1:
                    if self._keeps:
                        self._service().order_mean()
                        self._has_means = True
                    else:
                        self._service().order_step(self._held.number + 1, self._held.ordered())
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

        def push(part: torch.Tensor) -> None:
            # Parameters are pulled when no gradient depends on them any more; their versions go up then.
            is_pulled = self._held is not None and not self._keeps
            into = None
            if is_pulled:
                room = self._room(key, self._parameters[key].detach())
                into = self._span(room, route.dtype, route.count, writable=False)
            gradients = self._span(part, route.dtype, route.count, writable=self._held is None)
            if self._held is None and flat.is_cuda:
                self._entering[key] = (flat[: route.count], part)
            waiting = self._service().push(route.tensor, gradients, name_of(route.dtype), into, self._keeps)
            # Nobody else holds a gradient that the proxies take.
            self._unpushed = [*self._unpushed, part] if waiting and self._held is not None else []

        part = flat[: route.count]
        if (scale := scale_of(route.dtype, self._size)) < 1:
            # The proxies sum first.
            with torch.no_grad():
                torch.mul(part, scale, out=part)
        self._leave(part, push)
        self._pushing_s += time.perf_counter() - began

    def _end_backward(self) -> None:
        came, self._came = self._came, {}
        error, self._error = self._error, None
        with self._surviving():
            if error is not None:
                raise error
            self._expect_all(came)
            self._synchronise(came)
            self._blocked_s = time.perf_counter() - self._last_gradient
            if not self._closed:
                self._count_step(came)

    @contextlib.contextmanager
    def _surviving(self) -> Generator[None]:
        """Goes on from a snapshot if a process dies inside, where the service has one."""
        try:
            with self._guarded(), torch.no_grad():
                yield
        except PolderError as error:
            # With on_death="shrink", the death of a proxy that keeps an optimizer's state is one too.
            has_lost_proxy = self._held is not None and isinstance(error, PeerDeadError)
            if self._survivors is None or not (self._survivors.have_lost(error) or has_lost_proxy):
                raise
            self._shrink(self._survivors)

    def _expect_all(self, came: dict[int, Run]) -> None:
        if self._failed:
            raise ArgumentError("the service has failed, as when a backward pass ended early; make another service")
        # DDP knows by itself.
        if self._ddp is None and len(came) != len(self._parameters):
            missing = next(name for number, name in enumerate(self._names) if number not in came)
            raise ArgumentError(
                f"{len(self._parameters) - len(came)} of {len(self._parameters)} parameters got no gradient in this "
                f"step, {missing} the first; the service needs one for each: freeze those that are not used before "
                "attach, checkpoint with use_reentrant=False, or attach a model of DDP with "
                "find_unused_parameters=True"
            )
        for number, run in came.items():
            if run.gradient is not None and (
                self._parameters[number].grad is not run.gradient or run.gradient._version != run.version
            ):
                raise ArgumentError(
                    f"the gradient of {self._names[number]} was changed in the backward pass after the service had "
                    "taken it; register hooks that change gradients before attach"
                )

    def _count_step(self, came: dict[int, Run]) -> None:
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

    def _report(self) -> None:
        if self._client is not None and self._plan is not None:
            plan = self._plan
            self._client.report(
                self._steps, self._blocked_s, plan.proxied_bytes, plan.total_bytes, plan.threshold_bytes
            )

    # Averages.

    def _synchronise(self, came: dict[int, Run]) -> None:
        """Averages by the proxies and by the workers at once."""
        order = self._order if len(self._order) == len(came) else list(came)
        if not self._overlap:
            for key in order:
                self._push(key, came[key].flat)
        self._push_left()
        counts = {key: route.count for key, route in self._routes.items()}
        rest = [came[key].flat[counts.get(key, 0) :] for key in order]
        finish = self._average([flat for flat in rest if flat.numel()])
        lost: PeerDeadError | None = None
        self._is_pulling = self._is_early and not self._keeps
        if self._routes and not self._is_pulling:
            try:
                self._service().wait()
            except PeerDeadError as error:
                lost = error
            # What has not come is there as it was given.
            self._enter()
            for key, route in self._routes.items():
                if (scale := scale_of(route.dtype, self._size)) < 1:
                    came[key].flat[: route.count].div_(scale)
        finish()
        if self._held is not None:
            if lost is not None:
                self._take_over(self._held, lost, is_step=True)
            self._unpushed = []
            if not self._keeps:
                self._held.number = self._held.stepping
                self._has_stepped()
        elif lost is not None:
            self._fall_back(came, lost, list(self._service().unsummed().values()))


class _Hook:
    """A hook of a module. A copy of the module, also a pickled one, has nothing to do with the service."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        if self._call is not None:
            self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


_open: "WeakSet[ParameterService]" = WeakSet()


# Runs before the groups are left, because it was registered after that.
@atexit.register
def _close_all() -> None:
    """Leaves every service when a program ends without closing it: the other workers may not come."""
    for service in list(_open):
        service.__exit__(None, SystemExit(), None)


def _expect_unattached(parameters: list[torch.nn.Parameter]) -> None:
    ours = {id(parameter) for parameter in parameters}
    for service in _open:
        if service._hooks and not ours.isdisjoint(map(id, service._parameters)):
            raise ArgumentError(
                "another ParameterService averages parameters of the model already, and one of them alone may; "
                "call close() of it first"
            )
