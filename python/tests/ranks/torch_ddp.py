"""Trains the same small model with DDP over polder and over gloo, and compares every weight."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_meet import meet

meet()
gloo = dist.new_group(backend="gloo")
rank = dist.get_rank()


def train(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # DDP makes the weights those of rank 0
    layers = [torch.nn.Linear(96, 96) for _ in range(6)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(96)), process_group=group, bucket_cap_mb=0.05
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        batch = torch.randn(16, 96, generator=torch.Generator().manual_seed(100 * step + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


ours, theirs = train(None), train(gloo)
if dist.get_world_size() == 2:
    # Two numbers have one sum, whichever comes first.
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))
for weight in ours:
    first = weight.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, weight), "ranks differ"
dist.barrier()
print("equal")
