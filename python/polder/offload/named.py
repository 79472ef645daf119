"""Tensors that a program names, each in a range of its own that is striped over tiers of memory."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch

from polder import _core, arguments
from polder.errors import ArgumentError
from polder.offload.ranges import Memory, striped
from polder.offload.shards import storage_of
from polder.offload.tiers import Tier


class Named:
    """Moves tensors into ranges, and back. They stay the same objects; views that were made before do not follow.

    ``shares`` has the fraction of each in each tier of memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], shares: Mapping[str, Mapping[Tier, float]]) -> None:
        self._tensors = dict(tensors)
        self._memory: dict[str, Memory] = {}
        for name, tensor in tensors.items():
            memory = Memory(striped(tensor.nbytes, shares[name], name))
            tensor.data = memory.tensor(tensor).copy_(tensor.detach())
            self._memory[name] = memory

    def ranges(self) -> dict[str, list[_core.Range]]:
        """The range of each."""
        return {name: [it.range] for name, it in self._memory.items()}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of them."""
        return any(it.holds(tensor) for it in self._memory.values())

    def close(self) -> None:
        """Moves those that still lie there into memory of torch."""
        for name, tensor in self._tensors.items():
            if self._memory[name].holds(tensor):
                tensor.data = tensor.detach().clone()


def check_named(tensors: Any, others: Collection[str], model: torch.nn.Module) -> None:
    """Refuses names that objects of a step have, and tensors whose bytes do not lie in one row in a CPU's memory.

    A tensor that shares its bytes with another of the model, or has two names, is refused too: only one would move.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"tensors: expected tensors by their names, found {type(tensors).__name__}")
    tensors = cast("Mapping[str, Any]", tensors)
    sharing: dict[int, list[tuple[str, torch.Tensor]]] = {}
    parts: tuple[tuple[str, Any], ...] = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in (*tensors.items(), *parts) if tensors else ():
        # Another tensor of the model, or any under a second name.
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu":
            sharing.setdefault(storage_of(tensor), []).append((name, tensor))
    for name, tensor in tensors.items():
        arguments.text("a name of tensors", name)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"tensors: {name!r}: expected a contiguous tensor on a CPU, found {type(tensor).__name__}"
            )
        if name in others:
            raise ArgumentError(f"tensors: {name!r} is an object of every step; give it another name")
        is_plain = not hasattr(tensor, "to_local") and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_plain or not tensor.is_contiguous() or not tensor.nbytes:
            given = f"{type(tensor).__name__} of shape {tuple(tensor.shape)} on {tensor.device}"
            raise ArgumentError(f"tensors: {name!r}: expected a contiguous tensor on a CPU, found {given}")
        users = sharing[storage_of(tensor)]
        known = [of for of, user in users if user is not tensor or (of in tensors and of != name)]
        if known:
            raise ArgumentError(
                f"tensors: {name!r} shares its bytes with {known[0]!r}, which would not follow it; name neither, or "
                "make them one tensor under one name"
            )
