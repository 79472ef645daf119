"""A group that cannot be made, by one rank's fault: says what this rank was told, and what it still holds open."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import polder
import polder.torch

rank, folder, kind, port = int(sys.argv[1]), *sys.argv[2:]
core = polder._core


def fails(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


if kind == "settings" and rank == 0:
    os.environ["POLDER_TIMEOUT"] = "soon"
elif kind == "attach" and rank == 0:
    core.Pool = fails(polder.RegionError("the device is gone"))
elif kind == "odd" and rank == 1:
    core.Pool = fails(ZeroDivisionError("by a bug"))
elif kind == "join" and rank == 1:
    core.Group = fails(polder.PoolFullError("the pool is full"))
elif kind == "hosts":
    polder.torch.meeting._machine = lambda: [f"node{rank}", "boot"]
elif kind == "files":
    # A file of the same name on each machine.
    polder.torch.meeting._machine = lambda: [f"node{rank}", "boot"]
    uuid = core.Pool.uuid
    core.Pool = type("Pool", (core.Pool,), {"uuid": property(lambda self: f"{uuid.__get__(self)}-{rank}")})
elif kind == "ends" and rank == 0:
    core.settings = lambda: os._exit(3)
try:
    address = f"tcp://127.0.0.1:{port}"
    seconds = 4 if kind == "late" else 600
    dist.init_process_group("polder", address, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
except Exception as error:
    print(f"{type(error).__name__}|{isinstance(error, polder.PolderError)}|{error}|{polder.torch.meeting.attachments}")
