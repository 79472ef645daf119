"""What a parameter service takes: its numbers, links, places and models."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from polder import arguments
from polder.errors import ArgumentError
from polder.torch.meeting import is_under_torchrun

# torch's stubs leave modules without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["NUMBERS", "EmulatedLinks", "expect_alike", "expect_carried", "expect_links", "expect_numbers"]
__all__ += ["expect_kinds", "expect_places", "expect_sharded"]

CARRIED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types whose means the proxies know."""


@dataclass(frozen=True)
class EmulatedLinks:
    """What links that are not here would take: token buckets let bytes through. What is timed so is emulated.

    Attributes
    ----------
    proxies : list of (float, float)
        The link of each proxy's device: seconds that it is busy with a shard besides the bytes, and bytes a second in
        each direction. All workers share it.
    workers : float
        Bytes a second of each worker's link in an all-reduce of the workers, by the ring's formula.
    """

    proxies: Sequence[tuple[float, float]]
    workers: float


NUMBERS: dict[str, tuple[type, float, float, str]] = {
    "proxies": (Integral, 1, 1024, "a whole number from 1 to 1024, or None for one of each worker"),
    "profile_steps": (Integral, 2, math.inf, "a whole number from 2 on, because the first step is not counted"),
    "replan_steps": (Integral, 0, math.inf, "a whole number from 0 on"),
    "timeout": (Real, 1e-9, 1e9, "seconds from 1e-9 to 1e9"),
    "split": (Real, 0, 1, "a number from 0 to 1, or None for the planned part"),
    "shard_bytes": (Integral, 1, 1 << 62, "a whole number of bytes from 1 on, or None for the measured size"),
}
"""What each number of the constructor may be: its kind, the least, the highest, and both in words."""


def _is_number(value: object, kind: type, least: float, most: float = math.inf) -> bool:
    # What is not a number is between no two.
    return arguments.is_number(value, kind) and least <= cast(float, value) <= most


def expect_numbers(given: dict[str, object]) -> None:
    """Raises an ArgumentError for a number of the constructor that is none, or is out of its range."""
    for name, value in given.items():
        kind, least, most, expected = NUMBERS[name]
        is_left_out = value is None and "None" in expected
        if not is_left_out and not _is_number(value, kind, least, most):
            raise ArgumentError(f"{name} is {value!r}; give {expected}")


def expect_links(emulated: object) -> None:
    """Raises an ArgumentError for what are no links."""
    if emulated is None:
        return
    if not isinstance(emulated, EmulatedLinks):
        raise ArgumentError(f"emulated is {emulated!r}; give EmulatedLinks or None")
    try:
        are_links = all(
            _is_number(busy, Real, 0, 1e9) and _is_number(rate, Real, 1, 1e18) for busy, rate in emulated.proxies
        )
    except (TypeError, ValueError):
        are_links = False
    if not are_links or not _is_number(emulated.workers, Real, 1, 1e18):
        raise ArgumentError(
            f"emulated is {emulated!r}; give seconds from 0 to 1e9 and bytes a second from 1 to 1e18 of each proxy, "
            "and bytes a second of the workers"
        )


def expect_kinds(flags: Mapping[str, object], snapshots: object) -> None:
    """Raises an ArgumentError for an option of the constructor that is neither True nor False, or no text."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} is {value!r}; give True or False")
    if snapshots is not None:
        arguments.text("snapshots", snapshots)


def expect_places(
    optimizer: str, split: float | None, overlap: bool, clips: bool, early: bool, on_death: str, snapshots: str | None
) -> None:
    """Raises an ArgumentError where options of the constructor do not go together."""
    if optimizer not in ("worker", "proxy"):
        raise ArgumentError(f'optimizer is {optimizer!r}; give "worker" or "proxy"')
    if optimizer == "proxy" and (split not in (None, 1.0) or not overlap):
        raise ArgumentError(
            f"split {split} and overlap {overlap} with the optimizer on the proxies; leave both out, because the "
            "proxies take all gradients as they come"
        )
    if clips and optimizer != "proxy":
        raise ArgumentError(
            f"clips {clips} with the optimizer on the worker; leave it out, because they can be clipped there anyway"
        )
    if early and optimizer != "proxy":
        raise ArgumentError(
            f"early {early} with the optimizer on the worker; leave it out, because that steps all layers at once"
        )
    if on_death not in ("raise", "shrink") or (on_death == "shrink") != (snapshots is not None):
        raise ArgumentError(
            f'on_death is {on_death!r} and snapshots {snapshots!r}; give "shrink" and the name of the snapshots to go '
            'back to, or "raise" and none'
        )
    has_one_agent = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") != "1"
    if on_death == "shrink" and optimizer == "worker" and is_under_torchrun() and has_one_agent:
        raise ArgumentError(
            'on_death is "shrink" in a job of one torchrun agent, which ends all workers when one dies; start each '
            "worker by itself, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or under an agent of its own: "
            "docs/sync.md"
        )


def expect_alike(group: dist.ProcessGroup, given: dict[str, object]) -> None:
    """Raises an ArgumentError on all workers of a group where one gives something else than worker 0. All call it."""
    everyones: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, given, group=group)
    for worker, theirs in enumerate(everyones):
        for name in {**everyones[0], **theirs}:
            one, other = everyones[0].get(name), theirs.get(name)
            if one != other:
                raise ArgumentError(
                    f"{name} is {one!r} on worker 0 and {other!r} on worker {worker}; give all workers the same"
                )


def expect_carried(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    """Raises an ArgumentError for a model that the service does not carry."""
    if not parameters:
        raise ArgumentError("the model has no parameters to train")
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise ArgumentError(
            "some parameters are DTensors; the service carries plain ones, and those of FSDP2: call fully_shard on the "
            "model that is attached"
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ArgumentError(
                f"{name or 'the model'} has sparse gradients; the service carries dense ones: give it sparse=False"
            )
    device = parameters[0].device
    for parameter in parameters:
        is_carried = parameter.is_contiguous() and parameter.numel() > 0 and parameter.dtype in CARRIED
        if not is_carried or parameter.device != device or device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} on {parameter.device}; the "
                f"service carries contiguous tensors of float64, float32, bfloat16 and float16 on one CPU or GPU, here "
                f"{device}"
            )


def expect_sharded(model: torch.nn.Module, parameters: list[torch.nn.Parameter], ranks: list[int]) -> None:
    """Raises an ArgumentError for a model of FSDP2 that the service does not carry."""
    if not parameters:
        raise ArgumentError("the model has no parameters to train")
    whole = next((parameter for parameter in parameters if not hasattr(parameter, "device_mesh")), None)
    if whole is not None:
        raise ArgumentError(
            f"a parameter of shape {tuple(whole.shape)} is not sharded; with FSDP2 the service carries no "
            "ignored_params that are trained"
        )
    meshes: list[Any] = [parameter.device_mesh for parameter in parameters]  # pyright: ignore[reportAttributeAccessIssue]
    for mesh in meshes:
        theirs = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or theirs != ranks or len(ranks) == 1:
            raise ArgumentError(
                f"FSDP2 shards over a mesh of shape {tuple(mesh.mesh.shape)} with the ranks {theirs}; the service "
                f"carries a mesh of one dimension over its own workers {ranks}, at least two"
            )
    if any(
        not hasattr(module, "set_custom_reduce_scatter") for module in model.modules() if isinstance(module, FSDPModule)
    ):
        raise ArgumentError(f"torch {torch.__version__} has no hook for the reduce-scatter of FSDP2; take a later one")
