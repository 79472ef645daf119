"""Long tensors of a GPU in the calls that go through the pool, as `torch_gpu.py`."""

import threading

import stand_in
import torch
import torch.distributed as dist
from stand_in import IS_REAL, given, holds, main, plain, registered
from torch_meet import meet

import polder
from polder.torch.gpu import HALF, SHORT

meet()
rank, size = dist.get_rank(), dist.get_world_size()
if not IS_REAL:
    stand_in.install()
# Three pieces of one message; of what is gathered more.
LONG = 2 * HALF // 4 + 1000


def drawn(source: int, count: int = LONG, part: int = 0) -> torch.Tensor:
    """What a rank has: numbers whose sum depends on the order."""
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * part + source))


mine, everyones = drawn(rank), [drawn(source) for source in range(size)]
# The same call on a CPU says what belongs there.
dist.all_reduce(total := mine.clone())

before = len(registered)
dist.all_reduce(sums := given(mine))
assert holds(sums, total)
assert IS_REAL or len(registered) == before + 1
dist.broadcast(told := given(mine), 1)
assert holds(told, everyones[1])
dist.all_gather(listed := [given(torch.zeros(LONG)) for _ in range(size)], given(mine))
assert all(map(holds, listed, everyones))
dist.all_gather_into_tensor(whole := given(torch.zeros(size * LONG)), given(mine))
assert holds(whole, torch.cat(everyones))
parts = [drawn(rank, part=to) for to in range(size)]
dist.reduce_scatter(expected := torch.zeros(LONG), parts)
dist.reduce_scatter(part := given(torch.zeros(LONG)), list(map(given, parts)))
assert holds(part, expected)
dist.reduce_scatter_tensor(part := given(torch.zeros(LONG)), given(torch.cat(parts)), dist.ReduceOp.SUM)
assert holds(part, expected)

# Of the shortest length, strided, of another type, and what requires a gradient.
dist.all_reduce(edge := given(torch.full((SHORT // 4,), rank + 0.5)))
assert holds(edge, torch.full((SHORT // 4,), size * size / 2))
dist.all_reduce(strided := given(mine[: LONG // 4 * 4].view(4, -1).t()))
assert holds(strided, total[: LONG // 4 * 4].view(4, -1).t())
flags = torch.zeros(HALF + 3, dtype=torch.bool)
flags[rank :: size + 1] = True
dist.all_reduce(anyones := given(flags), dist.ReduceOp.MAX)
assert anyones.dtype == torch.bool and int(plain(anyones).sum() if not IS_REAL else anyones.sum()) > int(flags.sum())
dist.broadcast(weight := given(mine).requires_grad_(), 0)
assert holds(weight, everyones[0])
if IS_REAL:
    # c10d makes of it a tensor that the stand-in does not know.
    dist.broadcast(turned := given(torch.view_as_complex(mine.view(-1, 2))), 1)
    assert holds(turned, torch.view_as_complex(everyones[1].view(-1, 2)))

# A call that fails leaves its tensor alone from then on.
failed = given(mine)
try:
    dist.all_reduce(failed, dist.ReduceOp.BAND)
except polder.PolderError as error:
    assert "floats have sum" in str(error)
if not IS_REAL:
    main.queue(lambda: plain(failed).fill_(5))
    main.synchronize()
    dist.all_reduce(sums := given(mine))
    assert holds(sums, total) and holds(failed, torch.full((LONG,), 5.0))

try:
    dist.all_gather([whole[:LONG] for _ in range(size)], given(mine))
except polder.ArgumentError as error:
    assert "share memory" in str(error)
else:
    raise AssertionError("outputs that share memory are refused")

# An output over an input, at its place and elsewhere; the same on a CPU says what belongs there.
for begin in (rank * LONG, (rank + 1) % size * LONG, LONG // 2):
    over, other = drawn(rank, size * LONG), given(drawn(rank, size * LONG))
    dist.all_gather_into_tensor(over, over[begin : begin + LONG].clone())
    dist.all_gather_into_tensor(other, other[begin : begin + LONG])
    assert holds(other, over)
    whole = torch.cat(parts)
    dist.reduce_scatter_tensor(expected := torch.zeros(LONG), whole)
    dist.reduce_scatter_tensor((other := given(whole))[begin : begin + LONG], other)
    assert holds(other[begin : begin + LONG], expected)

# In inference mode, where tensors of their own kind come from.
with torch.inference_mode():
    work = dist.all_reduce(inferred := given(mine), async_op=True)
    assert work.wait() and holds(inferred, total)
version = (tensor := given(mine))._version
dist.all_reduce(tensor)
assert holds(tensor, total) and (not IS_REAL or tensor._version > version)

# Several on their way, and between them others that are not long: each comes whole, in whatever order it is waited for.
works = []
for number in range(6):
    value = drawn(rank, LONG if number % 3 else 1000, number)
    dist.all_reduce(expected := value.clone())
    tensor = given(value)
    works.append((dist.all_reduce(tensor, async_op=True), tensor, expected))
for work, tensor, expected in (works[4], works[1], works[5], works[0], works[2], works[3]):
    assert work.wait() and holds(tensor, expected)
work = dist.all_reduce(tensor := given(mine), async_op=True)
dist.all_reduce(other := given(mine))
assert holds(other, total) and work.wait() and holds(tensor, total)
future = dist.all_reduce(tensor := given(mine), async_op=True).get_future()
assert future.then(lambda done: done.value()[0] is tensor and holds(tensor, total)).wait()
# Nobody waits for this one.
dist.all_reduce(given(mine), async_op=True)

# What a short call waits for on the GPU does not hold a long one up that was called before it.
if not IS_REAL:
    is_through, was_late = threading.Event(), []
    long = dist.all_reduce(tensor := given(mine), async_op=True)
    main.queue(lambda: was_late.append(not is_through.wait(20)))
    short = dist.all_reduce(other := given(mine[:100]), async_op=True)
    assert long.wait() and holds(tensor, total)
    is_through.set()
    assert short.wait() and holds(other, total[:100]) and was_late == [False]

# A group of its own has a place of its own.
group = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(pair := given(mine), group=group)
    assert holds(pair, everyones[0] + everyones[1])
    assert IS_REAL or len(registered) >= before + 2
late = dist.all_reduce(tensor := given(mine), async_op=True)
dist.barrier()
dist.destroy_process_group()
# Its result is there, and its memory is not held.
assert late.wait() and holds(tensor, total)
assert not registered
print("equal")
