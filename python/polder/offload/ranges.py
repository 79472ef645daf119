"""Tensors over ranges of memory that lie in a tier, for as long as the tensors live."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from polder import _core
from polder.offload.tiers import Tier


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
