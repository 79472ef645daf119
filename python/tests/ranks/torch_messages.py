"""Every collective of c10d that is not in torch_collectives.py, and messages, on polder and on gloo."""

import itertools
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
gloo = dist.new_group(backend="gloo")
rank, size = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % size, (rank - 1) % size
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def tensor(count: int, dtype: torch.dtype, source: int = rank) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    draw = torch.Generator().manual_seed(1000 * count + source)
    return torch.randint(0, 4, (count,), generator=draw).to(dtype)


def parts(count: int, dtype: torch.dtype, source: int = rank) -> list[torch.Tensor]:
    return [tensor(count + to, dtype, 100 * source + to)[:count] for to in range(size)]


def same(what: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), f"{what}: {one} is not {other}"


# Messages: short ones, and long ones that wait for their receiver.
for count, dtype in itertools.product([0, 1, 1000, 300_001], TYPES):
    came = torch.zeros(count, dtype=dtype)
    receive = dist.irecv(came, before)
    send = dist.isend(tensor(count, dtype), after)
    send.wait()
    receive.wait()
    assert receive.is_completed() and torch.equal(came, tensor(count, dtype, before)), (count, dtype)
came = torch.zeros(5, dtype=torch.complex64)
work = dist.irecv(came, before)
dist.send(torch.arange(5) * (1 + 2j), after)
work.wait()
assert torch.equal(came, torch.arange(5) * (1 + 2j))

# Tags keep messages apart, and those of one tag keep their order; strided tensors come back in place.
kept = [torch.full((3,), float(tag)) for tag in (7, 8, 7)]
sends = [dist.isend(each, after, tag=tag) for each, tag in zip(kept, (7, 8, 7), strict=True)]
kept[2] += 0.5
strided = torch.zeros(3, 4).t()
dist.recv(eight := torch.zeros(3), before, tag=8)
first, second = torch.zeros(3), torch.zeros(3)
dist.recv(first, before, tag=7)
dist.recv(second, before, tag=7)
assert (eight == 8).all() and (first == 7).all() and second[0] in (7, 7.5)
works = [dist.isend(torch.arange(12.0).view(3, 4).t(), after), dist.irecv(strided, before)]
for work in [*works, *sends]:
    work.wait()
assert torch.equal(strided, torch.arange(12.0).view(3, 4).t()) and not strided.is_contiguous()

# No tag stands for another one.
for tag, call in itertools.product((-1, 1 << 31, (1 << 32) + 7), (dist.isend, dist.irecv)):
    with pytest.raises(polder.ArgumentError, match=f"got the tag {tag}; give one from 0 to 2147483647"):
        call(torch.zeros(1), after, tag=tag)

# From any rank, which the work names; with a future; and in a batch.
if rank == 0:
    sources = [dist.recv(came := torch.zeros(2), tag=5) for _ in range(1, size)]
    assert sorted(sources) == list(range(1, size)) and came.tolist() == [sources[-1]] * 2
else:
    dist.send(torch.full((2,), float(rank)), 0, tag=5)
came = torch.zeros(100_000)
work = dist.irecv(came, before)
future = work.get_future().then(lambda done: done.value()[0].sum().item())
dist.isend(torch.ones(100_000), after).wait()
assert future.wait() == 100_000
outs, ins = [torch.full((70_000,), float(rank)) for _ in range(2)], [torch.zeros(70_000) for _ in range(2)]
batch = [
    dist.P2POp(dist.isend, outs[0], after),
    dist.P2POp(dist.irecv, ins[0], before),
    dist.P2POp(dist.isend, outs[1], before),
    dist.P2POp(dist.irecv, ins[1], after),
]
for request in dist.batch_isend_irecv(batch):
    request.wait()
assert (ins[0] == before).all() and (ins[1] == after).all()

