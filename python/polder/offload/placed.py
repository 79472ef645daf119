"""A placement carried out: states of the optimizer and saved activations in their tiers."""

import itertools
import json
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from polder import _core, arguments
from polder.errors import ArgumentError, PlacementError, PlacementWarning, TierFullError
from polder.offload.frozen import Frozen, frozen_of
from polder.offload.fsdp import Sharded, groups_of
from polder.offload.gpu import Mover, OnGpu
from polder.offload.named import Named, check_named
from polder.offload.optimizer import Fused
from polder.offload.phases import PHASES, Phases
from polder.offload.ranges import cut, memory
from polder.offload.saved import is_placed, stretch
from polder.offload.shards import (
    Held,
    arrays,
    check_materialised,
    check_version,
    local,
    storage_of,
    storages,
    ungraphed,
)
from polder.offload.states import HALVES, states_of
from polder.offload.tiers import PAGE, Tier, check_tiers, tiers_of

#: The policies by name; a mapping of fractions, or a JSON file of one, is a policy too.
POLICIES = ("dram", "interleave", "paper", "optimal")
#: What fractions that add up to 1 may leave over.
_ROUNDING = 1e-9
_WEIGHTS, _GRADIENTS, _STATES, _ACTIVATIONS = "weights", "gradients", "optimizer states", "activations"
_FROZEN = "frozen weights"
#: What torch computes with where it lies.
_IN_MEMORY = (_WEIGHTS, _GRADIENTS)
#: How often a phase reads and writes each object.
_Moves = dict[str, dict[str, tuple[float, float]]]
_MOVES: _Moves = {
    "FWD": {_ACTIVATIONS: (0, 1), _FROZEN: (1, 0)},
    "BWD": {_ACTIVATIONS: (1, 0), _FROZEN: (1, 0)},
    "STEP": {_WEIGHTS: (1, 1), _GRADIENTS: (1, 0), _STATES: (1, 1)},
}
#: FSDP2 gathers weights in both passes, and what it has reduced is copied to the gradients.
_SHARDED_MOVES: _Moves = {
    "FWD": {**_MOVES["FWD"], _WEIGHTS: (1, 0)},
    "BWD": {**_MOVES["BWD"], _WEIGHTS: (1, 0), _GRADIENTS: (0, 1)},
    "STEP": _MOVES["STEP"],
}
#: What is taken of a tensor that the program names; the optimizer reads and writes it too if it is a parameter.
_NAMED_MOVES: dict[str, tuple[float, float]] = {"FWD": (1, 0), "BWD": (1, 0)}


@dataclass(frozen=True)
class Row:
    """Bytes of an object in a tier, and whose word it is: the kernel's, or the placement's own count."""

    object: str
    tier: str
    bytes: int
    word: str


class Kept(Protocol):
    """What a training stack keeps in ranges of memory, because a placement carries it out."""

    #: Bytes of gradients that lie elsewhere until they are copied, at most at once.
    passing: int
    #: What tells of steps, in place of the optimizer.
    steps: Any

    def ranges(self) -> dict[str, list[_core.Range]]:
        """The ranges of each object."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this process lies in one of them."""
        ...

    def gathered(self, tensor: torch.Tensor) -> Any:
        """What stands for a saved tensor if it is a weight that the stack has gathered, and frees itself."""
        ...

    def release(self) -> None:
        """Watches nothing any more."""
        ...

    def close(self) -> None:
        """Moves everything into memory of torch."""
        ...


#: Makes what a stack keeps, of the fractions of weights and of gradients in each tier of memory.
Keep = Callable[[Mapping[str, Mapping[Tier, float]]], Kept]


