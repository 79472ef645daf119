"""A worker that trains with a parameter service: beside DDP, or until another process dies.

Arguments: the rank, a folder to meet in, and what to do.
"""

import collections
import contextlib
import copy
import itertools
import math
import os
import pickle
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_meet import meet

import polder.torch
from polder.torch import EmulatedLinks, ParameterService
from polder.torch.meeting import attachments

meet()
rank, size, kind = dist.get_rank(), dist.get_world_size(), sys.argv[3]


class Net(torch.nn.Module):
    """Layers of several sizes, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 300), torch.nn.Linear(300, 64)
        self.last = torch.nn.Linear(64, 7)
        self.spare = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first two layers are used twice."""
        for _ in range(2):
            x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x) + (0 if kind == "missing" else self.spare(x[:, :1]))


class Words(torch.nn.Module):
    """A small language model. The head has the embedding's weight, and one layer is not used in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.spare = torch.nn.Linear(32, 32)
        self.head.weight = self.embedding.weight
        self.checkpoints = False

    def forward(self, words: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        """What comes after each word."""
        x = self.embedding(words)
        for layer in self.layers:
            # Its backward pass runs inside another.
            x = torch.relu(checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x))
        return self.head(self.spare(x) if uses_spare else x)


def trained(
    service: ParameterService | None, steps: int, before_step: Callable[[int], None] = lambda _: None
) -> torch.nn.Module:
    """The model after some steps; each rank begins with other weights where the service copies those of rank 0."""
    torch.manual_seed(rank if service else 0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if service:
        service.attach(model, optimizer)
    net = model if service else DistributedDataParallel(model)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        before_step(step)
        loss = net(torch.randn(16, 64, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and kind == "endless" and service:
            (Path(sys.argv[2]) / "pool").write_text(next(iter(attachments)))
            pids = " ".join(str(count.pid) for count in service.proxies())
            (Path(sys.argv[2]) / f"pids-{rank}").write_text(pids)
    return model


def trained_as_people_do(
    service: ParameterService | None,
    steps: int,
    parts: int = 2,
    momentum: bool = False,
    checkpoints: bool = False,
    **flags: bool,
) -> torch.nn.Module:
    """Words under DDP: accumulation, clipping of the global norm, groups of parameters, a scheduler, autocast."""
    torch.manual_seed(0)
    model = Words()
    model.checkpoints = checkpoints
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    if momentum:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    net = DistributedDataParallel(model, bucket_cap_mb=0.006, **flags)
    if service:
        service.attach(net, optimizer)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        for part in range(parts):
            words = torch.randint(50, (8, 6), generator=draw)
            # In some steps no rank uses the spare layer, in others one of them does.
            uses_spare = "find_unused_parameters" not in flags or (step + rank) % 3 == 0
            with net.no_sync() if part + 1 < parts else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    guesses = net(words, uses_spare)
                loss = functional.cross_entropy(guesses.float().flatten(0, 1), words.flatten())
                (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def is_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
RULES: dict[str, Make] = {
    "SGD with Nesterov's momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "SGD with dampening": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, fused=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam with AdamW's decay": lambda groups: torch.optim.Adam(
        groups, lr=1e-2, fused=True, decoupled_weight_decay=True
    ),
}


class Training:
    """Net with two groups of settings, a scheduler and accumulation: by a service, or by DDP."""

    def __init__(self, make: Make, service: ParameterService | None, *, clips: bool = False) -> None:
        torch.manual_seed(rank if service else 0)
        self.clips, self.norms = clips, list[float]()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=clips)
        self.model, self.service = Net(), service
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        self.optimizer = make([{"params": vectors, "lr": 3e-3}, {"params": matrices, "weight_decay": 0.1}])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.net = self.model if service else DistributedDataParallel(self.model)
        self.draw = torch.Generator().manual_seed(rank)
        if service:
            service.attach(self.model, self.optimizer)

    def train(self, steps: int) -> None:
        """Some steps of two parts."""
        source: Any = self.service or self.net
        for step in range(steps):
            for part in range(2):
                with source.no_sync() if part == 0 else contextlib.nullcontext():
                    loss = self.net(torch.randn(8, 64, generator=self.draw)).square().mean()
                    # The third step has no finite gradients on one rank.
                    factor = float("inf") if self.clips and step == 2 and rank == 0 else 1.0
                    self.scaler.scale(loss * factor).backward()
            # Optimizers that are fused unscale by themselves, but where gradients are clipped.
            if self.clips and not (step % 2 and self.optimizer.defaults.get("fused")):
                self.scaler.unscale_(self.optimizer)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
                self.norms.append(norm.item())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()


def state_is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two optimizers' state dicts have the same arrays."""
    one, other = one["state"], other["state"]
    arrays = [(of.get(name), value) for key, its in other.items() for name, value in its.items() for of in [one[key]]]
    return one.keys() == other.keys() and all(
        mine is value or (isinstance(mine, torch.Tensor) and torch.equal(mine, value)) for mine, value in arrays
    )


class Mixed(torch.nn.Module):
    """Layers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 300), torch.nn.Linear(64, 7)
        self.second = torch.nn.Linear(300, 64, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        x = torch.relu(self.second(torch.relu(self.first(x)).bfloat16()))
        return self.last(x.float())


def trained_mixed(service: ParameterService | None, in_ddp: bool) -> torch.nn.Module:
    """Mixed after some steps."""
    torch.manual_seed(0)
    model = Mixed()
    net = DistributedDataParallel(model, bucket_cap_mb=0.05) if in_ddp or service is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if service:
        service.attach(net, optimizer)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(6):
        net(torch.randn(16, 64, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Chain(torch.nn.Module):
    """Layers of lengths that no number of workers divides, one behind the other."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(31, 31) for _ in range(4))
        self.spare, self.last = torch.nn.Linear(31, 31), torch.nn.Linear(31, 7)
        self.uses, self.uses_spare = uses, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each layer as often as it is said."""
        for layer in self.layers:
            for _ in range(self.uses):
                x = torch.relu(layer(x))
        return self.last(self.spare(x) if self.uses_spare else x)


class Scaled(torch.nn.Module):
    """A weight whose gradient is what the model is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4096, dtype=dtype))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


