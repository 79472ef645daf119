"""Weights and gradients of a model that FSDP2 has sharded, each in one range of memory that a placement knows."""

import functools
import sys
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from polder import _core, pinned
from polder.errors import ArgumentError
from polder.offload.ranges import Memory, striped, taken
from polder.offload.shards import local, storage_of, storages, whole
from polder.offload.tiers import Tier


class Sharded:
    """Keeps the sharded weights of a model, and what FSDP2 reduces their gradients to, in two ranges.

    ``shares`` has the fraction of ``weights`` and of ``gradients`` in each tier of memory.

    FSDP2 makes gradients anew in each backward pass, as views of what it has reduced for a group of parameters. Where
    it makes a DTensor of one, the gradient is copied into the range, and the one that lies there takes its place.
    Batches that follow accumulate there. What was reduced on a GPU stays there until the GPU has copied it.
    """

    steps = None

    def __init__(self, model: torch.nn.Module, groups: list[Any], shares: Mapping[str, Mapping[Tier, float]]) -> None:
        self._model, self._groups = model, groups
        self._parts: list[Any] = [part for group in groups for part in group.fsdp_params]
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

        def kept(name: str, nbytes: int) -> Memory:
            # A range has a page at least.
            return Memory(striped(max(nbytes, 1), shares[name], name))

        self._weights = kept("weights", sum(taken(it._sharded_param_data.nbytes) for it in self._parts))
        self._gradients = kept("gradients", sum(taken(local(it.sharded_param).nbytes) for it in self._parts))
        if any(part.pin_memory for part in self._parts) and not self._weights.is_pinned():
            raise ArgumentError(
                "FSDP2 pins the parameters, so that it would move what is placed; "
                "shard with CPUOffloadPolicy(pin_memory=False)"
            )
        self._kept: dict[torch.Tensor, Any] = {}
        # What was put before a method of a class, with its name and owner.
        self._before: list[tuple[Any, str, Any]] = []
        self._warned = False
        #: Bytes of reduced gradients that lie elsewhere until they are copied, at most at once.
        self.passing = 0
        for part in self._parts:
            parameter = part.sharded_param
            _move(part, self._weights.tensor(part._sharded_param_data))
            if parameter.requires_grad:
                place = self._kept[parameter] = whole(parameter, self._gradients.tensor(local(parameter)))
                if parameter.grad is not None:
                    with torch.no_grad():
                        local(place).copy_(local(parameter.grad))
                    parameter.grad = place
            self._put_before(part, "to_sharded_dtensor", functools.partial(self._keep, part))
        for group in groups:
            if group.device.type == "cuda":
                self._put_before(group, "post_backward", functools.partial(_reduce, group))

    def _put_before(self, owner: Any, name: str, call: Any) -> None:
        setattr(owner, name, call)
        self._before.append((owner, name, call))

    @torch.no_grad()
    def _keep(self, part: Any, reduced: torch.Tensor) -> Any:
        """The gradient of a parameter that had none, in its place."""
        kept = self._kept.get(part.sharded_param)
        kind = cast("Any", type(part))
        if kept is None:
            # Frozen when it was placed, or put in the place of one that was.
            return kind.to_sharded_dtensor(part, reduced.cpu())
        if sys.getrefcount(kept) > _OURS or sys.getrefcount(kept._local_tensor) > _OURS - 1:
            if not self._warned:
                self._warned = True
                name = self._names[part.sharded_param]
                warnings.warn(
                    f"gradient of {name}: the program still has the one before, so this one lies outside the "
                    "placement; drop it, or keep a clone",
                    stacklevel=2,
                )
            return kind.to_sharded_dtensor(part, reduced.cpu())
        if reduced.is_cuda:
            local(kept).copy_(reduced, non_blocking=True)
            # FSDP2 waits for it at the end of the backward pass; the program's hooks read the gradient at once.
            part.grad_offload_event = torch.cuda.current_stream(reduced.device).record_event()
            if getattr(part.sharded_param, "_post_accumulate_grad_hooks", None):
                part.grad_offload_event.synchronize()
        else:
            if part.grad_offload_event is not None:
                part.grad_offload_event.synchronize()
            self.passing = max(self.passing, reduced.untyped_storage().nbytes())
            local(kept).copy_(reduced)
        return kept

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
        """Leaves gradients where FSDP2 makes them."""
        while self._before:
            owner, name, call = self._before.pop()
            # Another placement may have put its own there since then.
            if cast("dict[str, Any]", vars(owner)).get(name) is call:
                delattr(owner, name)

    def close(self) -> None:
        """Moves weights and gradients into memory of torch."""
        self.release()
        for part in self._parts:
            parameter = part.sharded_param
            _move(part, torch.empty_like(part._sharded_param_data))
            if parameter.grad is not None and parameter.grad is self._kept.pop(parameter, None):
                parameter.grad = whole(parameter, local(parameter.grad).clone())
        pinned.forget()


#: References to a gradient that the program does not have: in the dictionary, in `_keep`, and as an argument.
_OURS = 3

_CPU = torch.device("cpu")


class _StayOnGpu(TorchFunctionMode):
    """Leaves reduced gradients on the GPU, which are copied to memory of torch otherwise.

    The calls are those of ``foreach_reduce``. Hooks of the program run here too, and may call whatever they like.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[1] if len(args) == 2 else None
        is_to_cpu = func is torch.Tensor.to and isinstance(given, torch.device) and given == _CPU
        if is_to_cpu and args[0].is_cuda and list(kwargs) == ["non_blocking"]:
            return args[0]
        is_sum = func in (torch.Tensor.__iadd__, torch.Tensor.add_) and not kwargs
        if is_sum and isinstance(given, torch.Tensor) and given.is_cuda and not args[0].is_cuda:
            reduced = pinned.room(given.nbytes).view(given.dtype).view(given.shape)
            reduced.copy_(given, non_blocking=True)
            torch.cuda.current_stream(given.device).synchronize()
            args = args[0], reduced
        return func(*args, **kwargs)


def _reduce(group: Any, *given: Any) -> Any:
    """What FSDP2 calls to reduce the gradients of a group on a GPU."""
    kind = cast("Any", type(group))
    with _StayOnGpu():
        return kind.post_backward(group, *given)


def groups_of(model: torch.nn.Module) -> list[Any]:
    """FSDP2's groups of sharded parameters. The model has its sharded parameters from here on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    groups: list[Any] = []
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
        groups += module._get_fsdp_state()._fsdp_param_groups
    return groups


@torch.no_grad()
def _move(part: Any, to: torch.Tensor) -> None:
    """Makes the weights of a parameter, with what they are padded by, lie in ``to``."""
    to.copy_(part._sharded_param_data)
    dim, shard = part.fsdp_placement.dim, part.sharded_param._local_tensor
    length = shard.size(dim) if shard.numel() else 0
    part._sharded_param_data = to
    part.sharded_param._local_tensor = to.view(part.padded_sharded_param_size).narrow(dim, 0, length)
