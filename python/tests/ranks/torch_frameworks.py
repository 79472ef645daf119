"""What frameworks do with a process group, on polder and on gloo: the same bits, or why a part is skipped."""

import copy
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_meet import meet

from polder.torch import in_order

warnings.simplefilter("ignore")
meet(seconds=60)
rank, size = dist.get_rank(), dist.get_world_size()
gloo = dist.new_group(backend="gloo")
GROUPS = [dist.group.WORLD, gloo]


class Net(nn.Module):
    """Layers of several sizes, of which one is used on request only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.spare = nn.Linear(128, 128)
        self.last = nn.Linear(128, 8)

    def forward(self, inputs: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        return self.last(self.spare(hidden) if spare else hidden)


def same(what: str, outcomes: list[list[torch.Tensor]]) -> None:
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.equal(ours, theirs), f"{what}: {ours} is not {theirs}"


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def trained(step_of: Callable[[nn.Module], Callable[[torch.Tensor], None]], model: nn.Module) -> list[torch.Tensor]:
    step = step_of(model)
    for at in range(4):
        step(inputs(at))
    return [parameter.detach() for parameter in model.parameters()]


def ddp(
    group: dist.ProcessGroup,
    hook: Callable[[DistributedDataParallel], None],
    bucket: float = 0.02,
    **flags: bool,
) -> list[torch.Tensor]:
    def step_of(model: nn.Module) -> Callable[[torch.Tensor], None]:
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, **flags)
        hook(wrapped)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        turns = iter(range(100))

        def step(batch: torch.Tensor) -> None:
            spare = not flags.get("find_unused_parameters") or next(turns) % 2 == rank
            optimizer.zero_grad()
            wrapped(batch, spare).square().mean().backward()
            optimizer.step()

        return step

    return trained(step_of, net())


def power(
    group: dist.ProcessGroup, around: Callable[..., Callable[..., object]] = lambda hook: hook
) -> Callable[[DistributedDataParallel], None]:
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    return lambda wrapped: wrapped.register_comm_hook(state, around(powerSGD_hook.powerSGD_hook))


def hooked(hook: Callable[..., object]) -> Callable[[dist.ProcessGroup], Callable[[DistributedDataParallel], None]]:
    return lambda group: lambda wrapped: wrapped.register_comm_hook(group, hook)


NO_HOOK = lambda group: lambda wrapped: None  # noqa: E731
for flag in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"):
    same(flag, [ddp(group, NO_HOOK(group), **{flag: True}) for group in GROUPS])
for name, hook in {
    "allreduce_hook": hooked(default_hooks.allreduce_hook),
    "fp16_compress_hook": hooked(default_hooks.fp16_compress_hook),
    "bf16_compress_hook": hooked(default_hooks.bf16_compress_hook),
    "powerSGD_hook": power,
}.items():
    # PowerSGD's callbacks call collectives: with several buckets their order differs by rank, over gloo too.
    same(name, [ddp(group, hook(group), bucket=25 if hook is power else 0.02) for group in GROUPS])
same("powerSGD_hook of several buckets", [ddp(group, power(group, in_order)) for group in GROUPS])
print("ddp", flush=True)


def sharded_optimizer(group: dist.ProcessGroup) -> list[torch.Tensor]:
    def step_of(model: nn.Module) -> Callable[[torch.Tensor], None]:
        wrapped = DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()

        return step

    return trained(step_of, net())


same("ZeroRedundancyOptimizer", [sharded_optimizer(group) for group in GROUPS])

MESHES = [init_device_mesh("cpu", (size,)), DeviceMesh.from_group(gloo, "cpu")]


def fsdp(mesh: DeviceMesh) -> nn.Module:
    model = net()
    for layer in (model.first, model.spare, model.last, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for at in range(4):
        optimizer.zero_grad()
        model(inputs(at)).square().mean().backward()
        optimizer.step()
    return model


shards = [fsdp(mesh) for mesh in MESHES]
same("FSDP2", [[parameter.full_tensor() for parameter in model.parameters()] for model in shards])
print("fsdp", flush=True)

# DCP: what is saved comes back, over the backend's own collectives of objects.
folder = Path(sys.argv[2]) / "checkpoint"
saved = shards[0].state_dict()
dcp.save(saved, checkpoint_id=folder)
loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
dcp.load(loaded, checkpoint_id=folder)
same("DCP", [[each[name].full_tensor() for name in saved] for each in (saved, loaded)])


# DTensor moves between placements by each collective.
def placements(mesh: DeviceMesh) -> list[torch.Tensor]:
    torch.manual_seed(1)
    whole = torch.randn(size * 3 + 1, size * 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(torch.randn(size * 4, 5), mesh, [Shard(0)])
    partial = product.placements == (Partial(),)
    everywhere = rows.redistribute(mesh, [Replicate()])
    scattered = product.redistribute(mesh, [Shard(0)])
    return [
        columns.to_local(),
        everywhere.to_local(),
        scattered.to_local(),
        product.full_tensor(),
        torch.tensor(partial),
    ]


same("DTensor", [placements(mesh) for mesh in MESHES])


# Functional collectives, and a compiled step with some of them.
def functionals(group: dist.ProcessGroup | DeviceMesh) -> list[torch.Tensor]:
    own = torch.arange(6.0 * size) + rank
    uneven = [2 + to for to in range(size)]
    outcomes = [
        functional.all_reduce(own, "sum", group),
        functional.all_reduce(own, "avg", group),
        functional.all_gather_tensor(own, 0, group),
        functional.reduce_scatter_tensor(own, "sum", 0, group),
        functional.broadcast(own, size - 1, group),
        functional.all_to_all_single(own[: sum(uneven)], [2 + rank] * size, uneven, group),
        *functional.all_reduce_coalesced([own, own + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([own, own + 1], group),
        *functional.reduce_scatter_tensor_coalesced([own, own + 1], "sum", [0, 0], group),
    ]
    return [outcome.clone() for outcome in outcomes]


def differentiable(group: dist.ProcessGroup) -> list[torch.Tensor]:
    own = torch.arange(2.0 * size, requires_grad=True)
    everyone = functional.all_gather_tensor_autograd(own * (rank + 1), 0, group)
    swapped = functional.all_to_all_single_autograd(everyone.square()[: 2 * size], [2] * size, [2] * size, group)
    swapped.sum().backward()
    return [swapped.detach(), own.grad]


# gloo has no average: its part is the same with a sum.
skipped = []
ours = functionals(dist.group.WORLD)
assert torch.equal(ours[1], ours[0] / size)
ours[1] = ours[0]
original = functional.all_reduce
functional.all_reduce = lambda own, op, group: original(own, "sum", group)
theirs = functionals(gloo)
functional.all_reduce = original
same("functional collectives", [ours, theirs])
same("differentiable collectives", [differentiable(group) for group in GROUPS])


def step(batch: torch.Tensor) -> torch.Tensor:
    total = functional.all_reduce(batch * 2, "sum", dist.group.WORLD)
    return functional.all_gather_tensor(total.relu() + 1, 0, dist.group.WORLD)


if shutil.which(os.environ.get("CXX", "g++")):
    torch._inductor.config.compile_threads = 1
    batch = torch.randn(8, generator=torch.Generator().manual_seed(rank))
    same("torch.compile", [[torch.compile(step)(batch)], [step(copy.copy(batch))]])
else:
    skipped.append("skipped: torch.compile, there is no C++ compiler (g++)")
dist.barrier()
dist.destroy_process_group()
print(*skipped, "equal", sep="\n")
