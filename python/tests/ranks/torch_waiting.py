"""Waits for a rank that does not come, and says how that ended: whose death it was told of, and in which operation."""

import signal
import sys

import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
waits = {
    "receive": lambda: dist.recv(torch.zeros(4), 1),
    "receive from any rank": lambda: dist.recv(torch.zeros(4)),
    "send": lambda: dist.send(torch.zeros(1 << 20), 1),
    "all-to-all": lambda: dist.all_to_all(list(torch.zeros(2, 4)), list(torch.zeros(2, 4))),
    "gather": lambda: dist.gather(torch.zeros(4), list(torch.zeros(2, 4))),
}
dist.barrier()
if dist.get_rank() == 1:
    signal.pause()
print("going", flush=True)
try:
    waits[sys.argv[3]]()
except polder.PeerDeadError as error:
    print(f"{error.rank} {error.host} {error.pid}|{error}")
