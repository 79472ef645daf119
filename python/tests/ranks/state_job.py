"""A rank of a job that does what it is told, and says which step and which weight it has.

Arguments: rank, ranks, a folder with the pool, which start it is, the folder of snapshots or -, and acts. ``restore``,
``fill=VALUE``, ``snap=STEP``, ``wait`` for the others, ``say`` what it has; ``0:`` before an act is for rank 0 alone.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import polder
import polder.torch

rank, ranks, scratch, start, to = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]
store = dist.FileStore(str(scratch / f"store-{start}"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
pool = polder.Pool(os.environ.get("STATE_POOL", str(scratch / "pool")), size="32MiB", run=scratch)
with_folder: dict[str, Any] = {} if to == "-" else {"folder": to}
model = torch.nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0
for act in sys.argv[6:]:
    whose, _, said = act.rpartition(":")
    verb, _, value = said.partition("=")
    if whose and int(whose) != rank:
        continue
    if verb == "fill":
        with torch.no_grad():
            model.weight.fill_(float(value))
    elif verb == "snap":
        step = int(value)
        pending = polder.torch.snapshot("job", model, optimizer, step=step, pool=pool, **with_folder)
        pending.wait()
        pending.wait_flushed()
    elif verb == "restore":
        try:
            step = polder.torch.restore("job", model, optimizer, pool=pool, **with_folder).step
        except polder.PolderError as error:
            print(type(error).__name__, error, flush=True)
    elif verb == "wait":
        dist.barrier()
    else:
        print(step, model.weight[0, 0].item(), flush=True)
sys.stdout.flush()
# As one that is killed: nothing is given back.
os._exit(0)
