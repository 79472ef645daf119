"""FSDP2 placed by each policy: 50 steps have the bits of the unplaced stack, and the kernel says where bytes lie.

Arguments: the rank, a folder on a disk, a file in memory in place of a dax device, and whose AdamW: ours or torch.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from offload_fsdp import RANKS, SETTINGS, locals_of, model, train

from polder import offload

STEPS = range(50)
PAGE = 4096


def near_card(card: str, elements: int) -> offload.Tier:
    """A tier of memory beside that of the host."""
    return offload.Tier("card", 10 * elements, 1e10, 1e10, device=card)


def main(rank: int, folder: str, card: str, optimizers: str) -> None:
    """One rank of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    reference = model()
    train(reference, torch.optim.AdamW(reference.parameters(), **SETTINGS, fused=True), STEPS, None)
    elements = sum(it.numel() for it in locals_of(reference))
    # A card of half the rate, and no policy but the first finds room for everything in memory.
    enough, little = (
        [offload.Tier("dram", near, 2e10, 2e10), near_card(card, elements)] for near in (1 << 30, 10 * elements)
    )
    disk = offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)
    far = {"optimizer states": {"dram": 0.3, "card": 0.2, "disk": 0.5}}
    make = offload.AdamW if optimizers == "ours" else functools.partial(torch.optim.AdamW, fused=True)
    for policy in ("dram", "interleave", "paper", "optimal", far):
        ours = model()
        optimizer = make(ours.parameters(), **SETTINGS)
        tiers = enough if policy == "dram" else [*enough, disk] if policy is far else little
        placed = offload.place(ours, optimizer, policy, tiers=tiers)
        train(ours, optimizer, STEPS, placed)
        assert all(map(torch.equal, locals_of(ours), locals_of(reference))), f"{policy}: other weights"
        held = {(row.object, row.tier): row.bytes for row in placed.rows() if row.word.startswith("kernel")}
        for name in ("weights", "gradients", "optimizer states"):
            whole = (8 if name == "optimizer states" else 4) * elements
            expected = placed.fractions[name][1] * whole
            assert held.get((name, "card"), 0) == pytest.approx(expected, abs=4 * PAGE), (policy, name, held)
        moved = [placed.fractions[name][1] > 0 for name in ("weights", "gradients")]
        assert any(moved) is (policy not in ("dram", far)), (policy, placed.fractions)
        # What FSDP2 gathers and reduces counts in its phases.
        assert min(sum(placed.links[phase]) for phase in ("FWD", "BWD", "STEP")) > 0
        placed.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.write("equal\n")
