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

from polder import _core, address, pinned
from polder.errors import PolderError, PoolFullError
from polder.pinned import forget

# torch's stubs leave streams and copies without types.
# pyright: reportUnknownMemberType=false

__all__ = ["HALF", "SHORT", "Passage", "Piece", "PinnedPool", "cut", "dense", "flat", "overlap", "unaliased"]
__all__ += ["begun", "copied_out", "copy_in", "copy_out", "forget", "leaving", "room_for"]

SHORT = 1 << 20
"""Messages of fewer bytes go through private memory: there two looks at the GPU more take longer than a copy less."""

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


def begun() -> list[Any]:
    """An event behind each copy out that this thread has begun since the last call."""
    events, _begun.events = _begun.events, []
    return events


def leaving() -> Callable[[], None] | None:
    """What returns once all that this thread has begun to copy out is there; None if that is nothing."""
    events = begun()
    if not events:
        return None

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


def copy_out(room: torch.Tensor, tensor: torch.Tensor) -> None:
    """Brings what a tensor holds into the room that was made for it."""
    for stream in _copy([(room, tensor)]):
        stream.synchronize()


def copy_in(tensors: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> None:
    """Brings what `rooms` hold into the tensors that they were made for."""
    for stream in _copy(zip(tensors, rooms, strict=True)):
        stream.synchronize()


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterable[Any]:
    """Copies into the first of each pair what the second holds, and gives the streams; one of a pair is on a GPU."""
    streams: dict[Any, None] = {}
    # A parameter is a tensor like any other here, and one of inference too.
    with torch.inference_mode():
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
    """The tensor, or a copy on its device whose bytes are its values in order; the current stream makes it."""
    if address.is_plain(tensor):
        return tensor
    with torch.inference_mode():
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


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of bytes share one."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    begin, at = one.storage_offset(), other.storage_offset()
    return bool(begin < at + len(other) and at < begin + len(one))


def unaliased(
    leave: list[tuple[int, torch.Tensor]], enter: list[tuple[int, torch.Tensor]]
) -> list[tuple[int, torch.Tensor]]:
    """The bytes that leave; copies on their GPU, if a piece that comes would overwrite some that have not left."""

    def overwrites(new: torch.Tensor, old: torch.Tensor) -> bool:
        return overlap(new, old) and bool(new.storage_offset() != old.storage_offset())

    if not any(overwrites(new, old) for _, new in enter for _, old in leave):
        return leave
    copies = [torch.empty(it.shape, dtype=it.dtype, device=it.device) for _, it in leave]
    with torch.inference_mode():
        return [(chunk, copy.copy_(it, non_blocking=True)) for copy, (chunk, it) in zip(copies, leave, strict=True)]


class PinnedPool:
    """Two halves of memory that is registered with CUDA, through which tensors go to one group's collectives.

    The memory is the pool's, where peers read it, if each rank of the group has some. While a call works on one half,
    the GPU fetches the result of the piece before from the other half, and brings the next piece there. A half is
    filled once what was in it has left, whichever GPU it went to.
    """

    def __init__(self, pool: "_core.Pool") -> None:
        #: What there is of the pool.
        self.pooled: _core.PoolMemory | None = None
        try:
            self.pooled = _core.PoolMemory.take(pool, 2 * HALF)
        except PoolFullError as error:
            warnings.warn(f"tensors of a GPU take a longer way, through private memory: {error}", stacklevel=2)
        #: Whether all ranks have memory of the pool.
        self.agreed = _core.Agreed()
        memory = self.pooled or _core.Range(2 * HALF)
        try:
            pinned.register(memory)
        except RuntimeError as error:
            warnings.warn(f"CUDA does not register memory, so copies take longer: {error}", stacklevel=2)
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._streams: dict[torch.device, Any] = {}
        self._turn = threading.Lock()
        # The piece whose call is over or under way, and has not been brought to the GPU.
        self._due: tuple[Passage, int] | None = None
        # Once these are reached, all that was brought before has left the halves.
        self._left: list[Any] = []

    def bring(self, passage: "Passage", number: int) -> None:
        """Returns once a piece is in its half; calls come in the order of the group's."""
        with self._turn:
            self._settle()
            if number == 0:
                for device in passage.given:
                    for event in passage.given.values():
                        self._stream(device).wait_event(event)
                passage.gone = [self._copy_out(passage, 0)]
            gone = passage.gone[number]
            if number + 1 < len(passage.pieces):
                passage.gone.append(self._copy_out(passage, number + 1))
            self._due = passage, number
        for event in gone:
            event.synchronize()

    def drop(self, passage: "Passage") -> None:
        """Leaves the tensors of an operation alone that has failed."""
        with self._turn:
            if self._due is not None and self._due[0] is passage:
                self._due = None

    def finish(self, passage: "Passage") -> None:
        """Returns once all of an operation is on the GPU; its calls are over."""
        with self._turn:
            if self._due is not None and self._due[0] is passage:
                self._settle()
        if passage.come is None:
            raise PolderError("the operation's result was not copied to the GPU, by an error that was raised elsewhere")
        for event in passage.come:
            event.synchronize()

    def close(self) -> None:
        """Has what the last call left brought to the GPU, and lets go of the memory. The group's calls are over."""
        with self._turn:
            try:
                self._settle()
            finally:
                self.pooled, self._bytes = None, torch.empty(0, dtype=torch.uint8, device="cpu")

    def _stream(self, device: torch.device) -> Any:
        """A stream of this group's own: what waits on it makes no other wait."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _copy_out(self, passage: "Passage", number: int) -> list[Any]:
        """What is reached once a piece is in its half, and what was there before has left it."""
        leave = passage.pieces[number].leave
        for device in {tensor.device for _, tensor in leave}:
            for event in self._left:
                self._stream(device).wait_event(event)
        gone = self._copy((self._part(number, place, tensor), tensor, tensor.device) for place, tensor in leave)
        return gone + self._left

    def _settle(self) -> None:
        """Has what the last call left brought to the GPU, if it did not fail."""
        if self._due is None:
            return
        (passage, number), self._due = self._due, None
        passage.come = None
        ticket = passage.tickets[number] if passage.tickets else None
        if ticket is not None and ticket.error() is not None:
            return
        enter = passage.pieces[number].enter
        passage.come = self._left = self._copy(
            (tensor, self._part(number, place, tensor), tensor.device) for place, tensor in enter
        )
        for _, tensor in enter:
            # Nobody has to wait for an operation: what uses these bytes next waits for the copy.
            tensor.record_stream(self._stream(tensor.device))

    def _copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor, torch.device]]) -> list[Any]:
        """Copies the second into the first on the stream of a device; an event behind each stream."""
        streams: dict[torch.device, Any] = {}
        # A tensor of inference takes part as any other.
        with torch.inference_mode():
            for target, source, device in copies:
                streams[device] = self._stream(device)
                with torch.cuda.device(device), torch.cuda.stream(streams[device]):
                    target.copy_(source, non_blocking=True)
        return [stream.record_event() for stream in streams.values()]

    def _part(self, number: int, place: int, like: torch.Tensor) -> torch.Tensor:
        return self.part(number % 2 * HALF + place, len(like))

    def part(self, begin: int, nbytes: int) -> torch.Tensor:
        """A part of the memory."""
        return self._bytes[begin : begin + nbytes]


class Passage:
    """One operation's way through a `PinnedPool`, behind what the current streams were given before."""

    def __init__(self, pool: PinnedPool, pieces: list[Piece]) -> None:
        self._pool = pool
        self.pieces = pieces
        devices = {tensor.device for piece in pieces for _, tensor in (*piece.leave, *piece.enter)}
        self.given = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        # Reached once each piece that was begun can be worked on, and once what was brought last is on the GPU.
        self.gone: list[list[Any]] = []
        self.come: list[Any] | None = None
        #: Of each piece what its call has returned, where calls go on behind the program.
        self.tickets: list[_core.Ticket] = []

    def places(self) -> "Iterable[tuple[int, list[torch.Tensor], Callable[[], None]]]":
        """Of each piece where it begins in the pool's memory, the bytes there in a list, and what brings it there."""
        for number, piece in enumerate(self.pieces):
            begin = number % 2 * HALF
            yield begin, [self._pool.part(begin, piece.nbytes)], functools.partial(self._pool.bring, self, number)

    def finish(self) -> None:
        """Returns once the result is on the GPU."""
        self._pool.finish(self)
