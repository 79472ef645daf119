"""A job that names the backend and imports nothing of it."""

import os
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
meeting = f"file://{sys.argv[2]}/named"
dist.init_process_group("polder", init_method=meeting, rank=int(sys.argv[1]), world_size=int(os.environ["WORLD_SIZE"]))
total = torch.ones(1)
dist.all_reduce(total)
print(type(dist.group.WORLD).__name__, int(total))
dist.destroy_process_group()
