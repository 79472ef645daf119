"""A parameter service as the reduce-scatter of FSDP2: proxies average whole gradients, a worker pulls its own shard."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from polder.errors import ArgumentError, PeerDeadError
from polder.torch import gpu
from polder.torch.averages import scale_of
from polder.torch.exchange import Route, name_of
from polder.torch.shrink import Shrinker

# torch's stubs leave collectives and hooks without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

__all__ = ["Sharder"]


class ReduceScatter:
    """What FSDP2 calls for the gradients of one of its groups of parameters.

    It is of the interface that ``FSDPModule.set_custom_reduce_scatter`` takes.
    """

    def __init__(self, service: "Sharder", number: int) -> None:
        self._service, self._number = service, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gradients, or for the shard of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Brings this worker's shard of the averages, and returns when it is there."""
        del async_op
        self._service._reduce_scatter(self._number, output_tensor, input_tensor, group, op)


class Sharder(Shrinker):
    """Averages the gradients of FSDP2: each group of parameters in one call, which waits for the proxies."""

    _sharded: Any = None
    """The model, if FSDP2 shards it."""
    _modules: list[str]
    """The name of the FSDP2 module of each group of parameters."""
    _groups: dict[int, tuple[int, torch.dtype]]
    """Of each group whose gradients have come in this backward pass: its elements and their type."""
    _lost: PeerDeadError | None
    """How a proxy died in this backward pass."""
    _closed: bool
    _blocked_s: float

    def _report(self) -> None:
        """Says to those that look from outside what the last step was."""
        raise NotImplementedError

    def _join_sharded(self, model: Any) -> None:
        """Becomes the reduce-scatter of all modules of a model."""
        self._sharded = model
        modules: list[tuple[str, Any]] = [
            (name or type(module).__name__, module)
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
        ]
        self._modules = [name for name, _ in modules]
        for number, (_, module) in enumerate(modules):
            module.set_custom_reduce_scatter(ReduceScatter(self, number))

    def _reduce_scatter(
        self, number: int, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        """FSDP2's reduce-scatter. Without a plan the workers do it."""
        if self._closed:
            dist.reduce_scatter_tensor(output, gradients, op=op, group=group)
            return
        if op != dist.ReduceOp.AVG:
            self._failed = True
            raise ArgumentError(
                f"FSDP2 reduces {gradients.dtype} by {op}; the proxies average: leave gradient divide factors alone, "
                "and reduce in float32 or bfloat16"
            )
        if self._failed:
            raise ArgumentError("the service has failed; make another service")
        if not self._groups:
            self._blocked_s = 0.0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_sharded)
        began = time.perf_counter()
        known = (gradients.numel(), gradients.dtype)
        with self._guarded(), torch.no_grad():
            if number in self._groups:
                raise ArgumentError(
                    f"the FSDP2 module {self._modules[number]} reduces gradients twice in a backward pass; the service "
                    "carries modules that are used once"
                )
            if self._routes:
                self._expect_next(self._groups, number)
            self._groups[number] = known
            route = self._routes.get(number)
            if route is not None and known != (route.total, route.dtype):
                raise ArgumentError(
                    f"the FSDP2 module {self._modules[number]} has {known[0]} gradients of {known[1]}, {route.total} "
                    f"of {route.dtype} in the first backward pass; the service carries modules that stay"
                )
            if route is None or self._lost is not None:
                dist.reduce_scatter_tensor(output, gradients, op=op, group=group)
                return
            scale = scale_of(route.dtype, self._size)
            try:
                if scale < 1:
                    # The proxies sum first. FSDP2 uses the gradients' memory again.
                    torch.mul(gradients, scale, out=gradients)
                self._pull_shard(route, output, gradients)
                if scale < 1:
                    output.div_(scale)
                self._blocked_s += time.perf_counter() - began
            except PeerDeadError as error:
                self._expect_proxy_lost(error, number)
                self._lost = error
                gradients.div_(scale)
                dist.reduce_scatter_tensor(output, gradients, op=op, group=group)

    def _expect_next(self, came: Collection[int], number: int | None) -> None:
        """Raises unless groups come in the order of the first backward pass: so windows of proxies are used.

        None is the end of the pass.
        """
        order = list(self._routes)
        if number is not None and number not in order:
            raise ArgumentError(
                f"the FSDP2 module {self._modules[number]} has gradients, and had none in the first backward pass; the "
                "service carries modules that stay: checkpoint with use_reentrant=False"
            )
        if len(came) < len(order) and number != order[len(came)]:
            raise ArgumentError(
                f"the FSDP2 module {self._modules[order[len(came)]]} got no gradients in this step, or late; the "
                "service needs those of all, in one order: freeze what is not used, and checkpoint with "
                "use_reentrant=False"
            )

    def _pull_shard(self, route: Route, output: torch.Tensor, gradients: torch.Tensor) -> None:
        """Pushes all gradients of a group, and waits for this worker's part of the averages."""
        service, name = self._service(), name_of(route.dtype)
        source = gradients
        if gradients.is_cuda:
            (source,) = gpu.copied_out([gradients])
            for event in gpu.begun():
                event.synchronize()
        room = self._room(route.tensor, output)
        for rank, part in enumerate(source.view(self._size, -1)):
            into = self._span(room, route.dtype, route.count, writable=True) if rank == self._rank else None
            span = self._span(part, route.dtype, route.count, writable=False)
            service.push(route.tensor + rank, span, name, into, into is None)
        # FSDP2 uses the gradients' memory again.
        for rank in range(self._size):
            service.wait_for(route.tensor + rank)
        self._enter()

    def _expect_proxy_lost(self, error: PeerDeadError, number: int) -> None:
        """Raises the error unless a proxy died, and all workers miss the averages of the same group."""
        counts = self._service().stat()
        if (error.host, error.pid) not in {count[:2] for count in counts}:
            raise error
        mine = torch.tensor([self._steps, number])
        everyones = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(everyones, mine, group=self._group)
        if any(not torch.equal(mine, other) for other in everyones):
            raise error

    def _end_sharded(self) -> None:
        """All groups have come."""
        groups, self._groups = self._groups, {}
        lost, self._lost = self._lost, None
        if self._closed or self._failed:
            return
        with self._guarded(), torch.no_grad():
            self._steps += 1
            if lost is None and self._routes:
                self._expect_next(groups, None)
            if lost is not None and not self._leave_dead(self._service().stat()):
                return
            if self._routes:
                self._report()
            elif self._proxies:
                self._plan_sharded(groups)

    def _plan_sharded(self, groups: dict[int, tuple[int, torch.dtype]]) -> None:
        """Plans by what has come: each worker's part of a group is a tensor of its own."""
        counts = [count // self._size for count, _ in groups.values()]
        for at, (number, (count, dtype)) in enumerate(groups.items()):
            self._routes[number] = Route(at * self._size, counts[at], count, dtype)
        dtypes = [dtype for _, dtype in groups.values() for _ in range(self._size)]
        sizes = [count * dtype.itemsize for count, (_, dtype) in zip(counts, groups.values(), strict=True)]
        self._plan_all([size for size in sizes for _ in range(self._size)], dtypes)
