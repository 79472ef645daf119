"""A placed run that a checkpoint cuts in two processes of different policies, held against an unplaced run in one.

Arguments: a folder on a disk, the fraction of states there, the first step and the last, the checkpoint. If the first
step is not 0, it is loaded, and the weights are compared. Otherwise it is written.
"""

import sys
from pathlib import Path

import torch

from polder import offload

folder, far, first, last, checkpoint = sys.argv[1:]
SETTINGS = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def model() -> torch.nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 520), torch.nn.Tanh(), torch.nn.Linear(520, 33))


def groups(model: torch.nn.Module) -> list[dict]:
    """Two groups, as decoders have them: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    matrices, vectors = [it for it in parameters if it.ndim > 1], [it for it in parameters if it.ndim == 1]
    return [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-2, "weight_decay": 0.0}]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Each step is of two accumulated batches, with clipped gradients and a rate that falls."""
    for step in steps:
        for group, rate in zip(optimizer.param_groups, (1e-2, 3e-2), strict=True):
            group["lr"] = rate / (1 + step)
        optimizer.zero_grad()
        for batch in range(2):
            draw = torch.Generator().manual_seed(2 * step + batch)
            (model(torch.randn(64, 40, generator=draw)).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


torch.set_num_threads(1)
ours = model()
optimizer = offload.AdamW(groups(ours), **SETTINGS)
tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)]
offload.place(ours, optimizer, {"optimizer states": [1 - float(far), float(far)]}, tiers=tiers)
if int(first):
    kept = torch.load(checkpoint, mmap=True)
    ours.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
train(ours, optimizer, range(int(first), int(last)))
assert all(set(state) == {"step"} for state in optimizer.state.values()), "a state lies outside the placement"
if int(first):
    reference = model()
    train(reference, torch.optim.AdamW(groups(reference), **SETTINGS, fused=True), range(int(last)))
    assert all(map(torch.equal, ours.parameters(), reference.parameters())), "other weights"
    sys.stdout.write("equal\n")
else:
    known = optimizer.state_dict()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("(deleted)")]
    assert any(folder in line for line in maps), "a state dict of states on a disk lies in memory"
    torch.save({"model": ours.state_dict(), "optimizer": known}, checkpoint)
    sys.stdout.write("written\n")
