"""Trains a model of FSDP2, snapshots it, or restores it on another number of ranks, and says what all of it sums to.

Arguments: rank, ranks, a folder with the pool, which start it is, the folder of snapshots or -, and save or load.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import polder
import polder.torch

rank, ranks, scratch, start, to = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]
store = dist.FileStore(str(scratch / f"store-{start}"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
pool = polder.Pool(os.environ.get("STATE_POOL", str(scratch / "pool")), size="32MiB", run=scratch)
with_folder: dict[str, Any] = {} if to == "-" else {"folder": to}
torch.manual_seed(3 if sys.argv[6] == "save" else 4)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


def train() -> None:
    model(torch.arange(10.0).reshape(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if sys.argv[6] == "save":
    train()
    pending = polder.torch.snapshot("job", model, optimizer, step=1, pool=pool, **with_folder)
    pending.wait()
    pending.wait_flushed()
else:
    assert polder.torch.restore("job", model, optimizer, pool=pool, **with_folder).step == 1
bits = hashlib.sha256()
of_states = [value for state in optimizer.state.values() for value in state.values()]
for tensor in [*model.parameters(), *of_states]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    bits.update(whole.detach().contiguous().numpy().tobytes())
train()
weights = [parameter.full_tensor().sum().item() for parameter in model.parameters() if isinstance(parameter, DTensor)]
dist.barrier()
print(bits.hexdigest(), [round(weight, 4) for weight in weights], flush=True)
os._exit(0)
