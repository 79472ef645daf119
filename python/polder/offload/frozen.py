"""Weights that are not trained, as the base below adapters: in tiers of memory, or read ahead from a disk."""

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from polder import _core
from polder.errors import TierError, TierFullError
from polder.offload.ranges import Memory, memory, taken
from polder.offload.shards import is_plain, storage_of
from polder.offload.tiers import PAGE, Tier

#: Bytes that are read ahead, at most, beside the weight that is needed next.
_AHEAD = 16 << 20
#: Of madvise, since Linux 5.4.
_MADV_PAGEOUT = 21


def frozen_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that are not trained and can move: contiguous on a CPU, and no bytes of another's."""
    spans: list[tuple[int, int, int]] = []
    for tensor in (*model.parameters(), *model.buffers()):
        if is_plain(tensor) and tensor.device.type == "cpu" and tensor.nbytes:
            # Of one with gaps everything to the end of its storage.
            nbytes = tensor.nbytes if tensor.is_contiguous() else tensor.untyped_storage().nbytes()
            spans.append((tensor.data_ptr(), tensor.data_ptr() + nbytes, id(tensor)))
    spans.sort()
    shared: set[int] = set()
    end, last = 0, 0
    for begin, until, key in spans:
        if begin < end:
            shared |= {key, last}
        if until > end:
            end, last = until, key
    return [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad
        and is_plain(parameter)
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and parameter.nbytes
        and id(parameter) not in shared
    ]


class Frozen:
    """Keeps weights in their tiers: whole ones, the first tier's where they are.

    What a disk has lies in a mapped file without a name, so that a write to it stays. It is read before the module that
    has it computes, and its memory is given back after that. In the backward pass that happens in the opposite order,
    where saved weights are unpacked.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: Sequence[torch.nn.Parameter], shares: Mapping[Tier, float]
    ) -> None:
        self._moved: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._near: list[Memory] = []
        self._disks: list[_Disk] = []
        self._of: dict[int, tuple[_Disk, int]] = {}
        self._hooks: list[RemovableHandle] = []
        self._stay: dict[int, torch.nn.Parameter] = {}
        #: Bytes of each disk.
        self.on_disk: dict[str, int] = {}
        #: Bytes of each tier.
        self.dealt: dict[str, int] = {}
        tiers = list(shares)
        for tier, chosen in zip(tiers, _tensors_by_tier(tensors, list(shares.values())), strict=True):
            self.dealt[tier.name] = sum(tensor.nbytes for tensor in chosen)
            if tier is tiers[0] or not chosen:
                self._stay |= {id(tensor): tensor for tensor in chosen}
            elif tier.folder is None:
                kept = Memory(memory(sum(taken(tensor.nbytes) for tensor in chosen), tier))
                self._near.append(kept)
                for tensor in chosen:
                    self._move(tensor, kept.tensor(tensor).copy_(tensor.detach()))
            else:
                disk = _Disk(Path(tier.folder), chosen, self._move)
                self._disks.append(disk)
                self.on_disk[tier.name] = disk.nbytes
                self._of |= {storage_of(tensor): (disk, number) for number, tensor in enumerate(chosen)}
        for module in model.modules() if self._disks else ():
            own = [
                self._of[key]
                for parameter in module.parameters(recurse=False)
                if (key := storage_of(parameter)) in self._of
            ]
            # Of a table only the rows that are looked up are read.
            if own and not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                self._watch(module, own)
                for disk, number in own:
                    disk.used.append(number)

    def _move(self, it: torch.nn.Parameter, to: torch.Tensor) -> None:
        before, it.data = it.detach(), to
        self._moved.append((it, to))
        _page_out(before)

    def _watch(self, module: torch.nn.Module, own: list[tuple["_Disk", int]]) -> None:
        def before(*_: object) -> None:
            for disk, number in own:
                disk.need(number, 1)

        def after(*_: object) -> None:
            for disk, number in own:
                disk.drop(number)

        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def saved(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """What to call before a saved weight is used in the backward pass, if a disk has it."""
        if (found := self._of.get(storage_of(tensor))) is None:
            return None
        disk, number = found
        return lambda: disk.need(number, -1)

    @property
    def stays(self) -> int:
        """Bytes of weights that stay where they are."""
        return sum(it.nbytes for it in self._stay.values())

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a weight is one of those that stay."""
        return id(tensor) in self._stay

    def staged(self) -> int:
        """The most bytes of weights of disks that were in memory at once, as they were asked for."""
        return sum(it.window.most for it in self._disks)

    def staging(self) -> int:
        """As `staged`, of the steps to come: modules compute in their order, then backward."""
        return sum(it.staging() for it in self._disks)

    def ranges(self) -> list[_core.Range]:
        """Ranges of memory that hold some."""
        return [it.range for it in self._near]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one, or on a disk."""
        return any(it.holds(tensor) for it in self._near) or storage_of(tensor) in self._of

    def close(self) -> None:
        """Moves all that lie in tiers into memory of torch."""
        while self._hooks:
            self._hooks.pop().remove()
        for it, to in self._moved:
            if it.data_ptr() == to.data_ptr():
                it.data = to.clone()
        self._moved, self._near, self._disks, self._of = [], [], [], {}
        self._stay, self.on_disk, self.dealt = {}, {}, {}


class _Window:
    """Which weights of a disk are in memory."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._nbytes = nbytes
        self._here: set[int] = set()
        self._last = -1
        #: The most bytes at once.
        self.most = 0

    def need(self, number: int, step: int) -> tuple[list[int], list[int]]:
        """A weight is needed, and those after it soon: which are read, and which are not needed any more."""
        gone = [self._last] if step < 0 and self._last not in (-1, number) else []
        for index in gone:
            self.drop(index)
        self._last = number if step < 0 else -1
        read: list[int] = []
        ahead = 0
        while 0 <= number < len(self._nbytes):
            if number not in self._here:
                read.append(number)
            number += step
            ahead += self._nbytes[number] if 0 <= number < len(self._nbytes) else 0
            if ahead > _AHEAD:
                break
        self._here.update(read)
        self.most = max(self.most, sum(self._nbytes[index] for index in self._here))
        return read, gone

    def drop(self, number: int) -> None:
        """A weight was used."""
        self._here.discard(number)


