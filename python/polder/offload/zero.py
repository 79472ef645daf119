"""DeepSpeed's ZeRO-2 and ZeRO-3 offload, with what it keeps in host memory placed."""

import json
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from polder import _core
from polder.errors import ArgumentError, PlacementError
from polder.offload.optimizer import PAGE, Adam
from polder.offload.placed import Placed, Weight, carry_out
from polder.offload.ranges import Memory, memory
from polder.offload.shards import storage_of
from polder.offload.tiers import Tier, check_tiers, tiers_of


def zero(
    model: torch.nn.Module,
    config: Mapping[str, Any] | str | Path,
    policy: str | Path | Mapping[str, Sequence[float]] = "optimal",
    *,
    tiers: Sequence[Tier] | None = None,
    platform: str | Path | None = None,
    activations: int = 0,
    computation: tuple[float, float] = (0.0, 0.0),
    **given: Any,
) -> tuple[Any, Placed]:
    """Calls ``deepspeed.initialize`` for ZeRO-2 or ZeRO-3 offload, and places what it keeps in host memory.

    Every buffer that DeepSpeed pins lies in a range of the placement: this stands in for its object that pins natively.
    An `AdamW` of Polder, given as ``optimizer=``, has its states in all tiers. DeepSpeed's own Adam steps over tensors,
    so its states lie in memory.

    Parameters
    ----------
    model : torch.nn.Module
        As for ``deepspeed.initialize``. What its forward passes save is placed if ``activations`` is given.
    config : mapping, str or Path
        DeepSpeed's, or its JSON file, in which ``zero_optimization.offload_optimizer.device`` is ``cpu``.
    policy, tiers, platform, activations, computation
        As in `place`, for each rank.
    given
        Other arguments of ``deepspeed.initialize``.

    Returns
    -------
    tuple
        The engine, and a `Placed`.

    Raises
    ------
    ArgumentError
        The configuration has another stage or device.
    PlacementError
        States of DeepSpeed's own Adam would lie in another tier than the first, or as in `place`.
    TierError
        A tier cannot be used.
    """
    if (tiers is None) == (platform is None):
        raise ArgumentError("expected tiers or a platform, one of the two")
    tiers = list(tiers) if tiers is not None else tiers_of(platform or "")
    if not isinstance(config, Mapping):
        config = cast("Mapping[str, Any]", json.loads(Path(config).read_text()))
    settings = _pinning(config, isinstance(given.get("optimizer"), Adam))
    native: Any = import_module("deepspeed.utils.pin_memory")
    if not isinstance(native._shared_native_pins, Pins):
        native._shared_native_pins = Pins()
    pins: Pins = native._shared_native_pins
    check_tiers(tiers[:1])
    pins.tier = tiers[0]
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    engine: Any = import_module("deepspeed").initialize(model=model, config=settings, **given)[0]
    kept = Zero(engine, pins)
    optimizer = engine.optimizer.optimizer
    if not isinstance(optimizer, Adam):
        optimizer = TensorStates(optimizer, kept)
    with kept.listed():
        placed = carry_out(
            engine.module, kept.masters, optimizer, policy, tiers, None, activations, computation, lambda _: kept
        )
    if activations > 0:
        placed.cover(engine.module)
    return engine, placed


def _pinning(config: Mapping[str, Any], is_ours: bool) -> dict[str, Any]:
    """A configuration that pins what it offloads, and takes an optimizer of Polder."""
    stage: dict[str, Any] = dict(config.get("zero_optimization", {}))
    given = stage.get("stage"), stage.get("offload_optimizer", {}).get("device")
    if given not in ((2, "cpu"), (3, "cpu")):
        raise ArgumentError(
            "config: expected zero_optimization of stage 2 or 3 with offload_optimizer.device cpu, "
            f"found stage {given[0]} with {given[1]}"
        )
    for name in ("offload_optimizer", "offload_param"):
        if name in stage:
            stage[name] = {**stage[name], "pin_memory": True}
    ours = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True} if is_ours else {}
    return {**config, "zero_optimization": stage, **ours}


