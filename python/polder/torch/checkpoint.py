"""Checkpoints of ``torch.distributed.checkpoint`` in the pool.

Apart from `polder.torch.snapshot`, because to import that package of torch takes longer than all of ours.
"""

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
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

from polder import _core, arguments
from polder.errors import ArgumentError, NotFoundError
from polder.pool import Pool
from polder.torch.versions import own_rank, pool_of, read, store_of, values_of

# torch's stubs leave plans and their planners without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["SnapshotReader", "SnapshotWriter"]

_METADATA = "metadata"
"""The store of a checkpoint's metadata, beside those of the ranks."""


def _job_store(pool: Pool | None, name: str, version: int | None) -> tuple[_core.Version, Metadata]:
    """The metadata of the newest checkpoint, or of that number, and what holds it."""
    held = store_of(pool, name, _METADATA).open(version)
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
        self._name = None if name is None else arguments.text("the name of the checkpoints", name)
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
        store = store_of(self._pool, self._name, own_rank())
        arrays: list[tuple[str, Any]] = []
        kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            is_bytes = item.type == WriteItemType.BYTE_IO
            array = np.frombuffer(data.getbuffer(), np.uint8) if is_bytes else values_of(data)
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
        store_of(self._pool, self._name, _METADATA).publish([(_METADATA, saved)])

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
        self._name = None if name is None else arguments.text("the name of the checkpoints", name)
        self._pool = pool
        self._version = (
            None if version is None else arguments.whole("version", version, expected="the number of a checkpoint")
        )
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
        pool = pool_of(self._pool)
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
