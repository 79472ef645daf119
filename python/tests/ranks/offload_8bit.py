"""The 8-bit AdamW of bitsandbytes, placed under three policies: 50 steps have the bits of the unplaced run.

Arguments: a folder on a disk.
"""

import copy
import sys

import bitsandbytes
import torch
from torch.utils._pytree import tree_leaves

from polder import offload

(folder,) = sys.argv[1:]


def run(far: float | None) -> torch.nn.Module:
    """The model after all steps, with a fraction of the states on the disk."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=1024)
    if far is not None:
        tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)]
        placed = offload.place(model, optimizer, {"optimizer states": [1 - far, far]}, tiers=tiers)
    for step in range(50):
        if step == 25:
            # As bitsandbytes loads it: past what torch calls then.
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
        model(torch.randn(32, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    if far is not None:
        kept = [it for it in tree_leaves(optimizer.state_dict()["state"][0]) if isinstance(it, torch.Tensor)]
        assert sum(it.dtype == torch.uint8 and bool(it.any()) for it in kept) == 2, kept
        held = {row.tier: row.bytes for row in placed.rows() if row.object == "optimizer states"}
        assert abs(held.get("disk", 0) - far * sum(held.values())) <= 4096, held
    return model


torch.set_num_threads(1)
reference = run(None)
for far in (0.0, 0.3, 1.0):
    assert all(map(torch.equal, run(far).parameters(), reference.parameters())), f"{far}: other weights"
sys.stdout.write("equal\n")
