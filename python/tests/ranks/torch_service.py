"""A worker that trains with a parameter service: beside DDP, or until another process dies.

Arguments: the rank, a folder to meet in, and what to do.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
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

    def forward(self, words: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        """What comes after each word."""
        x = self.embedding(words)
        for layer in self.layers:
            x = torch.relu(layer(x))
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
    service: ParameterService | None, steps: int, parts: int = 2, momentum: bool = False, **flags: bool
) -> torch.nn.Module:
    """Words under DDP: accumulation, clipping of the global norm, groups of parameters, a scheduler, autocast."""
    torch.manual_seed(0)
    model = Words()
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
    with ParameterService(profile_steps=2, split=1.0) as service:

        def kill(step: int) -> None:
            """Two proxies die, one after the other. The second may have ended with the first, for which it waited."""
            if rank == 0 and step in (4, 7) and (alive := service.proxies()):
                os.kill(alive[-1].pid, signal.SIGKILL)

        ours = trained(service, 10, kill)
        assert service.proxies() == []
        assert service.plan is not None
        assert service.plan.proxied_bytes == 0
    print("equal" if is_equal(ours, trained(None, 10)) else "different")
elif kind == "replan":
    rate = 20e6
    with ParameterService(profile_steps=2, replan_steps=4, emulated=EmulatedLinks([(0, rate)] * 2, rate)) as service:
        plans = []

        def change(step: int) -> None:
            """The links of the proxies become slow."""
            plans.append(service.plan)
            if step == 3:
                service.emulated = EmulatedLinks([(0, rate / 20)] * 2, rate)

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
elif kind == "refused":
    # Of one worker: what cannot be carried is refused before anything is attached.
    with ParameterService(1) as service:

        def refused(model: torch.nn.Module) -> None:
            try:
                service.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            except polder.errors.ArgumentError as error:
                print(error)

        hooked = DistributedDataParallel(torch.nn.Linear(2, 2))
        hooked.register_comm_hook(None, default_hooks.allreduce_hook)
        refused(hooked)
        refused(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.float64)))
        refused(torch.nn.Embedding(2, 2, sparse=True))
        mesh = init_device_mesh("cpu", (1,))
        refused(fully_shard(torch.nn.Linear(2, 2), mesh=mesh))
        refused(torch.nn.Linear(2, 2).requires_grad_(False))
else:
    try:
        with ParameterService(profile_steps=2, timeout=30, split=0.7) as service:
            trained(service, 1_000_000 if kind == "endless" else 1)
    except polder.errors.PolderError as error:
        print(f"{type(error).__name__}|{getattr(error, 'pid', '')}|{error}")
if kind != "endless":
    dist.destroy_process_group()