class Placed:
    """What `place` returns: the placement, what it takes, and the tiers that hold it."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        optimizer: Any,
        tiers: Sequence[Tier],
        objects: dict[str, int],
        answer: Any,
        moves: _Moves,
        keep: Keep | None,
        named: Mapping[str, torch.Tensor],
        frozen: Sequence[torch.nn.Parameter],
        is_timed: bool,
    ) -> None:
        self.tiers = list(tiers)
        #: Of each object the fraction in each tier.
        self.fractions: dict[str, list[float]] = dict(zip(objects, answer["fractions"], strict=True))
        #: Predicted seconds of FWD, BWD and STEP: the slowest link of each, or its computation.
        self.seconds: dict[str, float] = dict(zip(PHASES, answer["seconds"], strict=True))
        #: Predicted seconds of each tier's link in each phase.
        self.links: dict[str, list[float]] = dict(zip(PHASES, answer["links"], strict=True))
        self._model, self._optimizer, self._objects = model, optimizer, objects
        self._parameters = list(parameters)
        self._hooks: list[RemovableHandle] = []
        self._warned = False
        self._states, folder = _states(tiers, optimizer, self.fractions[_STATES])
        with_states = zip(tiers, cut(optimizer.elements(), self.fractions[_STATES], _units(tiers)), strict=True)
        self._with_states = [tier for tier, count in with_states if count and tier.folder is not None]
        # Tiers beside memory that hold saved tensors, in the order of `_core.Saved`.
        self._near: list[Tier] = []
        self._far: list[Tier] = []
        if _ACTIVATIONS in objects:
            placed = [tier for tier, fraction in zip(tiers, self.fractions[_ACTIVATIONS], strict=True) if fraction > 0]
            self._near = [tier for tier in placed if tier.place is not None]
            self._far = [tier for tier in placed if tier.folder is not None]
        self._saved, near, missed = self._room_for_saved()
        self._mover = Mover(self._saved, near)
        self._copies = _Copies()
        for object_, reasons in ((_STATES, self._states.missed()), (_ACTIVATIONS, missed)):
            for why in dict.fromkeys(reasons):
                warnings.warn(f"{object_}: in memory of the kernel's choice: {why}", PlacementWarning, stacklevel=3)
        # All tiers are there: from here on nothing can be refused for want of room.
        if (before := optimizer.placed_by) is not None:
            before.release()
        optimizer.placed_by = self
        optimizer.place(self._states, folder)
        shares = {
            name: {
                tier: fraction
                for tier, fraction in zip(tiers, self.fractions[name], strict=True)
                if tier.folder is None
            }
            for name in (*_IN_MEMORY, *named)
        }
        self._kept = keep(shares) if keep is not None else None
        self._named = Named(named, shares)
        self._frozen = Frozen(model, frozen, dict(zip(tiers, self.fractions.get(_FROZEN, ()), strict=False)))
        names = [tier.name for tier in self.tiers]
        steps = optimizer if self._kept is None or self._kept.steps is None else self._kept.steps
        moved = _moved(objects, self.fractions, moves)
        self._phases = Phases(steps, names, self.seconds, self.links, moved, is_timed)
        self._hooks.append(steps.register_step_pre_hook(self._check))

    def _room_for_saved(self) -> tuple[_core.Saved, list[_core.Range], list[str]]:
        """Room for what a forward pass saves, its ranges, and why a tier has none; a saved tensor takes whole pages."""
        if _ACTIVATIONS not in self._objects:
            return _core.Saved(1.0), [], []
        parts = dict(zip((tier.name for tier in self.tiers), self.fractions[_ACTIVATIONS], strict=True))

        def room(part: float, unit: int) -> int:
            return _up(int(self._objects[_ACTIVATIONS] * part * 1.05) + (1 << 20), unit)

        kept = max(0.0, 1.0 - sum(parts[tier.name] for tier in (*self._near, *self._far)))
        near: list[tuple[float, _core.Range]] = []
        missed: list[str] = []
        for tier in self._near:
            part = parts[tier.name]
            try:
                near.append((part, memory(room(part, tier.unit), tier)))
            except TierFullError as error:
                missed.append(str(error))
                kept += part
        if torch.cuda.is_available() and kept > _ROUNDING:
            # Of memory of the allocator a GPU makes a copy first.
            near.append((kept, memory(room(kept, PAGE))))
            kept = 0.0
        far = [
            (parts[tier.name], room(parts[tier.name], tier.unit), folder)
            for tier in self._far
            if (folder := tier.folder) is not None
        ]
        return _core.Saved(kept, near, far), [it for _, it in near], missed

    @contextmanager
    def activations(self) -> Generator[None]:
        """Places what the forward pass inside saves for the backward pass.

        Parameters, views of them, small tensors and tensors that are not contiguous stay where they are. Bytes that are
        saved several times are copied once. With activation checkpointing what is saved is the input of each block.

        Warns
        -----
        PlacementWarning
            Once in a placement: more is saved at once than ``activations`` said. What does not fit stays where it is.
        """
        weights = storages(self._model)
        saved, mover, kept, named, frozen = self._saved, self._mover, self._kept, self._named, self._frozen

        def copied(tensor: torch.Tensor) -> "_Packed | OnGpu | None":
            if tensor.is_cuda:
                return mover.put(tensor)
            # The room may be that of a tensor which a GPU still brings back.
            mover.settle()
            packed = _Packed(saved, tensor)
            return None if packed.slot is None else packed

        def pack(tensor: torch.Tensor) -> object:
            if not is_placed(tensor, weights) or named.holds(tensor):
                return _Unmoved(tensor, frozen.saved(tensor))
            weight = None if kept is None else kept.gathered(tensor)
            if weight is None:
                packed = self._copies.of(tensor, copied)
                if packed is not None:
                    return packed if packed.shape == tensor.shape else _Shaped(packed, tensor.shape)
                self._warn_of(tensor)
                return _Unmoved(tensor)
            return _Unmoved(weight) if isinstance(weight, torch.Tensor) else weight

        if not torch.is_grad_enabled():
            # An evaluation saves nothing, and is no phase of a step.
            yield
            return
        self._check()
        self._phases.turn("FWD")
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self._phases.turn("BWD")

    def _warn_of(self, tensor: torch.Tensor) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{_ACTIVATIONS}: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, stays where it is, as all "
                f"that do not fit: more is saved at once than activations={self._objects.get(_ACTIVATIONS, 0)}; "
                "place with more, and count what is saved outside the model too, as by a loss",
                PlacementWarning,
                stacklevel=3,
            )

    def _check(self, *_: object) -> None:
        """Whether devices still have what lies there; states and activations are looked at when they are used."""
        for kept in itertools.chain.from_iterable(self._ranges().values()):
            kept.check()

    def _ranges(self) -> dict[str, list[_core.Range]]:
        """The ranges of each object that has some, besides states and activations."""
        frozen = self._frozen.ranges()
        kept = {} if self._kept is None else self._kept.ranges()
        return {**kept, **self._named.ranges(), **({_FROZEN: frozen} if frozen else {})}

    def summary(self) -> str:
        """A table of each phase and tier: measured beside predicted seconds, bytes and bandwidth.

        Measured are the steps so far, FWD and BWD where `activations` is used. BWD ends where the next phase begins.
        """
        return self._phases.summary()

    def trace(self, path: str | Path) -> None:
        """Writes the phases of all steps so far, and those predicted, as a trace that Perfetto reads."""
        self._phases.trace(arguments.path("path", path))

    def cover(self, module: torch.nn.Module) -> None:
        """Places what each call of ``module`` saves, as `activations` does, without a scope at the call."""
        if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"cover: expected a torch.nn.Module, found {type(module).__name__}")
        inside: list[AbstractContextManager[None]] = []

        def enter(*_: object) -> None:
            inside.append(self.activations())
            inside[-1].__enter__()

        def leave(*_: object) -> None:
            inside.pop().__exit__(None, None, None)

        self._hooks.append(module.register_forward_pre_hook(enter))
        # Also after a call that raises.
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def rows(self) -> list[Row]:
        """Where each byte lies now. Pages of states in memory are counted by the kernel."""
        dram = self.tiers[0].name
        names = {f"node {tier.node}": tier.name for tier in self.tiers if tier.node is not None}
        names |= {str(tier.device): tier.name for tier in self.tiers if tier.device is not None}
        names["not touched"] = "not touched yet"
        rows = [
            Row(name, names.get(place, dram), nbytes, f"kernel: {place}")
            for name, ranges in self._ranges().items()
            for place, nbytes in _where(ranges).items()
        ]
        if self._kept is None:
            weights = [
                local(parameter)
                for parameter in self._parameters
                if not self.holds(parameter) and not self._frozen.counts(parameter)
            ]
            gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
            rows = [
                Row(name, dram, sum(tensor.nbytes for tensor in tensors), "count")
                for name, tensors in ((_WEIGHTS, weights), (_GRADIENTS, gradients))
            ] + rows
        else:
            rows.append(Row("gradients elsewhere", dram, self._kept.passing, "most at once"))
        rows.append(Row(_FROZEN, dram, self._frozen.stays, "count"))
        rows += [Row(_FROZEN, tier, nbytes, "size of the file") for tier, nbytes in self._frozen.on_disk.items()]
        for object_, places in ((_STATES, self._states.where()), (_ACTIVATIONS, self._saved.where())):
            for place, nbytes in places:
                rows.append(Row(object_, names.get(place, dram), nbytes, f"kernel: {place}"))
        on_disk, staged = self._states.on_disk()
        memory, _, far, buffers = self._saved.most()
        rows += [
            Row(_STATES, tier.name, nbytes, "size of the file")
            for tier, nbytes in zip(self._with_states, on_disk, strict=True)
        ]
        rows.append(Row(_ACTIVATIONS, dram, memory, "most at once"))
        rows += [
            Row(_ACTIVATIONS, tier.name, nbytes, "most at once") for tier, nbytes in zip(self._far, far, strict=True)
        ]
        rows.append(Row("staging", dram, staged + buffers + self._frozen.staged(), "count"))
        return [row for row in rows if row.bytes]

    def predicted(self) -> list[Row]:
        """Where each byte will lie in a step, `staging` among it, before there has been one."""
        names = [tier.name for tier in self.tiers]
        rows = [
            Row(object_, tier, round(self._objects[object_] * part), "predicted")
            for object_, parts in self.fractions.items()
            for tier, part in zip(names, parts, strict=True)
            if object_ != _FROZEN
        ]
        # Whole weights, which have their places already.
        rows += [Row(_FROZEN, tier, nbytes, "predicted") for tier, nbytes in self._frozen.dealt.items()]
        staging = self._states.on_disk()[1] + self._saved.staging() + self._frozen.staging()
        rows.append(Row("staging", names[0], staging, "predicted"))
        return [row for row in rows if row.bytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, of a sharded one what this process has of it, lies in a range of the placement."""
        shard = local(tensor)
        return (
            self._named.holds(shard)
            or self._frozen.holds(shard)
            or (self._kept is not None and self._kept.holds(shard))
        )

    def outside(self) -> list[torch.Tensor]:
        """Every array of numbers in this process's memory that lies outside the placement, one for each storage.

        They are those that Python knows. Their bytes are the sum of their ``untyped_storage().nbytes()``.
        """
        return list({storage_of(it): it for it in arrays() if not self.holds(it)}.values())

    def release(self) -> None:
        """Watches no step and no module any more. The states stay."""
        self._phases.close()
        if self._kept is not None:
            self._kept.release()
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """Moves the optimizer's states back into tensors, and gives the tiers' room back."""
        self.release()
        self._named.close()
        self._frozen.close()
        # Otherwise all else has moved on to another placement.
        if self._optimizer.placed_by is self:
            self._optimizer.place(None)
            self._optimizer.placed_by = None
            if self._kept is not None:
                self._kept.close()
        self._kept, self._named = None, Named({}, {})
        self._states = _core.States([])
        self._saved = _core.Saved(1.0)
        self._mover = Mover(self._saved, [])


