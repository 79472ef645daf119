"""Tensors whose bytes are not their values in order, and modes of the program: every way in and out of the backend."""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch_meet import meet

from polder import errors

meet()
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
Tensor = torch.Tensor


def value(source: int = rank, count: int = 4 * size) -> Tensor:
    """What a rank gives, with a sign of its own in each place."""
    whole = torch.arange(1.0, count + 1) * (-1) ** torch.arange(count) + 100 * source
    return torch.complex(whole, whole + 1000)


def negated(tensor: Tensor) -> Tensor:
    """This value, as the negative of what the bytes hold."""
    lazy = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous()
    return lazy


def imaginary(tensor: Tensor) -> Tensor:
    """This value, as the imaginary part of a conjugate: negative, and not contiguous."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg() and not lazy.is_contiguous()
    return lazy


def conjugate(tensor: Tensor) -> Tensor:
    """This value, as the conjugate of what the bytes hold."""
    lazy = tensor.conj().resolve_conj().conj()
    assert lazy.is_conj() and lazy.is_contiguous()
    return lazy


def turned(tensor: Tensor) -> Tensor:
    """This value, with the strides of a transpose."""
    lazy = tensor.view(-1, 2).t().contiguous().t()
    assert not lazy.is_contiguous()
    return lazy


Kind = Callable[[Tensor], Tensor]


def calls(of: Callable[[int], Tensor], lazy: Kind) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every call, from lazy tensors into lazy tensors: its name, what this rank has got, and what it should have."""
    own, everyone = of(rank), [of(source) for source in range(size)]
    part, whole, options = len(own) // size, len(own), dist.AllToAllOptions

    def empty(count: int) -> Tensor:
        return lazy(torch.full((count,), 7).to(own.dtype))

    def parts(tensor: Tensor) -> list[Tensor]:
        return list(tensor.split(part))

    for root in range(size):
        got = lazy(own.clone())
        world.broadcast([got], _rooted(dist.BroadcastOptions(), root)).wait()
        yield f"broadcast from {root}", got, everyone[root]
        got = [empty(whole) for _ in range(size)] if rank == root else []
        world.gather([got] if got else [], [lazy(own)], _rooted(dist.GatherOptions(), root)).wait()
        yield f"gather to {root}", _joined(got, own), torch.cat(everyone) if rank == root else own
        got, given = empty(part), [[lazy(piece) for piece in parts(own)]] if rank == root else []
        world.scatter([got], given, _rooted(dist.ScatterOptions(), root)).wait()
        yield f"scatter from {root}", got, parts(everyone[root])[rank]
    got = [empty(whole) for _ in range(size)]
    world.allgather([got], [lazy(own)]).wait()
    yield "all_gather", _joined(got, own), torch.cat(everyone)
    got = empty(size * whole)
    world.all_gather_single(got, lazy(own)).wait()
    yield "all_gather_into_tensor", got, torch.cat(everyone)
    got = empty(whole)
    world.all_to_all_single(got, lazy(own), [], [], options()).wait()
    exchanged = torch.cat([parts(each)[rank] for each in everyone])
    yield "all_to_all_single", got, exchanged
    if got.dim() == 1:
        got = empty(whole)
        world.all_to_all_single(got, lazy(own), [part] * size, [part] * size, options()).wait()
        yield "all_to_all_single with lengths", got, exchanged
    got = [empty(part) for _ in range(size)]
    world.alltoall(got, [lazy(piece) for piece in parts(own)], options()).wait()
    yield "all_to_all", _joined(got, own), exchanged
    got = empty(whole)
    works = [world.send([lazy(own)], (rank + 1) % size, 3), world.recv([got], (rank - 1) % size, 3)]
    for work in works:
        work.wait()
    yield "send and recv", got, everyone[(rank - 1) % size]
    if own.is_complex():
        return
    got = lazy(own.clone())
    world.allreduce([got]).wait()
    yield "all_reduce", got, sum(everyone)
    for root in range(size):
        got = lazy(own.clone())
        world.reduce([got], _rooted(dist.ReduceOptions(), root)).wait()
        yield f"reduce to {root}", got, sum(everyone) if rank == root else own
    reduced = parts(sum(everyone))[rank]
    got = empty(part)
    world.reduce_scatter([got], [[lazy(piece) for piece in parts(own)]]).wait()
    yield "reduce_scatter", got, reduced
    got = empty(part)
    world.reduce_scatter_single(got, lazy(own)).wait()
    yield "reduce_scatter_tensor", got, reduced


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def _joined(got: list[Tensor], otherwise: Tensor) -> Tensor:
    return torch.cat([it.reshape(-1) for it in got]) if got else otherwise


