"""Three ranks of which two make their first group with another member: torch gives both groups one name."""

import torch.distributed as dist
from torch_meet import meet

import polder

meet()
rank = dist.get_rank()
try:
    if rank != 1:
        dist.new_group([0, 1] if rank == 0 else [0, 2])
        print("mixed")
except polder.errors.ArgumentError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
