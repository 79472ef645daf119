"""Loses rank 1 in the first attempt, and ends well in the second."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import polder.torch  # noqa: F401

# torchrun ends who is left as soon as it sees that one is gone: what that one says comes first.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("polder")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
tensor = torch.ones(100_000)
for step in range(30):
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    if (step, attempt, dist.get_rank()) == (10, "0", 1):
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"attempt-{attempt}-rank-{dist.get_rank()}\n")
