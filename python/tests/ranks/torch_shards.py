"""A tensor in shards on CPUs, which one rank gathers."""

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch_meet import meet

meet()
rank, size = dist.get_rank(), dist.get_world_size()
where = ShardMetadata(shard_offsets=[2 * rank], shard_sizes=[2], placement=f"rank:{rank}/cpu")
sharded = ShardedTensor._init_from_local_shards([Shard(torch.arange(2.0) + 10 * rank, where)], [2 * size])
whole = torch.full((2 * size,), -1.0) if rank == 0 else None
sharded.gather(0, whole)
assert whole is None or whole.tolist() == [10.0 * source + place for source in range(size) for place in range(2)]
dist.destroy_process_group()
print("equal")
