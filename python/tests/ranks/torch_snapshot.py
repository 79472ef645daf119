"""Trains with snapshots on two ranks. Rank 1 dies in the first attempt; both go on from the newest step that both have.

Arguments: a folder, and where the second attempt finds the snapshots: pool or disk.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import polder.torch

# torchrun ends who is left as soon as it sees that one is gone: what that one does comes first.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, where = Path(sys.argv[1]), sys.argv[2]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("polder")
rank = dist.get_rank()
pool = polder.Pool(folder / ("pool" if where == "pool" else f"pool-{attempt}"), size="32MiB", run=folder)
torch.manual_seed(7)
model = torch.nn.Linear(20, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
torch.manual_seed(rank)
step, came_from = 0, "nothing"
try:
    restored = polder.torch.restore("job", model, optimizer, pool=pool, folder=folder / "disk")
    step, came_from = restored.step, "disk" if restored.folder else "pool"
except polder.NotFoundError:
    pass
start = step
while step < 6:
    optimizer.zero_grad()
    model(torch.randn(4, 20)).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step += 1
    if (step, attempt, rank) == (4, "0", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    polder.torch.snapshot("job", model, optimizer, step=step, pool=pool, folder=folder / "disk").wait_flushed()
bits = hashlib.sha256(b"".join(it.detach().numpy().tobytes() for it in model.parameters())).hexdigest()
sys.stdout.write(f"rank-{rank}-from-{came_from}-{start}-{bits}\n")
