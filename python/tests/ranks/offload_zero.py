"""ZeRO-2 or ZeRO-3 offload of DeepSpeed: a placed run that a checkpoint cuts in two, held against an unplaced one.

Arguments: a folder on a disk, the fraction of states there, the stage, the optimizer, and the part of the run: first or
last. The optimizer is `ours`, or `theirs` for DeepSpeed's own Adam, whose states lie in memory.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint

from polder import offload

folder, far, stage, whose, part = sys.argv[1:]
STEPS, SAVED = 50, 20
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Block(torch.nn.Linear):
    """A layer that may change its weight in place once it is saved."""

    spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.spoils:
            with torch.no_grad():
                self.weight.mul_(2)
        return y


class Model(torch.nn.Module):
    """Checkpointed blocks whose inputs are large enough to be placed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(80, 80) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x) if block.spoils else checkpoint(block, x, use_reentrant=False))
        return x.float().square().mean()


def config() -> dict:
    """Two accumulated batches a step, clipped gradients, and a rate that falls."""
    zero = {
        "stage": int(stage),
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": 7000,
        "reduce_bucket_size": 9000,
    }
    if stage == "3":
        zero |= {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    adam = {"optimizer": {"type": "AdamW", "params": {**SETTINGS, "torch_adam": False}}} if whose == "theirs" else {}
    return {
        "train_micro_batch_size_per_gpu": 600,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.01,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 3}},
        **adam,
    }


def train(engine: deepspeed.DeepSpeedEngine, steps: range) -> None:
    for step in steps:
        for batch in range(2):
            draw = torch.Generator().manual_seed(2 * step + batch)
            engine.backward(engine(torch.randn(600, 80, generator=draw).bfloat16().to(engine.device)))
            engine.step()


def weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """The 32-bit ones."""
    zero = engine.optimizer
    return zero.fp32_partitioned_groups_flat if stage == "3" else zero.single_partition_of_fp32_groups


def of_state_dict(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """Everything of 32 bits that a checkpoint of the optimizer has."""
    known = engine.optimizer.state_dict()
    states = known["optimizer_state_dict" if stage == "3" else "base_optimizer_state"]["state"]
    return [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]


def placed_run() -> tuple[offload.Placed, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Model()
    saved = offload.saved_bytes(model, torch.empty(600, 80)) // 2
    own = {"optimizer": offload.AdamW(model.parameters(), **SETTINGS)} if whose == "ours" else {}
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)]
    policy = {
        "optimizer states": [1 - float(far), float(far)],
        "activations": [0, 1] if part == "first" else [0.5, 0.5],
    }
    engine, placed = offload.zero(model, config(), policy, tiers=tiers, activations=saved, **own)
    if part == "last":
        engine.load_checkpoint(f"{folder}/checkpoint")
    train(engine, range(SAVED) if part == "first" else range(SAVED, STEPS))
    held = {(row.object, row.tier): row.bytes for row in placed.rows()}
    elements = sum(weight.numel() for weight in weights(engine))
    assert held["weights", "dram"] >= 4 * elements, held
    assert held["gradients", "dram"] >= 4 * elements, held
    assert held["activations", "disk"] > 0, held
    if whose == "ours":
        assert all(set(state) == {"step"} for state in engine.optimizer.optimizer.state.values())
        assert held["optimizer states", "disk"] >= float(far) * 8 * elements - 8192, held
    else:
        assert held["optimizer states", "dram"] >= 8 * elements, held
    mine = [weight for weight in weights(engine)] + [weight.grad for weight in weights(engine)]
    assert all(map(placed.holds, mine)), "a weight or a gradient lies outside the placement"
    for tensor in placed.outside():
        sys.stderr.write(f"outside: {tensor.dtype} {tuple(tensor.shape)} {tensor.untyped_storage().nbytes()} bytes\n")
    assert not outside(placed), "an array of 32-bit numbers lies outside the placement"
    if part == "first":
        engine.save_checkpoint(f"{folder}/checkpoint")
    ours = [tensor.detach().clone() for tensor in (*weights(engine), *of_state_dict(engine))]
    if part == "last":
        spoil(engine)
    return placed, ours


def spoil(engine: deepspeed.DeepSpeedEngine) -> None:
    """A weight that is changed in place after it was saved is found, as without placement."""
    engine.module.blocks[1].spoils = True
    loss = engine(torch.randn(600, 80).bfloat16().to(engine.device))
    try:
        engine.backward(loss)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
    else:
        raise AssertionError("a weight was changed in place, and nothing was said")


def outside(placed: offload.Placed) -> int:
    """Bytes of 32-bit numbers."""
    return sum(it.untyped_storage().nbytes() for it in placed.outside() if it.dtype == torch.float32)


def unplaced_run() -> list[torch.Tensor]:
    """DeepSpeed's own Adam rounds otherwise after a checkpoint, so that its run is cut too."""
    os.environ.pop("DS_PIN_MEMORY_BACKEND")
    torch.manual_seed(0)
    model = Model()
    given, own = config(), {}
    if whose == "ours":
        given |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        own = {"optimizer": torch.optim.AdamW(model.parameters(), **SETTINGS, fused=True)}
    engine, *_ = deepspeed.initialize(model=model, config=given, **own)
    if whose == "ours":
        steps = range(STEPS if part == "last" else SAVED)
    elif part == "first":
        steps = range(SAVED)
    else:
        engine.load_checkpoint(f"{folder}/unplaced")
        steps = range(SAVED, STEPS)
    train(engine, steps)
    if part == "first":
        engine.save_checkpoint(f"{folder}/unplaced")
    return [it.detach().clone() for it in (*weights(engine), *of_state_dict(engine))]


torch.set_num_threads(1)
# DeepSpeed has read DS_ACCELERATOR when it was imported. It leaves a file in /dev/shm that these name.
on_gpu = os.environ["DS_ACCELERATOR"] == "cuda"
os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "polder", "MASTER_PORT": str(os.getpid())}
torch.distributed.init_process_group(
    "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
try:
    placed, ours = placed_run()
    reference = unplaced_run()
    assert outside(placed) >= sum(it.nbytes for it in reference), "the count sees nothing"
    assert len(ours) == len(reference) and all(map(torch.equal, ours, reference)), "other weights or states"
finally:
    torch.distributed.destroy_process_group()
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_polder_{os.getpid()}_*"):
        left.unlink()
sys.stdout.write("equal\n" if part == "last" else "written\n")