for lazy in (negated, imaginary, turned, conjugate):
    of = value if lazy is conjugate else lambda source: value(source).real.contiguous()
    for name, got, expected in calls(of, lazy):
        assert torch.equal(got.reshape(-1), expected), f"{name} of {lazy.__name__}: {got} is not {expected}"

with warnings.catch_warnings(action="ignore"):
    # torch is about to give them up.
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    # And this is a prototype.
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
short = torch.ones(4, 3)
cut = [short, short.t(), short[:, 2]]
short.untyped_storage().resize_(40)
# What has no bytes of its own, or bytes that say less than the tensor, is refused before other ranks are at work.
for refused, said in (
    (torch.ones(3).expand(2, 3), "share memory"),
    (quantized, "qint8"),
    (torch._efficientzerotensor(3), "has no memory"),
    *((view, f"of {view.numel()} elements that has no memory for them") for view in cut),
    (nested, r"nested tensor; give its values\(\)"),
    (torch.ones(3, device="meta"), "on meta"),
):
    with pytest.raises(errors.ArgumentError, match=said):
        world.recv([refused], (rank + 1) % size, 0)
    with pytest.raises(errors.ArgumentError, match=said):
        world.allreduce([refused])
with pytest.raises(errors.ArgumentError, match=r"torch\.float64 where 1 of torch\.float32"):
    world.alltoall([torch.ones(1, dtype=torch.float64)] * size, [torch.ones(1)] * size, dist.AllToAllOptions())
# Without splits each rank gets whole rows.
for rows, given, said in (
    (size + 1, [], "an input of .* rows"),
    (size, [-1, 3, *[1] * (size - 2)], "input_split_sizes"),
):
    with pytest.raises(errors.ArgumentError, match=f"all_to_all_single got {said}"):
        dist.all_to_all_single(torch.zeros(rows, size), torch.zeros(rows, size), given, given)
with pytest.raises(errors.ArgumentError, match=f"an output of {size + 1} rows for {size} ranks; give a whole number"):
    dist.all_to_all_single(torch.zeros(size + 1, size), torch.zeros((size + 1) * size))
one = torch.ones(3)
with pytest.raises(errors.ArgumentError, match="share memory"):
    world.alltoall([one] * size, [torch.ones(3)] * size, dist.AllToAllOptions())
# As views of one memory they are refused as well, if an element of one is an element of another.
columns = torch.zeros(4, 2 * size)
for outputs in (
    [columns[:3, 0], columns[1:, 0], *(columns[:3, at] for at in range(2, size))],
    [columns[:3, 0]] * size,
):
    with pytest.raises(errors.ArgumentError, match="all_gather got outputs 0 and 1 that share memory"):
        dist.all_gather(outputs, torch.ones(3))
    with pytest.raises(errors.ArgumentError, match="all_to_all got outputs 0 and 1 that share memory"):
        dist.all_to_all(outputs, [torch.ones(3)] * size)
with pytest.raises(errors.ArgumentError, match=r"strides \[1, 1\], whose elements share memory"):
    dist.all_gather_into_tensor(torch.zeros(size + 3).as_strided((size, 4), (1, 1)), torch.ones(4))
# Columns of one matrix, and steps that no order of dimensions explains, have elements of their own.
outputs = [columns[1:, at] for at in range(size)]
dist.all_gather(outputs, torch.full((3,), 1.0 + rank))
assert columns[:, :size].tolist() == [[0.0] * size, *([[1.0 + at for at in range(size)]] * 3)]
stepped = torch.ones(8).as_strided((3, 2), (2, 3))
dist.all_reduce(stepped)
assert stepped.eq(size).all()
# What a functional collective gives stands for a tensor, which is carried once it has come.
total = functional.all_reduce(torch.ones(3), "sum", world)
dist.all_reduce(total)
assert total.eq(size**2).all()
parts = [torch.zeros(3) for _ in range(size)]
dist.all_gather(parts, functional.all_reduce(torch.full((3,), 1.0 + rank), "max", world))
assert torch.stack(parts).eq(size).all()
total = functional.all_reduce(torch.full((3,), 1.0 + rank), "sum", world)
works = [world.send([total], (rank + 1) % size, 4), world.recv([parts[0]], (rank - 1) % size, 4)]
for work in works:
    work.wait()
assert parts[0].eq(size * (size + 1) / 2).all()
# What is only sent may have elements that are one.
sent = torch.full((1,), 5.0).expand(3) if rank == 0 else torch.zeros(3)
dist.broadcast(sent, 0)
assert sent.tolist() == [5.0] * 3

