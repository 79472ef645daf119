"""A placement carried out: states of the optimizer and saved activations in their tiers."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from polder import _core
from polder.errors import ArgumentError, PlacementError
from polder.offload.fsdp import Sharded, parts_of
from polder.offload.optimizer import PAGE, Adam
from polder.offload.phases import PHASES, Phases
from polder.offload.shards import local
from polder.offload.tiers import Tier, tiers_of

#: The policies by name; a mapping of fractions, or a JSON file of one, is a policy too.
POLICIES = ("dram", "interleave", "paper", "optimal")
#: Saved tensors below this stay where they are: their own bookkeeping costs as much.
_LEAST = 64 << 10
_WEIGHTS, _GRADIENTS, _STATES, _ACTIVATIONS = "weights", "gradients", "optimizer states", "activations"
#: How often a phase reads and writes each object.
_MOVES: dict[str, dict[str, tuple[float, float]]] = {
    "FWD": {_ACTIVATIONS: (0, 1)},
    "BWD": {_ACTIVATIONS: (1, 0)},
    "STEP": {_WEIGHTS: (1, 1), _GRADIENTS: (1, 0), _STATES: (1, 1)},
}


@dataclass(frozen=True)
class Row:
    """Bytes of an object in a tier, and whose word it is: the kernel's, or the placement's own count."""

    object: str
    tier: str
    bytes: int
    word: str


class Placed:
    """What `place` returns: the placement, what it takes, and the tiers that hold it."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Adam, tiers: Sequence[Tier], objects: dict[str, int], answer: Any
    ) -> None:
        self.tiers = list(tiers)
        #: Of each object the fraction in each tier.
        self.fractions: dict[str, list[float]] = dict(zip(objects, answer["fractions"], strict=True))
        #: Predicted seconds of FWD, BWD and STEP: the slowest link of each, or its computation.
        self.seconds: dict[str, float] = dict(zip(PHASES, answer["seconds"], strict=True))
        #: Predicted seconds of each tier's link in each phase.
        self.links: dict[str, list[float]] = dict(zip(PHASES, answer["links"], strict=True))
        self._model, self._optimizer, self._objects = model, optimizer, objects
        self._parameters = list(model.parameters())
        self._hooks: list[RemovableHandle] = []
        folders = [tier.folder for tier in tiers if tier.folder is not None]
        folder = folders[0] if folders else None
        counts = _cut(optimizer.elements(), self.fractions[_STATES])
        kept = [(count, tier.node) for count, tier in zip(counts, tiers, strict=True) if tier.folder is None]
        far = sum(count for count, tier in zip(counts, tiers, strict=True) if tier.folder is not None)
        self._states = _core.States(kept, far, folder)
        in_memory, on_disk = 1.0, 0
        if _ACTIVATIONS in objects:
            rows = zip(self.fractions[_ACTIVATIONS], tiers, strict=True)
            in_memory = sum(fraction for fraction, tier in rows if tier.folder is None)
            # Each saved tensor takes whole pages.
            on_disk = int(objects[_ACTIVATIONS] * (1 - in_memory) * 1.05) + (1 << 20) if in_memory < 1 else 0
        self._saved = _core.Saved(in_memory, on_disk, folder)
        # All tiers are there: from here on nothing can be refused for want of room.
        if (before := optimizer.placed_by) is not None:
            before.release()
        optimizer.placed_by = self
        optimizer.place(self._states, folder if far else None)
        self._sharded = Sharded(model, parts) if (parts := parts_of(model)) else None
        names = [tier.name for tier in self.tiers]
        self._phases = Phases(optimizer, names, self.seconds, self.links, _moved(objects, self.fractions))

    @contextmanager
    def activations(self) -> Generator[None]:
        """Places what the forward pass inside saves for the backward pass.

        Parameters, views of them, small tensors and tensors that are not contiguous stay where they are. With
        activation checkpointing what is saved is the input of each block.
        """
        weights = _storages(self._model)
        saved = self._saved

        def pack(tensor: torch.Tensor) -> object:
            if not _is_placed(tensor, weights):
                return tensor
            if self._sharded is not None and not _is_placed(tensor, _storages(self._model)):
                # FSDP2 has gathered this weight since, and gives its memory back itself.
                return tensor
            return _Packed(saved, tensor)

        if not torch.is_grad_enabled():
            # An evaluation saves nothing, and is no phase of a step.
            yield
            return
        self._phases.turn("FWD")
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self._phases.turn("BWD")

    def summary(self) -> str:
        """A table of each phase and tier: measured beside predicted seconds, bytes and bandwidth.

        Measured are the steps so far, FWD and BWD where `activations` is used. BWD ends where the next phase begins.
        """
        return self._phases.summary()

    def trace(self, path: str | Path) -> None:
        """Writes the phases of all steps so far, and those predicted, as a trace that Perfetto reads."""
        self._phases.trace(path)

    def cover(self, module: torch.nn.Module) -> None:
        """Places what each call of ``module`` saves, as `activations` does, without a scope at the call."""
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
        weights = [local(parameter) for parameter in self._parameters]
        gradients = [local(it.grad) for it in self._parameters if it.grad is not None]
        rows = [
            Row(name, dram, sum(it.nbytes for it in tensors), "count")
            for name, tensors in ((_WEIGHTS, weights), (_GRADIENTS, gradients))
        ]
        if self._sharded is not None:
            rows.append(Row("gradients reduced", dram, self._sharded.passing, "most at once"))
        names: dict[int | None, str] = {tier.node: tier.name for tier in self.tiers if tier.node is not None}
        names[None] = "not touched yet"
        for node, nbytes in self._states.nodes():
            rows.append(Row(_STATES, names.get(node, dram), nbytes, f"kernel: node {node}"))
        disk = next((tier.name for tier in self.tiers if tier.folder is not None), "")
        on_disk, staged = self._states.on_disk()
        memory, far, buffers = self._saved.most()
        rows += [
            Row(_STATES, disk, on_disk, "size of the file"),
            Row(_ACTIVATIONS, dram, memory, "most at once"),
            Row(_ACTIVATIONS, disk, far, "most at once"),
            Row("staging", dram, staged + buffers, "count"),
        ]
        return [row for row in rows if row.bytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a weight or a gradient, of a sharded model what this process has of it, lies in the placement."""
        shard = local(tensor)
        return self._sharded is not None and (
            self._sharded.weights.holds(shard) or self._sharded.gradients.holds(shard)
        )

    def release(self) -> None:
        """Watches no step and no module any more. The states stay."""
        self._phases.close()
        if self._sharded is not None:
            self._sharded.release()
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """Moves the optimizer's states back into tensors, and gives the tiers' room back."""
        self.release()
        if self._optimizer.placed_by is not self:
            # The states have moved on to another placement.
            return
        self._optimizer.place(None)
        self._optimizer.placed_by = None
        if self._sharded is not None:
            self._sharded.close()
        self._states = _core.States([])
        self._saved = _core.Saved(1.0)


def place(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: str | Path | Mapping[str, Sequence[float]] = "optimal",
    *,
    tiers: Sequence[Tier] | None = None,
    platform: str | Path | None = None,
    activations: int = 0,
    computation: tuple[float, float] = (0.0, 0.0),
) -> Placed:
    """Places an optimizer's states and a forward pass's saved activations, and carries the placement out.

    Parameters
    ----------
    model : torch.nn.Module
        Of 32-bit parameters. Its weights and their gradients stay in the first tier, where torch computes with them.
    optimizer : Adam
        A `polder.offload.AdamW` or `polder.offload.Adam` over the model's parameters. States that it has move.
    policy : str, Path or mapping
        ``dram``, ``interleave``, ``paper`` (the greedy order of Liaw and Chen's code), ``optimal`` (the least sum of
        the phases' seconds, by a linear program), or fractions, one for each tier:
        ``{"optimizer states": [0.25, 0.75], "activations": [0, 1]}``, or a JSON file of such.
    tiers : sequence of Tier, optional
        Memory first, then NUMA nodes or one folder on a disk.
    platform : str or Path, optional
        The file of ``polder probe --disk FOLDER``, in place of ``tiers``.
    activations : int
        Bytes that a forward pass saves, as `saved_bytes` says; 0 keeps them out of the placement.
    computation : pair of float
        Seconds of a forward and of a backward pass with everything in memory, which transfers are hidden behind.

    Returns
    -------
    Placed

    Raises
    ------
    PlacementError
        There is no such policy, fractions do not add up, or a tier is too small.
    TierError
        A tier cannot be used.
    """
    if not isinstance(optimizer, Adam):
        found = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ArgumentError(f"optimizer: expected polder.offload.AdamW or Adam, found {found}")
    parts_of(model)
    owned: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in optimizer.parameters():
        if parameter not in owned:
            raise ArgumentError("optimizer: expected parameters of the model, found others")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ArgumentError(
                f"parameter {owned[parameter]}: expected float32 on a CPU, found {parameter.dtype} on "
                f"{parameter.device}; give the optimizer 32-bit parameters alone, or convert the model with .float()"
            )
    if (tiers is None) == (platform is None):
        raise ArgumentError("expected tiers or a platform, one of the two")
    tiers = list(tiers) if tiers is not None else tiers_of(platform or "")
    _check_tiers(tiers)
    objects = {
        _WEIGHTS: sum(local(parameter).nbytes for parameter in model.parameters()),
        _GRADIENTS: sum(local(parameter).nbytes for parameter in model.parameters() if parameter.requires_grad),
        _STATES: 8 * optimizer.elements(),
    }
    if activations > 0:
        objects[_ACTIVATIONS] = activations
    problem = json.dumps(_problem(tiers, objects, computation))
    if isinstance(policy, str) and policy in POLICIES:
        answer = json.loads(_core.offload_place(problem, policy, None))
    else:
        fractions = _fractions(policy, list(objects), len(tiers))
        answer = json.loads(_core.offload_place(problem, "", json.dumps(fractions)))
    return Placed(model, optimizer, tiers, objects, answer)


def saved_bytes(model: torch.nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> int:
    """Bytes that a forward pass of ``model`` saves for its backward pass and that can be placed.

    Runs the model on the meta device: nothing is computed, and no memory is taken. A model that looks at values runs
    once for real, and what it saves is dropped at once.

    Parameters
    ----------
    model : torch.nn.Module
        In training mode, with the checkpointing that it will have.
    inputs, named : tensors
        As in a step; only shapes and types count.
    """

    def run(device: str) -> int:
        buffers = {name: it.to(device, copy=True) for name, it in model.named_buffers()}
        parameters = {
            name: torch.empty_like(it, device=device).requires_grad_(it.requires_grad) if device == "meta" else it
            for name, it in model.named_parameters()
        }
        weights = {_storage(it) for it in (*parameters.values(), *buffers.values())}
        saved: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            if _is_placed(tensor, weights):
                saved.append(tensor.nbytes)
            # Nothing is walked backwards here.
            return tensor if device == "meta" else None

        # Training goes on with the numbers that it would have drawn.
        with (
            torch.random.fork_rng(devices=[]),  # pyright: ignore[reportUnknownMemberType]
            torch.autograd.graph.saved_tensors_hooks(pack, lambda it: it),
        ):
            given = tuple(it.to(device) for it in inputs)
            also = {name: it.to(device) for name, it in named.items()}
            torch.func.functional_call(model, {**parameters, **buffers}, given, also)
        return sum(saved)

    try:
        return run("meta")
    except RuntimeError:
        return run("cpu")


class _Packed:
    """A saved tensor in its tiers, until the graph lets go of it."""

    def __init__(self, saved: _core.Saved, tensor: torch.Tensor) -> None:
        self.saved, self.shape, self.dtype, self.nbytes = saved, tensor.shape, tensor.dtype, tensor.nbytes
        self.slot = saved.put(tensor.data_ptr(), tensor.nbytes)

    def __del__(self) -> None:
        # A tensor that no tier took has no slot.
        if (slot := getattr(self, "slot", None)) is not None:
            self.saved.free(slot)


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _Packed):
        return packed
    tensor = torch.empty(packed.shape, dtype=packed.dtype)
    packed.saved.take(packed.slot, tensor.data_ptr(), tensor.nbytes)
    return tensor


def _storages(model: torch.nn.Module) -> set[int]:
    return {_storage(it) for it in (*model.parameters(), *model.buffers())}


def _storage(tensor: torch.Tensor) -> int:
    """What views of one tensor share, on the meta device too, where nothing has an address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _is_placed(tensor: torch.Tensor, weights: set[int]) -> bool:
    return (
        tensor.nbytes >= _LEAST
        and tensor.device.type in ("cpu", "meta")
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and _storage(tensor) not in weights
    )


def _check_tiers(tiers: Sequence[Tier]) -> None:
    if not tiers or tiers[0].folder is not None:
        raise ArgumentError("tiers: expected memory first")
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ArgumentError(f"tiers: expected names that differ, found {[tier.name for tier in tiers]}")
    if sum(tier.folder is not None for tier in tiers) > 1:
        raise ArgumentError("tiers: expected one folder at most")


def _fractions(policy: str | Path | Mapping[str, Sequence[float]], objects: list[str], tiers: int) -> list[list[float]]:
    """Fractions of every object; one that is not named lies in the first tier."""
    if not isinstance(policy, Mapping):
        path = Path(policy)
        if not path.is_file():
            raise PlacementError(f"{str(policy)!r} is no policy and no file; there are {', '.join(POLICIES)}")
        try:
            policy = json.loads(path.read_text())
        except ValueError as error:
            raise PlacementError(f"{path}: expected JSON: {error}") from None
        if not isinstance(policy, dict):
            raise PlacementError(f"{path}: expected an object's fractions by its name")
    if unknown := [name for name in policy if name not in objects]:
        raise PlacementError(f"{unknown[0]!r} is no object of this step; there are {', '.join(objects)}")
    first = [1.0] + [0.0] * (tiers - 1)
    return [[float(it) for it in policy.get(name, first)] for name in objects]


def _cut(elements: int, fractions: Sequence[float]) -> list[int]:
    """Elements in each tier, in whole pages; the tier with the most takes what is left over.

    >>> _cut(10240, [0.5, 0.5]), _cut(3072, [0.49, 0.51]), _cut(0, [1.0])
    ([5120, 5120], [1024, 2048], [0])
    """
    counts = [int(elements * fraction) // PAGE * PAGE for fraction in fractions]
    counts[max(range(len(counts)), key=lambda tier: fractions[tier])] += elements - sum(counts)
    return counts


def _problem(tiers: Sequence[Tier], objects: dict[str, int], computation: tuple[float, float]) -> dict[str, object]:
    """What `polder_place::Problem` reads. States and activations are what can be placed here."""
    names = list(objects)
    kinds = {
        _WEIGHTS: "master-parameter",
        _GRADIENTS: "master-gradient",
        _STATES: "momentum",
        _ACTIVATIONS: "activation",
    }
    stay = {_WEIGHTS, _GRADIENTS}
    if any(tier.node is not None for tier in tiers):
        # Saved tensors are not bound to nodes yet.
        stay.add(_ACTIVATIONS)
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
            {"name": name, "kind": kinds[name], "bytes": f"{nbytes} B", "only": 0 if name in stay else None}
            for name, nbytes in objects.items()
        ],
        "phases": [
            {
                "name": phase,
                "least_s": least_s[phase],
                "moved": [
                    {"object": names.index(name), "read": read, "write": write}
                    for name, (read, write) in _MOVES[phase].items()
                    if name in names
                ],
            }
            for phase in PHASES
        ],
    }


def _moved(objects: dict[str, int], fractions: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each phase the bytes that it reads and writes in each tier."""
    tiers = range(len(fractions[_STATES]))
    passes = {phase: {name: read + write for name, (read, write) in _MOVES[phase].items()} for phase in PHASES}
    return {
        phase: [
            sum(objects[name] * fractions[name][tier] * it for name, it in of.items() if name in objects)
            for tier in tiers
        ]
        for phase, of in passes.items()
    }
