"""Tensors on a GPU in the calls of the backend: they go through memory of the host that is registered with CUDA.

A copy runs on a stream of its own, behind what the current stream was given before. One into a tensor is over when the
call here returns, so that any stream sees it; one out of a tensor when `leaving` says so.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from polder import pinned
from polder.pinned import forget

# torch's stubs leave streams and copies without types.
# pyright: reportUnknownMemberType=false

__all__ = ["copied_out", "copy_in", "forget", "leaving", "room_for"]


class _Begun(threading.local):
    """Copies out that a thread has begun for its next call: an event behind each."""

    def __init__(self) -> None:
        self.events: list[Any] = []


_begun = _Begun()


def copied_out(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in memory of the host, of what the current streams have in these tensors.

    They have the bytes once what `leaving` gives has returned. Their bytes can be used again when nothing refers to a
    copy, or to a view of it, any more.
    """
    rooms = room_for(tensors)
    streams = _copy(zip(rooms, tensors, strict=True))
    for tensor in tensors:
        # What uses its bytes next on the GPU waits for the copy.
        tensor.record_stream(pinned.stream(tensor.device))
    _begun.events += [stream.record_event() for stream in streams]
    return rooms


def leaving() -> Callable[[], None] | None:
    """What returns once all that this thread has begun to copy out is there; None if that is nothing."""
    if not _begun.events:
        return None
    events, _begun.events = _begun.events, []

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous memory of the host, of the types and shapes of these tensors, which `copy_in` brings there.

    What the current streams were given so far still sees the tensors as they were.
    """
    for device in {tensor.device for tensor in tensors}:
        pinned.stream(device).wait_stream(torch.cuda.current_stream(device))
    return [_room(tensor) for tensor in tensors]


def copy_in(tensors: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> None:
    """Brings what `rooms` hold into the tensors that they were made for."""
    for stream in _copy(zip(tensors, rooms, strict=True)):
        stream.synchronize()


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterable[Any]:
    """Copies into the first of each pair what the second holds, and gives the streams; one of a pair is on a GPU."""
    streams: dict[Any, None] = {}
    # A parameter is a tensor like any other here.
    with torch.no_grad():
        for target, source in pairs:
            stream = pinned.stream((target if target.is_cuda else source).device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            streams[stream] = None
    return streams


def _room(like: torch.Tensor) -> torch.Tensor:
    return pinned.room(like.numel() * like.element_size()).view(like.dtype).view(like.shape)