class _Disk:
    """Weights in a mapped file, each of whole pages, in the order in which they are needed."""

    def __init__(self, folder: Path, tensors: Sequence[torch.nn.Parameter], move: Any) -> None:
        self._spans: list[tuple[int, int]] = []
        at = 0
        for tensor in tensors:
            self._spans.append((at, (tensor.nbytes + PAGE - 1) // PAGE * PAGE))
            at += self._spans[-1][1]
        self.nbytes = at
        self.window = _Window([nbytes for _, nbytes in self._spans])
        #: Those that are read as a whole before their module computes.
        self.used: list[int] = []
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, at)
                self._file = os.dup(file.fileno())
        except OSError as error:
            kind = TierFullError if error.errno == errno.ENOSPC else TierError
            raise kind(f"{folder}: no room for {at} bytes of weights: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(self._file, at)
        done = 0
        for tensor, (begin, nbytes) in zip(tensors, self._spans, strict=True):
            flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            move(tensor, flat.view(tensor.shape).copy_(tensor.detach()))
            if begin + nbytes - done >= _AHEAD or begin + nbytes == at:
                os.fdatasync(self._file)
                self._forget(done, begin + nbytes - done)
                done = begin + nbytes

    def _forget(self, begin: int, nbytes: int) -> None:
        """Gives the memory of a part back. What was written there goes to the disk."""
        self._map.madvise(mmap.MADV_DONTNEED, begin, nbytes)
        os.posix_fadvise(self._file, begin, nbytes, os.POSIX_FADV_DONTNEED)

    def need(self, number: int, step: int) -> None:
        """Reads a weight, and those that are needed after it."""
        read, gone = self.window.need(number, step)
        for it in gone:
            self._forget(*self._spans[it])
        for it in read:
            self._map.madvise(mmap.MADV_WILLNEED, *self._spans[it])

    def drop(self, number: int) -> None:
        """Gives the memory of a weight back that was used."""
        self.window.drop(number)
        self._forget(*self._spans[number])

    def staging(self) -> int:
        """The most bytes at once in a step, if the modules compute in their order."""
        window = _Window([nbytes for _, nbytes in self._spans])
        for number in self.used:
            window.need(number, 1)
            window.drop(number)
        for number in reversed(self.used):
            window.need(number, -1)
        return window.most


def _page_out(tensor: torch.Tensor) -> None:
    """Asks the kernel to give back the memory of a weight that has moved: other weights may keep the file mapped."""
    begin = (tensor.data_ptr() + PAGE - 1) // PAGE * PAGE
    nbytes = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - begin
    if nbytes > 0:
        # A hint, which changes no byte.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _MADV_PAGEOUT)


def _tensors_by_tier(
    tensors: Sequence[torch.nn.Parameter], fractions: Sequence[float]
) -> list[list[torch.nn.Parameter]]:
    """The tensors of each tier, in their order: the largest goes first, to the tier that lacks most."""
    whole = sum(tensor.nbytes for tensor in tensors)
    lacks = [whole * fraction for fraction in fractions]
    tier_of: dict[int, int] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.nbytes):
        tier = max(range(len(lacks)), key=lambda number: lacks[number])
        tier_of[id(tensor)] = tier
        lacks[tier] -= tensor.nbytes
    return [[tensor for tensor in tensors if tier_of[id(tensor)] == number] for number in range(len(lacks))]
