"""A work and its future: whoever learns from the one that an operation is over finds the other set."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch_meet import meet

from polder import errors

meet()
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD


def begin(kind: str, tensor: torch.Tensor) -> dist.Work:
    if kind == "all-reduce":
        return dist.all_reduce(tensor, async_op=True)
    if kind == "two tickets":
        return world.alltoall([torch.empty(3)] + [torch.empty(3) for _ in range(size - 1)], [tensor] * size)
    return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)


for kind in ("all-reduce", "two tickets", "message"):
    for turn in range(300):
        work = begin(kind, torch.ones(3))
        future = work.get_future()
        if turn % 3 == 0:
            work.wait()
        elif turn % 3 == 1:
            while not work.is_completed():
                pass
        else:
            work.result()
        # Of a future that is not set, `value` is an error of torch itself.
        assert future.done() and future.value() is not None, (kind, turn)

# A callback that was there before may wait for the same work, and for others.
work = dist.all_reduce(torch.ones(3), async_op=True)
future = work.get_future().then(lambda _: (work.wait(), dist.all_reduce(torch.ones(2), async_op=True).wait()))
work.wait()
assert future.wait() == (True, True)

# A failure: rank 1 does not come in time.
dist.barrier()
short = dist.new_group(timeout=timedelta(seconds=1))
if rank == 0:
    work = dist.all_reduce(torch.ones(2), group=short, async_op=True)
    future = work.get_future()
    with pytest.raises(errors.PeerTimeoutError):
        work.wait()
    assert future.done() and work.is_completed() and work.exception() is not None
    with pytest.raises(RuntimeError, match="within 1000 ms"):
        future.value()
dist.barrier()

# A copy back that fails does so for all that ask, of the work and of the future.
strided = torch.ones(4, 3).t()
work = dist.all_reduce(strided, async_op=True)
work._finish = lambda: 1 / 0
future = work.get_future() if rank == 0 else None
for _ in range(2):
    with pytest.raises(ZeroDivisionError):
        work.wait()
with pytest.raises((RuntimeError, ZeroDivisionError)):
    (future or work.get_future()).wait()
dist.barrier()
dist.destroy_process_group()
print("equal")