# The collectives, beside gloo's.
for count, dtype in itertools.product([0, 17, 100_001], TYPES):
    what = f"{count} {dtype}"
    for root in {0, size - 1}:
        results = []
        for group in (None, gloo):
            gathered = [torch.zeros(count, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(tensor(count, dtype), gathered, root, group=group)
            scattered = torch.zeros(count, dtype=dtype)
            dist.scatter(scattered, parts(count, dtype) if rank == root else None, root, group=group)
            reduced = tensor(count, dtype)
            if dtype is not torch.bool:
                dist.reduce(reduced, root, group=group)
            results.append([*(gathered or []), scattered, *([reduced] if rank == root else [])])
        same(f"gather, scatter, reduce {what}", *results)
    whole = torch.cat(parts(count, dtype))
    expected = torch.cat([parts(count, dtype, source)[rank] for source in range(size)])
    swapped = torch.zeros_like(whole)
    dist.all_to_all_single(swapped, whole)
    assert torch.equal(swapped, expected), what
    listed = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    dist.all_to_all(listed, list(whole.split(count)) if count else [whole] * size)
    assert torch.equal(torch.cat(listed), expected), what
    lengths = [count // 2 + 3 * to for to in range(size)]
    uneven = [tensor(length, dtype, 10 * rank + to) for to, length in enumerate(lengths)]
    mine = [tensor(lengths[rank], dtype, 10 * source + rank) for source in range(size)]
    swapped = torch.zeros(size * lengths[rank], dtype=dtype)
    dist.all_to_all_single(swapped, torch.cat(uneven), [lengths[rank]] * size, lengths)
    assert torch.equal(swapped, torch.cat(mine)), what
    listed = [torch.zeros(lengths[rank], dtype=dtype) for _ in range(size)]
    work = dist.all_to_all(listed, uneven, async_op=True)
    assert work.get_future().wait() is not None
    same(f"all_to_all {what}", listed, mine)

# Several at once, averages, and objects.
lists = [[torch.zeros(3), torch.zeros(5)] for _ in range(size)]
with pytest.warns(FutureWarning):
    dist.all_gather_coalesced(lists, [torch.full((3,), float(rank)), torch.full((5,), rank + 0.5)])
assert all((one == source).all() and (two == source + 0.5).all() for source, (one, two) in enumerate(lists))
wholes, chunks = [torch.zeros(2 * size), torch.zeros(3 * size)], [torch.zeros(2), torch.zeros(3)]
with dist._coalescing_manager():
    for whole in wholes:
        dist.all_gather_into_tensor(whole, torch.full((len(whole) // size,), float(rank)))
with dist._coalescing_manager(async_ops=True) as several:
    for whole, chunk in zip(wholes, chunks, strict=True):
        dist.reduce_scatter_tensor(chunk, whole, op=dist.ReduceOp.AVG)
several.wait()
assert all((chunk == rank).all() for chunk in chunks)
average = torch.tensor([float(rank)])
dist.reduce(average, 0, op=dist.ReduceOp.AVG)
assert rank or average.item() == (size - 1) / 2
told = [None] * size
dist.gather_object({"rank": rank}, told if rank == 0 else None)
assert rank or told == [{"rank": source} for source in range(size)]
dist.scatter_object_list(word := [None], [f"for {to}" for to in range(size)] if rank == 0 else None)
assert word == [f"for {rank}"]
dist.broadcast_object_list(word := [rank, "x" * rank])
assert word == [0, ""]
if rank == 1:
    dist.send_object_list(["a", {"b": 1}], 0)
elif rank == 0:
    dist.recv_object_list(word := [None, None], 1)
    assert word == ["a", {"b": 1}]
half = torch.full((2,), rank, dtype=torch.complex64)
dist.broadcast(half, size - 1)
assert half.tolist() == [size - 1] * 2

# c10d's own methods need no options.
world = dist.group.WORLD
world.allreduce([total := torch.ones(2)]).wait()
world.broadcast([total]).wait()
world.allgather([[torch.zeros(2) for _ in range(size)]], [total]).wait()
world.all_to_all_single(torch.zeros(size), torch.ones(size), [], []).wait()
assert total.tolist() == [size] * 2

# Sparse tensors, also where one rank has nothing, and with values that are vectors.
for entries, shape in [([[rank, 1, rank], [0, 2, 0]], [size, 3]), ([[0] * rank, [1] * rank], [size, 3, 2])]:
    values = torch.arange(1.0, len(entries[0]) * (2 if len(shape) > 2 else 1) + 1).view(-1, *shape[2:])
    sums = []
    for group in (None, gloo):
        total = torch.sparse_coo_tensor(torch.tensor(entries, dtype=torch.int64), values, shape, check_invariants=True)
        dist.all_reduce(total, group=group)
        sums.append(total.coalesce())
    same("sparse all_reduce", *([total.indices(), total.values()] for total in sums))
dist.all_reduce(mean := torch.sparse_coo_tensor([[0]], [float(rank)], [2], check_invariants=True), op=dist.ReduceOp.AVG)
assert mean.to_dense().tolist() == [(size - 1) / 2, 0]
with pytest.raises(polder.ArgumentError, match="max of a sparse tensor"):
    dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], [2], check_invariants=True), op=dist.ReduceOp.MAX)

# Groups of some ranks have messages of their own.
halves = [dist.new_group(list(range(part, size, 2))) for part in range(2)]
half = halves[rank % 2]
if dist.get_world_size(half) > 1:
    at, of = dist.get_rank(half), dist.get_world_size(half)
    swapped = torch.zeros(of)
    dist.all_to_all_single(swapped, torch.full((of,), float(rank)), [1] * of, [1] * of, group=half)
    assert swapped.tolist() == [float(rank % 2 + 2 * source) for source in range(of)]
    work = dist.irecv(came := torch.zeros(1), group_src=(at + 1) % of, group=half)
    dist.send(torch.full((1,), float(at)), group_dst=(at + 1) % of, group=half)
    work.wait()
    assert came.item() == (at + 1) % of if of == 2 else (at - 1) % of
split = dist.split_group(split_ranks=[[r for r in range(size) if r % 2 == part] for part in range(2)])
dist.all_reduce(count := torch.ones(1), group=split)
assert count.item() == len(range(rank % 2, size, 2)) and split.rank() == rank // 2
dist.destroy_process_group(split)

# A monitored barrier names the rank that is missing, on all of them, also on that rank; and the next one holds.
dist.monitored_barrier()
if rank == size - 1:
    dist.barrier(group=gloo)
with pytest.raises(RuntimeError, match=f"Rank {size - 1} failed to pass monitoredBarrier in 300 ms") as late:
    dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
assert isinstance(late.value, polder.PeerTimeoutError) and {
    0: "Rank 0 timed out in monitoredBarrier",
    size - 1: "Rank",
}.get(rank, f"Rank {rank} successfully reached monitoredBarrier, but received errors") in str(late.value)
if rank != size - 1:
    dist.barrier(group=gloo)
dist.monitored_barrier()

# A message that does not come ends by the timeout. One that does not fit is told where it is seen.
hasty = dist.new_group(timeout=timedelta(seconds=0.3))
with pytest.raises(polder.PeerTimeoutError, match=rf"no answer from rank {before} .* within 300 ms .* receive"):
    dist.recv(torch.zeros(1), before, group=hasty)
with pytest.raises(polder.PeerTimeoutError, match="receive from any rank"):
    dist.recv(torch.zeros(1), group=hasty)
dist.barrier(group=gloo)
dist.send(torch.ones(4), after)
with pytest.raises(
    polder.MismatchError, match=rf"rank {before} .* called send of 16 bytes \(float32\).* receive of 24"
):
    dist.recv(torch.ones(3, dtype=torch.float64), before)
pieces = [1 + (rank == 0 and to == 1) for to in range(size)]
with (
    pytest.raises(polder.MismatchError, match=r"send of 8 bytes .* receive of 4 bytes") if rank == 1 else nullcontext()
):
    dist.all_to_all_single(torch.zeros(size), torch.zeros(sum(pieces)), [1] * size, pieces)

# A message on one rank and a collective on the other end by the timeout, and name both.
mixed = dist.new_group([0, 1], timeout=timedelta(seconds=2))
dist.barrier(group=gloo)
if rank == 0:
    dist.send(torch.ones(3), 1, group=mixed)
    with pytest.raises(polder.PeerTimeoutError, match=r"receive.*rank 1 has called all-reduce of 16 bytes \(sum of"):
        dist.recv(torch.zeros(1), 1, group=mixed)
elif rank == 1:
    with pytest.raises(polder.PeerTimeoutError, match=r"all-reduce.*rank 0 has called send of 12 bytes \(float32\)"):
        dist.all_reduce(torch.zeros(4), group=mixed)
dist.barrier(group=gloo)

# So does a receive alone, which has put nothing into the pool.
expected = r"all-reduce.*rank 0 has called receive of 4 bytes \(float32\) from rank 1"
mixed = dist.new_group([0, 1], timeout=timedelta(seconds=2))
dist.barrier(group=gloo)
if rank == 0:
    with pytest.raises(polder.PeerTimeoutError, match=r"receive.*rank 1 has called all-reduce of 16 bytes \(sum of"):
        dist.recv(torch.zeros(1), 1, group=mixed)
elif rank == 1:
    with pytest.raises(polder.PeerTimeoutError, match=expected):
        dist.all_reduce(torch.zeros(4), group=mixed)
dist.barrier(group=gloo)

# And one that begins when the timeout of the other is nearly over.
mixed = dist.new_group([0, 1], timeout=timedelta(seconds=2))
dist.barrier(group=gloo)
if rank == 0:
    time.sleep(1.5)
    with pytest.raises(polder.PeerTimeoutError, match=r"receive.*rank 1 has called all-reduce of 16 bytes \(sum of"):
        dist.recv(torch.zeros(1), 1, group=mixed)
elif rank == 1:
    with pytest.raises(polder.PeerTimeoutError, match=expected):
        dist.all_reduce(torch.zeros(4), group=mixed)
dist.barrier(group=gloo)

# Ranks that call different collectives are told both.
different = dist.new_group()
calls = [
    lambda: dist.all_to_all(list(torch.zeros(size, 1)), list(torch.zeros(size, 1)), group=different),
    lambda: dist.reduce(torch.zeros(4), 1, group=different),
]
with pytest.raises(polder.PolderError, match=r"all-to-all of .*reduce of|reduce of .*all-to-all of|gave up"):
    calls[rank % 2]()
    dist.barrier(group=different)
# Lists of several lengths go as a call for each part, and an error has the name of the whole.
counts = [3 if rank == 1 and to == 1 else 2 for to in range(size)]
listed, own = [torch.zeros(count) for count in counts], torch.zeros(counts[rank])
for part, name in (("broadcast", "an all-gather"), ("reduce", "a reduce-scatter")):
    lists = dist.new_group()
    said = {
        0: f"called {part} of 8 .* which may be a part of {name} of several lengths, this process called",
        1: f"this process called {name} of several lengths, by {part} of 8 bytes",
    }
    with pytest.raises(polder.PolderError, match=f"{said.get(rank, name)}|gave up"):
        if part == "reduce":
            dist.reduce_scatter(own, listed, group=lists)
        else:
            dist.all_gather(listed, own, group=lists)
        dist.barrier(group=lists)
roots = dist.new_group()
with pytest.raises(polder.PolderError, match=r"with root 1.*with root 0|with root 0.*with root 1|gave up"):
    dist.gather(torch.zeros(4), list(torch.zeros(size, 4)) if rank == rank % 2 else None, rank % 2, group=roots)
    dist.barrier(group=roots)
dist.barrier()
dist.destroy_process_group()
print("equal")