def _where(ranges: Sequence[_core.Range]) -> dict[str, int]:
    """Bytes in each place."""
    bytes_in: dict[str, int] = {}
    for place, nbytes in (it for one in ranges for it in one.where()):
        bytes_in[place] = bytes_in.get(place, 0) + nbytes
    return bytes_in


def place(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: str | Path | Mapping[str, Sequence[float]] = "optimal",
    *,
    tiers: Sequence[Tier] | None = None,
    platform: str | Path | None = None,
    activations: int = 0,
    computation: tuple[float, float] = (0.0, 0.0),
    tensors: Mapping[str, torch.Tensor] | None = None,
    masters: bool = False,
) -> Placed:
    """Places an optimizer's states and a forward pass's saved activations, and carries the placement out.

    Parameters
    ----------
    model : torch.nn.Module
        Its trained weights and their gradients stay in the first tier, where torch computes with them; those that FSDP2
        has sharded are placed too, in tiers of memory. Those that are not trained are the object ``frozen weights``,
        which any tier takes.
    optimizer : torch.optim.Optimizer
        Any that can step over a part of its parameters, over the model's, or over 32-bit masters of 16-bit ones that
        the program keeps. It stays the same optimizer with the same bits. States that it has move. Parameters that are
        frozen when they are placed get no room for states.
    policy : str, Path or mapping
        ``dram``, ``interleave``, ``paper`` (the greedy order of Liaw and Chen's code), ``optimal`` (the least sum of
        the phases' seconds, by a linear program), or fractions, one for each tier:
        ``{"optimizer states": [0.25, 0.75], "activations": [0, 1]}``, or a JSON file of such.
    tiers : sequence of Tier, optional
        Memory first, then NUMA nodes, dax devices, and folders on disks.
    platform : str or Path, optional
        The file of ``polder probe --disk FOLDER``, in place of ``tiers``.
    activations : int
        Bytes that a forward pass saves, as `saved_bytes` says; 0 keeps them out of the placement.
    computation : pair of float
        Seconds of a forward and of a backward pass with everything in memory, which transfers are hidden behind.
    tensors : mapping of Tensor, optional
        Other objects by their names: contiguous tensors on a CPU, parameters too. Each moves into a range over tiers of
        memory and stays the same tensor; views that were made before do not follow. Policies count that a forward and a
        backward pass read it once each, and that the optimizer reads and writes a parameter.
    masters : bool
        Whether 16-bit parameters are stepped as 32-bit masters, which are one more state of each.

    Returns
    -------
    Placed

    Raises
    ------
    ArgumentError
        The optimizer cannot step over a part of its parameters, or has parameters of another model.
    PlacementError
        There is no such policy, fractions do not add up, or a tier is too small.
    TierError
        A tier cannot be used.
    """
    states = states_for(model, optimizer, masters)
    groups = [group for group in groups_of(model) if group.fsdp_params]
    return carry_out(
        model,
        list({**dict.fromkeys(model.parameters()), **dict.fromkeys(states.parameters())}),
        states,
        policy,
        tiers,
        platform,
        activations,
        computation,
        (lambda shares: Sharded(model, groups, shares)) if groups else None,
        is_sharded=bool(groups),
        named=tensors or {},
        frozen=[] if groups else frozen_of(model),
    )


