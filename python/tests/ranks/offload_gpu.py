"""Saved tensors of a GPU move to their tiers and back, with a stand-in for CUDA where there is none.

Arguments: the rank, a folder on a disk, ``real`` for a GPU or ``stand-in``.
"""

import gc
import itertools
import sys

import pytest
import stand_in
import torch
from stand_in import main, plain

IS_REAL = sys.argv[3] == "real"
if not IS_REAL:
    stand_in.install()

from polder import _core  # noqa: E402
from polder.offload.fsdp import _reduce  # noqa: E402
from polder.offload.gpu import Mover  # noqa: E402
from polder.offload.ranges import memory  # noqa: E402

PAGE = 4096
SHAPES = [(33, 700), (5, 64, 64), (100_000,), (1 << 20,), (70_000,)]
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


def given(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the GPU that has this value once the current stream has come so far."""
    if IS_REAL:
        torch.cuda._sleep(1_000_000)
        return value.pin_memory().to("cuda", non_blocking=True)
    tensor = stand_in.on_gpu(value.clone().fill_(1))
    main.queue(lambda: plain(tensor).copy_(value))
    return tensor


def holds(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether what the current stream sees is this."""
    if not IS_REAL:
        main.synchronize()
    return torch.equal(tensor.cpu() if IS_REAL else plain(tensor), value)


def values(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    kinds = zip(itertools.cycle(SHAPES), TYPES * 3, strict=False)
    return [torch.randint(0, 100, shape, generator=draw).to(dtype) for shape, dtype in kinds]


def mover(folder: str, near: list[float], far: float) -> Mover:
    ranges = [memory(64 << 20) for _ in near]
    files = [(far, 64 << 20, folder)] if far else []
    return Mover(_core.Saved(0.0, list(zip(near, ranges, strict=True)), files), ranges)


def check(folder: str, near: list[float], far: float) -> None:
    """What was saved comes back in the other order, in each step; on a GPU other tensors have taken its bytes."""
    store = mover(folder, near, far)
    for step in range(4):
        saved = values(step)
        packed = []
        for value in saved:
            tensor = given(value)
            packed.append(store.put(tensor))
            nbytes = tensor.nbytes
            del tensor
            if IS_REAL:
                torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(99)
        if step == 2:
            # A graph that is dropped before it is walked.
            packed = packed[:4]
        while packed:
            last = packed.pop()
            tensor = last.unpacked()
            # A graph that is walked twice.
            again = last.unpacked() if step == 3 else tensor
            del last
            assert holds(tensor, saved[len(packed)]) and holds(again, saved[len(packed)]), (step, len(packed))
        gc.collect()
    most = store.saved.most()
    assert (sum(most[1]) > 0) == bool(near) and (sum(most[2]) > 0) == bool(far), most
    store.settle()


folder = sys.argv[2]
for near, far in (([1.0], 0.0), ([0.3, 0.7], 0.0), ([0.5], 0.5), ([], 1.0)):
    check(folder, near, far)

# A tensor without room stays where it is, and takes nothing.
full = mover(folder, [1.0], 0.0)
first = full.put(given(torch.ones(15 << 20)))
assert first is not None and full.put(given(torch.ones(2 << 20))) is None
del first
assert full.put(given(torch.ones(2 << 20))) is not None

# One that is changed in place after it was saved is found, as torch does.
tensor = given(torch.ones(1 << 15))
kept = full.put(tensor)
assert kept is not None
tensor.detach().as_subclass(torch.Tensor).add_(1)
with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32 of shape \(32768,\)"):
    kept.unpacked()


# What FSDP2 would copy to memory of torch stays on the GPU, but for what is added to a gradient.
class Group:
    """What FSDP2 does with a gradient of two batches."""

    def post_backward(self, reduced: torch.Tensor, gradient: torch.Tensor) -> None:
        assert reduced.to(torch.device("cpu"), non_blocking=True) is reduced
        gradient += reduced
        # What a hook of the program may do here.
        assert reduced.to(torch.float64) is not reduced
        steps = torch.zeros(())
        steps += 1
        steps.add_(other=steps)
        assert steps == 2


gradient = torch.full((1000,), 2.0)
_reduce(Group(), given(torch.arange(1000.0)), gradient)
assert torch.equal(gradient, torch.arange(1000.0) + 2)
sys.stdout.write("equal\n")
