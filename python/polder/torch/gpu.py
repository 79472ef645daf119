"""Tensors on a GPU in the calls of the backend: they go through memory of the host that is registered with CUDA.

A copy runs on a stream of its own, behind what the current stream was given before. It is over when the call here
returns, so that any stream sees it.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from polder import _core
from polder.pinned import register

# torch's stubs leave streams and copies without types.
# pyright: reportUnknownMemberType=false

__all__ = ["copied_out", "copy_in", "forget", "room_for"]

_PAGE = 4096

_free: "defaultdict[int, list[_core.Range]]" = defaultdict(list)
"""Registered memory that nothing uses now, by its bytes: to register some takes longer than most copies."""


def copied_out(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in memory of the host, of what the current streams have in these tensors.

    Their bytes can be used again when nothing refers to a copy, or to a view of it, any more.
    """
    rooms = room_for(tensors)
    _copy(zip(rooms, tensors, strict=True))
    return rooms


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous memory of the host, of the types and shapes of these tensors, which `copy_in` brings there.

    What the current streams were given so far still sees the tensors as they were.
    """
    for device in {tensor.device for tensor in tensors}:
        _stream(device).wait_stream(torch.cuda.current_stream(device))
    return [_room(tensor) for tensor in tensors]


def copy_in(tensors: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> None:
    """Brings what `rooms` hold into the tensors that they were made for."""
    _copy(zip(tensors, rooms, strict=True))


def forget() -> None:
    """Gives registered memory back that nothing uses now."""
    _free.clear()


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies into the first of each pair what the second holds; one of them is on a GPU."""
    streams: dict[Any, None] = {}
    # A parameter is a tensor like any other here.
    with torch.no_grad():
        for target, source in pairs:
            stream = _stream((target if target.is_cuda else source).device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            streams[stream] = None
    for stream in streams:
        stream.synchronize()


def _room(like: torch.Tensor) -> torch.Tensor:
    nbytes = like.numel() * like.element_size()
    if not nbytes:
        return torch.empty(like.shape, dtype=like.dtype)
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
    return torch.frombuffer(lent, dtype=torch.uint8, count=nbytes).view(like.dtype).view(like.shape)


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
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
