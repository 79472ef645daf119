"""Snapshots: whole versions of a training state in the pool, which outlive the process that made them.

`snapshot` and `restore` are the short way for one process or for the ranks of a job. `SnapshotWriter` and
`SnapshotReader` are the same storage for ``torch.distributed.checkpoint``.
"""

import io
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future as ThreadFuture
from contextlib import ExitStack
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

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
from polder.torch.versions import bytes_of, default_pool, read, read_leaf

# torch's stubs leave state dictionaries and plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["PendingSnapshot", "Restored", "SnapshotReader", "SnapshotWriter", "Snapshotted", "restore", "snapshot"]

_STATE = "state"
"""What holds everything that is no tensor. The name of a tensor has a `/`."""
_METADATA = "metadata"
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


def _store(pool: Pool | None, name: str, rank: int | str) -> _core.Store:
    return _core.Store(pool or default_pool(), f"{name}/{rank}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
    store = _store(pool, name, _rank())
    home = None if folder is None else disk.home_of(Path(folder), name, _rank())
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
    store = _store(pool, name, _rank())
    home = None if folder is None else disk.home_of(Path(folder), name, _rank())
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


def _job_store(pool: Pool | None, name: str, version: int | None) -> tuple[_core.Version, Metadata]:
    """The metadata of the newest checkpoint, or of that number, and what holds it."""
    held = _store(pool, name, _METADATA).open(version)
    saved = read(held, _METADATA)
    return held, pickle.loads(saved)  # DCP's own files hold the same pickle.


@dataclass(frozen=True)
class _Place:
    """Where an item of a checkpoint lies."""

    store: str
    version: int
    tensor: str
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SnapshotWriter(StorageWriter):
    """Writes checkpoints of ``torch.distributed.checkpoint`` to the pool, as versions of one name.

    A rank publishes what the plan gives it as a version of its own store. The coordinator publishes the metadata last,
    so a checkpoint is there as a whole or not at all. Two checkpoints are kept.

    Parameters
    ----------
    name : str, optional
        The name of the checkpoints; else `checkpoint_id` of ``save`` and ``async_save`` is it.
    pool : Pool, optional
        The default is ``Pool()``.

    Raises
    ------
    PoolFullError
        There is no room for a third version of this rank's part. In ``save``, torch wraps it in a CheckpointException.
    ArgumentError
        Neither `name` nor `checkpoint_id` was given.

    Examples
    --------
    >>> dcp.save(state, storage_writer=polder.torch.SnapshotWriter("job"))  # doctest: +SKIP
    >>> dcp.async_save(state, storage_writer=polder.torch.SnapshotWriter("job"))  # doctest: +SKIP
    """

    def __init__(self, name: str | None = None, *, pool: Pool | None = None) -> None:
        super().__init__()
        self._name = name
        self._pool = pool

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begins a checkpoint."""
        if checkpoint_id is not None:
            self._name = str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a checkpoint without a name."""
        if self._name is None:
            raise ArgumentError("the checkpoint has no name; give SnapshotWriter one, or save(…, checkpoint_id=)")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the version that its rank has in the newest checkpoint."""
        assert self._name is not None
        try:
            held, metadata = _job_store(self._pool, self._name, None)
        except NotFoundError:
            return plans
        held.close()
        versions = {place.store: place.version for place in metadata.storage_data.values()}
        return [replace(plan, storage_data=versions) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Publishes this rank's items, over the version that the newest checkpoint has of them."""
        assert self._name is not None
        store = _store(self._pool, self._name, _rank())
        arrays: list[tuple[str, Any]] = []
        kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            is_bytes = item.type == WriteItemType.BYTE_IO
            array = np.frombuffer(data.getbuffer(), np.uint8) if is_bytes else bytes_of(data)
            arrays.append((_item_name(item.index), array))
            kinds.append((torch.uint8, (array.nbytes,)) if is_bytes else (data.dtype, tuple(data.shape)))
        over = (plan.storage_data or {}).get(store.name)
        version, _, _ = store.publish(arrays, over)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, array.nbytes, _Place(store.name, version, key, array.nbytes, *kind))
                for item, (key, array), kind in zip(plan.items, arrays, kinds, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the metadata: from now on the checkpoint is there."""
        assert self._name is not None
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        saved = np.frombuffer(pickle.dumps(metadata), np.uint8)
        _store(self._pool, self._name, _METADATA).publish([(_METADATA, saved)])

    def storage_meta(self) -> StorageMeta:
        """The name of the checkpoints."""
        return StorageMeta(checkpoint_id=self._name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the name could be one of an object."""
        name = str(checkpoint_id)
        return bool(name) and not name.startswith("/") and len(name) < 200


class SnapshotReader(StorageReader):
    """Reads the newest checkpoint of `SnapshotWriter`, on any number of ranks.

    Parameters
    ----------
    name : str, optional
        The name of the checkpoints; else `checkpoint_id` of ``load`` is it.
    pool : Pool, optional
        The default is ``Pool()``.
    version : int, optional
        The number of a checkpoint that is kept; the newest by default.

    Raises
    ------
    NotFoundError
        There is no whole checkpoint of this name.
    CorruptError
        The bytes of a tensor are not those that were written. Both come out of ``load`` in a CheckpointException.

    Examples
    --------
    >>> dcp.load(state, storage_reader=polder.torch.SnapshotReader("job"))  # doctest: +SKIP
    """

    def __init__(self, name: str | None = None, *, pool: Pool | None = None, version: int | None = None) -> None:
        super().__init__()
        self._name = name
        self._pool = pool
        self._version = version
        self._places: dict[MetadataIndex, _Place] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begins to load."""
        if checkpoint_id is not None:
            self._name = str(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint."""
        if self._name is None:
            raise ArgumentError("the checkpoint has no name; give SnapshotReader one, or load(…, checkpoint_id=)")
        held, metadata = _job_store(self._pool, self._name, self._version)
        held.close()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps where each item lies."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of the plan, each against its checksum."""
        versions: dict[tuple[str, int], _core.Version] = {}
        pool = self._pool or default_pool()
        try:
            for item in plan.items:
                place = self._places[item.storage_index]
                whose = (place.store, place.version)
                if whose not in versions:
                    versions[whose] = _core.Store(pool, place.store).open(place.version)
                found = read(versions[whose], place.tensor, place.nbytes)
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(found))
                    continue
                target = planner.resolve_tensor(item).detach()
                bare = torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
                whole = bare.view(place.dtype).reshape(place.shape)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    whole = whole.narrow(dim, offset, length)
                target.copy_(whole)
                planner.commit_tensor(item, target)
        finally:
            for version in versions.values():
                version.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether the name could be one of an object."""
        return SnapshotWriter.validate_checkpoint_id(checkpoint_id)


def _item_name(index: MetadataIndex) -> str:
    offset = "" if index.offset is None else ",".join(map(str, index.offset))
    return f"{index.fqn}/{offset}/{index.index}"
