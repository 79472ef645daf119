"""Calls of compiled programs, beside the same that are not compiled. Nothing is generated: Dynamo alone is at work."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_meet import meet

meet()
rank, size = dist.get_rank(), dist.get_world_size()


def calls(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor + rank
    dist.broadcast(tensor, 0)
    dist.barrier()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    strided = (tensor + rank).view(2, 2).t()
    dist.all_reduce(strided)
    if rank == 0:
        dist.send(strided, 1)
    else:
        dist.recv(strided, 0)
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor + rank)
    return torch.cat([strided.reshape(-1), *parts])


model = DistributedDataParallel(torch.nn.Linear(4, 2))
expected = calls(torch.ones(4)), model(torch.ones(3, 4))
for compiled, given, plain in zip(
    (torch.compile(calls, backend="eager"), torch.compile(model, backend="eager")),
    (torch.ones(4), torch.ones(3, 4)),
    expected,
    strict=True,
):
    for _ in range(2):
        got = compiled(given)
        assert torch.equal(got, plain), (got, plain)
got.sum().backward()
gradients = [torch.empty(2, 4) for _ in range(size)]
dist.all_gather(gradients, model.module.weight.grad)
assert torch.equal(*gradients)
dist.destroy_process_group()
print("equal")