class Pins:
    """Stands in for DeepSpeed's object that pins natively: what it gives are ranges of memory.

    A range goes back with the last tensor over it, unpinned or not.
    """

    def __init__(self) -> None:
        #: What new ranges lie in.
        self.tier = Tier("memory", 1, 1, 1)
        self._ranges: weakref.WeakSet[_core.Range] = weakref.WeakSet()

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy of a tensor, or room for one."""
        pinned = self.pin_empty(tensor, tensor.shape if match_shape else (tensor.numel(),))
        return pinned.copy_(tensor.detach().reshape(pinned.shape)) if make_copy else pinned

    def pin_empty(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Room for a tensor of a shape, and of the type of another."""
        kept = Memory(memory(max(torch.Size(shape).numel() * example.element_size(), 1), self.tier))
        self._ranges.add(kept.range)
        return kept.tensor(example, shape)

    def range_of(self, tensor: torch.Tensor) -> _core.Range | None:
        """The range that a tensor lies in, if any."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        at = tensor.data_ptr()
        return next((it for it in self._ranges if 0 <= at - it.address < it.nbytes), None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the ranges."""
        return self.range_of(tensor) is not None

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Whether it was pinned. Its memory goes back with the last tensor over it."""
        return self.is_pinned(tensor)

    def ranges(self) -> list[_core.Range]:
        """All that are there."""
        return list(self._ranges)


class Zero:
    """What an engine keeps: 32-bit weights, their gradients and DeepSpeed's states, and its other pinned buffers."""

    passing = 0

    def __init__(self, engine: Any, pins: Pins) -> None:
        self._module, self._pins, self._zero = engine.module, pins, engine.optimizer
        self._is_sharded = hasattr(self._zero, "fp32_partitioned_groups_flat")
        groups = "fp32_partitioned_groups_flat" if self._is_sharded else "single_partition_of_fp32_groups"
        self.masters: list[torch.Tensor] = list(getattr(self._zero, groups))
        self.states: list[torch.Tensor] = []
        for it in self.masters:
            # ZeRO-3 does not pin them.
            it.data = self.pinned(it.data)
        self.steps = Steps(self._zero)

    @property
    def place(self) -> int | str | None:
        """Where ranges are made: the place of the first tier."""
        return self._pins.tier.place

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it in a range."""
        return tensor if self._pins.is_pinned(tensor) else self._pins.pin(tensor)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros in a range."""
        return self._pins.pin_empty(like, like.shape)

    @contextmanager
    def listed(self) -> Generator[None]:
        """The optimizer lists all weights inside. ZeRO-3 lists them only while it steps them."""
        if self._is_sharded:
            self._zero._set_fp32_optimizer_param_groups()
        yield
        if self._is_sharded:
            self._zero._clear_fp32_optimizer_param_groups()

    def ranges(self) -> dict[str, list[_core.Range]]:
        """The ranges of each object."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        named = {"weights": self.masters, "gradients": gradients, "optimizer states": self.states}
        of: dict[str, list[_core.Range]] = {
            name: [kept for tensor in tensors if (kept := self._pins.range_of(tensor)) is not None]
            for name, tensors in named.items()
        }
        known = {pinned.address for ranges in of.values() for pinned in ranges}
        return {**of, "other pinned buffers": [pinned for pinned in self._pins.ranges() if pinned.address not in known]}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this process lies in a range."""
        return self._pins.is_pinned(tensor)

    def gathered(self, tensor: torch.Tensor) -> Weight | torch.Tensor | None:
        """What stands for a weight that ZeRO-3 has gathered: the parameter, or a view as it is."""
        of = next((it for it in self._module.parameters() if storage_of(it) == storage_of(tensor)), None)
        if of is None:
            return None
        is_whole = (tensor.data_ptr(), tensor.shape, tensor.stride()) == (of.data_ptr(), of.shape, of.stride())
        return Weight(of) if is_whole else tensor

    def release(self) -> None:
        """Tells of steps no more."""
        self.steps.release()

    def close(self) -> None:
        """Nothing is to do: DeepSpeed gives its buffers back."""


class Steps:
    """Tells of the steps of a ZeRO optimizer, each of which steps the optimizer inside once for each of its groups."""

    def __init__(self, zero: Any) -> None:
        self._zero, self._step = zero, zero.step
        self._before: dict[int, Callable[..., object]] = OrderedDict()
        self._after: dict[int, Callable[..., object]] = OrderedDict()
        zero.step = self._whole

    def register_step_pre_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Calls ``hook`` before each step."""
        return _listed(self._before, hook)

    def register_step_post_hook(self, hook: Callable[..., object]) -> RemovableHandle:
        """Calls ``hook`` after each step."""
        return _listed(self._after, hook)

    def _whole(self, *given: Any, **named: Any) -> Any:
        for hook in self._before.values():
            hook()
        stepped = self._step(*given, **named)
        for hook in self._after.values():
            hook()
        return stepped

    def release(self) -> None:
        """The optimizer steps as before."""
        self._zero.step = self._step


def _listed(hooks: dict[int, Callable[..., object]], hook: Callable[..., object]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class TensorStates:
    """DeepSpeed's own Adam. Its states are tensors, which it makes only where there are none."""

    def __init__(self, optimizer: torch.optim.Optimizer, kept: Zero) -> None:
        self._optimizer, self._kept = optimizer, kept
        self.placed_by: Any = None
        self._hook: RemovableHandle | None = None

    def elements(self) -> int:
        """Elements that the states take."""
        return sum((it.numel() + PAGE - 1) // PAGE * PAGE for it in self._kept.masters)

    def nbytes(self) -> int:
        """Bytes of both moments."""
        return 8 * self.elements()

    def room(self, kept: Sequence[tuple[int, Any]], files: Sequence[tuple[int, str | Path]]) -> _core.States:
        """No room besides the tensors."""
        if files or any(place != self._kept.place for _, place in kept):
            raise PlacementError(
                "DeepSpeed's own Adam steps over tensors in the first tier; give optimizer=polder.offload.AdamW(...) "
                'to place states in others, or a policy with "optimizer states" there'
            )
        return _core.States([])

    def place(self, states: _core.States | None, _: str | Path | None = None) -> None:
        """Makes states in ranges, or leaves them there."""
        if states is None:
            if self._hook is not None:
                self._hook.remove()
            return
        self._hook = self._optimizer.register_load_state_dict_post_hook(self._move)
        self._move(self._optimizer)

    def _move(self, optimizer: torch.optim.Optimizer) -> None:
        """Also after a state dict was loaded, which makes new tensors."""
        self._kept.states.clear()
        for master in self._kept.masters:
            state = optimizer.state[master]
            state.setdefault("step", 0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._kept.pinned(state[name]) if name in state else self._kept.room(master)
                self._kept.states.append(state[name])
