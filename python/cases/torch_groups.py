"""200 groups of all ranks are alive at once in the job's own pool, and each sums up."""

import torch
import torch.distributed as dist

import polder.torch  # noqa: F401

dist.init_process_group("polder")
ranks = dist.get_world_size()
groups = [dist.new_group(list(range(ranks))) for _ in range(200)]
for number, group in enumerate(groups):
    values = torch.full((1000,), float(number + dist.get_rank()))
    dist.all_reduce(values, group=group)
    assert values.eq(ranks * number + ranks * (ranks - 1) // 2).all(), (number, values)
dist.destroy_process_group()
