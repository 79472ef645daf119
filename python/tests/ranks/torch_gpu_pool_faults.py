"""A long tensor of a GPU, by a stand-in: `full` has a pool without room, `mixed` a tensor of a CPU at rank 0."""

import sys

import stand_in
import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
stand_in.install()
tensor = torch.ones(1_000_000)
if sys.argv[3] == "full" or dist.get_rank() == 1:
    tensor = stand_in.on_gpu(tensor)
try:
    dist.all_reduce(tensor)
except polder.PolderError as error:
    print(f"{type(error).__name__}|{error}")
dist.destroy_process_group()
assert not stand_in.registered
