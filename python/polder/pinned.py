"""Memory that a GPU copies from and to without a detour: registered with CUDA."""

import functools
import weakref
from collections import defaultdict
from typing import Any, cast

import torch

from polder import _core

# torch's stubs leave streams without types.
# pyright: reportUnknownMemberType=false

__all__ = ["forget", "register", "room", "stream"]

_PAGE = 4096

_free: "defaultdict[int, list[_core.Range]]" = defaultdict(list)
"""Registered memory that nothing uses now, by its bytes: to register some takes longer than most copies."""


def register(kept: "_core.Range | _core.PoolMemory") -> bool:
    """Pins whole pages for copies by a GPU, up to their end; whether there is one to do it."""
    if not torch.cuda.is_available():
        return False
    cuda = cast("Any", torch.cuda.cudart())
    address = kept.address
    torch.cuda.check_error(cuda.cudaHostRegister(address, kept.size, 0))

    def release() -> None:
        # A copy that a GPU has not ended would go on with whatever comes to lie at this address.
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # pyright: ignore[reportPrivateUsage]
                torch.cuda.synchronize(device)
        cuda.cudaHostUnregister(address)

    # It does not hold the range itself, which would then live for ever.
    kept.before_release(release)
    return True


def room(nbytes: int) -> torch.Tensor:
    """Registered bytes, which can be used again when no view of them is left."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    size = _rounded(nbytes)
    free = _free[size]
    try:
        kept = free.pop()
    except IndexError:
        kept = _core.Range(size)
        register(kept)
    # A tensor's storage holds what it was made over, for as long as any view lives.
    lent = memoryview(kept)
    weakref.finalize(lent, free.append, kept).atexit = False
    return torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)


def forget() -> None:
    """Gives registered memory back that nothing uses now."""
    _free.clear()


def _rounded(nbytes: int) -> int:
    """What is taken for so many bytes: pages, in four sizes from each power of two to the next.

    Examples
    --------
    >>> [_rounded(nbytes) for nbytes in (1, 4097, 100_000, 131_072, 131_073)]
    [4096, 8192, 114688, 131072, 163840]
    """
    step = max(1 << max((nbytes - 1).bit_length() - 3, 0), _PAGE)
    return -(-nbytes // step) * step


@functools.cache
def stream(device: torch.device, use: str = "") -> Any:
    """A stream of its own for copies of one ``use``."""
    del use
    return torch.cuda.Stream(device)
