"""Callbacks of futures that call a collective and wait for it: one in another, and in DDP's PowerSGD."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_meet import meet

meet()
rank, size = dist.get_rank(), dist.get_world_size()


def nested(depth: int) -> torch.futures.Future[float]:
    """A sum in whose callback the next is called and waited for, `depth` times."""

    def after(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        own = future.value()[0].sum().item()
        return own + (nested(depth - 1).wait() if depth else 0.0)

    return dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(after)


assert nested(5).wait() == 6 * 1000 * size
# A synchronous call in a callback, and a wait for a work.
future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
done = future.then(lambda _: (dist.barrier(), dist.all_reduce(torch.ones(2), async_op=True).wait()))
done.wait()


def train(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)), process_group=group
    )
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


ours, theirs = train(None), train(dist.new_group(backend="gloo"))
assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))

# The operation that a callback waits for keeps its timeout: rank 0 does not call it.
dist.barrier()
short = dist.new_group(timeout=timedelta(seconds=1))
future = dist.all_reduce(torch.ones(2), group=short, async_op=True).get_future()
if rank == 0:
    future.wait()
else:
    waiting = future.then(lambda _: dist.all_reduce(torch.ones(3), group=short, async_op=True).wait())
    try:
        waiting.wait()
    except RuntimeError as error:
        assert "rank 0 (host 0, pid " in str(error) and "within 1000 ms" in str(error), error
    else:
        raise AssertionError("rank 0 called nothing")
dist.barrier()
dist.destroy_process_group()
print("equal")