# Results come in whatever mode the program is, when the call is made and when it is waited for.
modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
shapes = (lambda tensor: tensor, lambda tensor: tensor.t())
for made, called, waited, shape in itertools.product(modes, modes, modes, shapes):
    with made():
        tensor = shape(torch.ones(4, 6))
    version = None if tensor.is_inference() else tensor._version
    with called():
        work = dist.all_reduce(tensor, async_op=True)
    with waited():
        work.wait()
    assert tensor.eq(size).all(), (made, called, waited)
    assert version is None or tensor._version > version, (made, called, waited)
for shape in shapes:
    parameter = torch.nn.Parameter(shape(torch.full((4, 6), float(rank))))
    dist.broadcast(parameter, 1)
    assert parameter.eq(1).all() and parameter.grad_fn is None and parameter._version == (rank != 1)
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    inner = shape(parameter * 2)
    dist.all_reduce(inner)
    inner.sum().backward()
    assert parameter.grad is not None and parameter.grad.eq(2).all(), "it is as before, of the function before"
    parameter = torch.nn.Parameter(shape(torch.ones(2, 3)))
    parts = [shape(torch.zeros(2, 3)) for _ in range(size)]
    dist.all_gather(parts, parameter)
    assert not any(part.requires_grad for part in parts)
# A work that is dropped is done when a later call of the group is, waited for by whatever way.
for later in (dist.barrier, lambda: dist.all_reduce(torch.ones(1), async_op=True).wait()):
    strided = torch.ones(6, 2)
    for column in (0, 1):
        dist.all_reduce(strided[:, column], async_op=True)
    later()
    assert strided.eq(size).all()
assert not world._unfinished
# Operations that nobody waits for between them work on what those before have made, by copies or in place.
places: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda it: it,
    "turned": torch.t,
    "column": lambda it: it[:, 1],
    "row": lambda it: it[1],
}
for order in itertools.product(places, repeat=3):
    for waits in itertools.product((False, True), repeat=3):
        whole, expected = torch.ones(4, 4), torch.ones(4, 4)
        works = []
        for place, is_waited in zip(order, waits, strict=True):
            works.append(dist.all_reduce(places[place](whole), async_op=not is_waited))
            places[place](expected).mul_(size)
        for work in works:
            if work is not None:
                work.wait()
        assert torch.equal(whole, expected), (order, waits, whole)
gathered = [torch.zeros(size, 2).t() for _ in range(size)]
dist.all_gather(gathered, torch.full((size, 2), 1.0 + rank).t(), async_op=True)
# Rank 0 gets the rows of all.
sent, received = [2] + [0] * (size - 1), [2 if rank == 0 else 0] * size
exchanged = torch.zeros(sum(received), size)
dist.all_to_all_single(exchanged, gathered[1], received, sent, async_op=True).wait()
assert exchanged.eq(2).all()
# What autograd has kept is seen to have changed.
parameter = torch.nn.Parameter(torch.ones(3))
kept = parameter * 1
loss = (kept * kept).sum()
dist.all_reduce(kept.detach())
with pytest.raises(RuntimeError, match="modified by an inplace operation"):
    loss.backward()
# The program's default device is where its tensors are made, not ours.
with torch.device("meta"):
    dist.barrier()
    dist.monitored_barrier()
    got = torch.zeros(size, device="cpu")
    dist.all_to_all_single(got, torch.full((size,), float(rank), device="cpu"), [1] * size, [1] * size)
assert got.tolist() == list(range(size))

# A sum of short integers may be too large already, so that its average is refused, as of dense tensors.
for dtype in (torch.int8, torch.uint8, torch.int16, torch.bool):
    with pytest.raises(errors.ArgumentError, match=r"avg of a sparse tensor of torch\.\w+; convert it to a float"):
        dist.all_reduce(torch.tensor([100, 100]).to(dtype).to_sparse(), op=dist.ReduceOp.AVG)

# Nor do the sums of what is longer leave their range.
for large in (
    torch.full((2,), 60_000, dtype=torch.float16),
    torch.full((2,), 2.0**127, dtype=torch.bfloat16),
    torch.full((2, 3), 2**30 + 7, dtype=torch.int32),
    torch.full((2, 3), -(2**62) - 7),
):
    dist.all_reduce(sparse := large.to_sparse(1), op=dist.ReduceOp.AVG)
    # Thirds of halves are rounded.
    rtol = 1e-2 if large.is_floating_point() else 0
    torch.testing.assert_close(sparse.to_dense(), large, rtol=rtol, atol=0)

# A sparse sum into a parameter's gradient, in any mode.
for mode in (*modes, nullcontext):
    sparse = torch.eye(3).to_sparse()
    with mode():
        dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), size * torch.eye(3)) and not sparse.values().is_inference()

dist.barrier()
dist.destroy_process_group()
print("equal")
sys.exit()
