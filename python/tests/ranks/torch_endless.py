"""All-reduces until a rank dies, and says what it saw."""

import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
tensor = torch.zeros(500_000)
dist.all_reduce(tensor)
print("going", flush=True)
try:
    while True:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
except polder.PeerDeadError as error:
    print(type(error).__name__, error.pid)
