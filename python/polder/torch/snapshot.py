"""Snapshots: whole versions of a training state in the pool, which outlive the process that made them.

`snapshot` and `restore` are for one process or for the ranks of a job. `polder.torch.checkpoint` gives the same storage
to ``torch.distributed.checkpoint``.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import ExitStack
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polder import _core
from polder.errors import ArgumentError, NameExistsError, NotFoundError, PoolFullError
from polder.pool import Pool
from polder.torch import disk
from polder.torch.staging import PendingSnapshot, Snapshotted, flusher, publisher, staging_of
from polder.torch.state import (
    deserialize,
    put_together,
    random_state,
    serialize,
    set_random_state,
    take_apart,
)
from polder.torch.versions import default_pool, own_rank, read, read_leaf, store_of

# torch's stubs leave state dictionaries and plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["PendingSnapshot", "Restored", "Snapshotted", "restore", "snapshot"]

_STATE = "state"
"""What holds everything that is no tensor. The name of a tensor has a `/`."""
_log = getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What `restore` has found.

    Attributes
    ----------
    version, step : int
        The number of the version, and the step at which it was made.
    folder : Path or None
        Where it was read, if that was on disk. The version is then the number of that folder.
    """

    version: int
    step: int
    folder: Path | None = None


_bases: dict[tuple[str, str], int] = {}
"""The version from which this process went on, of each pool and store, until it has published one."""


def _whose(pool: Pool | None, store: _core.Store) -> tuple[str, str]:
    return str((pool or default_pool()).path), store.name


def snapshot(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    pool: Pool | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> PendingSnapshot:
    """Publishes a version of a training state in the pool: parameters, buffers, optimizer, step and random states.

    The call copies the state and returns. A thread computes checksums, copies to the pool what has changed since the
    version before, and publishes the version last. Until then the version before is the newest, also if this process
    is killed. ``wait()`` of the result returns when the version is whole. An interpreter that ends waits for it too.

    Two versions are kept, so the pool needs room for three, and for four while a disk is slower than the snapshots. The
    copy of the state stays in memory of this process for the next snapshot.

    In a job of torch.distributed each rank calls it, and keeps its own state. A step of which not every rank has
    published its version does not count: `restore` takes the one before. So ranks snapshot the same steps.

    Parameters
    ----------
    name : str
        The name of the snapshots; that of the job, say.
    model : torch.nn.Module
        Its ``state_dict()``: dense tensors of any shapes and dtypes. Tensors of a GPU are copied to the CPU.
    optimizer : torch.optim.Optimizer, optional
        Its ``state_dict()``.
    step : int
        The step, for `restore`.
    pool : Pool, optional
        The default is ``Pool()``. A pool that a job makes of its own does not outlive it: name one with
        ``POLDER_POOL``.
    folder : path, optional
        Another thread writes the version there too, as a checkpoint that ``torch.distributed.checkpoint`` loads, in
        ``folder/name/rank``. The two newest are kept. An error of it is logged, and raised by ``wait_flushed()`` alone.

    Returns
    -------
    PendingSnapshot

    Raises
    ------
    PolderError
        The snapshot before this one was not published, and ``wait()`` of it has not said so: its error. See there.
    ArgumentError
        The state holds what a snapshot does not take.

    Examples
    --------
    >>> polder.torch.snapshot("job", model, optimizer, step=step)  # doctest: +SKIP
    """
    store = store_of(pool, name, own_rank())
    home = None if folder is None else disk.home_of(Path(folder), name, own_rank())
    whose = _whose(pool, store)
    staging = staging_of(whose)
    staging.settle()
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"model": model.state_dict(), "random": random_state()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    walked = take_apart(state, "", tensors)
    arrays: list[tuple[str, Any]] = list(zip(tensors, staging.stage(list(tensors.values())), strict=True))
    base = _bases.pop(whose, None)
    handed: ThreadFuture[tuple[_core.Version, bytes]] = ThreadFuture()

    def publish() -> Snapshotted:
        try:
            saved = serialize({"step": step, "state": walked})
            version, copied, shared = store.publish([*arrays, (_STATE, np.frombuffer(saved, np.uint8))], base)
            if home is not None:
                # Held, so that it stays until it is on disk.
                handed.set_result((store.open(version), saved))
        except BaseException as error:
            _log.error("the snapshot %s of step %d was not published: %s", name, step, error)
            if base is not None and isinstance(error, NameExistsError | PoolFullError):
                # Nothing was published, and the base is still there.
                _bases[whose] = base
            if not handed.done():
                handed.set_exception(error)
            raise
        finally:
            store.close()
        return Snapshotted(version, step, copied, shared)

    def flush(home: Path) -> Path:
        version, saved = handed.result()
        try:
            return disk.write(home, step, saved, lambda leaf: read_leaf(version, leaf))
        except BaseException as error:
            _log.error("the snapshot %s of step %d is not on disk: %s", name, step, error)
            raise
        finally:
            version.close()

    published = publisher().submit(publish)
    flushed = None if home is None else flusher().submit(flush, home)
    if flushed is not None:
        staging.flushes.append(flushed)
    staging.last = PendingSnapshot(step, published, flushed)
    return staging.last


class _InPool:
    """A version of the pool that may be restored."""

    folder = None

    def __init__(self, version: _core.Version) -> None:
        self.number = version.number
        self.saved = deserialize(read(version, _STATE))
        self.step: int = self.saved["step"]
        self._version = version

    def state(self) -> Any:
        """The whole state."""
        return put_together(self.saved["state"], lambda leaf: read_leaf(self._version, leaf))


class _OnDisk:
    """A folder that may be restored."""

    def __init__(self, folder: Path, step: int) -> None:
        self.number, self.step = int(folder.name.partition("-")[0]), step
        self.folder = folder

    def state(self) -> Any:
        """The whole state, once every file matches its checksum."""
        saved, of_leaf = disk.read(self.folder)
        return put_together(saved["state"], of_leaf)


def _in_pool(store: _core.Store, held: ExitStack) -> Iterator[_InPool]:
    """The versions of a store, the oldest first."""
    for number in store.versions():
        try:
            version = store.open(number)
        except NotFoundError:
            continue
        held.callback(version.close)
        yield _InPool(version)


def _common(pools: set[int], disks: set[int], group: dist.ProcessGroup | None) -> set[int]:
    """The steps that every rank has in the pool; if there are none, those that every rank has there or on disk."""
    everywhere: list[Any] = [(pools, disks)]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, (pools, disks), group=group)
    in_pool = set.intersection(*(pools for pools, _ in everywhere))
    return in_pool or set.intersection(*(pools | disks for pools, disks in everywhere))


