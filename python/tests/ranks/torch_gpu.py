"""Every call of c10d on tensors of a GPU, with a stand-in for CUDA where there is none: ``real`` asks for a GPU."""

import threading

import stand_in
import torch
import torch.distributed as dist
from stand_in import IS_REAL, given, holds, main, plain, registered, registrations
from torch_meet import meet

meet()
rank, size = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % size, (rank - 1) % size
if not IS_REAL:
    stand_in.install()


def mine(count: int = 1000, source: int = rank) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10_000 * source


def hollow(*shape: int) -> torch.Tensor:
    return given(torch.zeros(*shape))


def everyones(count: int = 1000) -> list[torch.Tensor]:
    return [mine(count, source) for source in range(size)]


total = torch.stack(everyones()).sum(0)

# Collectives that return when they are over.
dist.all_reduce(sums := given(mine()))
assert holds(sums, total)
dist.broadcast(told := given(mine()), 1)
assert holds(told, mine(source=1))
dist.reduce(sums := given(mine()), 1)
assert rank != 1 or holds(sums, total)
dist.all_gather(listed := [hollow(1000) for _ in range(size)], given(mine()))
assert all(map(holds, listed, everyones()))
dist.all_gather_into_tensor(whole := hollow(size * 1000), given(mine()))
assert holds(whole, torch.cat(everyones()))
dist.reduce_scatter(part := hollow(1000), [given(mine() + to) for to in range(size)])
assert holds(part, total + size * rank)
dist.reduce_scatter_tensor(part := hollow(500), given(mine()))
assert holds(part, total[500 * rank : 500 * (rank + 1)])
dist.gather(given(mine()), listed := [hollow(1000) for _ in range(size)] if rank == 1 else None, 1)
assert listed is None or all(map(holds, listed, everyones()))
dist.scatter(part := hollow(1000), [given(mine() + to) for to in range(size)] if rank == 1 else None, 1)
assert holds(part, mine(source=1) + rank)
dist.all_to_all_single(swapped := hollow(1000), given(mine()))
assert holds(swapped, torch.cat([each[500 * rank : 500 * (rank + 1)] for each in everyones()]))
dist.all_to_all_single(swapped := hollow(4 * (rank + 1)), given(mine(6)), [2 * (rank + 1)] * 2, [2, 4])
assert holds(swapped, torch.cat([each.split([2, 4])[rank] for each in everyones(6)]))
splits = [2 * (rank + 1)] * 2, [2, 4]
dist.all_to_all_single(swapped := hollow(4 * (rank + 1)), given(mine(6)), *splits, async_op=True).wait()
assert holds(swapped, torch.cat([each.split([2, 4])[rank] for each in everyones(6)]))
dist.all_to_all(listed := [hollow(3), hollow(3)], [given(mine(3) + to) for to in range(size)])
assert all(map(holds, listed, [each + rank for each in everyones(3)]))

# Strided and empty ones, other types, and what requires a gradient.
dist.all_reduce(strided := given(mine(12).view(3, 4).t()))
assert holds(strided, total[:12].view(3, 4).t())
dist.all_reduce(empty := hollow(0))
assert holds(empty, torch.zeros(0))
dist.all_reduce(flags := given(torch.tensor([[rank == 0, False]])), dist.ReduceOp.MAX)
assert holds(flags, torch.tensor([[True, False]]))
# Averages whose sums are too large for their type, short ones and those that go through the pool.
for large in (torch.full((1000,), 40_000, dtype=torch.float16), torch.full((1 << 20,), 3e38).bfloat16()):
    dist.all_reduce(mean := given(large), dist.ReduceOp.AVG)
    assert holds(mean, large)
    work = dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert holds(mean, large)
    part = given(torch.zeros(len(large) // 2, dtype=large.dtype))
    dist.reduce_scatter_tensor(part, given(large), dist.ReduceOp.AVG)
    assert holds(part, large[len(part) :])
dist.all_reduce(mean := given(torch.full((3, 2), 2**63 - 1).t()), dist.ReduceOp.AVG)
assert holds(mean, torch.full((2, 3), 2**63 - 1))
dist.broadcast(weight := given(mine()).requires_grad_(), 0)
assert holds(weight.detach(), mine(source=0))

# Those that go on behind: the result is there after the wait, and for a future's callback.
work = dist.all_reduce(sums := given(mine()), async_op=True)
assert work is not None and work.wait() and holds(sums, total) and work.result()[0] is sums
if not IS_REAL:
    # The call returns while the GPU has still to compute what is sent.
    computed, was_early = threading.Event(), []
    main.queue(lambda: was_early.append(not computed.wait(20)))
    work = dist.all_reduce(sums := given(mine()), async_op=True)
    computed.set()
    assert work.wait() and holds(sums, total) and was_early == [False]
future = dist.all_reduce(sums := given(mine()), async_op=True).get_future()
assert future.then(lambda done: done.value()[0] is sums and holds(sums, total)).wait()
with dist._coalescing_manager(async_ops=True) as several:
    dist.all_reduce(one := given(mine()))
    dist.all_reduce(other := given(mine() + 1))
several.wait()
assert holds(one, total) and holds(other, total + size)
# One that nobody waited for is over before the next on its tensor reads it.
works = [dist.all_reduce(chained := given(torch.ones(8)), async_op=True)]
works += [dist.all_reduce(place, async_op=True) for place in (chained[2:], chained.view(2, 4).t())]
for work in reversed(works):
    assert work is not None and work.wait()
assert holds(chained, torch.tensor([size**2] * 2 + [size**3] * 6))

# Messages. What a stream still reads of a tensor that receives is what was there before.
batch = [dist.P2POp(dist.isend, given(mine()), after), dist.P2POp(dist.irecv, came := hollow(1000), before)]
seen: list[torch.Tensor] = []
if not IS_REAL:
    main.queue(lambda: seen.append(plain(came).clone()))
for request in dist.batch_isend_irecv(batch):
    request.wait()
assert holds(came, mine(source=before)) and (IS_REAL or holds(seen[0], torch.zeros(1000)))
if rank == 0:
    dist.send(given(mine()), 1, tag=3)
elif rank == 1:
    came = hollow(1000)
    assert dist.recv(came, tag=3) == 0 and holds(came, mine(source=0))

# Registered memory is used again, and given back with the last group.
if not IS_REAL:
    before = len(registrations)
    for _ in range(5):
        dist.all_reduce(given(mine()))
    assert len(registrations) == before == len(registered)
dist.barrier()
dist.destroy_process_group()
assert not registered
print("equal")
