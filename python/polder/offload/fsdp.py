"""Weights and gradients of a model that FSDP2 has sharded, each in one range of memory that a placement knows."""

import mmap
import sys
import warnings
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from polder.errors import ArgumentError
from polder.offload.shards import local, whole

#: What a tensor begins at in its range, in bytes: a line of the caches.
_ALIGNED = 64


class Memory:
    """One range of memory that tensors are views of. Its bytes go back with the last of them."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)
        self._taken = 0

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """The next part of the range, of the shape and the type of another tensor; its bytes are 0 at first."""
        begin, self._taken = self._taken, self._taken + taken(like)
        return self._bytes[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the range; an empty one lies anywhere."""
        return not tensor.nbytes or 0 <= tensor.data_ptr() - self._bytes.data_ptr() < self._bytes.nbytes


def taken(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes of a range."""
    return (tensor.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED


class Sharded:
    """Keeps the sharded weights of a model, and what FSDP2 reduces their gradients to, in two ranges.

    FSDP2 makes gradients anew in each backward pass, as views of what it has reduced for a group of parameters. A hook
    that it calls after each copies the gradient into the range, and makes that one the parameter's. Batches that follow
    accumulate there.
    """

    def __init__(self, model: torch.nn.Module, parts: list[Any]) -> None:
        self._parts = parts
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.weights = Memory(sum(taken(it._sharded_param_data) for it in self._parts))
        self.gradients = Memory(sum(taken(local(it.sharded_param)) for it in self._parts))
        self._kept: dict[torch.Tensor, Any] = {}
        self._hooks: list[RemovableHandle] = []
        self._warned = False
        #: Bytes of reduced gradients that lie elsewhere until they are copied, at most at once.
        self.passing = 0
        for part in self._parts:
            parameter = part.sharded_param
            _move(part, self.weights.tensor(part._sharded_param_data))
            if parameter.requires_grad:
                self._kept[parameter] = whole(parameter, self.gradients.tensor(local(parameter)))
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
        reduced = local(parameter.grad)
        self.passing = max(self.passing, reduced.untyped_storage().nbytes())
        local(kept).copy_(reduced)
        parameter.grad = kept

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
    if any(part.pin_memory for part in parts):
        raise ArgumentError(
            "FSDP2 pins the parameters, and would move what is placed; shard with CPUOffloadPolicy(pin_memory=False)"
        )
    return parts


@torch.no_grad()
def _move(part: Any, to: torch.Tensor) -> None:
    """Makes the weights of a parameter, with what they are padded by, lie in ``to``."""
    to.copy_(part._sharded_param_data)
    dim, shard = part.fsdp_placement.dim, part.sharded_param._local_tensor
    length = shard.size(dim) if shard.numel() else 0
    part._sharded_param_data = to
    part.sharded_param._local_tensor = to.view(part.padded_sharded_param_size).narrow(dim, 0, length)