def states_for(model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: bool = False) -> Any:
    """What places an optimizer's states: Polder's own where one pass steps them, of 32-bit parameters alone.

    Raises
    ------
    ArgumentError
        It steps what cannot be placed.
    """
    check_materialised(model)
    given: Any = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        found = f"{type(given).__module__}.{type(given).__qualname__}"
        raise ArgumentError(f"optimizer: expected a torch.optim.Optimizer, found {found}")
    if not isinstance(masters, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"masters: expected True or False, found {masters!r}")
    is_fused = isinstance(optimizer, Fused) and all(it.dtype == torch.float32 for it in optimizer.with_states())
    states: Any = optimizer if is_fused else states_of(optimizer, masters)
    if masters and (isinstance(optimizer, Fused) or not any(it.dtype in HALVES for it in states.with_states())):
        raise ArgumentError(
            "masters=True: expected an optimizer of torch over 16-bit parameters; polder.offload's have masters anyway"
        )
    owned: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in states.with_states():
        if parameter not in owned and not is_master(model, parameter):
            raise ArgumentError(
                "optimizer: expected parameters of the model, or 32-bit masters of its 16-bit ones, found others"
            )
        if parameter.device.type != "cpu" or not parameter.is_floating_point():
            raise ArgumentError(
                f"parameter {owned.get(parameter, 'outside the model')}: expected floating point on a CPU, found "
                f"{parameter.dtype} on {parameter.device}"
            )
    return states


