"""FSDP2 placed by each policy: 50 steps have the bits of the unplaced stack, and the kernel says where bytes lie.

Arguments: the rank, a folder on a disk, and a file in memory in place of a dax device.
"""

import sys

import pytest
import torch
import torch.distributed as dist
from offload_fsdp import RANKS, SETTINGS, locals_of, model, train

from polder import offload

STEPS = range(50)
PAGE = 4096


def main(rank: int, folder: str, card: str) -> None:
    """One rank of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    reference = model()
    train(reference, torch.optim.AdamW(reference.parameters(), **SETTINGS, fused=True), STEPS, None)
    elements = sum(it.numel() for it in locals_of(reference))
    for policy in ("dram", "interleave", "paper", "optimal"):
        ours = model()
        optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
        # A card of half the rate, and no policy but the first finds room for everything in memory.
        dram = 1 << 30 if policy == "dram" else 10 * elements
        tiers = [offload.Tier("dram", dram, 2e10, 2e10), offload.Tier("card", 10 * elements, 1e10, 1e10, device=card)]
        placed = offload.place(ours, optimizer, policy, tiers=tiers)
        train(ours, optimizer, STEPS, placed)
        assert all(map(torch.equal, locals_of(ours), locals_of(reference))), f"{policy}: other weights"
        held = {(row.object, row.tier): row.bytes for row in placed.rows() if row.word.startswith("kernel")}
        for name in ("weights", "gradients", "optimizer states"):
            whole = (8 if name == "optimizer states" else 4) * elements
            expected = placed.fractions[name][1] * whole
            assert held.get((name, "card"), 0) == pytest.approx(expected, abs=4 * PAGE), (policy, name, held)
        moved = [placed.fractions[name][1] > 0 for name in ("weights", "gradients")]
        assert any(moved) is (policy != "dram"), (policy, placed.fractions)
        # What FSDP2 gathers and reduces counts in its phases.
        assert min(sum(placed.links[phase]) for phase in ("FWD", "BWD", "STEP")) > 0
        placed.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.write("equal\n")
