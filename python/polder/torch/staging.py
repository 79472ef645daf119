"""What publishes a snapshot behind the training thread: a copy of the state, and threads that go on with it."""

import functools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# torch's stubs leave the types of its copies open.
# pyright: reportUnknownMemberType=false

__all__ = ["PendingSnapshot", "Snapshotted", "Staging", "flusher", "publisher", "staging_of"]

_LINE = 64
_FLUSHES = 2
"""So many snapshots may be on their way to disk before another one waits."""


@dataclass(frozen=True)
class Snapshotted:
    """What `snapshot` has published.

    Attributes
    ----------
    version, step : int
        The number of the version, counted from 1, and the step that it was given.
    copied, shared : int
        Bytes of tensors that were copied, and those that have not changed since the version before.
    """

    version: int
    step: int
    copied: int
    shared: int


class PendingSnapshot:
    """A snapshot that is on its way to the pool, and to disk if a folder was given.

    Attributes
    ----------
    step : int
        The step that it was given.
    """

    def __init__(self, step: int, published: "Future[Snapshotted]", flushed: "Future[Path] | None") -> None:
        self.step = step
        self.published = published
        self._flushed = flushed
        self._is_told = False

    def done(self) -> bool:
        """Whether the version is published, or has failed."""
        return self.published.done()

    def wait(self, timeout: float | None = None) -> Snapshotted:
        """Waits until the version is whole in the pool.

        Parameters
        ----------
        timeout : float, optional
            Seconds; without it, as long as it takes.

        Returns
        -------
        Snapshotted

        Raises
        ------
        PoolFullError
            There is no room for a third version. The two before are whole.
        NameExistsError
            Another process that lives is writing a version of this name.
        TimeoutError
            The version is not published yet.
        """
        self._await(self.published, "published", timeout)
        self._is_told = True
        return self.published.result()

    def wait_flushed(self, timeout: float | None = None) -> Path | None:
        """Waits until the version is on disk too, and gives its folder; None if `snapshot` was given none.

        Raises
        ------
        TierFullError
            The disk is full. What was there before is whole.
        TierError
            The folder cannot be written.
        TimeoutError
            The version is not on disk yet.
        PolderError
            As `wait`: the version was not published.
        """
        self.wait(timeout)
        if self._flushed is None:
            return None
        self._await(self._flushed, "on disk", timeout)
        return self._flushed.result()

    def _await(self, future: "Future[Any]", what: str, timeout: float | None) -> None:
        if not wait([future], timeout).done:
            raise TimeoutError(f"the snapshot of step {self.step} is not {what} after {timeout} s; wait longer")

    def expect_published(self) -> None:
        """Waits until its bytes are needed no more, and raises the error of a publication if `wait` has not."""
        if not self._is_told:
            self.wait()


class Staging:
    """What a process keeps of a store between two snapshots."""

    def __init__(self) -> None:
        self.last: PendingSnapshot | None = None
        self.flushes: deque[Future[Path]] = deque()
        self._layout: list[Any] = []
        self._places: list[torch.Tensor] = []
        self._bytes: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def drain(self) -> None:
        """Waits until all that is under way has ended. Its errors are for those that ask."""
        if self.last is not None:
            wait([self.last.published])
        wait(self.flushes)

    def settle(self) -> None:
        """Waits until the bytes of the last snapshot may be overwritten, and no more than one is on its way to disk.

        Raises
        ------
        PolderError
            The last one was not published, and nobody has been told.
        """
        last, self.last = self.last, None
        while len(self.flushes) >= _FLUSHES:
            # Its error is for those that ask: training goes on.
            self.flushes.popleft().exception()
        if last is not None:
            last.expect_published()

    def stage(self, tensors: Sequence[torch.Tensor]) -> "list[np.ndarray[Any, np.dtype[np.uint8]]]":
        """Copies dense tensors into memory of this process: their bytes, which stay until the next call."""
        layout = [(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in tensors]
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        with torch.no_grad():
            for place, tensor in zip(self._places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return self._bytes

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the memory: one piece, in which each tensor begins a line."""
        offsets = [0]
        for tensor in tensors:
            offsets.append(-(-(offsets[-1] + tensor.nbytes) // _LINE) * _LINE)
        self._layout, self._places, self._bytes = [], [], []
        is_pinned = any(tensor.is_cuda for tensor in tensors)
        whole = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=is_pinned)
        for tensor, offset in zip(tensors, offsets, strict=False):
            place = whole[offset : offset + tensor.nbytes]
            self._bytes.append(place.numpy())
            self._places.append(place.view(tensor.dtype).reshape(tensor.shape))


@functools.cache
def _stagings() -> dict[tuple[str, str], Staging]:
    return {}


def staging_of(whose: tuple[str, str]) -> Staging:
    """What this process keeps of a pool's store."""
    return _stagings().setdefault(whose, Staging())


@functools.cache
def publisher() -> ThreadPoolExecutor:
    """The thread that publishes. An interpreter that ends waits for it."""
    return ThreadPoolExecutor(1, "polder-publish")


@functools.cache
def flusher() -> ThreadPoolExecutor:
    """The thread that writes to disk. An interpreter that ends waits for it."""
    return ThreadPoolExecutor(1, "polder-flush")


def _forget() -> None:
    """A child has neither the threads of its parent nor what they publish."""
    for cached in (_stagings, publisher, flusher):
        cached.cache_clear()


os.register_at_fork(after_in_child=_forget)
