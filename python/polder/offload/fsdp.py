"""Weights and gradients of a model that FSDP2 has sharded, each in one range of memory that a placement knows."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from polder import _core
from polder.errors import ArgumentError
from polder.offload.ranges import Memory, striped, taken
from polder.offload.shards import local, storage_of, storages, whole
from polder.offload.tiers import Tier


class Sharded:
    """Keeps the sharded weights of a model, and what FSDP2 reduces their gradients to, in two ranges.

    ``shares`` has the fraction of ``weights`` and of ``gradients`` in each tier of memory.

    FSDP2 makes gradients anew in each backward pass, as views of what it has reduced for a group of parameters. A hook
    that it calls after each copies the gradient into the range, and makes that one the parameter's. Batches that follow
    accumulate there.
    """

    steps = None

    def __init__(self, model: torch.nn.Module, parts: list[Any], shares: Mapping[str, Mapping[Tier, float]]) -> None:
        self._model, self._parts = model, parts
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

        def kept(name: str, nbytes: int) -> Memory:
            # A range has a page at least.
            return Memory(striped(max(nbytes, 1), shares[name], name))

        self._weights = kept("weights", sum(taken(it._sharded_param_data.nbytes) for it in self._parts))
        self._gradients = kept("gradients", sum(taken(local(it.sharded_param).nbytes) for it in self._parts))
        if any(part.pin_memory for part in parts) and not self._weights.is_pinned():
            raise ArgumentError(
                "FSDP2 pins the parameters, so that it would move what is placed; "
                "shard with CPUOffloadPolicy(pin_memory=False)"
            )
        self._kept: dict[torch.Tensor, Any] = {}
        self._part_of = {part.sharded_param: part for part in self._parts}
        self._hooks: list[RemovableHandle] = []
        self._warned = False
        #: Bytes of reduced gradients that lie elsewhere until they are copied, at most at once.
        self.passing = 0
        for part in self._parts:
            parameter = part.sharded_param
            _move(part, self._weights.tensor(part._sharded_param_data))
            if parameter.requires_grad:
                self._kept[parameter] = whole(parameter, self._gradients.tensor(local(parameter)))
                self._keep(parameter)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._keep))

    @torch.no_grad()
    def _keep(self, parameter: torch.Tensor) -> None:
        kept = self._kept[parameter]
        if parameter.grad is None or parameter.grad is kept:
            return
        if sys.getrefcount(kept) > _OURS or sys.getrefcount(kept._local_tensor) > _OURS - 1:
            if not self._warned:
                self._warned = True
                name = self._names[parameter]
                warnings.warn(
                    f"gradient of {name}: the program still has the one before, so this one lies outside the "
                    "placement; drop it, or keep a clone",
                    stacklevel=2,
                )
            return
        copied = self._part_of[parameter].grad_offload_event
        if copied is not None:
            # A GPU may still copy it to where it is.
            copied.synchronize()
        reduced = local(parameter.grad)
        self.passing = max(self.passing, reduced.untyped_storage().nbytes())
        local(kept).copy_(reduced)
        parameter.grad = kept

    def ranges(self) -> dict[str, list[_core.Range]]:
        """The ranges of each object."""
        return {"weights": [self._weights.range], "gradients": [self._gradients.range]}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this process lies in one of them."""
        return self._weights.holds(tensor) or self._gradients.holds(tensor)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor, if it is a weight that FSDP2 has gathered: it gives the memory back itself."""
        return tensor if storage_of(tensor) in storages(self._model) else None

    def release(self) -> None:
        """Watches no gradient any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """Moves weights and gradients into memory of torch."""
        self.release()
        for part in self._parts:
            parameter = part.sharded_param
            _move(part, torch.empty_like(part._sharded_param_data))
            if parameter.grad is not None and parameter.grad is self._kept.pop(parameter, None):
                parameter.grad = whole(parameter, local(parameter.grad).clone())


#: References to a gradient that the program does not have: in the dictionary, in `_keep`, and as an argument.
_OURS = 3


def parts_of(model: torch.nn.Module) -> list[Any]:
    """What FSDP2 keeps of each parameter that it has sharded. The model has its sharded parameters from here on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    parts: list[Any] = []
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
        parts += [part for group in module._get_fsdp_state()._fsdp_param_groups for part in group.fsdp_params]
    return parts


@torch.no_grad()
def _move(part: Any, to: torch.Tensor) -> None:
    """Makes the weights of a parameter, with what they are padded by, lie in ``to``."""
    to.copy_(part._sharded_param_data)
    dim, shard = part.fsdp_placement.dim, part.sharded_param._local_tensor
    length = shard.size(dim) if shard.numel() else 0
    part._sharded_param_data = to
    part.sharded_param._local_tensor = to.view(part.padded_sharded_param_size).narrow(dim, 0, length)
