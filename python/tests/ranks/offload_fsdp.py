"""FSDP2 with its parameters offloaded: two ranks, placed, that a checkpoint cuts in two runs of different policies.

Arguments: the rank, a folder on a disk, a file in memory in place of a dax device, the fraction of states on the disk
and of weights on the device, the first step and the last, the checkpoint. Gradients lie on the device. If the first
step is not 0, it is loaded, and the weights are compared with those of an unplaced run of all steps.
"""

import gc
import sys
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from polder import offload
from polder.errors import PlacementError

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
RANKS = 2


class Block(torch.nn.Module):
    """Matrices and vectors that two ranks do not share evenly, and one that only the first has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(40, 129), torch.nn.Linear(129, 40)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(40), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.frozen + self.scale * self.down(torch.tanh(self.up(x)))


def model() -> torch.nn.Module:
    """The same in every process."""
    torch.manual_seed(0)
    it = torch.nn.Sequential(torch.nn.Linear(40, 40), *(Block() for _ in range(3)))
    for module in (*it, it):
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return it


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, placed: offload.Placed | None
) -> None:
    """Each step is of two accumulated batches, with clipped gradients and a rate that falls."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS["lr"] / (1 + step)
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        for batch in range(2):
            draw = torch.Generator().manual_seed(4 * step + 2 * batch + dist.get_rank())
            inputs = torch.randn(600, 40, generator=draw)
            if placed is None:
                loss = model(inputs).square().mean() / 2
            else:
                with placed.activations():
                    loss = model(inputs).square().mean() / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def outside(inside: Callable[[torch.Tensor], bool]) -> int:
    """Bytes of all arrays of numbers in this process that do not lie in the placement."""
    gc.collect()
    types = (torch.Tensor, torch.nn.Parameter)
    arrays = [it for it in gc.get_objects() if type(it) in types and it.is_floating_point() and it.ndim]
    storages = [it.untyped_storage() for it in arrays if it.device.type == "cpu" and not inside(it)]
    return sum({it.data_ptr(): it.nbytes() for it in storages}.values())


def main(rank: int, folder: str, card: str, far: str, first: str, last: str, checkpoint: str) -> None:
    """One rank of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{first}", rank=rank, world_size=RANKS)
    ours = model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("disk", "64 MiB", 2e9, 1e9, folder)]
    tiers.append(offload.Tier("card", "1 GiB", 1e10, 1e10, device=card))
    near, whole = 1 - float(far), [0.0, 0.0, 1.0]
    policy = {"optimizer states": [near, float(far), 0], "activations": [0, 1, 0]}
    with pytest.raises(PlacementError, match="weights: expected none of it in disk; it can lie in dram, card"):
        offload.place(ours, optimizer, {"weights": [near, float(far), 0]}, tiers=tiers)
    policy |= {"weights": [near, 0, float(far)], "gradients": whole}
    placed = offload.place(ours, optimizer, policy, tiers=tiers, activations=4 << 20)
    if int(first):
        model_state, optimizer_state = get_state_dict(ours, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
        set_state_dict(ours, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        del model_state, optimizer_state
    train(ours, optimizer, range(int(first), int(last)), placed)
    assert all(set(state) == {"step"} for state in optimizer.state.values()), "a state lies outside the placement"
    assert all(parameter.grad is not None for parameter in ours.parameters() if parameter.requires_grad)
    assert outside(placed.holds) == 0
    held = {(row.object, row.tier): row.bytes for row in placed.rows()}
    assert held["activations", "disk"] > 0, held
    assert held["optimizer states", "disk"] >= float(far) * 8 * optimizer.elements() - 8192, held
    # The kernel's word; both objects are in whole pages.
    elements = sum(tensor.numel() for tensor in locals_of(ours))
    assert held["gradients", "card"] >= 3.9 * elements, held
    assert held["weights", "card"] == pytest.approx(float(far) * 4 * elements, abs=3 * 4096), held
    assert held["weights", "dram"] == pytest.approx(near * 4 * elements, abs=3 * 4096), held
    if int(first):
        reference = model()
        adamw = torch.optim.AdamW(reference.parameters(), **SETTINGS, fused=True)
        train(reference, adamw, range(int(last)), None)
        assert all(map(torch.equal, locals_of(ours), locals_of(reference))), "other weights"
        # The same count of the unplaced stack: weights, gradients and states are 16 bytes an element, and padding.
        assert outside(placed.holds) > 14 * elements, "the count sees nothing"
    else:
        model_state, optimizer_state = get_state_dict(ours, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
        del model_state, optimizer_state
    check_a_gradient_that_is_kept(ours, placed)
    check_a_placement_that_is_closed_while_weights_are_gathered(ours, placed)
    assert not any(placed.holds(tensor) for tensor in locals_of(ours) if tensor.numel())
    dist.destroy_process_group()


def check_a_gradient_that_is_kept(model: torch.nn.Module, placed: offload.Placed) -> None:
    """What the program has of a step before does not change: the next gradient lies elsewhere, which a warning says."""
    parameter = model[0].weight
    kept, before = parameter.grad, parameter.grad.to_local().clone()
    model.zero_grad()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.ones(2, 40)).sum().backward()
    assert ["gradient of 0.weight: the program still has" in str(it.message) for it in seen] == [True]
    assert torch.equal(kept.to_local(), before) and placed.holds(kept) and not placed.holds(parameter.grad)
    del kept
    model.zero_grad()
    model(torch.ones(2, 40)).sum().backward()
    assert placed.holds(parameter.grad)


def check_a_placement_that_is_closed_while_weights_are_gathered(model: torch.nn.Module, placed: offload.Placed) -> None:
    """What is under way gets the weights that there were, and the ranges go once nothing uses them any more."""
    inputs = torch.ones(2, 40)
    with torch.no_grad():
        before = model(inputs)
    ranges = [weakref.ref(it) for of in placed._kept.ranges().values() for it in of]
    model.reshard()
    handles = [module.unshard(async_op=True) for module in (*model, model)]
    groups = [group for module in (*model, model) for group in module._get_fsdp_state()._fsdp_param_groups]
    assert any(group._all_gather_result is not None for group in groups), "nothing is under way (the control)"
    placed.close()
    for handle in handles:
        handle.wait()
    with torch.no_grad():
        assert torch.equal(model(inputs), before)
    model.zero_grad()
    gc.collect()
    assert ranges and all(it() is None for it in ranges)


def locals_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank has of each parameter."""
    return [it.to_local().detach() for it in model.parameters()]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
    sys.stdout.write("equal\n" if int(sys.argv[5]) else "written\n")
