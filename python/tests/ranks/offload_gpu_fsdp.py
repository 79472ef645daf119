"""FSDP2 with its parameters offloaded, computing on a GPU: one rank, 50 steps, beside the same steps unplaced.

Arguments: the rank, a folder on a disk, whether FSDP2 pins (``pinned`` or ``plain``), and the fraction of states and of
activations on the disk.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from polder import offload

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
WIDTH, BLOCKS, BATCH, STEPS = 512, 8, 4096, 50


class Block(torch.nn.Module):
    """Its input is what a step keeps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def model(pin: bool) -> torch.nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    it = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for module in (*it, it):
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    return it


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, placed: offload.Placed | None) -> int:
    """Steps of two accumulated batches, with clipped gradients; the most bytes that the GPU held at once."""
    torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        for batch in range(2):
            draw = torch.Generator().manual_seed(2 * step + batch)
            inputs = torch.randn(BATCH, WIDTH, generator=draw).cuda()
            if placed is None:
                loss = model(inputs).square().mean() / 2
            else:
                with placed.activations():
                    loss = model(inputs).square().mean() / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return torch.cuda.max_memory_allocated()


def main(rank: int, folder: str, pins: str, far: float) -> None:
    """The whole job."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=1)
    ours = model(pins == "pinned")
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    tiers = [offload.Tier("dram", "4 GiB", 2e10, 2e10), offload.Tier("disk", "1 GiB", 2e9, 1e9, folder)]
    placed = offload.place(
        ours,
        optimizer,
        {"optimizer states": [1 - far, far], "activations": [1 - far, far]},
        tiers=tiers,
        activations=(BLOCKS + 2) * 4 * BATCH * WIDTH,
    )
    most = train(ours, optimizer, placed)
    held: dict[tuple[str, str], int] = {}
    for row in placed.rows():
        held[row.object, row.tier] = held.get((row.object, row.tier), 0) + row.bytes
    saved = BLOCKS * 4 * BATCH * WIDTH
    assert held.get(("activations", "disk"), 0) >= 0.99 * far * saved, held
    assert far == 1 or held["activations", "dram"] >= 0.99 * (1 - far) * saved, held
    reference = model(pins == "pinned")
    plain = train(reference, torch.optim.AdamW(reference.parameters(), **SETTINGS, fused=True), None)
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()), "other weights"
    # All inputs of blocks but two are elsewhere; blocks that overlap may hold another.
    assert most < plain - (BLOCKS - 4) * 4 * BATCH * WIDTH, (most, plain)
    placed.close()
    dist.destroy_process_group()
    sys.stdout.write(f"the GPU held {most} bytes, unplaced {plain}\nequal\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