def restore(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    pool: Pool | None = None,
    folder: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Restored:
    """Puts a model, an optimizer and the random states back to the newest whole version of `snapshot`.

    In a job of torch.distributed each rank calls it. The ranks take the newest step of which each has a whole version.
    It must have as many ranks as the job that made the snapshots.

    Parameters
    ----------
    name : str
        The name that `snapshot` was given.
    model : torch.nn.Module
        A model of the same structure; ``load_state_dict`` fills it.
    optimizer : torch.optim.Optimizer, optional
        An optimizer over its parameters.
    pool : Pool, optional
        The default is ``Pool()``.
    folder : path, optional
        The folder that `snapshot` was given. It is read if the pool has no step that is whole on every rank, such as a
        new pool. Its metadata is a pickle, as in all of ``torch.distributed.checkpoint``: give one that you trust.
    group : ProcessGroup, optional
        The ranks that restore; all by default. Fewer may be left than made the snapshot: each takes its own.

    Returns
    -------
    Restored

    Raises
    ------
    NotFoundError
        No step of this name is whole on every rank. It names the steps that are kept. Nothing is changed.
    CorruptError
        The bytes of a tensor or of a file are not those that were written. Nothing is changed.
    ArgumentError
        An optimizer is asked for, and the snapshot has none.
    RuntimeError
        The state does not fit the model, from ``load_state_dict``.
    """
    store = store_of(pool, name, own_rank())
    home = None if folder is None else disk.home_of(Path(folder), name, own_rank())
    staging_of(_whose(pool, store)).drain()
    on_disk = {} if home is None else {step: _OnDisk(at, step) for step, at in disk.kept(home).items()}
    with ExitStack() as held:
        in_pool = {version.step: version for version in _in_pool(store, held)}
        steps = _common(set(in_pool), set(on_disk), group)
        if not steps:
            kept = ", ".join(map(str, sorted(in_pool))) or "none"
            where = "" if home is None else f"; {home} keeps steps: {', '.join(map(str, sorted(on_disk))) or 'none'}"
            raise NotFoundError(
                f"no step of the snapshot {name} is whole on every rank; the store {store.name} keeps steps: {kept}"
                f"{where}; check the name and POLDER_POOL, or start anew"
            )
        found = in_pool.get(max(steps)) or on_disk[max(steps)]
        state = found.state()
    if optimizer is not None and "optimizer" not in state:
        raise ArgumentError(f"the snapshot {name} has no optimizer; restore without one, or make it with one")
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    set_random_state(state["random"])
    if found.folder is None:
        _bases[_whose(pool, store)] = found.number
    return Restored(found.number, found.step, found.folder)
