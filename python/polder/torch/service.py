"""A parameter service for data-parallel training: proxies sum gradients in the pool while the workers compute.

It is the COARSE system of the paper "COARSE: a disaggregated memory extension for distributed DL training", on a
pool. Section numbers below are the paper's.
"""

import atexit
import contextlib
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist

from polder import _core
from polder.errors import ArgumentError
from polder.torch.meeting import Attachment, attachments

# torch's stubs leave hooks and collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["ParameterService", "ProxyCount", "SyncPlan"]

_SIZES = [1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22]
"""Sizes of shards that a profile tries, in bytes."""
_PROBE_BYTES = 8 << 20
_PROBES = 3
_LATENCY_BYTES = 64
_LATENCY_PROBES = 10
_SLACK = 0.05
"""A bandwidth within so much of the highest is full."""
_ALIKE = 0.2
"""Links within so much of each other in bandwidth are equal: repeated measurements differ by as much."""


@dataclass(frozen=True)
class SyncPlan:
    """What a profile found, and what follows from it; the same on every worker.

    Attributes
    ----------
    forward_s, backward_s : float
        Seconds of a forward and a backward pass without synchronisation: ``T_FP`` and ``T_BP`` (section III-F).
    proxy_rate, worker_rate : float
        ``BW_proxy`` and ``BW_worker`` (the paper's ``BW_GPU``) in bytes a second: ``2(p-1)/p`` times bytes, over
        seconds, of a push, sum and pull by all proxies, and of an all-reduce by the workers.
    links : list of (float, float)
        Seconds of the least message and bytes a second of large ones, of each proxy.
    shard_bytes : int
        The smallest size of a shard that reaches full bandwidth (section III-E).
    total_bytes : int
        Bytes of all gradients: the paper's n.
    split_bytes : float
        Bytes that the proxies should take: the paper's m (section III-F).
    proxied_bytes : int
        Bytes that they take: whole tensors, those whose gradients come first.
    shards : list of (int, int, int, int)
        Of each shard its tensor, counted in the order of gradients, its first byte, its bytes, and its proxy.
    """

    forward_s: float
    backward_s: float
    proxy_rate: float
    worker_rate: float
    links: list[tuple[float, float]]
    shard_bytes: int
    total_bytes: int
    split_bytes: float
    proxied_bytes: int
    shards: list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class ProxyCount:
    """What a proxy has done since the plan began, in which process.

    Attributes
    ----------
    host, pid : int
        Its host id in the pool, and its process id.
    steps, shards, nbytes : int
        Steps and shards that it has summed, and bytes of the sums.
    """

    host: int
    pid: int
    steps: int
    shards: int
    nbytes: int


