"""All-reduces until a rank dies, and says what it saw. `stand-in` as the next argument means long tensors of a GPU."""

import sys

import stand_in
import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
tensor = torch.zeros(500_000)
if sys.argv[3:] == ["stand-in"]:
    stand_in.install()
    # Two pieces, so that a rank also dies between them.
    tensor = stand_in.on_gpu(torch.zeros(3_000_000))
dist.all_reduce(tensor)
print("going", flush=True)
try:
    while True:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
except polder.PeerDeadError as error:
    print(error)
    print(type(error).__name__, error.pid)
