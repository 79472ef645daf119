"""The plan of a parameter service: what is measured, and which gradients go to which proxy in which shards."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from polder import _core
from polder.torch.exchange import Exchange, Route, Run, name_of
from polder.torch.expect import expect_numbers

# torch's stubs leave collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["ALIKE", "RECENT", "SIZES", "SLACK", "Planner", "Profile", "SyncPlan"]

SIZES = [1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22]
"""Sizes of shards that a profile tries, in bytes."""
_PROBE_BYTES = 8 << 20
_PROBES = 3
_LATENCY_BYTES = 64
_LATENCY_PROBES = 10
SLACK = 0.05
"""A bandwidth within so much of the highest is full."""
ALIKE = 0.2
"""Values within so much of each other are equal: repeated measurements differ by as much."""
RECENT = 100
"""A profile rests on so many of the last passes."""


@dataclass(frozen=True)
class Profile:
    """What was measured: the same on every worker."""

    forward_s: float
    backward_s: float
    proxy_rate: float
    worker_rate: float
    copy_rate: float
    links: list[tuple[float, float]]
    shard_bytes: int
    arrivals: dict[int, float]

    def is_like(self, other: "Profile") -> bool:
        """Whether nothing differs by more than repeated measurements do."""
        pairs = [
            (self.forward_s, other.forward_s),
            (self.backward_s, other.backward_s),
            (self.proxy_rate, other.proxy_rate),
            (self.worker_rate, other.worker_rate),
            *((one[1], two[1]) for one, two in zip(self.links, other.links, strict=True)),
        ]
        return all(abs(one - two) <= ALIKE * max(one, two) for one, two in pairs)


@dataclass(frozen=True)
class SyncPlan(Profile):
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


class Planner(Exchange):
    """Measures the passes, the workers and the way over the proxies, and plans from that."""

    _split: float | None
    _shard_bytes: int | None
    _replan_steps: int
    _replans: bool
    _plan: SyncPlan | None
    _profile: Profile | None
    _routes: dict[int, Route]
    """Of each run that has any, what the proxies sum of it."""
    _order: list[int]
    """The runs in the order of their gradients, the same on all workers."""
    _steps: int
    _planned_at: int
    _passes: deque[tuple[float, float, dict[int, float]]]
    """Seconds of the last forward and backward passes, and when each gradient was complete."""

    @property
    def shard_bytes(self) -> int | None:
        """The least bytes of a shard, or None for the measured size."""
        return self._shard_bytes

    @shard_bytes.setter
    def shard_bytes(self, value: int | None) -> None:
        expect_numbers({"shard_bytes": value})
        self._shard_bytes = value

    def _plan_again(self, came: dict[int, Run]) -> None:
        """Plans anew where it is time to."""
        assert self._plan is not None
        if self._replans and self._profile is not None:
            self._make_plan(came, self._profile)
        elif self._replan_steps and self._steps - self._planned_at >= self._replan_steps:
            profile = self._measure(came, self._profile)
            if self._profile is not None and profile.is_like(self._profile):
                self._planned_at = self._steps
                self._passes.clear()
                self._begin_planned(self._plan.shards)
            else:
                self._make_plan(came, profile)

    def _measure(self, came: dict[int, Run], before: Profile | None) -> Profile:
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
        measured = self._probe_sizes(total, [fixed] if fixed else SIZES)
        shard_bytes = _core.service_shard_bytes([(size, rate) for size, rate, _ in measured], SLACK)
        proxy_rate, copy_rate, links = self._probe_links(measured, shard_bytes, total)
        return Profile(
            forward_s,
            backward_s,
            ring * proxy_rate,
            worker_rate,
            copy_rate,
            links,
            fixed or shard_bytes,
            dict(zip(sorted(came), ready_s, strict=True)),
        )

    def _make_plan(self, came: dict[int, Run], profile: Profile) -> None:
        order = torch.tensor(list(came))
        dist.broadcast(order, group_src=0, group=self._group)
        self._order = order.tolist()
        runs = [came[key] for key in self._order]
        sizes = [size * run.flat.element_size() for run in runs for size in run.sizes]
        rates = (profile.forward_s, profile.backward_s, profile.proxy_rate, profile.worker_rate)
        shard_bytes = self.shard_bytes or profile.shard_bytes
        split, taken = _core.service_split(sizes, self._size, *rates, self._split)
        best, seconds = self._predict(runs, profile, shard_bytes)
        if self._split is None:
            taken = best
        proxied = sum(sizes[:taken])
        ends = itertools.accumulate(run.flat.nbytes for run in runs)
        counts = [
            max(min(proxied - (end - run.flat.nbytes), run.flat.nbytes), 0) for run, end in zip(runs, ends, strict=True)
        ]
        tensors = [count for count in counts if count]
        threshold, shards = _core.service_shards(tensors, shard_bytes, profile.links, ALIKE)
        self._routes = {
            key: Route(tensor, count // run.flat.element_size(), run.flat.numel(), run.flat.dtype)
            for tensor, (key, run, count) in enumerate(zip(self._order, runs, counts, strict=True))
            if count
        }
        self._begin_planned(shards)
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

    def _begin_planned(self, shards: list[tuple[int, int, int, int]]) -> None:
        routes = sorted(self._routes.values(), key=lambda route: route.tensor)
        self._begin(shards, [route.dtype for route in routes])

    def _plan_all(
        self,
        sizes: list[int],
        dtypes: list[torch.dtype],
        group_of: Callable[[int], int] | None = None,
        moments: int = 0,
    ) -> None:
        """Plans without a profile: the proxies take all tensors, of these bytes, and keep so many `moments`.

        `group_of` says to which group of settings a tensor belongs.
        """
        total = sum(sizes)
        measured = self._probe_sizes(total, [self.shard_bytes] if self.shard_bytes else SIZES)
        shard_bytes = _core.service_shard_bytes([(size, rate) for size, rate, _ in measured], SLACK)
        ring = max(2 * (self._size - 1) / self._size, 1e-9)
        rate, copies, links = self._probe_links(measured, shard_bytes, total)
        shard_bytes = self.shard_bytes or shard_bytes
        threshold, shards = _core.service_shards(sizes, shard_bytes, links, ALIKE)
        groups = [] if group_of is None else [group_of(shard[0]) for shard in shards]
        self._begin(shards, dtypes, groups, moments=moments)
        measured_rates = (0.0, 0.0, ring * rate, 0.0, copies, links, shard_bytes, {})
        self._plan = SyncPlan(*measured_rates, total, total, [], total, threshold, shards, self._steps)

    def _predict(self, runs: list[Run], profile: Profile, shard_bytes: int) -> tuple[int, list[float]]:
        """How many tensors the proxies should take, and the seconds of each number."""
        gradients = [
            (size * run.flat.element_size(), profile.arrivals.get(key, profile.backward_s))
            for key, run in zip(self._order, runs, strict=True)
            for size in run.sizes
        ]
        # Proxies that share memory or cores are slower together than each alone.
        ring = max(2 * (self._size - 1) / self._size, 1e-9)
        together = min(profile.proxy_rate / ring / sum(rate for _, rate in profile.links), 1.0)
        links = [(latency, rate * together) for latency, rate in profile.links]
        rates = (profile.copy_rate, profile.worker_rate)
        return _core.service_predict(gradients, self._size, profile.backward_s, rates, shard_bytes, links, ALIKE)

    def _probe_workers(self, total: int) -> float:
        """Seconds of an all-reduce of all gradients by workers that have nothing else to do."""
        first = self._parameters[0]
        dummy = torch.empty(total // first.element_size(), dtype=first.dtype, device=first.device).zero_()
        times: list[float] = []
        for _ in range(_PROBES + 1):
            dist.barrier(group=self._group)
            began = time.perf_counter()
            self._average([dummy])()
            times.append(time.perf_counter() - began)
        return self._agreed([statistics.median(times[1:])])[0]

    def _probe_sizes(self, total: int, sizes: Iterable[int]) -> list[tuple[int, float, float]]:
        """For each size of shards: bytes a second that all proxies together sum, and that a worker pushes."""
        nbytes = max(min(_PROBE_BYTES, total), SIZES[0]) // SIZES[0] * SIZES[0]
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
        dtype = self._parameters[0].dtype
        # The push alone is measured too, so that no shard may wait for another.
        self._begin(shards, [dtype], reuses=False)
        service = self._service()
        dummy = torch.zeros(sum(shard[2] for shard in shards) // dtype.itemsize, dtype=dtype, device="cpu")
        times: list[float] = []
        pushes: list[float] = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            service.push(0, self._span(dummy, dtype, dummy.numel(), writable=True), name_of(dtype))
            pushes.append(time.perf_counter() - began)
            service.wait()
            times.append(time.perf_counter() - began)
        seconds, pushing = self._agreed([statistics.median(times[1:]), statistics.median(pushes[1:])])
        return seconds, pushing
