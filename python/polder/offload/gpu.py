"""Saved activations of a GPU in their tiers: it copies them there and back itself, beside its computation."""

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from polder import _core, pinned
from polder.offload.shards import check_version

# torch's stubs leave streams and copies without types.
# pyright: reportUnknownMemberType=false

#: Copies on their way to disks at once, at most: each has memory of the host.
_LEAVING = 4


class Mover:
    """Moves saved tensors between GPUs and the tiers of ``saved``, whose ranges are ``near``, in their order.

    A GPU copies to and from ranges that are registered with it, on a stream for each direction. What a disk has goes
    through registered memory. A tensor is brought back while that which was saved after it is in use.
    """

    def __init__(self, saved: _core.Saved, near: Sequence[_core.Range]) -> None:
        self.saved = saved
        self._near = [torch.frombuffer(kept, dtype=torch.uint8) for kept in near]
        self._devices: set[torch.device] = set()
        self._there: WeakValueDictionary[int, OnGpu] = WeakValueDictionary()
        self._leaving: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()

    def put(self, tensor: torch.Tensor) -> "OnGpu | None":
        """Begins to copy a contiguous tensor of a GPU into its tiers; none if one has no room."""
        self._write_out(_LEAVING)
        reserved = self.saved.reserve(tensor.nbytes)
        if reserved is None:
            return None
        slot, pieces, far = reserved
        self._devices.add(tensor.device)
        stream = pinned.stream(tensor.device, "saved")
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        for device in self._devices:
            # The bytes may be of a slot that is free, and is still read.
            stream.wait_stream(pinned.stream(device, "taken"))
        try:
            room = pinned.room(far)
        except BaseException:
            self.saved.free(slot)
            raise
        packed = OnGpu(self, slot, pieces, room, tensor)
        with torch.no_grad(), torch.cuda.stream(stream):
            for place, part in self._parts(packed, room, tensor):
                place.copy_(part, non_blocking=True)
        # What uses its bytes next on the GPU waits for the copy.
        tensor.record_stream(stream)
        self._there[slot] = packed
        if far:
            self._leaving.append((slot, room, stream.record_event()))
        return packed

    def take(self, packed: "OnGpu") -> torch.Tensor:
        """The tensor on its GPU, for the current stream. The one before it is brought meanwhile."""
        tensor, event = packed.brought or self._bring(packed)
        packed.brought = None
        current = torch.cuda.current_stream(packed.device)
        current.wait_event(event)
        tensor.record_stream(current)
        before = max((slot for slot in list(self._there) if slot < packed.slot), default=None)
        nearest = self._there.get(before) if before is not None else None
        if nearest is not None and nearest.brought is None and nearest.room is None:
            self.saved.fetch(nearest.slot)
        elif nearest is not None and nearest.brought is None:
            nearest.brought = self._bring(nearest)
        return tensor

    def settle(self) -> None:
        """Waits until no GPU copies to or from the tiers."""
        for device in self._devices:
            for use in ("saved", "taken"):
                pinned.stream(device, use).synchronize()

    def _bring(self, packed: "OnGpu") -> tuple[torch.Tensor, Any]:
        """Begins to copy a tensor to its GPU: the tensor, and an event behind the copy."""
        while self._coming and self._coming[0][1].query():
            self._coming.popleft()
        room = packed.room
        if room is None:
            room = pinned.room(packed.far)
            self.saved.read(packed.slot, room.data_ptr(), packed.far)
        stream = pinned.stream(packed.device, "taken")
        # Its bytes, or those in memory of the host before they are written to a disk.
        stream.wait_stream(pinned.stream(packed.device, "saved"))
        with torch.no_grad(), torch.cuda.stream(stream):
            tensor = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
            for place, part in self._parts(packed, room, tensor):
                part.copy_(place, non_blocking=True)
        event = stream.record_event()
        # Until then nothing else may have its bytes.
        self._coming.append((room, event))
        return tensor, event

    def _parts(
        self, packed: "OnGpu", room: torch.Tensor, tensor: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Places in memory of the host, ``room`` last, and the bytes of the tensor that belong there."""
        places = [self._near[number][begin : begin + count] for number, begin, count in packed.pieces]
        flat = tensor.detach().view(-1).view(torch.uint8)
        begins = [0, *itertools.accumulate(map(len, places))]
        ends = [*begins[1:], flat.numel()]
        return [(place, flat[b:e]) for place, b, e in zip([*places, room], begins, ends, strict=True)]

    def _write_out(self, most: int) -> None:
        """Gives disks what has left the GPUs, until no more than ``most`` copies are on their way."""
        while self._leaving and (len(self._leaving) >= most or self._leaving[0][2].query()):
            slot, room, event = self._leaving.popleft()
            event.synchronize()
            packed = self._there.get(slot)
            # The slot may be another tensor's by now.
            if packed is not None and packed.room is room:
                self.saved.write(slot, room.data_ptr(), packed.far)
                packed.room = None


class OnGpu:
    """A saved tensor of a GPU in its tiers, until the graph lets go of it."""

    def __init__(
        self, mover: Mover, slot: int, pieces: list[tuple[int, int, int]], room: torch.Tensor, tensor: torch.Tensor
    ) -> None:
        self._mover, self.slot, self.pieces, self.far = mover, slot, pieces, room.nbytes
        #: What of it goes to disks, in memory of the host, unless a disk has it.
        self.room: torch.Tensor | None = room
        #: The tensor, back on the GPU, and an event behind the copy.
        self.brought: tuple[torch.Tensor, Any] | None = None
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        # It shares the tensor's version, and none of its bytes.
        self._version_of = tensor.detach()
        self._version_of.data = tensor.new_empty(0)
        self._version = tensor._version

    def unpacked(self) -> torch.Tensor:
        """The tensor, unless it was changed in place since: its copy may have been made before or after."""
        check_version(self._version_of, self._version, self.shape)
        return self._mover.take(self)

    def __del__(self) -> None:
        self._mover.saved.free(self.slot)
