"""Tensors over ranges of memory that lie in a tier, for as long as the tensors live."""

import math
import warnings
from collections.abc import Mapping, Sequence

import torch

from polder import _core
from polder.errors import PlacementWarning, TierFullError
from polder.offload.tiers import PAGE, Tier, put
from polder.pinned import register

#: What a tensor begins at in its range, in bytes: a line of the caches.
_ALIGNED = 64


def memory(nbytes: int, tier: Tier | None = None) -> _core.Range:
    """Zeroed memory for ``nbytes`` bytes in one tier, exact to the page, and registered with CUDA where there is a GPU.

    Without a tier it lies where the kernel has room.

    Raises
    ------
    TierFullError
        The tier has no room for it.
    TierError
        The tier cannot be used.
    """
    unit = PAGE if tier is None else tier.unit
    kept = _core.Range((nbytes + unit - 1) // unit * unit)
    if tier is not None:
        put(kept, 0, kept.size, tier)
    register(kept)
    return kept


def striped(nbytes: int, shares: Mapping[Tier, float], name: str) -> _core.Range:
    """Zeroed memory whose stripes lie in several tiers, contiguous for torch, in whole pages.

    A stripe whose tier has no room lies in memory of the kernel's choice; a warning says so of ``name``.
    """
    kept = _core.Range((nbytes + PAGE - 1) // PAGE * PAGE)
    counts = cut(kept.size, list(shares.values()), [tier.unit for tier in shares])
    begin = 0
    # A stripe begins at a multiple of its own unit: the largest go first.
    for tier, count in sorted(zip(shares, counts, strict=True), key=lambda it: -it[0].unit):
        try:
            if count:
                put(kept, begin, count, tier)
        except TierFullError as error:
            warnings.warn(f"{name}: in memory of the kernel's choice: {error}", PlacementWarning, stacklevel=2)
        begin += count
    register(kept)
    return kept


def cut(whole: int, fractions: Sequence[float], units: Sequence[int]) -> list[int]:
    """What each tier has, in multiples of its unit; of tiers of pages that with the most takes what is left over.

    >>> cut(10240, [0.5, 0.5], [1024, 1024]), cut(3072, [0.49, 0.51], [1024, 1024]), cut(0, [1.0], [1024])
    ([5120, 5120], [1024, 2048], [0])
    >>> cut(10240, [0.3, 0.7], [1024, 4096])
    [6144, 4096]
    """
    counts = [int(whole * fraction) // unit * unit for fraction, unit in zip(fractions, units, strict=True)]
    finest = [tier for tier, unit in enumerate(units) if unit == min(units)]
    counts[max(finest, key=lambda tier: fractions[tier])] += whole - sum(counts)
    return counts


def tensor(
    kept: _core.Range, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """A tensor over a range, which lives as long as the tensor and its views do. Without strides it is contiguous."""
    flat = torch.frombuffer(kept, dtype=dtype, count=kept.nbytes // dtype.itemsize)
    if stride is None:
        return flat[: math.prod(shape)].view(tuple(shape))
    return flat.as_strided(tuple(shape), tuple(stride), offset)


class Memory:
    """A range of memory that tensors are views of. Its bytes go back with the last of them."""

    def __init__(self, kept: _core.Range) -> None:
        self.range = kept
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
