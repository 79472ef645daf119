"""Trains with DDP until rank 1 dies in the middle of a backward pass, and says what rank 0 saw."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_meet import meet

meet()
torch.manual_seed(0)
layers = [torch.nn.Linear(300, 300) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
batch = torch.randn(8, 300)
model(batch).square().mean().backward()
print("going", flush=True)
if dist.get_rank() == 1:
    # The gradients of the later layers are on their way by then.
    layers[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
try:
    model(batch).square().mean().backward()
except Exception as error:
    print(f"{type(error).__name__}: {error}".replace("\n", " "))
else:
    print("nothing")
