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
    restored: Restored | None

    def _fall_back(self, came: dict[int, Run], error: PeerDeadError, missing: list[tuple[int, int, int, int]]) -> None:
        """A proxy has died: the workers average what is `missing` of its sums, and go on with the other proxies.

        What it had published counts for every worker, and the others have summed the rest of theirs. So all workers
        miss the same shards of the same step; they compare that first.
        """
        counts = self._service().stat()
        if self._plan is None or (error.host, error.pid) not in {count[:2] for count in counts}:
            raise error
        mine = torch.tensor([self._steps, len(missing), *(value for shard in missing[:1] for value in shard)])
        facts = torch.zeros(6, dtype=torch.int64)
        facts[: len(mine)] = mine
        everyones = [torch.empty_like(facts) for _ in range(self._size)]
        dist.all_gather(everyones, facts, group=self._group)
        if any(not torch.equal(facts, other) for other in everyones):
            raise error
        keys = {route.tensor: (key, route.dtype.itemsize) for key, route in self._routes.items()}
        pieces: list[torch.Tensor] = []
        for tensor, start, nbytes, _ in missing:
            key, width = keys[tensor]
            pieces.append(came[key].flat[start // width : (start + nbytes) // width])
        self._average(pieces)()
        if self._leave_dead(counts):
            self._make_plan(came, self._measure(came, self._profile))

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
