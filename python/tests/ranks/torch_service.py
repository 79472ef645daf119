"""A worker that trains with a parameter service: beside DDP, or until another process dies.

Arguments: the rank, a folder to meet in, and `equal`, `endless` or `missing`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch_meet import meet

import polder.torch

meet()
rank, kind = dist.get_rank(), sys.argv[3]


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


def trained(service: polder.torch.ParameterService | None, steps: int) -> torch.nn.Module:
    """The model after some steps; each rank begins with other weights where the service copies those of rank 0."""
    torch.manual_seed(rank if service else 0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if service:
        service.attach(model, optimizer)
    net = model if service else torch.nn.parallel.DistributedDataParallel(model)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        loss = net(torch.randn(16, 64, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and kind == "endless" and service:
            pids = " ".join(str(count.pid) for count in service.proxies())
            (Path(sys.argv[2]) / f"pids-{rank}").write_text(pids)
    return model


if kind == "equal":
    with polder.torch.ParameterService(profile_steps=2) as service:
        ours = trained(service, 8)
        plan, counts = service.plan, service.proxies()
        assert plan is not None
        # By the pids and counts of the proxies: the sums of all steps after the profile, in other processes than these.
        assert len({count.pid for count in counts}) == 2
        pids = torch.tensor([0] * dist.get_world_size())
        pids[rank] = torch.multiprocessing.current_process().pid or 0
        dist.all_reduce(pids)
        assert not {count.pid for count in counts} & set(pids.tolist())
        assert sum(count.nbytes for count in counts) == 6 * plan.proxied_bytes > 0
        assert sum(count.shards for count in counts) == 6 * len(plan.shards)
        assert service.blocked_s > 0
    theirs = trained(None, 8)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    print("equal" if all(torch.equal(*pair) for pair in pairs) else "different")
else:
    try:
        with polder.torch.ParameterService(profile_steps=2, timeout=30) as service:
            trained(service, 1_000_000 if kind == "endless" else 1)
    except polder.errors.PolderError as error:
        print(f"{type(error).__name__}|{getattr(error, 'pid', '')}|{error}")
if kind != "endless":
    dist.destroy_process_group()
