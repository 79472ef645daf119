"""torch.compile of a DDP model and of calls that compiled programs make, beside the same without it."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polder.torch  # noqa: F401

dist.init_process_group("polder")
rank, size = dist.get_rank(), dist.get_world_size()
wrong: list[str] = []


def weights(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> list[torch.Tensor]:
    """The weights of a model after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    trained = wrap(DistributedDataParallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        trained(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone() + rank
    dist.broadcast(tensor, 0)
    return tensor + 1


def barrier(tensor: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return tensor + 1


def pairs(tensor: torch.Tensor) -> torch.Tensor:
    if rank == 0:
        dist.send(tensor + 5, 1)
    else:
        tensor = tensor.clone()
        dist.recv(tensor, 0)
    return tensor + 1


def begun(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor + rank
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor + 1


def strided(tensor: torch.Tensor) -> torch.Tensor:
    tensor = (tensor + rank).view(2, 2).t()
    dist.all_reduce(tensor)
    return tensor + 1


def lists(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor + rank)
    return torch.cat(parts)


for one, other in zip(weights(lambda model: model), weights(torch.compile), strict=True):
    if not torch.allclose(one, other, atol=1e-6):
        wrong.append("the weights of a compiled model")
for call in (broadcast, barrier, pairs, begun, strided, lists):
    torch._dynamo.reset()
    expected = call(torch.ones(4))
    try:
        if not torch.equal(torch.compile(call)(torch.ones(4)), expected):
            wrong.append(call.__name__)
    except Exception as error:
        wrong.append(f"{call.__name__}: {type(error).__name__}: {error}")
        break
dist.destroy_process_group()
print("\n".join(wrong) or "equal")
sys.exit(bool(wrong))