def trained_sharded(
    service: ParameterService | None, before_step: Callable[[int], None] = lambda _: None, uses: int = 1, **policy: Any
) -> torch.nn.Module:
    """Chain under FSDP2 after steps of two parts."""
    torch.manual_seed(0)
    model = Chain(uses)
    mesh, mixed = init_device_mesh("cpu", (size,)), MixedPrecisionPolicy(**policy)
    for module in (*model.layers, model.spare, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if service:
        service.attach(model, optimizer)
    draw = torch.Generator().manual_seed(rank)
    for step in range(7):
        before_step(step)
        if step == 5 and kind == "sharded-unused":
            model.uses_spare = False
        for part in range(2):
            if service:
                with service.no_sync() if part == 0 else contextlib.nullcontext():
                    model(torch.randn(16, 31, generator=draw)).float().square().mean().backward()
            else:
                model.set_requires_gradient_sync(part == 1)
                model(torch.randn(16, 31, generator=draw)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def is_sharded_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs: Any = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine.to_local(), theirs.to_local()) for mine, theirs in pairs)


def pooled() -> int:
    """Bytes in the pool of all parts of the service."""
    (attachment,) = attachments.values()
    return sum(entry.nbytes for entry in attachment.pool.list("/sync/") if entry.name.rsplit("/", 2)[1].isdigit())


def kill_all(service: ParameterService) -> None:
    """Kills the proxies and waits for their ends: nobody misses one without shards, and it would stay a proxy."""
    proxies = [os.pidfd_open(count.pid) for count in service.proxies()]
    assert proxies
    for proxy in proxies:
        signal.pidfd_send_signal(proxy, signal.SIGKILL)
    for proxy in proxies:
        select.select([proxy], [], [])
        os.close(proxy)


