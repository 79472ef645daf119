"""Snapshots on disk: folders that ``torch.distributed.checkpoint`` reads, with a checksum for each file.

A folder gets its name when it is whole, so a process that is killed before leaves the folders before. The two newest
are kept. ``torch.distributed.checkpoint`` is imported when the first is written or read: that takes longer than the
import of all of `polder.torch`.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polder.errors import CorruptError, TierError, TierFullError
from polder.torch.state import Leaf, by_dotted_name, deserialize

# torch's stubs leave planners and their plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

__all__ = ["home_of", "kept", "read", "write"]

_KEPT = 2
_SUMS = "polder.json"
_STATE = "polder.state"
"""The item that says how the others make a state."""
_NAME = re.compile(r"(\d{8,})-step(-?\d+)")


def home_of(folder: Path, name: str, rank: int) -> Path:
    """Where the snapshots of a rank lie."""
    return folder / name / str(rank)


def kept(home: Path) -> dict[int, Path]:
    """The folder of each step that is whole; the newest if there are several."""
    return {int(name[2]): home / name[0] for name in _named(home)}


def _named(home: Path) -> list[re.Match[str]]:
    """The names of whole folders, the oldest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = (_NAME.fullmatch(entry.name) for entry in home.iterdir())
        return sorted((name for name in found if name), key=lambda name: int(name[1]))
    return []


def write(home: Path, step: int, saved: bytes, read_leaf: Callable[[Leaf], torch.Tensor]) -> Path:
    """Writes a state to a new folder in `home`, and removes all but two.

    Parameters
    ----------
    home : Path
        Of this rank; it is made if it is missing.
    step : int
        Part of the folder's name.
    saved : bytes
        How the state is made of its leaves, as `polder.torch.state.serialize` gives it.
    read_leaf : callable
        The tensor of a leaf.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    TierFullError
        The disk is full. Nothing is left of it.
    TierError
        The folder cannot be written.
    """
    leaves = by_dotted_name(deserialize(saved)["state"])
    items = {name: read_leaf(leaf) if "tensor" in leaf else leaf["value"] for name, leaf in leaves.items()}
    items[_STATE] = torch.frombuffer(bytearray(saved), dtype=torch.uint8)
    needed = sum(item.nbytes for item in items.values() if isinstance(item, torch.Tensor))
    building: Path | None = None
    try:
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(".*"):
            # Of a process that was killed.
            shutil.rmtree(left)
        _expect_room(home, step, needed)
        number = max((int(name[1]) for name in _named(home)), default=0) + 1
        building = home / f".{number:08}"
        _save(building, items)
        _write_sums(building, step)
        whole = home / f"{number:08}-step{step}"
        building.rename(whole)
        _sync(home)
        for name in _named(home)[:-_KEPT]:
            # First its name, so that nothing which is half removed has one.
            shutil.rmtree((home / name[0]).rename(home / f".{name[0]}"))
    except (OSError, RuntimeError) as error:
        # A writer of torch may say why its file could not be written only by what it left.
        if building is not None:
            free = _free(home)
            shutil.rmtree(building, ignore_errors=True)
            if free < needed or getattr(error, "errno", None) == errno.ENOSPC:
                raise _full(home, step, needed, free) from error
        if isinstance(error, TierError):
            raise
        raise TierError(
            f"the snapshot of step {step} cannot be written to {home}: {error}; give a folder that this process may "
            "write. The snapshots before, and those in the pool, are whole"
        ) from error
    return whole


def _free(home: Path) -> int:
    at = os.statvfs(home)
    return at.f_bavail * at.f_frsize


def _expect_room(home: Path, step: int, needed: int) -> None:
    if (free := _free(home)) < needed:
        raise _full(home, step, needed, free)


def _full(home: Path, step: int, needed: int, free: int) -> TierFullError:
    return TierFullError(
        f"the snapshot of step {step} needs {needed} bytes in {home}, and {free} are free there; make room, or give "
        "another folder. The snapshots before, and those in the pool, are whole"
    )


def _save(folder: Path, items: dict[str, Any]) -> None:
    """As ``torch.distributed.checkpoint.save`` in a process of its own, which takes part in no collective."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(items, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _write_sums(folder: Path, step: int) -> None:
    files = {file.name: [file.stat().st_size, _sum(file)] for file in folder.iterdir()}
    with (folder / _SUMS).open("w") as sums:
        json.dump({"step": step, "files": files}, sums)
        sums.flush()
        os.fsync(sums.fileno())
    _sync(folder)


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read(folder: Path) -> tuple[Any, Callable[[Leaf], torch.Tensor]]:
    """How the state of a folder is made of its leaves, and what gives the tensor of a leaf.

    Raises
    ------
    CorruptError
        A file is missing, or its bytes are not those that were written.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        sums = json.loads((folder / _SUMS).read_bytes())
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in sums["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(folder / _SUMS, f"cannot be read ({error})") from error
    for file, (size, digest) in files.items():
        try:
            found = (folder / file).stat().st_size, _sum(folder / file)
        except OSError as error:
            raise _corrupt(folder / file, f"cannot be read ({error})") from error
        if found[0] != size:
            raise _corrupt(folder / file, f"has {found[0]} bytes of {size}")
        if found[1] != digest:
            raise _corrupt(folder / file, "holds other bytes than were written")
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    kinds = {
        name: kind for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)
    }
    items: dict[str, Any] = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner(items, metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
    reader.read_data(plan, planner).wait()
    saved = deserialize(items[_STATE].numpy().tobytes())
    named = {leaf["tensor"]: name for name, leaf in by_dotted_name(saved["state"]).items() if "tensor" in leaf}
    return saved, lambda leaf: items[named[leaf["tensor"]]]


def _corrupt(file: Path, how: str) -> CorruptError:
    error = CorruptError(
        f"{file} {how}; remove its folder to restore the snapshot before it, or give a copy of the folder that is whole"
    )
    error.offset = 0
    return error
