"""Long tensors of a GPU, by a stand-in, where something is wrong.

The third argument is what: ``full`` has a pool without room, ``mixed`` a tensor of a CPU at rank 0, ``longer`` a tensor
of two pieces there and of one at rank 1, ``sparse`` a sparse tensor; in ``broken`` rank 1 fails between two pieces.
"""

import sys
import warnings

import stand_in
import torch
import torch.distributed as dist
from stand_in import main, plain
from torch_meet import meet

import polder
from polder.torch.gpu import HALF, PinnedPool

kind = sys.argv[3]
meet()
stand_in.install()
rank = dist.get_rank()
count = HALF // 4 * (2 if kind == "broken" or (kind == "longer" and rank == 0) else 1)
tensor = torch.ones(count)
if kind == "sparse":
    tensor = tensor.to_sparse()
elif kind != "mixed" or rank == 1:
    tensor = stand_in.on_gpu(tensor)
bring = PinnedPool.bring


def failing(self: PinnedPool, passage: object, number: int) -> None:
    if number == 1:
        raise ZeroDivisionError("by a bug")
    bring(self, passage, number)


if kind == "broken" and rank == 1:
    PinnedPool.bring = failing
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
        for _ in range(2):
            dist.broadcast(tensor, 0) if kind == "sparse" else dist.all_reduce(tensor)
        main.synchronize()
        print(f"{plain(tensor).unique().tolist()}|{[str(it.message) for it in warned]}")
    except (polder.PolderError, ZeroDivisionError) as error:
        print(f"{type(error).__name__}|{error}")
dist.destroy_process_group()
assert not stand_in.registered