def is_master(model: torch.nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a tensor outside a model may be the master of one of its 16-bit parameters, in 32 bits."""
    shapes = {it.shape for it in model.parameters() if it.dtype in HALVES}
    return parameter.dtype == torch.float32 and parameter.shape in shapes


def carry_out(
    model: torch.nn.Module,
    parameters: Sequence[torch.Tensor],
    optimizer: Any,
    policy: str | Path | Mapping[str, Sequence[float]],
    tiers: Sequence[Tier] | None,
    platform: str | Path | None,
    activations: int,
    computation: tuple[float, float],
    keep: Keep | None,
    is_sharded: bool = False,
    named: Mapping[str, torch.Tensor] = MappingProxyType({}),
    frozen: Sequence[torch.nn.Parameter] = (),
) -> Placed:
    """What `place` does with an optimizer that fits: it steps ``parameters``, and ``model`` saves activations.

    Weights and gradients that FSDP2 has sharded may lie in every tier of memory, others in the first tier alone.
    """
    if (tiers is None) == (platform is None):
        raise ArgumentError("expected tiers or a platform, one of the two")
    tiers = tiers_of(platform or "") if tiers is None else _checked(tiers)
    if not _is_count(activations):
        raise ArgumentError(f"activations: expected bytes from 0 on, found {activations!r}")
    if not _is_pair(computation):
        given = repr(computation)
        raise ArgumentError(f"computation: expected the seconds of a forward and of a backward pass, found {given}")
    check_named(named, (_WEIGHTS, _GRADIENTS, _STATES, _ACTIVATIONS, _FROZEN), model)
    own = [storage_of(tensor) for tensor in named.values()]
    frozen = [parameter for parameter in frozen if storage_of(parameter) not in own]
    others = {id(parameter) for parameter in frozen}
    objects = {
        _WEIGHTS: sum(
            local(parameter).nbytes
            for parameter in parameters
            if is_sharded or (storage_of(parameter) not in own and id(parameter) not in others)
        ),
        _GRADIENTS: sum(local(parameter).nbytes for parameter in parameters if parameter.requires_grad),
        _STATES: optimizer.nbytes(),
    }
    if activations > 0:
        objects[_ACTIVATIONS] = activations
    if frozen:
        objects[_FROZEN] = sum(parameter.nbytes for parameter in frozen)
    objects |= {name: tensor.nbytes for name, tensor in named.items()}
    moves = {phase: dict(of) for phase, of in (_SHARDED_MOVES if is_sharded else _MOVES).items()}
    stepped = [storage_of(parameter) for parameter in parameters if not is_sharded]
    for name, tensor in named.items():
        for phase, passes in (
            *_NAMED_MOVES.items(),
            *([("STEP", (1.0, 1.0))] if storage_of(tensor) in stepped else []),
        ):
            moves[phase][name] = passes
    memory = [number for number, tier in enumerate(tiers) if tier.folder is None]
    only = dict.fromkeys(_IN_MEMORY, memory if is_sharded else [0]) | dict.fromkeys(named, memory)
    # What has no bytes, as weights that are all named, lies anywhere.
    there = {name: nbytes for name, nbytes in objects.items() if nbytes > 0}
    problem = json.dumps(_problem(tiers, there, computation, moves, only))
    if isinstance(policy, str) and policy in POLICIES:
        answer = json.loads(_core.offload_place(problem, policy, None))
    else:
        rows = dict(zip(objects, _fractions(policy, list(objects), tiers), strict=True))
        answer = json.loads(_core.offload_place(problem, "", json.dumps([rows[name] for name in there])))
    by_name = dict(zip(there, answer["fractions"], strict=True))
    answer["fractions"] = [by_name.get(name, [1.0] + [0.0] * (len(tiers) - 1)) for name in objects]
    check_tiers(tiers)
    return Placed(model, parameters, optimizer, tiers, objects, answer, moves, keep, named, frozen, any(computation))


class Weight:
    """Stands for a saved weight that its stack gathers again before it is needed."""

    def __init__(self, parameter: torch.Tensor) -> None:
        # A stack that gathers gives a parameter other data, which leaves its version as it is.
        self.parameter, self.version = parameter, parameter._version

    def unpacked(self) -> torch.Tensor:
        """The parameter, unless it was changed in place since."""
        check_version(self.parameter, self.version)
        return self.parameter.detach()


class _Packed:
    """A saved tensor in its tiers, until the graph lets go of it."""

    def __init__(self, saved: _core.Saved, tensor: torch.Tensor) -> None:
        self.saved, self.shape, self.dtype, self.nbytes = saved, tensor.shape, tensor.dtype, tensor.nbytes
        with Held("the forward pass ends") as held:
            self.slot = saved.put(held.address(tensor), tensor.nbytes)

    def unpacked(self) -> torch.Tensor:
        """A copy."""
        assert self.slot is not None
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.saved.take(self.slot, tensor.data_ptr(), tensor.nbytes)
        return tensor

    def __del__(self) -> None:
        # A tensor that did not fit, or whose copy failed, has no slot.
        if (slot := getattr(self, "slot", None)) is not None:
            self.saved.free(slot)


class _Unmoved:
    """A saved tensor that stays where it is. torch looks at no version of what a hook has packed, so this does.

    ``need`` is called before it is used.
    """

    def __init__(self, tensor: torch.Tensor, need: Callable[[], None] | None = None) -> None:
        self.tensor, self.need = ungraphed(tensor), need
        self.version = tensor._version

    def unpacked(self) -> torch.Tensor:
        check_version(self.tensor, self.version)
        if self.need is not None:
            self.need()
        return self.tensor


class _Shaped:
    """A copy that was made of the same bytes in another shape."""

    def __init__(self, packed: _Packed | OnGpu, shape: torch.Size) -> None:
        self.packed, self.shape = packed, shape

    def unpacked(self) -> torch.Tensor:
        return self.packed.unpacked().view(self.shape)


class _Copies:
    """The copies of saved tensors that graphs have, by the bytes that they were made of."""

    def __init__(self) -> None:
        self._of: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Packed | OnGpu]]] = {}

    def of(
        self, tensor: torch.Tensor, copied: Callable[[torch.Tensor], _Packed | OnGpu | None]
    ) -> _Packed | OnGpu | None:
        """The copy of a tensor's bytes: one that there is, or what ``copied`` returns."""
        key = (*stretch(tensor), tensor.data_ptr(), tensor.dtype)
        if (known := self._of.get(key)) is not None and (packed := known[1]()) is not None:
            return packed
        if (packed := copied(tensor)) is not None:
            # As long as the storage is referred to, no other has its name, so that the key stands for these bytes.
            gone = weakref.ref(packed, lambda _: self._of.pop(key, None))
            self._of[key] = StorageWeakRef(tensor.untyped_storage()), gone
        return packed


def _unpack(packed: Any) -> torch.Tensor:
    return packed.unpacked()


def _is_count(given: Any) -> bool:
    """Whether it is a number from 0 on."""
    return isinstance(given, Real) and given is not True and 0 <= float(given) < float("inf")


def _is_pair(given: Any) -> bool:
    return isinstance(given, Sequence) and len(pair := cast("Sequence[Any]", given)) == 2 and all(map(_is_count, pair))


def _checked(given: Any) -> list[Tier]:
    tiers: list[Any] = list(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else [given]
    if not all(isinstance(tier, Tier) for tier in tiers):
        raise ArgumentError(f"tiers: expected a list of polder.offload.Tier, found {given!r}")
    if not tiers or tiers[0].folder is not None:
        raise ArgumentError("tiers: expected memory first")
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ArgumentError(f"tiers: expected names that differ, found {[tier.name for tier in tiers]}")
    return tiers


def _fractions(
    policy: str | Path | Mapping[str, Sequence[float] | Mapping[str, float]], objects: list[str], tiers: Sequence[Tier]
) -> list[list[float]]:
    """Fractions of every object; one that is not named lies in the first tier."""
    source = "policy"
    if not isinstance(policy, Mapping):
        try:
            path = Path(policy)
        except TypeError:
            given = type(policy).__name__
            raise ArgumentError(f"policy: expected a name, a file or fractions by object, found {given}") from None
        if not path.is_file():
            raise PlacementError(f"{str(policy)!r} is no policy and no file; there are {', '.join(POLICIES)}")
        source = str(path)
        try:
            policy = json.loads(path.read_text())
        except OSError as error:
            raise PlacementError(f"{path}: cannot read it: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise PlacementError(f"{path}: expected JSON: {error}") from None
        if not isinstance(policy, dict):
            raise PlacementError(f"{path}: expected an object's fractions by its name")
    if unknown := [name for name in policy if name not in objects]:
        raise PlacementError(f"{unknown[0]!r} is no object of this step; there are {', '.join(objects)}")
    first = [1.0] + [0.0] * (len(tiers) - 1)
    return [_row(f"{source}: {name}", policy[name], tiers) if name in policy else first for name in objects]


def _row(source: str, given: Any, tiers: Sequence[Tier]) -> list[float]:
    """A fraction for each tier: from a list in their order, or by their names, where one that is not named has none."""
    names = [tier.name for tier in tiers]
    if isinstance(given, Mapping):
        given = cast("Mapping[str, float]", given)
        if unknown := [name for name in given if name not in names]:
            raise PlacementError(f"{source}: {unknown[0]!r} is no tier; there are {', '.join(names)}")
        given = [given.get(name, 0.0) for name in names]
    try:
        if isinstance(given, str):
            raise TypeError
        row = [float(number) for number in given]
    except (TypeError, ValueError):
        raise PlacementError(f"{source}: expected a list of fractions, or fractions by tier, found {given!r}") from None
    if odd := [fraction for fraction in row if not 0 <= fraction <= 1]:
        raise PlacementError(f"{source}: expected fractions from 0 to 1, found {odd[0]}")
    return row


def _states(
    tiers: Sequence[Tier], optimizer: Any, fractions: Sequence[float]
) -> tuple[_core.States, Path | str | None]:
    """Room for an optimizer's states, and the folder of the first file, if there is one."""
    counts = cut(optimizer.elements(), fractions, _units(tiers))
    pieces = [(count, tier) for count, tier in zip(counts, tiers, strict=True) if count]
    # A stripe begins at a multiple of its own unit: the largest go first.
    memory = sorted((it for it in pieces if it[1].folder is None), key=lambda it: -it[1].unit)
    files = [(count, folder) for count, tier in pieces if (folder := tier.folder) is not None]
    states = optimizer.room([(count, tier.place) for count, tier in memory], files)
    return states, files[0][1] if files else None


def _units(tiers: Sequence[Tier]) -> list[int]:
    """32-bit elements that pieces in each tier are multiples of."""
    return [tier.unit // 4 for tier in tiers]


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def _problem(
    tiers: Sequence[Tier],
    objects: dict[str, int],
    computation: tuple[float, float],
    moves: _Moves,
    only: Mapping[str, Sequence[int]],
) -> dict[str, object]:
    """What `polder_place::Problem` reads. What ``only`` does not name can lie in every tier."""
    names = list(objects)
    kinds = {
        _WEIGHTS: "master-parameter",
        _GRADIENTS: "master-gradient",
        _STATES: "momentum",
        _ACTIVATIONS: "activation",
        _FROZEN: "parameter",
    }
    least_s = dict(zip(PHASES, (*computation, 0.0), strict=True))
    return {
        "tiers": [
            {
                "name": tier.name,
                "capacity": f"{tier.nbytes} B",
                "cpu": {"read": f"{tier.read} B/s", "write": f"{tier.write} B/s"},
                "through": 0 if tier.folder is not None else None,
            }
            for tier in tiers
        ],
        "objects": [
            {"name": name, "kind": kinds.get(name, "other"), "bytes": f"{nbytes} B", "only": only.get(name, [])}
            for name, nbytes in objects.items()
        ],
        "phases": [
            {
                "name": phase,
                "least_s": least_s[phase],
                "moved": [
                    {"object": names.index(name), "read": read, "write": write}
                    for name, (read, write) in moves[phase].items()
                    if name in names
                ],
            }
            for phase in PHASES
        ],
    }


def _moved(objects: dict[str, int], fractions: dict[str, list[float]], moves: _Moves) -> dict[str, list[float]]:
    """Of each phase the bytes that it reads and writes in each tier."""
    tiers = range(len(fractions[_STATES]))
    passes = {phase: {name: read + write for name, (read, write) in moves[phase].items()} for phase in PHASES}
    return {
        phase: [
            sum(objects[name] * fractions[name][tier] * it for name, it in of.items() if name in objects)
            for tier in tiers
        ]
        for phase, of in passes.items()
    }
