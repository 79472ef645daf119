"""Tensors over ranges of memory that lie in a tier, for as long as the tensors live."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from polder import _core
from polder.offload.tiers import Tier

#: What a tensor begins at in its range, in bytes: a line of the caches.
_ALIGNED = 64


def memory(nbytes: int, tier: Tier) -> _core.Range:
    """Zeroed memory for ``nbytes`` bytes in one tier, exact to the page, and registered with CUDA where there is a GPU.

    Raises
    ------
    TierFullError
        The tier has no room for it.
    TierError
        The tier cannot be used.
    """
    kept = _core.Range((nbytes + tier.unit - 1) // tier.unit * tier.unit)
    if tier.node is not None:
        kept.bind(0, kept.size, tier.node)
    elif tier.device is not None:
        kept.map(0, kept.size, tier.device)
    register(kept)
    return kept


def tensor(
    kept: _core.Range, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """A tensor over a range, which lives as long as the tensor and its views do. Without strides it is contiguous."""
    flat = torch.frombuffer(kept, dtype=dtype, count=kept.nbytes // dtype.itemsize)
    if stride is None:
        return flat[: math.prod(shape)].view(tuple(shape))
    return flat.as_strided(tuple(shape), tuple(stride), offset)


def register(kept: _core.Range) -> bool:
    """Pins a range for copies by a GPU, up to its end; whether there is one to do it."""
    if not torch.cuda.is_available():
        return False
    cuda = cast("Any", torch.cuda.cudart())
    address = kept.address
    torch.cuda.check_error(cuda.cudaHostRegister(address, kept.size, 0))
    # Not the range itself, which would then live for ever.
    kept.before_release(lambda: cuda.cudaHostUnregister(address))
    return True


class Memory:
    """One range of memory of a tier that tensors are views of. Its bytes go back with the last of them."""

    def __init__(self, nbytes: int, tier: Tier) -> None:
        # A range has a page at least.
        self.range = memory(max(nbytes, 1), tier)
        self._bytes = torch.frombuffer(self.range, dtype=torch.uint8)
        self._taken = 0

    def is_pinned(self) -> bool:
        """Whether a GPU copies from it without a detour."""
        return self._bytes.is_pinned()

    def tensor(self, like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The next part of the range, of the type of another tensor, and of its shape if none is given. All is 0."""
        shape = torch.Size(like.shape if shape is None else shape)
        begin, nbytes = self._taken, shape.numel() * like.element_size()
        self._taken += taken(nbytes)
        return self._bytes[begin : begin + nbytes].view(like.dtype).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the range; an empty one lies anywhere."""
        return not tensor.nbytes or 0 <= tensor.data_ptr() - self.range.address < self.range.nbytes


def taken(nbytes: int) -> int:
    """Bytes that a tensor takes of a range."""
    return (nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED
