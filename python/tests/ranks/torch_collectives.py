"""Runs every collective on polder and on gloo and compares."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch_meet import meet

meet()
gloo = dist.new_group(backend="gloo")
rank, size = dist.get_rank(), dist.get_world_size()
OPS = dist.ReduceOp
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def tensor(count: int, dtype: torch.dtype, source: int = rank) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    draw = torch.Generator().manual_seed(1000 * count + source)
    return torch.randint(0, 4, (count,), generator=draw).to(dtype)


def same(what: str, ours: object, theirs: object) -> None:
    for one, other in zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]:
        assert torch.equal(one, other), f"{what}: {one} is not {other}"


for count, dtype in itertools.product([0, 17, 300_001], FLOATS + INTEGERS):
    for op in (OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX):
        results = [tensor(count, dtype) for _ in range(2)]
        for group, result in zip((None, gloo), results, strict=True):
            dist.all_reduce(result, op, group=group)
        same(f"all_reduce {op} {dtype} {count}", *results)
    gathered = [[torch.empty(count, dtype=dtype) for _ in range(size)] for _ in range(2)]
    for group, parts in zip((None, gloo), gathered, strict=True):
        dist.all_gather(parts, tensor(count, dtype), group=group)
    same(f"all_gather {dtype} {count}", *gathered)
    whole = torch.empty(size * count, dtype=dtype)
    dist.all_gather_into_tensor(whole, tensor(count, dtype))
    same("all_gather_into_tensor", whole, torch.cat(gathered[1]))
    part = torch.empty(count, dtype=dtype)
    everyone = torch.stack([tensor(size * count, dtype, source) for source in range(size)])
    expected = everyone.sum(0, dtype=dtype).view(size, count)[rank]
    dist.reduce_scatter_tensor(part, tensor(size * count, dtype))
    same(f"reduce_scatter_tensor {dtype} {count}", part, expected)
    dist.reduce_scatter(part, list(tensor(size * count, dtype).view(size, count)))
    same("reduce_scatter", part, expected)
    for root in range(size):
        sent = tensor(count, dtype)
        dist.broadcast(sent, root)
        same("broadcast", sent, tensor(count, dtype, root))

# Lists of several lengths: each rank has its own, and one has nothing.
for counts, is_async in itertools.product([list(range(size)), [3, 70_000, 1, 5][:size]], (False, True)):
    for dtype in (torch.float32, torch.int8, torch.bool):
        part = torch.empty(counts[rank], dtype=dtype)
        given = [tensor(count, dtype) for count in counts]
        expected = sum(tensor(counts[rank], dtype, source).to(torch.int64) for source in range(size)).to(dtype)
        work = dist.reduce_scatter(part, given, async_op=is_async)
        assert work is None or work.wait()
        same(f"reduce_scatter {counts} {dtype}", part, expected)
        same("what was given", given, [tensor(count, dtype) for count in counts])
        parts = [torch.empty(count, dtype=dtype) for count in counts]
        work = dist.all_gather(parts, given[rank], async_op=is_async)
        assert work is None or work.wait()
        same(f"all_gather {counts} {dtype}", parts, [tensor(count, dtype, at) for at, count in enumerate(counts)])
given = list(torch.arange(1.0, 1 + sum(range(1, size + 1))).split(list(range(1, size + 1))))
dist.reduce_scatter(given[rank], given)
assert given[rank].tolist() == [size * each for each in range(1 + rank * (rank + 1) // 2, 2 + rank * (rank + 3) // 2)]

# Outputs that share memory with inputs: at another place of the list, and shifted.
for count, shift in itertools.product((5, 70_000), (0, 1, 5)):
    sent = [torch.arange(count) + 1000 * rank + part for part in range(size)]
    got = sent[1:] + sent[:1]
    dist.all_to_all(got, sent)
    same("all_to_all, rotated", got, [torch.arange(count) + 1000 * source + rank for source in range(size)])
    lengths, mine = [count * (part + 1) for part in range(size)], count * (rank + 1)
    whole = torch.arange(max(sum(lengths), size * mine) + shift) + 1_000_000 * rank
    begin, got = sum(lengths[:rank]), whole[shift : shift + size * mine]
    dist.all_to_all_single(got, whole[: sum(lengths)], [mine] * size, lengths)
    parts = [torch.arange(begin, begin + mine) + 1_000_000 * source for source in range(size)]
    same("all_to_all_single, over its input", got, torch.cat(parts))

# Parts whose lengths only their two ranks know: none at all, one rank's own alone, and long ones beside nothing.
for of, is_async in itertools.product(
    (
        lambda source, to: 0,
        lambda source, to: 5 + 3 * (source == to == size - 1),
        lambda source, to: (source + 2 * to) % 3 * 50_000,
    ),
    (False, True),
):
    given = [tensor(of(rank, to), torch.float32, 10 * rank + to) for to in range(size)]
    parts = [torch.empty(of(source, rank)) for source in range(size)]
    work = dist.all_to_all(parts, given, async_op=is_async)
    assert work is None or work.wait()
    same("all_to_all", parts, [tensor(of(at, rank), torch.float32, 10 * at + rank) for at in range(size)])

# One list for both sides, whose tensors change places.
both = [torch.full((4,), 10.0 * rank + to) for to in range(size)]
dist.all_to_all(both, both)
assert [part[0].item() for part in both] == [10.0 * source + rank for source in range(size)]

# Bits, bools, averages.
bits = torch.tensor([1 << rank, 255], dtype=torch.int32)
dist.all_reduce(bits, OPS.BOR)
assert bits.tolist() == [(1 << size) - 1, 255]
for op, expected in ((OPS.BAND, 0), (OPS.BXOR, (1 << size) - 1)):
    bit = torch.tensor([1 << rank])
    dist.all_reduce(bit, op)
    assert bit.item() == expected
# What gloo does not take.
for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
    ones = torch.ones(3).to(dtype)
    dist.all_reduce(ones)
    assert ones.tolist() == [size] * 3 and ones.dtype == dtype
flags = torch.tensor([rank == 0, False])
dist.all_reduce(flags)
assert flags.tolist() == [True, False]
average = torch.tensor([float(rank)])
dist.all_reduce(average, OPS.AVG)
assert average.item() == (size - 1) / 2
average = torch.tensor([-rank])
dist.all_reduce(average, OPS.AVG)
assert average.item() == -((size - 1) // 2), "the quotient of a whole number is cut off"

# Averages whose sums are too large for their type, in every form: floats of 16 bits, and integers of 32 and 64.
for dtype, (low, high) in {
    torch.float16: (-57_344, 57_344),
    torch.bfloat16: (-(2**127), 2**127),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
    torch.uint32: (0, 2**32 - 1),
    torch.uint64: (0, 2**64 - 1),
}.items():
    step = 0 if dtype.is_floating_point else 1
    rows = [[high, low, (low, high)[at % 2], high - at * step, low + at * step, 8] for at in range(size)]
    # Python's own numbers are exact; a quotient is cut off towards zero.
    totals = [sum(row[at] for row in rows) for at in range(6)]
    means = [abs(total) // size * (1 if total > 0 else -1) for total in totals]
    expected = torch.tensor([float(it) if dtype.is_floating_point else it for it in means], dtype=dtype)
    own = torch.tensor([float(it) if dtype.is_floating_point else it for it in rows[rank]], dtype=dtype)
    dist.all_reduce(mean := own.clone(), OPS.AVG)
    same(f"average {dtype}", mean, expected)
    dist.all_reduce(strided := torch.stack([own, own], 1)[:, 0], OPS.AVG)
    same(f"average {dtype} of a column", strided, expected)
    mean = own.clone()
    works = [dist.all_reduce(mean, OPS.AVG, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    same(f"average {dtype} of averages", mean, expected)
    dist.reduce(mean := own.clone(), size - 1, OPS.AVG)
    same(f"average {dtype} at one rank", mean, expected if rank == size - 1 else own)
    part, inputs = torch.empty(6, dtype=dtype), own.repeat(size)
    dist.reduce_scatter_tensor(part, inputs, OPS.AVG)
    same(f"average {dtype}, scattered", part, expected)
    same("what was averaged", inputs, own.repeat(size))
    dist.reduce_scatter(part := torch.empty(6, 2, dtype=dtype)[:, 1], list(inputs.view(size, 6)), OPS.AVG)
    same(f"average {dtype}, scattered from a list", part, expected)
    dist.all_reduce(torch.empty(0, dtype=dtype), OPS.AVG)
with dist._coalescing_manager():
    many = [torch.full((3,), 60_000, dtype=torch.float16), torch.full((3,), 2**62 + 2**61)]
    for one in many:
        dist.all_reduce(one, OPS.AVG)
assert [one.tolist() for one in many] == [[60_000.0] * 3, [2**62 + 2**61] * 3]

# Tensors that are not contiguous come back in place; asynchronous work keeps its order.
strided = torch.zeros(6, 4).t()
strided += rank + 1
dist.all_reduce(strided)
assert strided.eq(size * (size + 1) / 2).all() and not strided.is_contiguous()
chain = torch.ones(50_000)
works = [dist.all_reduce(chain, async_op=True) for _ in range(5)]
dist.all_reduce(small := torch.ones(3))  # waits for its turn
assert small.tolist() == [size] * 3
for work in works:
    work.wait()
assert works[-1].is_completed() and chain.eq(size**5).all()
future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
assert future.wait()[0].tolist() == [size] * 2
# Whoever sees that it is over, by whatever way, sees the tensors whole: they are copied into place after the operation.
for _ in range(20):
    parts = [torch.zeros(1 << 19) for _ in range(size)]
    work = dist.all_gather(parts, torch.full((1 << 19,), rank + 1.0), async_op=True)
    future = work.get_future()
    work.wait()
    assert all(part[-1] == source + 1 for source, part in enumerate(parts))
parts = [torch.zeros(3) for _ in range(size)]
work = dist.all_gather(parts, torch.full((3,), rank + 1.0), async_op=True)
while not work.is_completed():
    pass
assert all(part[-1] == source + 1 for source, part in enumerate(parts))
with dist._coalescing_manager():
    many = [torch.full((3,), float(rank)), torch.ones(70_000)]
    for one in many:
        dist.all_reduce(one)
assert many[0][0] == sum(range(size)) and many[1].eq(size).all()

# Objects and groups of some of the ranks.
told: list[object] = [None] * size
dist.all_gather_object(told, {"rank": rank})
assert told == [{"rank": source} for source in range(size)]
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
pair = pairs[rank // 2]
partner = torch.tensor([rank])
dist.all_reduce(partner, group=pair)
assert partner.item() == 4 * (rank // 2) + 1
dist.barrier(group=pair)
dist.barrier()
work = dist.barrier(async_op=True)
work.wait()

# What is not carried says so, and the group goes on.
for dtype in (torch.int8, torch.uint8, torch.int16):
    with pytest.raises(ValueError, match=f"the average of {str(dtype).removeprefix('torch.')} is that of a sum, which"):
        dist.all_reduce(torch.full((3,), 100, dtype=dtype), OPS.AVG)
with pytest.raises(ValueError, match="premul_sum"):
    dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
with pytest.raises(ValueError, match="complex64"):
    dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], dist.AllreduceOptions())
dist.all_reduce(small)
dist.barrier()
dist.destroy_process_group()
print("equal")
