"""Waits in groups of some ranks for one that dies or ends after that, and says which rank each error names."""

import signal

import torch
import torch.distributed as dist
from torch_meet import meet

import polder

meet()
part = dist.new_group([0, 2])
others = dist.new_group([0, 1])
split = part.split_group([0, 1]) if dist.get_rank() != 1 else None
dist.barrier()
if dist.get_rank() == 2:
    signal.pause()
if dist.get_rank() == 1:
    try:
        dist.all_reduce(torch.zeros(4), group=others)
    except polder.PeerError as error:
        print(f"{type(error).__name__} {error.rank} {error.pid}|{error}")
if dist.get_rank() == 0:
    print("going", flush=True)
    work = dist.all_reduce(torch.zeros(4), group=part, async_op=True)
    for wait in [
        work.wait,
        lambda: dist.all_reduce(torch.zeros(4), group=part),
        lambda: dist.recv(torch.zeros(4), 2, group=part),
        lambda: split.allreduce([torch.zeros(4)]).wait(),
    ]:
        try:
            wait()
        except polder.PeerError as error:
            print(f"{type(error).__name__} {error.rank}|{error}")
    error = work.exception()
    print(f"{type(error).__name__} {error.rank}|{error}")
