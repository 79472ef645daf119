"""Tensors on a GPU in the calls of the backend: they go through memory of the host that is registered with CUDA.

Long tensors of four collectives go through the pool itself, where peers read what the GPU has put there (`PinnedPool`).
All else goes through private memory. A copy runs on a stream of its own, behind what the current stream was given
before. One into a tensor is over when the call here returns, so that any stream sees it; one out of a tensor when
`leaving` says so.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polder import _core, pinned
from polder.pinned import forget

# torch's stubs leave streams and copies without types.
# pyright: reportUnknownMemberType=false

__all__ = ["HALF", "SHORT", "Passage", "Piece", "PinnedPool", "cut", "dense", "flat"]
__all__ += ["copied_out", "copy_in", "forget", "leaving", "room_for"]

SHORT = 64 << 10
"""Messages of fewer bytes go through private memory: there the latency counts, not the copy."""

HALF = 8 << 20
"""Bytes of one of the two places in the pool that the pieces of a tensor take in turn."""

_LINE = 64


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


@dataclass
class Piece:
    """What one call of a group works on in the pool.

    Attributes
    ----------
    nbytes : int
        Bytes there.
    leave, enter : list of (int, tensor)
        Where bytes of tensors on the GPU go there before the call, and what comes from there after it.
    """

    nbytes: int
    leave: list[tuple[int, torch.Tensor]]
    enter: list[tuple[int, torch.Tensor]]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy on its GPU that the current stream makes."""
    if tensor.is_contiguous():
        return tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor, non_blocking=True)


def cut(
    leave: Sequence[tuple[int, torch.Tensor]], enter: Sequence[tuple[int, torch.Tensor]], chunks: int
) -> list[Piece]:
    """The pieces of a message in ``chunks`` of one length, each cut at the same places.

    Parameters
    ----------
    leave, enter
        The bytes of chunks that leave the GPU and that come to it, each with the chunk's number.

    Examples
    --------
    >>> whole = torch.empty(HALF + 100, dtype=torch.uint8)
    >>> [(piece.nbytes, len(piece.leave), len(piece.enter)) for piece in cut([(0, whole)], [], 1)]
    [(8388608, 1, 0), (100, 1, 0)]
    """
    length = len((*leave, *enter)[0][1])
    step = HALF // chunks // _LINE * _LINE

    def parts(of: Sequence[tuple[int, torch.Tensor]], begin: int, end: int) -> list[tuple[int, torch.Tensor]]:
        return [(chunk * (end - begin), it[begin:end]) for chunk, it in of]

    ends = [(begin, min(begin + step, length)) for begin in range(0, length, step)]
    return [Piece(chunks * (end - begin), parts(leave, begin, end), parts(enter, begin, end)) for begin, end in ends]


class PinnedPool:
    """Memory of a pool that is registered with CUDA: tensors go through it to one group's collectives.

    While a call works on one half, the GPU fetches the result of the piece before from the other half, and brings the
    next piece there. Both go through one stream, so that none comes to a half before the last has left it.
    """

    def __init__(self, memory: "_core.PoolMemory") -> None:
        try:
            pinned.register(memory)
        except RuntimeError as error:
            warnings.warn(f"CUDA does not register memory of the pool, so copies take longer: {error}", stacklevel=2)
        self.memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn = threading.Lock()
        # The piece whose call is over or under way, and has not been brought to the GPU.
        self._due: tuple[Passage, int] | None = None
        # Once this is reached, all that was brought before has left the halves.
        self._left: Any = None

    def bring(self, passage: "Passage", number: int) -> None:
        """Returns once a piece is in its half; calls come in the order of the group's."""
        with self._turn:
            self._settle()
            if number == 0:
                passage.stream.wait_event(passage.given)
                if self._left is not None:
                    passage.stream.wait_event(self._left)
                passage.gone = [self._copy_out(passage, 0)]
            gone = passage.gone[number]
            if number + 1 < len(passage.pieces):
                passage.gone.append(self._copy_out(passage, number + 1))
            self._due = passage, number
        gone.synchronize()

    def finish(self, passage: "Passage") -> None:
        """Returns once all of an operation is on the GPU; its calls are over."""
        with self._turn:
            if self._due is not None and self._due[0] is passage:
                self._settle()
        passage.come.synchronize()

    def close(self) -> None:
        """Forgets an operation that nobody has waited for, whose calls are over."""
        with self._turn:
            self._due = None

    def _copy_out(self, passage: "Passage", number: int) -> Any:
        with torch.cuda.stream(passage.stream):
            for place, tensor in passage.pieces[number].leave:
                self._part(number, place, tensor).copy_(tensor, non_blocking=True)
        return passage.stream.record_event()

    def _settle(self) -> None:
        """Has what the last call left brought to the GPU."""
        if self._due is None:
            return
        (passage, number), self._due = self._due, None
        with torch.cuda.stream(passage.stream), torch.no_grad():
            for place, tensor in passage.pieces[number].enter:
                tensor.copy_(self._part(number, place, tensor), non_blocking=True)
                # Nobody has to wait for an operation: what uses these bytes next waits for the copy.
                tensor.record_stream(passage.stream)
        passage.come = self._left = passage.stream.record_event()

    def _part(self, number: int, place: int, like: torch.Tensor) -> torch.Tensor:
        begin = number % 2 * HALF + place
        return self._bytes[begin : begin + len(like)]


class Passage:
    """One operation's way through a `PinnedPool`, behind what the current stream was given before."""

    def __init__(self, pool: PinnedPool, pieces: list[Piece], device: torch.device) -> None:
        self._pool = pool
        self.pieces = pieces
        self.stream = pinned.stream(device)
        self.given = torch.cuda.current_stream(device).record_event()
        # Reached once each piece that was begun has left the GPU, and once what was brought last is on it.
        self.gone: list[Any] = []
        self.come: Any = None

    def places(self) -> "Iterable[tuple[int, int, Callable[[], None]]]":
        """Of each piece where it begins in the pool's memory, its bytes, and what brings it there."""
        for number, piece in enumerate(self.pieces):
            yield number % 2 * HALF, piece.nbytes, functools.partial(self._pool.bring, self, number)

    def finish(self) -> None:
        """Returns once the result is on the GPU."""
        self._pool.finish(self)
