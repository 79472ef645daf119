"""A scope in which the tensors that are made lie in a tier."""

import threading
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from polder import _core
from polder.errors import PlacementWarning, TierFullError
from polder.offload import ranges
from polder.offload.shards import is_plain, storage_of
from polder.offload.tiers import Tier, check_tiers, named

#: Tensors below this stay where torch makes them: each in a tier takes pages of its own.
_LEAST = 64 << 10
_ATEN = torch.ops.aten
#: What makes tensors of any bytes, or of zeros, as new pages are.
_BLANK = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
    _ATEN.zeros.default,
    _ATEN.zeros_like.default,
    _ATEN.new_zeros.default,
}


def tier(name: str | Tier, platform: str | Path | None = None) -> "InTier":
    """A scope in which new tensors lie in a tier of memory: ``with polder.offload.tier("cxl"): …``.

    Every tensor of a CPU, of 64 KiB or more, that an operation of torch makes in this thread lies there: factories such
    as ``torch.empty``, ``zeros``, ``randn`` and ``tensor``, ``nn.Module`` constructors, results of arithmetic, copies,
    gradients of a backward pass, states that an optimizer makes in its first step. So does every parameter and buffer
    that a module gets meanwhile, whatever made it: ``from_pretrained`` of transformers and ``load_state_dict`` with
    ``assign=True`` load into the tier. It stays there after the scope, and its bytes go back with it. Not reached:
    other tensors of ``torch.load``, which have memory of their own, sparse, nested and quantized tensors, and
    subclasses. What lies there cannot be resized.

    Each operation takes some microseconds more, and each result is copied, so make tensors here and train outside.

    Parameters
    ----------
    name : str or Tier
        ``"node:1"``, the path of a dax device, or a name of ``platform``. A `Tier` is taken as it is.
    platform : str or Path, optional
        The file of ``polder probe``; ``platform.toml`` in the current folder if left out.

    Raises
    ------
    TierError
        The tier is not there, or this process may not use it.

    Warns
    -----
    PlacementWarning
        Once in a scope: a tensor did not fit, and lies in memory, as those after it that do not fit; or the scope ends
        and nothing was placed in it.

    Examples
    --------
    >>> import polder.offload
    >>> with polder.offload.tier("node:0") as scope:
    ...     table = torch.zeros(1024, 1024)
    >>> scope.where()
    [('node 0', 4194304)]
    """
    return InTier(name if isinstance(name, Tier) else named(name, platform))


class InTier(TorchDispatchMode):
    """What `tier` returns."""

    def __init__(self, it: Tier) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._tier = it
        self._made: weakref.WeakSet[_core.Range] = weakref.WeakSet()
        self._warned = False
        # Whether a tensor was put into the tier since the scope began.
        self._has_placed = False
        self._lock = threading.RLock()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        check_tiers([self._tier])
        self._warned = self._has_placed = False
        # Also what other threads give to modules, as those that load a checkpoint do.
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            self._hooks.append(register(self._got))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # pyright: ignore[reportUnknownMemberType]
        while self._hooks:
            self._hooks.pop().remove()
        if kind is None and not (self._warned or self._has_placed):
            warnings.warn(
                f"tier {self._tier.name}: nothing was placed in this scope: no operation of torch made a tensor of "
                f"{_LEAST} bytes or more on a CPU in this thread, and no module got one; make or load the model inside",
                PlacementWarning,
                stacklevel=2,
            )

    def _got(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """Moves a parameter or a buffer that a module gets, and that no operation in the scope has made."""
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.device.type != "cpu"
            or not is_plain(tensor)
            or tensor.nbytes < _LEAST
        ):
            return
        with self._lock:
            if any(0 <= tensor.data_ptr() - kept.address < kept.nbytes for kept in self._made):
                return
            # The bytes of the tensor alone: that of a checkpoint may be a view of the whole file.
            like = torch.empty_like(tensor, device="meta")
            if (kept := self._room(like.nbytes, tensor)) is not None:
                tensor.data = ranges.tensor(kept, tensor.shape, tensor.dtype, like.stride()).copy_(tensor.detach())

    def where(self) -> list[tuple[str, int]]:
        """Bytes of the tensors that were made here and still live, by place, as the kernel says."""
        places: dict[str, int] = {}
        for kept in self._made:
            for place, nbytes in kept.where():
                places[place] = places.get(place, 0) + nbytes
        return sorted(places.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is _ATEN.lift_fresh.default:
            given: set[int] = set()
        else:
            tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
            given = {
                storage_of(tensor) for tensor in tensors if tensor.layout == torch.strided and not tensor.is_nested
            }
        moved: dict[int, _core.Range | None] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not is_plain(tensor):
                return tensor
            key = storage_of(tensor)
            if tensor.untyped_storage().nbytes() < _LEAST or key in given:
                return tensor
            if key not in moved:
                moved[key] = self._range(tensor, is_blank=func in _BLANK)
            kept, begin = moved[key], int(tensor.storage_offset())
            return tensor if kept is None else ranges.tensor(kept, tensor.shape, tensor.dtype, tensor.stride(), begin)

        return tree_map_only(torch.Tensor, move, made)

    def _range(self, it: torch.Tensor, *, is_blank: bool) -> _core.Range | None:
        """Memory of the tier with the bytes of a tensor's storage."""
        storage = it.untyped_storage()
        kept = self._room(storage.nbytes(), it)
        if kept is not None and not is_blank:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            ranges.tensor(kept, (storage.nbytes(),), torch.uint8).copy_(whole)
        return kept

    def _room(self, nbytes: int, tensor: torch.Tensor) -> _core.Range | None:
        """Memory of the tier for a tensor, if there is some."""
        try:
            kept = ranges.memory(nbytes, self._tier)
        except TierFullError as error:
            if not self._warned:
                self._warned = True
                what = f"tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
                warnings.warn(
                    f"{what}: not in tier {self._tier.name}, but in memory: {error}",
                    PlacementWarning,
                    stacklevel=5,
                )
            return None
        with self._lock:
            self._made.add(kept)
        self._has_placed = True
        return kept
