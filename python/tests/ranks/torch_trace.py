"""Calls under POLDER_TRACE; with `full`, the disk has no more room after some."""

import resource
import sys

import torch
import torch.distributed as dist
from torch_meet import meet

meet()
dist.all_reduce(total := torch.ones(3))
dist.barrier()
if sys.argv[3] == "full":
    # The pool has its size already.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
for _ in range(5):
    dist.all_reduce(total)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert total[0] == 2**6
dist.destroy_process_group()
print("equal")
