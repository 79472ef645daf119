"""What the workers of a parameter service do when one of them, or a proxy, has died: the others go on."""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist

from polder.errors import PeerDeadError, PolderError
from polder.torch.exchange import Run, attachment_of
from polder.torch.expect import EmulatedLinks
from polder.torch.held import HeldOptimizer, Holder
from polder.torch.snapshot import Restored, restore
from polder.torch.survivors import Survivors

# torch's stubs leave collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["Shrinker"]


class Shrinker(Holder):
    """Goes on after a death: without a proxy whose sums the workers can do, or from a snapshot in a smaller group."""

    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer
    _snapshots: str | None
    _has_proxy_each: bool
    _profiled_from: int
    _unpushed: list[torch.Tensor]
    _keeps: bool
    restored: Restored | None

    def _fall_back(self, came: dict[int, Run], error: PeerDeadError, missing: list[tuple[int, int, int, int]]) -> None:
        """A proxy has died: the workers average what is `missing` of its sums, and go on with the other proxies.

        What it had published counts for every worker, and the others have summed the rest of theirs. So all workers
        miss the same shards of the same step; they compare that first.
        """
        counts = self._service().stat()
        if self._plan is None or (error.host, error.pid) not in {count[:2] for count in counts}:
            raise error
        self._expect_alike(missing, error)
        keys = {route.tensor: (key, route.dtype.itemsize) for key, route in self._routes.items()}
        pieces: list[torch.Tensor] = []
        for tensor, start, nbytes, _ in missing:
            key, width = keys[tensor]
            pieces.append(came[key].flat[start // width : (start + nbytes) // width])
        self._average(pieces)()
        if self._leave_dead(counts):
            self._make_plan(came, self._measure(came, self._profile))

    def _expect_alike(self, missing: list[tuple[int, int, int, int]], error: PeerDeadError) -> None:
        """That all workers miss the same shards of the same step."""
        mine = torch.tensor([self._steps, len(missing), *(value for shard in missing[:1] for value in shard)])
        facts = torch.zeros(6, dtype=torch.int64)
        facts[: len(mine)] = mine
        everyones = [torch.empty_like(facts) for _ in range(self._size)]
        dist.all_gather(everyones, facts, group=self._group)
        if any(not torch.equal(facts, other) for other in everyones):
            raise error

    @torch.no_grad()
    def _take_over(self, held: HeldOptimizer, error: PeerDeadError, *, is_step: bool) -> None:
        """A proxy has died, in a step of the optimizer or beside: others take over the state that is in the pool.

        It has done its step with a shard, or not. Where it has not, the workers still have the gradients, the
        parameters and moments are those of the step before, and worker 0 does the step. Then it brings all to other
        proxies, which are as many.
        """
        service = self._service()
        is_proxy = (error.host, error.pid) in {count[:2] for count in service.stat()}
        if self._keeps or self._survivors is not None or self._plan is None or not is_proxy:
            raise error
        missing = service.unsummed() if is_step else {}
        self._expect_alike(list(missing.values()), error)
        gradients = torch.empty(sum(row[2] for row in missing.values()) // 4, device="cpu")
        parts = dict(zip(missing, gradients.split([row[2] // 4 for row in missing.values()]), strict=True))
        for shard, part in parts.items():
            service.unsummed_gradients(shard, self._span(part, part.dtype, part.numel(), writable=True))
        everyones = [torch.empty_like(gradients) for _ in range(self._size)]
        dist.all_gather(everyones, gradients, group=self._group)
        # In the order of the workers, as proxies sum.
        gradients.copy_(everyones[0])
        for other in everyones[1:]:
            gradients.add_(other)
        gradients.div_(self._size)
        number = held.stepping if is_step else held.number
        if self._rank == 0:
            moments = self._salvaged(held, parts)
            held.number = number
            held.give_back(moments)
        self._abandon()
        self._leaving, self._entering, self._unpushed, self._is_pulling = [], {}, [], False
        self._open_service()
        self._hold(held)
        held.number = number

    def _salvaged(self, held: HeldOptimizer, gradients: dict[int, torch.Tensor]) -> list[list[torch.Tensor]]:
        """The moments of each parameter, and in the parameters those of shards that the workers have not pulled.

        With `gradients`, of such shards, the step is done where it has not been.
        """
        assert self._plan is not None
        service, keys = self._service(), {route.tensor: key for key, route in self._routes.items()}
        values = [
            [
                (torch.empty_like if slot else torch.clone)(
                    parameter.detach().cpu(), memory_format=torch.contiguous_format
                ).view(-1)
                for parameter in self._parameters
            ]
            for slot in range(1 + held.kept)
        ]
        for shard, (tensor, start, nbytes, _) in enumerate(self._plan.shards):
            key = keys[tensor]
            its = [of[key][start // 4 : (start + nbytes) // 4] for of in values]
            spans = [self._span(part, part.dtype, part.numel(), writable=True) for part in its]
            has_stepped = service.recover(shard, spans[0], spans[1:])
            gradient = gradients.get(shard)
            if gradient is not None and not has_stepped:
                held.step(key, [its[0], gradient, *its[1:]])
        for parameter, value in zip(self._parameters, values[0], strict=True):
            # A module of this forward pass may have saved it for the backward pass: its version stays.
            parameter.data.copy_(value.view(parameter.shape))
        shapes = [parameter.shape for parameter in self._parameters]
        moments = [[it.view(shape) for it, shape in zip(of, shapes, strict=True)] for of in values[1:]]
        return moments[: len(held.moments)]

    def _leave_dead(self, counts: "list[tuple[int, int, int, int, int, bool]]") -> bool:
        """Goes on with the proxies that some worker does not count as dead; false where none are left."""
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
        elif self._plan is not None:
            self._plan = replace(self._plan, proxied_bytes=0, split_bytes=0.0, shards=[], links=[], step=self._steps)
        return self._proxies > 0

    def _shrink(self, survivors: Survivors) -> None:
        """Goes on without the dead from the newest snapshot, in a group of its own and with other proxies."""
        for parameter in self._parameters:
            parameter.grad = None
        held, self._held = self._held, None
        self._is_pulling = False
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
        self._group, self._attachment = group, attachment_of(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        if self._has_proxy_each:
            self._proxies = self._size
            if self.emulated is not None:
                self.emulated = replace(self.emulated, proxies=list(self.emulated.proxies)[: self._size])
        self._plan, self._profile, self._routes, self._order = None, None, {}, []
        self._leaving, self._entering, self._unpushed = [], {}, []
        self._passes.clear()
        self._profiled_from = self._steps
        self._failed = False
        self._open_service()
        if held is not None:
            self._hold(held)
        self.restored = restore(self._snapshots, self._model, self._optimizer, group=group)
