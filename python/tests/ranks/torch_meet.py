"""How the torch scripts meet: over a file, so that no port is needed."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import polder.torch  # noqa: F401

torch.set_num_threads(1)
folder = Path(sys.argv[2])


def meet(backend: str = "polder", seconds: float = 30) -> None:
    import os

    folder.mkdir(exist_ok=True)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=int(sys.argv[1]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=seconds),
    )