def own_pids() -> set[int]:
    """The process ids of all workers."""
    pids = torch.zeros(size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    return set(pids.tolist())


if kind == "equal":
    with ParameterService(profile_steps=2, split=0.5) as service:
        ours = trained(service, 8)
        plan, counts = service.plan, service.proxies()
        assert plan is not None
        # By the pids and counts of the proxies: the sums of all steps after the profile, in other processes than these.
        assert len({count.pid for count in counts}) == 2
        assert not {count.pid for count in counts} & own_pids()
        assert sum(count.nbytes for count in counts) == 6 * plan.proxied_bytes > 0
        assert sum(count.shards for count in counts) == 6 * len(plan.shards)
        assert service.blocked_s > 0
    print("equal" if is_equal(ours, trained(None, 8)) else "different")
elif kind == "ddp":
    for flags, split, parts in (
        ({"find_unused_parameters": True}, 0.5, 2),
        ({"static_graph": True, "gradient_as_bucket_view": True}, 1.0, 1),
        ({"static_graph": True}, 1.0, 1),
        ({"checkpoints": True}, 0.5, 2),
    ):
        with ParameterService(profile_steps=3, split=split) as service:
            ours = trained_as_people_do(service, 9, parts, **flags)
            plan, counts = service.plan, service.proxies()
            assert plan is not None
            assert not {count.pid for count in counts} & own_pids()
            assert 0.3 * split < plan.proxied_bytes / plan.total_bytes <= 1.5 * split
            assert sum(count.nbytes for count in counts) == 6 * plan.proxied_bytes
        assert is_equal(ours, trained_as_people_do(None, 9, parts, **flags)), flags
    print("equal")
elif kind == "four":
    flags = {"find_unused_parameters": True}
    models = []
    for _ in range(2):
        with ParameterService(1, profile_steps=2, split=1.0) as service:
            models.append(trained_as_people_do(service, 6, momentum=True, **flags))
    theirs = trained_as_people_do(None, 6, momentum=True, **flags)
    assert is_equal(*models), "the order of sums is fixed"
    for one, other in zip(models[0].parameters(), theirs.parameters(), strict=True):
        # Four numbers in another order: 3 roundings of 2^-24 each, a step; some are amplified by the loss.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.detach().abs().max()))
    print("equal")
elif kind == "overlap":
    seen: list[int] = []
    with ParameterService(profile_steps=2, split=1.0) as service:

        def sums_run_now(_: torch.Tensor) -> None:
            """Called in the backward pass, when the last gradient comes."""
            if service.plan is None:
                return
            until = time.monotonic() + 30
            before = seen[-1] if seen else 0
            # The gradients of the last layers are summed, while this pass and that of the other worker go on.
            while (nbytes := sum(count.nbytes for count in service.proxies())) <= before:
                assert time.monotonic() < until, "no proxy sums"
            seen.append(nbytes)

        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        net = DistributedDataParallel(model, bucket_cap_mb=0.01)
        service.attach(net, torch.optim.SGD(model.parameters(), lr=0.1))
        hook = model[0].weight.register_hook(sums_run_now)
        for _ in range(5):
            net(torch.randn(4, 64)).square().mean().backward()
            if service.plan is not None and seen:
                # What was seen in the pass is a part of what the pass had summed.
                nbytes = sum(count.nbytes for count in service.proxies())
                assert seen[-1] < nbytes == len(seen) * service.plan.proxied_bytes
                seen[-1] = nbytes
        assert len(seen) == 3
        assert not {count.pid for count in service.proxies()} & own_pids()
    hook.remove()
    # DDP keeps its hook: without the service, the workers average by themselves.
    net(torch.randn(4, 64)).square().mean().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    most = gradient.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(most, gradient)
    print("overlapped")
elif kind == "proxy-death":
    theirs = trained(None, 10)
    # The small shards wait for each other in their windows.
    for shard_bytes in (None, 1024):
        with ParameterService(profile_steps=2, split=1.0, shard_bytes=shard_bytes) as service:

            def kill(step: int, service: ParameterService = service) -> None:
                """Two proxies die in turn. The second may have ended with the first, for which it waited."""
                if rank == 0 and step in (4, 7) and (alive := service.proxies()):
                    # One that was slow when the plan was made may have no shards, and nobody misses it.
                    os.kill(max(alive, key=lambda count: count.shards).pid, signal.SIGKILL)

            ours = trained(service, 10, kill)
            assert service.proxies() == []
            assert service.plan is not None
            assert service.plan.proxied_bytes == 0
        assert is_equal(ours, theirs), shard_bytes
    print("equal")
elif kind == "windows":
    theirs = trained(None, 8)
    for options in ({"profile_steps": 2, "split": 1.0}, {"profile_steps": 2, "split": 1.0, "overlap": False}):
        with ParameterService(1, shard_bytes=1024, **options) as service:
            ours = trained(service, 8)
            plan = service.plan
            assert plan is not None
            largest = max(nbytes for _, _, nbytes, _ in plan.shards)
            # Of each worker and of the proxy: a window, and queues.
            most = (size + 1) * (8 * largest + 8 * len(plan.shards) + 1024)
            assert pooled() <= most < (size + 1) * plan.total_bytes / 2, (pooled(), most, plan.total_bytes)
        assert is_equal(ours, theirs), options
    make = RULES["AdamW"]
    theirs = Training(make, None)
    theirs.train(4)
    with ParameterService(1, optimizer="proxy", shard_bytes=1024) as service:
        ours = Training(make, service)
        ours.train(4)
        plan = service.plan
        assert plan is not None
        largest = max(nbytes for _, _, nbytes, _ in plan.shards)
        # Parameters and two moments lie in the pool, once for all workers. Each array of a shard begins a line.
        state = 3 * plan.total_bytes
        # Gradients pass through a window of each worker, and moments through a log for the largest shard.
        passing = size * 8 * largest + 2 * largest
        words = (size + 1) * (8 * len(plan.shards) + 1024) + 64 + 8 * len(plan.shards)
        assert state < pooled() <= state + 3 * 64 * len(plan.shards) + passing + words, (pooled(), state, passing)
        assert pooled() - state < 0.6 * plan.total_bytes, (pooled(), state)
        assert is_equal(ours.model, theirs.model)
    print("equal")
elif kind == "mixed":
    theirs = trained_mixed(None, True)
    for in_ddp in (False, True):
        for split in (0.5, 1.0):
            with ParameterService(profile_steps=2, split=split, shard_bytes=8192) as service:
                ours = trained_mixed(service, in_ddp)
                assert service.plan is not None
                assert sum(count.nbytes for count in service.proxies()) == 4 * service.plan.proxied_bytes > 0
            assert is_equal(ours, theirs), (in_ddp, split)
    print("equal")
elif kind == "large":
    # Gradients whose sum is too large for their type. Those of a service are infinite or DDP's.
    for dtype, value in ((torch.float16, 60_000 / (rank + 1)), (torch.bfloat16, 3e38 / (rank + 1))):
        gradient = torch.full((), value).to(dtype)
        ddp = DistributedDataParallel(plain := Scaled(dtype))
        ddp(gradient).backward()
        assert plain.weight.grad is not None
        expected = plain.weight.grad[0].item()
        assert 0.7 * value * (rank + 1) < expected < math.inf
        for split, dies in ((None, False), (0.0, False), (1.0, False), (1.0, True)):
            model = Scaled(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with ParameterService(profile_steps=2, split=split, shard_bytes=1024) as service:
                service.attach(model, optimizer)
                for step in range(5):
                    if dies and step == 3 and rank == 0:
                        kill_all(service)
                    optimizer.zero_grad()
                    model(gradient).backward()
                    assert model.weight.grad is not None
                    assert model.weight.grad.eq(expected).all(), (dtype, split, dies, step, model.weight.grad)
                    optimizer.step()
                assert not dies or service.proxies() == []
    for dies in (False, True):
        model = Scaled(torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with ParameterService(shard_bytes=1024) as service:
            service.attach(model, optimizer)
            for step in range(4):
                if dies and step == 2 and rank == 0:
                    kill_all(service)
                optimizer.zero_grad()
                model(gradient).backward()
                found: Any = model.weight.grad
                assert found.to_local().eq(expected).all(), (dies, step, found)
                optimizer.step()
    print("equal")
elif kind == "sharded":
    for policy in ({}, {"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float32}):
        with ParameterService(shard_bytes=1024) as service:
            ours = trained_sharded(service, **policy)
            plan, counts = service.plan, service.proxies()
            assert plan is not None
            assert not {count.pid for count in counts} & own_pids()
            assert sum(count.nbytes for count in counts) == 6 * plan.total_bytes == 6 * plan.proxied_bytes
            assert service.blocked_s > 0
        assert is_sharded_equal(ours, trained_sharded(None, **policy)), policy
    print("equal")
elif kind == "sharded-death":
    with ParameterService(shard_bytes=1024) as service:

        def kill_one(step: int) -> None:
            """Two proxies die, one after the other."""
            dist.barrier()
            if rank == 0 and step in (3, 5) and (alive := service.proxies()):
                os.kill(max(alive, key=lambda count: count.shards).pid, signal.SIGKILL)

        ours = trained_sharded(service, kill_one)
        assert service.proxies() == []
        assert service.plan is not None
        assert service.plan.proxied_bytes == 0
    print("equal" if is_sharded_equal(ours, trained_sharded(None)) else "different")
elif kind in ("sharded-twice", "sharded-unused"):
    try:
        with ParameterService() as service:
            trained_sharded(service, uses=2 if kind == "sharded-twice" else 1)
        raise AssertionError("what cannot be carried is not refused")
    except polder.errors.ArgumentError as error:
        print(error)
elif kind == "replan":
    # So slow that a step takes longer than a process waits for a core on a busy machine.
    rate = 1e6
    links = EmulatedLinks([(0, rate)] * 2, rate)
    with ParameterService(profile_steps=2, replan_steps=4, shard_bytes=16384, emulated=links) as service:
        plans = []

        def change(step: int) -> None:
            """The links of the proxies become slow."""
            plans.append(service.plan)
            if step == 3:
                service.emulated = EmulatedLinks([(0, rate / 5)] * 2, rate)

        ours = trained(service, 10, change)
        first, last = plans[3], service.plan
        assert first is not None
        assert last is not None
        assert last.step > first.step
        # What is predicted for the number of tensors that was chosen is the least.
        assert {first.proxied_bytes, last.proxied_bytes} <= {
            nbytes for plan in (first, last) for nbytes, s in plan.predicted if s == min(s for _, s in plan.predicted)
        }
        assert last.split_bytes < first.split_bytes
        assert last.proxied_bytes < first.proxied_bytes
    print("equal" if is_equal(ours, trained(None, 10)) else "different")
elif kind == "central":
    with ParameterService.central(profile_steps=2) as service:
        ours = trained(service, 6)
        (count,) = service.proxies()
        assert service.plan is not None
        assert count.shards == 4 * 8
        assert service.plan.proxied_bytes == service.plan.total_bytes
    print("equal" if is_equal(ours, trained(None, 6)) else "different")
elif kind == "held":
    for name, make in RULES.items():
        theirs = Training(make, None)
        theirs.train(4)
        with ParameterService(optimizer="proxy", shard_bytes=16384) as service:
            ours = Training(make, service)
            ours.train(4)
            assert is_equal(ours.model, theirs.model), name
            # The worker has no gradients and no state.
            assert all(parameter.grad is None for parameter in ours.model.parameters())
            assert not any(ours.optimizer.state.values())
            assert service.plan is not None
            assert len(service.plan.shards) > len(list(ours.model.parameters())), "tensors are cut"
            assert not {count.pid for count in service.proxies()} & own_pids()
            said = copy.deepcopy(ours.optimizer.state_dict())
            assert state_is_equal(said, theirs.optimizer.state_dict()), name
            weights = copy.deepcopy(ours.model.state_dict())
            ours.train(2)
        # The state came back: the worker goes on without the service.
        theirs.train(2)
        assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict()), name
        # What was kept goes to other proxies.
        with ParameterService(1, optimizer="proxy") as service:
            again = Training(make, service)
            again.train(1)
            again.model.load_state_dict(weights)
            again.optimizer.load_state_dict(said)
            again.draw.set_state(torch.Generator().manual_seed(rank).get_state())
            # As after four steps of two parts; the learning rates came with the state.
            for _ in range(8):
                torch.randn(8, 64, generator=again.draw)
            again.train(2)
            assert is_equal(again.model, theirs.model), f"{name}, loaded"
    print("equal")
elif kind == "held-clipped":
    for name, make in RULES.items():
        theirs = Training(make, None, clips=True)
        theirs.train(7)
        with ParameterService(optimizer="proxy", clips=True, shard_bytes=16384) as service:
            ours = Training(make, service, clips=True)
            ours.train(7)
            assert str(ours.norms) == str(theirs.norms), (name, ours.norms, theirs.norms)
            assert max(norm for norm in ours.norms if norm < float("inf")) > 0.05, "all are clipped, or none"
            assert is_equal(ours.model, theirs.model), name
            assert all(parameter.grad is None for parameter in ours.model.parameters())
            assert not any(ours.optimizer.state.values())
            assert ours.scaler.get_scale() == theirs.scaler.get_scale() != 256
            assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict()), name
    with ParameterService(optimizer="proxy", clips=True) as service:
        linear = torch.nn.Linear(30, 3)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        service.attach(linear, optimizer)
        linear(torch.full((2, 30), float(rank + 1))).sum().backward()
        gradient: Any = linear.weight.grad
        assert gradient.shape == (3, 30) and torch.equal(gradient + 0, torch.full((3, 30), 3.0))
        assert torch.stack([gradient, 2 * gradient]).sum().item() == 3 * 270
        refusals: list[tuple[str, Callable[[], object]]] = [
            ("clamp_ got a gradient that the proxies keep", lambda: gradient.clamp_(-1, 1)),
            ("clip all parameters together", optimizer.step),
        ]
        gradient.mul_(0.5)
        for text, call in refusals:
            try:
                call()
            except polder.errors.ArgumentError as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)
        before = linear.weight.detach().clone()
        linear.bias.grad.mul_(0.5)  # pyright: ignore[reportOptionalMemberAccess]
        optimizer.step()
        torch.testing.assert_close(linear.weight.detach(), before - 0.1 * 1.5)
        linear(torch.ones(2, 30)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        linear(torch.ones(2, 30)).sum().backward()
        try:
            linear(torch.ones(2, 30)).sum().backward()
        except polder.errors.ArgumentError as error:
            assert "a backward pass before optimizer.step()" in str(error), error
        else:
            raise AssertionError("an average is lost")
        service.__exit__(None, SystemExit(), None)
    print("equal")
elif kind == "held-early":
    for name, make in RULES.items():
        clips = name == "AdamW"
        theirs = Training(make, None, clips=clips)
        theirs.train(5)
        theirs.train(1)
        with ParameterService(optimizer="proxy", early=True, clips=clips, shard_bytes=16384) as service:
            ours = Training(make, service, clips=clips)
            ours.train(5)
            assert service._is_pulling, "the step has returned before the parameters have come"
            ours.train(1)
            said = copy.deepcopy(ours.model.state_dict())
            assert not service._is_pulling
            assert all(torch.equal(said[key], it) for key, it in theirs.model.state_dict().items()), name
            assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict()), name
            ours.train(1)
        theirs.train(1)
        # The end of the service waits, too.
        assert is_equal(ours.model, theirs.model), name
    print("equal")
elif kind == "gradients":
    # What the bytes of a gradient are, and are not.
    class Phase(torch.nn.Module):
        """A real parameter whose gradient is a negated view on one rank alone."""

        def __init__(self) -> None:
            super().__init__()
            self.phase = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Of a gradient of 2 on one rank, and of 3 on the other."""
            if rank == 0:
                return (torch.complex(x, self.phase).conj() * (1 + 2j)).real.sum()
            return 3 * self.phase.sum()

    def phase_of(service: ParameterService) -> float:
        model = Phase()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        service.attach(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(1))
            loss.backward()
            optimizer.step()
        return model.phase.item()

    model = Phase()
    model(torch.ones(1)).backward()
    assert model.phase.grad is not None
    assert model.phase.grad.is_neg() is (rank == 0)
    for options in ({"profile_steps": 2, "split": 1.0}, {"optimizer": "proxy"}):
        with ParameterService(**options) as service:
            assert abs(phase_of(service) + 4 * 0.1 * 2.5) < 1e-6, options
    for options in ({"profile_steps": 2, "split": 1.0}, {"optimizer": "proxy"}):
        linear = torch.nn.Linear(30, 3, bias=False)
        linear.weight.grad_dtype = torch.bfloat16
        with contextlib.suppress(polder.errors.PolderError), ParameterService(**options) as service:
            service.attach(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
            before = linear.weight.detach().clone()
            try:
                linear(torch.ones(2, 30)).sum().backward()
            except polder.errors.ArgumentError as error:
                assert "the gradient of parameter 0 is torch.bfloat16" in str(error), error
                assert "leave grad_dtype alone" in str(error), error
            else:
                raise AssertionError("a gradient of another type is taken")
            assert torch.equal(linear.weight, before)
            # The other worker raises as well, and neither waits for the other.
            raise polder.errors.PolderError
    with ParameterService(optimizer="proxy") as service:
        linear = torch.nn.Linear(30, 3)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        service.attach(linear, optimizer)
        linear(torch.ones(2, 30)).sum().backward()
        clips: list[Callable[[], object]] = [
            lambda: torch.nn.utils.clip_grad_norm_(linear.parameters(), 1.0),
            lambda: torch.nn.utils.clip_grad_value_(linear.parameters(), 1.0),
            lambda: linear.weight.grad is not None and linear.weight.grad.norm(),
        ]
        for clip in clips:
            try:
                clip()
            except polder.errors.ArgumentError as error:
                assert 'use ParameterService(optimizer="worker")' in str(error), error
            else:
                raise AssertionError("a gradient that is gone is clipped")
        optimizer.step()
        # Loops that set gradients to zero, to None, and not at all.
        before = linear.weight.detach().clone()
        for begin in (lambda: optimizer.zero_grad(set_to_none=False), optimizer.zero_grad, lambda: None):
            begin()
            linear(torch.ones(2, 30)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(linear.weight.detach(), before - 3 * 0.1 * 2)
        # A parameter of another type is no room for what the proxies have.
        linear.weight.data = linear.weight.data.to(torch.bfloat16)
        try:
            linear.load_state_dict(linear.state_dict())
        except polder.errors.ArgumentError as error:
            print(error)
    assert linear.weight.grad is None
elif kind == "held-misused":

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.full((2, 30), float(rank + 1))).sum().backward()
        optimizer.step()

    def by_hand(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step_of(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        step_of(model, optimizer)

    def of_a_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step_of(model, optimizer)
        part: Any = model.get_submodule("1")
        part.load_state_dict({key: value + 1 for key, value in part.state_dict().items()})
        step_of(model, optimizer)

    def other_data(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step_of(model, optimizer)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        step_of(model, optimizer)

    def settings_between(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 30)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()

    def in_a_closure(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            loss = model(torch.ones(2, 30)).sum()
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    def left_out(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 30)).sum().backward()
        optimizer.zero_grad()
        step_of(model, optimizer)

    def another_group(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        step_of(model, optimizer)

    def momentum_later(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0].update(momentum=0, dampening=0.5)
        step_of(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.9
        step_of(model, optimizer)

    def an_end_of_its_own(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        hook = model.get_submodule("0").weight.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(torch.ones(2, 30)).sum().backward()
        hook.remove()
        step_of(model, optimizer)

    def another_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step_of(model, optimizer)
        state, parameter = optimizer.state, optimizer.param_groups[0]["params"][0]
        for use in (state.clear, lambda: state[parameter], lambda: state.update({}), lambda: state.pop(parameter)):
            with pytest.raises(polder.errors.ArgumentError, match="the proxies keep the optimizer's state: read it by"):
                use()
        optimizer.state = collections.defaultdict(dict)
        step_of(model, optimizer)

    def fewer_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"].pop()
        step_of(model, optimizer)

    def assigned(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict({name: it.clone() for name, it in model.state_dict().items()}, assign=True)

    def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    changed = "was changed by something else than the optimizer"
    cases: list[tuple[str, Callable[..., None], list[dict[str, Any]]]] = [
        (changed, by_hand, [{}, {"clips": True}]),
        ("was changed before its value of the last step had come", by_hand, [{"early": True}]),
        (changed, of_a_part, [{}]),
        (changed, other_data, [{}]),
        ("settings of the optimizer were changed", settings_between, [{}, {"early": True}]),
        ("step() got a closure", in_a_closure, [{}, {"clips": True}]),
        ("a second backward pass without optimizer.step()", left_out, [{}, {"early": True}]),
        ("the optimizer has 2 groups, and had 1", another_group, [{}]),
        ("the groups of the optimizer have other parameters", fewer_parameters, [{}]),
        ("optimizer.state was set, and the proxies keep", another_state, [{}]),
        ("load_state_dict(assign=True) has put other parameters", assigned, [{}]),
        ("group 0 of the optimizer has got momentum after 1 steps without", momentum_later, [{}, {"clips": True}]),
        ("as when a backward pass ended early", an_end_of_its_own, [{}, {"early": True}]),
    ]
    for text, misuse, ways in cases:
        for options in ways:
            model, optimizer = small()
            try:
                with ParameterService(1, optimizer="proxy", shard_bytes=4096, **options) as service:
                    service.attach(model, optimizer)
                    misuse(model, optimizer)
            except polder.errors.ArgumentError as error:
                assert text in str(error), error
            else:
                raise AssertionError((text, options))
            if misuse is by_hand and not options:
                # A failed service gives no state back, and this step would begin with moments of zeros.
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                with pytest.raises(polder.errors.ArgumentError, match="after a failure of the service load that of a"):
                    optimizer.step()
                optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict())
                optimizer.step()
    # What is said to do about it, a change that is taken back on one worker, and copies of the model.
    for options in ({}, {"early": True}, {"clips": True}):
        models: list[torch.nn.Module] = []
        for has_service in (False, True):
            model, optimizer = small()
            with contextlib.ExitStack() as stack:
                net: torch.nn.Module = model
                if has_service:
                    service = stack.enter_context(ParameterService(1, optimizer="proxy", shard_bytes=4096, **options))
                    service.attach(model, optimizer)
                else:
                    net = DistributedDataParallel(model)
                for step in range(4):
                    step_of(net, optimizer)
                    optimizer.zero_grad()
                    if has_service:
                        service.wait()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            if step == 1:
                                parameter.clamp_(-0.1, 0.1)
                            elif step == 2 and rank == 1:
                                kept = parameter.clone()
                                parameter.zero_()
                                parameter.copy_(kept)
                    if step == 1:
                        model.load_state_dict(model.state_dict())
                    if step == 2:
                        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
                    if step == 0:
                        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                            other(torch.ones(1, 30)).sum().backward()
                            other.load_state_dict(other.state_dict())
            models.append(model)
        assert is_equal(*models), options
    print("equal")
elif kind == "misused":
    # What would leave gradients of one worker alone in a step, without a word.
    Ways = dict[str, Any]

    def layers(count: int = 3) -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(count)))

    def backward(net: torch.nn.Module) -> None:
        net(torch.full((2, 30), float(rank + 1))).square().mean().backward()

    def train_on(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()

    def ends_early(net: torch.nn.Module, then: Callable[[], object]) -> None:
        hook = net.get_submodule("1").weight.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            backward(net)
        hook.remove()
        then()

    def steps_then(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        ends_early(net, optimizer.step)

    def goes_on_then(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        loss = net(torch.ones(2, 30)).square().mean()
        ends_early(net, loss.backward)

    def thaws(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        net.get_submodule("0").requires_grad_(True)
        train_on(net, optimizer)

    def grows(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        net.add_module("late", torch.nn.Linear(30, 30))
        optimizer.add_param_group({"params": net.get_submodule("late").parameters()})
        train_on(net, optimizer)

    def writes_late(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def clip(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-1, 1)

        net.get_submodule("1").weight.register_post_accumulate_grad_hook(clip)
        train_on(net, optimizer)

    def replaces_late(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net.get_submodule("1").weight.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", 2 * it.grad))
        train_on(net, optimizer)

    def leaves_out(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        net.get_submodule("1").requires_grad_(False)
        train_on(net, optimizer)

    def leaves_out_of_ddp(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)
        inner: Any = net.get_submodule("module")
        inner.forward = lambda x: inner[2](inner[1](x))
        train_on(net, optimizer, 1)

    def accumulates(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with service.no_sync():
            train_on(net, optimizer, 1)

    def checkpoints_inside(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inputs = torch.ones(2, 30, requires_grad=True)
        checkpoint(net, inputs, use_reentrant=True).sum().backward()
        inner = checkpoint(net.get_submodule("0"), inputs, use_reentrant=True)
        checkpoint(net.get_submodule("1"), inner, use_reentrant=True).sum().backward()

    def ranks_differ(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train_on(net, optimizer)

    def comes_twice(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        service.close()
        service.attach(net, optimizer)

    own: Ways = {"profile_steps": 2, "split": 1.0}
    misuses: list[tuple[str, Callable[..., None], Ways]] = [
        ("step() after a backward pass that has not come to its end", steps_then, own),
        ("a backward pass before this one has not come to its end", goes_on_then, own),
        ("the parameter 0.weight was frozen or not there when the model was attached", thaws, own),
        ("the parameter late.weight was frozen or not there when the model was attached", grows, own),
        ("the gradient of 1.weight was changed in the backward pass after the service had taken it", writes_late, own),
        ("the gradient of 1.weight was changed in the backward pass", replaces_late, {**own, "overlap": False}),
        ("2 of 6 parameters got no gradient in this step, 1.weight the first", leaves_out, own),
        ("checkpoint with use_reentrant=False", checkpoints_inside, own),
        ("(find_unused_parameters=True): the gradients are no averages", leaves_out_of_ddp, own),
        ("step() with a gradient of 0.weight that the proxies do not have", accumulates, {"optimizer": "proxy"}),
        ("parameter 0 is '1.weight, (30, 30) of torch.float32' on worker 0 and '0.weight", ranks_differ, own),
        ("the service is closed; make another one", comes_twice, own),
    ]
    for text, misuse, options in misuses:
        torch.manual_seed(0)
        model = layers()
        if misuse is thaws:
            model[0].requires_grad_(False)
        if misuse is ranks_differ:
            model[rank].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        net = DistributedDataParallel(model, bucket_cap_mb=0.002) if misuse is leaves_out_of_ddp else model
        try:
            with ParameterService(1, **options) as service:
                if misuse is not comes_twice:
                    service.attach(net, optimizer)
                misuse(net, optimizer)
        except polder.errors.ArgumentError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
        # Both have left.
        dist.barrier()
    # Options that differ are named on both, before anything is begun.
    given: list[tuple[str, Ways]] = [
        ("proxies is 1 on worker 0 and 2 on worker 1", {"proxies": 1 + rank}),
        ("profile_steps is 2 on worker 0 and 3 on worker 1", {"profile_steps": 2 + rank}),
        ("split is 0.0 on worker 0 and 1.0 on worker 1", {"split": float(rank)}),
        ("optimizer is 'worker' on worker 0 and 'proxy' on worker 1", {"optimizer": ("worker", "proxy")[rank]}),
    ]
    for text, options in given:
        try:
            ParameterService(**options)
        except polder.errors.ArgumentError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    with ParameterService(profile_steps=2) as service:
        static = DistributedDataParallel(layers(), static_graph=True)
        try:
            service.attach(static, torch.optim.SGD(static.parameters(), lr=0.1))
        except polder.errors.ArgumentError as error:
            assert "profile_steps is 2; DDP with static_graph" in str(error), error
        else:
            raise AssertionError("a plan of buckets that go")
    print("equal")
elif kind == "held-death":
    draw = random.Random(1)
    ways: tuple[dict[str, Any], ...] = ({"shard_bytes": 1024}, {"shard_bytes": 16384, "early": True})
    for (name, make), options in zip(RULES.items(), itertools.cycle(ways)):
        theirs = Training(make, None)
        theirs.train(6)
        said = copy.deepcopy(theirs.optimizer.state_dict())
        theirs.train(1)
        with ParameterService(optimizer="proxy", **options) as service:
            ours = Training(make, service)
            seen: set[int] = set()
            for step in range(6):
                counts, plan = service.proxies(), service.plan
                seen |= {count.pid for count in counts}
                assert plan is not None
                # One that keeps something.
                pid = counts[plan.shards[draw.randrange(len(plan.shards))][3]].pid
                number, backward = draw.randrange(len(list(ours.model.parameters()))), [0]

                def kill(_: torch.Tensor, pid: int = pid, backward: list[int] = backward) -> None:
                    """In the last part of a step, before this gradient is pushed."""
                    backward[0] += 1
                    if backward[0] == 2:
                        os.kill(pid, signal.SIGKILL)

                # An early one may notice in the next step.
                is_killed = step in (0, 2, 4)
                if is_killed and rank == 0:
                    hook = list(ours.model.parameters())[number].register_hook(kill)
                ours.train(1)
                if is_killed and rank == 0:
                    hook.remove()
            service.wait()
            # Another dies beside a step.
            dist.barrier()
            assert service.plan is not None
            if rank == 0:
                os.kill(service.proxies()[service.plan.shards[0][3]].pid, signal.SIGKILL)
            assert state_is_equal(ours.optimizer.state_dict(), said), (name, options)
            ours.train(1)
            service.wait()
            assert is_equal(ours.model, theirs.model), (name, options)
            assert len({count.pid for count in service.proxies()} - seen) == 2, "others have taken over"
            ours.train(1)
            dist.barrier()
            # One dies before the state is brought back; if the service is early, while parameters are awaited too.
            if rank == 0:
                os.kill(service.proxies()[service.plan.shards[0][3]].pid, signal.SIGKILL)
        theirs.train(1)
        assert is_equal(ours.model, theirs.model), (name, options)
        assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict()), (name, options)
    print("equal")
elif kind == "held-snapshot":
    with ParameterService(optimizer="proxy") as service:
        ours = Training(RULES["AdamW"], service)
        ours.train(3)
        polder.torch.snapshot("held", ours.model, ours.optimizer, step=3)
        ours.train(2)
        polder.torch.restore("held", ours.model, ours.optimizer)
        state = ours.optimizer.state_dict()["state"]
        assert {float(of["step"]) for of in state.values()} == {3.0}
    theirs = Training(RULES["AdamW"], None)
    theirs.train(3)
    assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    print("equal" if is_equal(ours.model, theirs.model) else "different")
elif kind.startswith("held-proxies-"):
    with ParameterService(optimizer="proxy", proxies=int(kind.rpartition("-")[2])) as service:
        ours = Training(RULES["AdamW"], service)
        extra = {"scheduler": ours.scheduler, "draw": ours.draw}
        step = 0
        with contextlib.suppress(polder.NotFoundError):
            step = polder.torch.restore("held", ours.model, ours.optimizer, extra=extra).step
        ours.train(2)
        assert len(service.proxies()) == int(kind.rpartition("-")[2])
        polder.torch.snapshot("held", ours.model, ours.optimizer, step=step + 2, extra=extra).wait()
    theirs = Training(RULES["AdamW"], None)
    theirs.train(step + 2)
    assert state_is_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    print(step, "equal" if is_equal(ours.model, theirs.model) else "different")
elif kind in ("shrink", "shrink-held"):
    where = "proxy" if kind == "shrink-held" else "worker"
    options: dict[str, Any] = {"optimizer": where, "profile_steps": 2, "timeout": 30}
    with ParameterService(on_death="shrink", snapshots="shrink", **options) as service:
        ours = Training(RULES["AdamW"], service)
        ours.train(4)
        polder.torch.snapshot("shrink", ours.model, ours.optimizer, step=4).wait()
        ours.train(2)
        assert service.restored is None
        if kind == "shrink-held":
            # No worker is left in the step before when a proxy dies.
            dist.barrier()
            counts = service.proxies()
            before = {count.pid for count in counts}
            if rank == 0:
                # One that was slow when the plan was made may keep nothing, and nobody misses it.
                os.kill(max(counts, key=lambda count: count.shards).pid, signal.SIGKILL)
            ours.train(1)
            assert service.restored is not None
            assert service.restored.step == 4
            assert dist.get_process_group_ranks(service.group) == [0, 1, 2]
            assert before.isdisjoint(count.pid for count in service.proxies())
            service.restored = None
            ours.train(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ours.train(1)
        assert service.restored is not None
        assert service.restored.step == 4
        assert dist.get_process_group_ranks(service.group) == [0, 2]
        ours.draw = torch.Generator().manual_seed(rank)
        ours.train(5)
        assert len({count.pid for count in service.proxies()}) == 2
        # Another two workers begin with what the pool has.
        with ParameterService(group=service.group, **options) as other:
            theirs = Training(RULES["AdamW"], other)
            polder.torch.restore("shrink", theirs.model, theirs.optimizer, group=service.group)
            # There the scheduler stepped after the step that was lost, too.
            for settings in theirs.optimizer.param_groups:
                settings["lr"] *= 0.9
            theirs.draw = torch.Generator().manual_seed(rank)
            theirs.train(5)
            print("equal" if is_equal(ours.model, theirs.model) else "different")
elif kind == "shrink-refused":
    try:
        ParameterService(on_death="shrink", snapshots="shrink")
    except polder.errors.ArgumentError as error:
        print(error)
    # A proxy that dies takes no worker with it.
    ParameterService(on_death="shrink", snapshots="shrink", optimizer="proxy").close()
elif kind in ("shrink-two", "shrink-meanwhile"):
    # Ranks 1 and 3 die at the same time, or rank 3 when it forms a group without rank 1.
    if kind == "shrink-meanwhile" and rank == 3:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with ParameterService(1, on_death="shrink", snapshots="shrink", profile_steps=2, timeout=30) as service:
        ours = Training(RULES["SGD"], service)
        ours.train(3)
        polder.torch.snapshot("shrink", ours.model, ours.optimizer, step=3).wait()
        kept = torch.nn.utils.parameters_to_vector(ours.model.parameters()).clone()
        ours.train(1)
        if rank == 1 or (rank == 3 and kind == "shrink-two"):
            os.kill(os.getpid(), signal.SIGKILL)
        ours.train(1)
        assert service.restored is not None
        assert dist.get_process_group_ranks(service.group) == [0, 2]
        assert torch.equal(torch.nn.utils.parameters_to_vector(ours.model.parameters()), kept)
        ours.train(3)
        weights = torch.nn.utils.parameters_to_vector(ours.model.parameters()).detach()
        assert not torch.equal(weights, kept)
        both = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(both, weights, group=service.group)
        print("equal" if torch.equal(*both) else "different")
elif kind == "refused":
    # Of one worker: what cannot be carried is refused before anything is attached.
    with ParameterService(1) as service:

        def refused(model: torch.nn.Module, optimizer: Any = None) -> None:
            try:
                service.attach(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
            except polder.errors.ArgumentError as error:
                print(error)

        hooked = DistributedDataParallel(torch.nn.Linear(2, 2))
        hooked.register_comm_hook(None, default_hooks.allreduce_hook)
        refused(hooked)
        refused(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64)))
        refused(torch.nn.Embedding(2, 2, sparse=True))
        mesh = init_device_mesh("cpu", (1,))
        refused(fully_shard(torch.nn.Linear(2, 2), mesh=mesh))
        spread = torch.nn.Linear(2, 2, bias=False)
        spread.weight = torch.nn.Parameter(DTensor.from_local(spread.weight.detach(), mesh, [Replicate()]))
        refused(spread)
        ignoring = torch.nn.Linear(2, 2)
        refused(fully_shard(ignoring, mesh=mesh, ignored_params={ignoring.bias}))
        frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        other = torch.nn.Linear(2, 2)
        refused(frozen)
        refused(other, torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))
        refused(other, other)
        # One service a model, until it is closed.
        service.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))
        with ParameterService(1) as second:
            outer = torch.nn.Sequential(other, torch.nn.Linear(2, 2))
            optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
            for _ in range(2):
                try:
                    second.attach(outer, optimizer)
                    print("attached")
                except polder.errors.ArgumentError as error:
                    print(error)
                service.close()
    with ParameterService(1, optimizer="proxy") as service:
        plain = torch.nn.Linear(2, 2)

        def not_held(optimizer: torch.optim.Optimizer, model: torch.nn.Module = plain) -> None:
            try:
                service.attach(model, optimizer)
            except polder.errors.ArgumentError as error:
                print(error)

        not_held(torch.optim.RMSprop(plain.parameters()))
        not_held(torch.optim.AdamW(plain.parameters(), amsgrad=True))
        not_held(torch.optim.SGD([plain.weight], lr=0.1))
        not_held(torch.optim.SGD(plain.parameters(), lr=0.1), DistributedDataParallel(plain))
        sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        not_held(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)
        double = torch.nn.Linear(2, 2, dtype=torch.float64)
        not_held(torch.optim.SGD(double.parameters(), lr=0.1), double)
        links = EmulatedLinks([(0, 1e6)] * 2, 1e6)
        for name, value in (("split", 0.5), ("split", "a"), ("shard_bytes", 0), ("emulated", links)):
            try:
                setattr(service, name, value)
            except polder.errors.ArgumentError as error:
                print(error)
        assert (service.split, service.shard_bytes, service.emulated) == (None, None, None)
    for make in (torch.optim.AdamW, lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, dampening=0.1)):
        # A bias that was frozen has done no step.
        thawed = torch.nn.Linear(2, 2)
        optimizer = make(thawed.parameters())
        thawed.weight.grad = torch.ones(2, 2)
        optimizer.step()
        with ParameterService(1, optimizer="proxy") as service:
            not_held(optimizer, thawed)
    try:
        ParameterService(1, optimizer="proxy", split=0.5)
    except polder.errors.ArgumentError as error:
        print(error)
else:
    try:
        with ParameterService(profile_steps=2, timeout=30, split=0.7) as service:
            trained(service, 1_000_000 if kind == "endless" else 1)
    except polder.errors.PolderError as error:
        print(f"{type(error).__name__}|{getattr(error, 'pid', '')}|{error}")
if kind != "endless":
    dist.destroy_process_group()