class ParameterService:
    """Averages the gradients of data-parallel workers: the first by proxies, the last by the workers themselves.

    All workers of a group construct it, attach it, and close it. It needs the backend ``polder``.

    The first ``profile_steps`` steps average all gradients by an all-reduce that blocks, and measure. Then the plan
    is made: which gradients go to the proxies, in which shards, and over which proxy. It stays as it is.

    Parameters
    ----------
    proxies : int, optional
        How many proxies the job has, one for each worker by default. Worker ``r`` starts the proxies ``p`` with ``p
        mod workers = r``, as children on its host. They end when it closes the service, or dies.
    group : ProcessGroup, optional
        The workers; all by default.
    profile_steps : int
        Steps that measure, at least 2: the first one is not counted.
    timeout : float
        Seconds that a worker waits for one sum.

    Raises
    ------
    ArgumentError
        When the group is none of the backend ``polder``.
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
        timeout: float = 60,
    ) -> None:
        self._group = group or dist.group.WORLD
        if self._group is None:
            raise ArgumentError('there is no process group; call init_process_group("polder") first')
        if profile_steps < 2:
            raise ArgumentError(f"profile_steps is {profile_steps}; give 2 or more, because the first is not counted")
        attachment = _attachment(self._group)
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._proxies = self._size if proxies is None else proxies
        if not 1 <= self._proxies <= 1024:
            raise ArgumentError(f"proxies is {self._proxies}; give 1 to 1024")
        self._name = f"/sync/{self._token()}"
        self._children = [
            _start(attachment, self._name, proxy, self._proxies, self._size, timeout)
            for proxy in range(self._rank, self._proxies, self._size)
        ]
        self._client: _core.ServiceClient | None = None
        self._hooks: list[Any] = []
        self._steps = profile_steps
        self._plan: SyncPlan | None = None
        self._failed = False
        try:
            self._client = _core.ServiceClient(
                attachment.pool,
                self._name,
                self._rank,
                self._size,
                self._proxies,
                timeout=timeout,
                given_up=self._has_lost_a_child,
            )
        except BaseException:
            self._failed = True
            self.close()
            raise
        _open.add(self)

    # Use.

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Averages the gradients of `model` from now on, before each step of `optimizer`. All workers call it.

        The weights of worker 0 are copied to all. The model is a plain module, not one of DDP. Its parameters are
        contiguous CPU tensors of one floating type; in a step each gets its gradient once, and all of them get one.

        Parameters
        ----------
        model : Module
            What is trained, the same on all workers.
        optimizer : Optimizer
            What steps it. Its step waits for the averages.

        Raises
        ------
        ArgumentError
            When the model is one of DDP, or has parameters that the service does not carry.
        """
        if self._hooks:
            raise ArgumentError("the service has a model already; make another service")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ArgumentError("the model is one of DDP, which averages gradients itself; attach its .module instead")
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _expect_carried(self._parameters)
        self._number: dict[torch.Tensor, int] = {parameter: index for index, parameter in enumerate(self._parameters)}
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=self._group)
        self._dtype = str(self._parameters[0].dtype).removeprefix("torch.")
        self._order: list[int] = []
        """The parameters in the order of their gradients in this step, by number."""
        self._last_gradient = 0.0
        self._forward = [0.0, 0.0]
        self._passes: list[tuple[float, float]] = []
        self._blocked_s = 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward),
            optimizer.register_step_pre_hook(self._before_step),
            *(parameter.register_post_accumulate_grad_hook(self._has_gradient) for parameter in self._parameters),
        ]

    @property
    def plan(self) -> SyncPlan | None:
        """What the profile found; None before it is over."""
        return self._plan

    @property
    def blocked_s(self) -> float:
        """Seconds of the last step that the training thread waited: from its last gradient to the last average."""
        return self._blocked_s

    def proxies(self) -> list[ProxyCount]:
        """What each proxy says that it has done since the plan began.

        Raises
        ------
        ArgumentError
            Before the plan has begun.
        """
        return [ProxyCount(*count) for count in self._service().stat()]

    def close(self) -> None:
        """Detaches from the model and ends the proxies. All workers call it; harmless when it was closed before."""
        _open.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        client, self._client = self._client, None
        try:
            if client is not None:
                client.abandon() if self._failed else client.close()
        finally:
            children, self._children = self._children, []
            for child in children:
                _end(child)

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
        self._forward[0] = time.perf_counter()
        self._order.clear()

    def _end_forward(self, *_: object) -> None:
        self._forward[1] = time.perf_counter()

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()
        number = self._number[parameter]
        self._order.append(number)
        if self._plan is not None and (tensor := self._sent.get(number)) is not None:
            gradient = self._gradient(number)
            with self._guarded():
                self._service().push(tensor, (gradient.data_ptr(), gradient.numel()), self._dtype)

    def _before_step(self, *_: object) -> None:
        if len(set(self._order)) != len(self._parameters):
            self._failed = True
            missing = len(self._parameters) - len(set(self._order))
            raise ArgumentError(
                f"{missing} of {len(self._parameters)} parameters got no gradient in this step; the service needs one "
                "for each: freeze those that are not used"
            )
        with self._guarded():
            if self._plan is None:
                self._profile()
            else:
                rest = [self._gradient(number) for number in self._rest]
                work = self._average(rest)
                self._service().wait()
                work()
        self._blocked_s = time.perf_counter() - self._last_gradient

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """Remembers a failure: then the service is not ended together."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _gradient(self, number: int) -> torch.Tensor:
        gradient = self._parameters[number].grad
        if gradient is None or not gradient.is_contiguous():
            raise ArgumentError(f"the gradient of parameter {number} is missing or not contiguous; call .contiguous()")
        return gradient

    def _average(self, gradients: list[torch.Tensor]) -> Any:
        """Begins an all-reduce of `gradients` together; what it returns waits for it."""
        if not gradients:
            return lambda: None
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            flat.div_(self._size)
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

        return finish

    # The profile.

    def _profile(self) -> None:
        """A step that measures: an all-reduce of all gradients, after the backward pass."""
        self._average([self._gradient(number) for number in range(len(self._parameters))])()
        forward = self._forward[1] - self._forward[0]
        self._passes.append((forward, self._last_gradient - self._forward[1]))
        if len(self._passes) == self._steps:
            self._make_plan()

    def _make_plan(self) -> None:
        forward_s, backward_s = self._agreed(
            [statistics.median(times) for times in zip(*self._passes[1:], strict=True)]
        )
        order = torch.tensor(self._order)
        dist.broadcast(order, group_src=0, group=self._group)
        numbers: list[int] = order.tolist()
        sizes = [self._parameters[number].nbytes for number in numbers]
        total = sum(sizes)
        ring = 2 * (self._size - 1) / self._size
        worker_rate = max(ring, 1e-9) * total / self._probe_workers(total)
        measured = self._probe_sizes(total)
        shard_bytes = _core.service_shard_bytes(measured, _SLACK)
        proxy_rate = max(ring, 1e-9) * dict(measured)[shard_bytes]
        links = [self._probe_link(proxy, shard_bytes, total) for proxy in range(self._proxies)]
        split, taken, shards = _core.service_plan(
            sizes, self._size, forward_s, backward_s, proxy_rate, worker_rate, shard_bytes, links, _ALIKE
        )
        self._sent = {number: tensor for tensor, number in enumerate(numbers[:taken])}
        self._rest = numbers[taken:]
        self._service().begin(shards, self._proxies, self._dtype)
        self._plan = SyncPlan(
            forward_s,
            backward_s,
            proxy_rate,
            worker_rate,
            links,
            shard_bytes,
            total,
            split,
            sum(sizes[:taken]),
            shards,
        )

    def _probe_workers(self, total: int) -> float:
        """Seconds of an all-reduce of all gradients by workers that have nothing else to do."""
        dummy = torch.zeros(total // self._parameters[0].element_size(), dtype=self._parameters[0].dtype)
        times: list[float] = []
        for _ in range(_PROBES + 1):
            dist.barrier(group=self._group)
            began = time.perf_counter()
            dist.all_reduce(dummy, group=self._group)
            times.append(time.perf_counter() - began)
        return self._agreed([statistics.median(times[1:])])[0]

    def _probe_sizes(self, total: int) -> list[tuple[int, float]]:
        """Bytes a second that all proxies together sum, for each size of shards."""
        nbytes = max(min(_PROBE_BYTES, total), _SIZES[0]) // _SIZES[0] * _SIZES[0]
        measured: list[tuple[int, float]] = []
        for size in _SIZES:
            count = nbytes // size
            if count < self._proxies and measured:
                break
            shards = [(0, index * size, size, index % self._proxies) for index in range(max(count, 1))]
            measured.append((size, max(count, 1) * size / self._probe(shards, _PROBES)))
        return measured

    def _probe_link(self, proxy: int, shard_bytes: int, total: int) -> tuple[float, float]:
        """Seconds of the least shard over one proxy, and bytes a second of shards that are large enough."""
        latency = self._probe([(0, 0, _LATENCY_BYTES, proxy)], _LATENCY_PROBES)
        count = max(min(_PROBE_BYTES, total) // shard_bytes // self._proxies, 1)
        seconds = self._probe([(0, index * shard_bytes, shard_bytes, proxy) for index in range(count)], _PROBES)
        return latency, count * shard_bytes / seconds

    def _probe(self, shards: list[tuple[int, int, int, int]], rounds: int) -> float:
        """Seconds of a step that pushes and pulls these shards of one tensor and does nothing else."""
        service = self._service()
        service.begin(shards, self._proxies, self._dtype)
        first = self._parameters[0]
        dummy = torch.zeros(sum(shard[2] for shard in shards) // first.element_size(), dtype=first.dtype)
        times: list[float] = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            service.push(0, (dummy.data_ptr(), dummy.numel()), self._dtype)
            service.wait()
            times.append(time.perf_counter() - began)
        return self._agreed([statistics.median(times[1:])])[0]

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The mean of what all workers measured, the same bits on each."""
        means = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(means, group=self._group)
        return means.div_(self._size).tolist()

    # Parts.

    def _token(self) -> str:
        """A word that worker 0 draws."""
        token = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(token, group_src=0, group=self._group)
        return bytes(token.tolist()).hex()

    def _service(self) -> "_core.ServiceClient":
        if self._client is None:
            raise ArgumentError("the service is closed; make another one")
        return self._client

    def _has_lost_a_child(self) -> bool:
        return any(child.poll() is not None for child in self._children)


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


def _expect_carried(parameters: list[torch.nn.Parameter]) -> None:
    if not parameters:
        raise ArgumentError("the model has no parameters to train")
    first = parameters[0]
    for parameter in parameters:
        is_carried = parameter.is_cpu and parameter.is_contiguous() and parameter.numel() > 0
        if not is_carried or parameter.dtype != first.dtype or not parameter.is_floating_point():
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} on {parameter.device}; the "
                f"service carries contiguous CPU tensors of one floating type, here {first.dtype}"
            )


def _start(
    attachment: Attachment, name: str, proxy: int, proxies: int, clients: int, timeout: float
) -> "subprocess.Popen[bytes]":
    """Starts a proxy on this worker's host; it ends when this process does, because its standard input does."""
    command = [sys.executable, "-m", "polder.proxy", "--pool", attachment.path, "--host", str(attachment.pool.host)]
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
