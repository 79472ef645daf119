"""Snapshots on disk: folders that ``torch.distributed.checkpoint`` reads, with a checksum for each file.

A folder gets its name when it is whole, so a process that is killed before leaves the folders before. One process at a
time writes for a rank: the one that holds its lock. ``torch.distributed.checkpoint`` is imported when the first is
written or read: that takes longer than the import of all of `polder.torch`.
"""

import contextlib
import errno
import fcntl
import functools
import grp
import hashlib
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polder.errors import CorruptError, NameExistsError, TierError, TierFullError
from polder.torch.identity import Identity
from polder.torch.state import Leaf, Views, by_dotted_name, deserialize, empty_of, put_in, viewed

# torch's stubs leave planners and their plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

__all__ = ["claim", "expect_whole", "home_of", "identity_of", "kept", "named", "prune", "read", "write"]

_UNSEEN = 4
"""So many versions stay where the folders of other ranks cannot be seen: no rank is further behind."""
_SUMS = "polder.json"
_BEFORE = {"step", "files"}
"""What a file of sums said before there were identities, and no other."""
_STATE = "polder.state"
"""The item that says how the others make a state."""
_NAME = re.compile(r"(\d{8,18})-step(-?\d{1,20})")
_LEFT = re.compile(r"\.\d{8,18}\.[0-9a-f]{16}")
"""What is being written or removed."""
_MOST_BYTES = 64 << 20
"""Of a file of sums."""


def home_of(folder: Path, name: str, rank: int) -> Path:
    """Where the snapshots of a rank lie."""
    return folder / name / str(rank)


def kept(home: Path) -> dict[int, Path]:
    """The folder of each step that is whole; the newest if there are several."""
    return {step: at for _, step, at in named(home)}


def named(home: Path) -> list[tuple[int, int, Path]]:
    """The number, the step and the path of each whole folder, the oldest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = (_NAME.fullmatch(entry.name) for entry in home.iterdir())
        return sorted((int(name[1]), int(name[2]), home / name[0]) for name in found if name)
    return []


# Whose folder it is.


def _expect_own(path: Path) -> None:
    """Refuses a folder that another user could change, with all above it, and links that another user has made."""
    ours = {0, os.geteuid()}
    for place in (path, *path.parents):
        try:
            found = place.lstat()
        except FileNotFoundError:
            continue
        if found.st_uid not in ours:
            raise TierError(
                f"{place} belongs to user {found.st_uid}, who could change a snapshot below it; give a folder of this "
                "user's"
            )
        if stat.S_ISLNK(found.st_mode):
            _expect_own(place.resolve())
        elif found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
            remedy = f"chmod o-w {shlex.quote(str(place))}"
            raise TierError(f"{place} may be written by every user; take their right: {remedy}")
        elif found.st_mode & 0o020 and not found.st_mode & stat.S_ISVTX and not _is_private(found.st_gid):
            remedy = f"chmod g-w {shlex.quote(str(place))}"
            raise TierError(f"{place} may be written by its group; take their right: {remedy}")


@functools.cache
def _is_private(group: int) -> bool:
    """Whether a group has no member but this user."""
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group == user.pw_gid and set(entry.gr_mem) <= {user.pw_name} and (entry.gr_name == user.pw_name)


def _make(home: Path) -> None:
    """Makes the folder of a rank, and has each folder on the way on disk. No link below the caller's is followed."""
    missing = [place for place in (home, *home.parents) if not place.exists()]
    for place in (home, home.parent):
        if place.is_symlink():
            raise TierError(f"{place} is a link; a snapshot is written to no place that a link names: remove it")
    _expect_own(home.absolute())
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o755)
        _sync(place.parent)
    if not home.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(home))


@functools.cache
def _locks() -> dict[Path, tuple[int, str]]:
    return {}


os.register_at_fork(after_in_child=_locks.cache_clear)


def claim(home: Path, attempt: str) -> None:
    """Makes this process the only one that writes for a rank, until it ends.

    Raises
    ------
    NameExistsError
        Another process that lives does.
    TierError
        The folder is another user's, or a link, or it cannot be locked.
    OSError
        It cannot be made.
    """
    at = _lock_of(home)
    held = _locks().get(at)
    if held is None or not _is_at(held[0], at):
        _make(home)
        _locks()[at] = _lock(home), ""
    opened, said = _locks()[at]
    if said != attempt:
        os.ftruncate(opened, 0)
        os.pwrite(opened, f"host {socket.gethostname()}, process {os.getpid()}, attempt {attempt}\n".encode(), 0)
        _locks()[at] = opened, attempt
        for left in _leftovers(home):
            shutil.rmtree(left)


def _lock_of(home: Path) -> Path:
    return home.with_name(f"{home.name}.lock").absolute()


def _lock(home: Path) -> int:
    """The lock of a rank's folder, until it is closed. If this process had it open already, that would end the lock."""
    at = _lock_of(home)
    opened = os.open(at, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(opened, 400, 0).decode(errors="replace").strip() or "a process that it does not name"
        os.close(opened)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise TierError(f"{at} cannot be locked ({error}); give a folder of a file system with locks") from error
        raise NameExistsError(
            f"{home} is in use by {holder}; one process at a time snapshots under a name: end it, or give another name"
        ) from error
    return opened


def _leftovers(home: Path) -> list[Path]:
    """What a process that died was writing or removing. Only a process that has the lock knows that it died."""
    return [it for it in home.iterdir() if _LEFT.fullmatch(it.name) and not it.is_symlink() and it.is_dir()]


def _is_at(opened: int, path: Path) -> bool:
    """Whether an open file is still the one of this path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(opened), path.lstat())
    os.close(opened)
    return False


# Writing.


def write(
    home: Path,
    identity: Identity,
    saved: bytes,
    read_leaf: Callable[[Leaf], torch.Tensor],
    sums: dict[str, str],
    shards: Callable[[Leaf, torch.Tensor], torch.Tensor] | None = None,
) -> Path:
    """Writes a state to a new folder in `home`, which `claim` has taken. Once this returns, it is on disk.

    Parameters
    ----------
    home : Path
        Of this rank; it is made if it is missing.
    identity : Identity
        Which version it is.
    saved : bytes
        How the state is made of its leaves, as `polder.torch.state.serialize` gives it.
    read_leaf : callable
        The tensor of a leaf.
    sums : dict of str to str
        A sum of each tensor, to compare parts of several ranks.
    shards : callable, optional
        The DTensor of the leaf of a part.

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
    walked = deserialize(saved)
    leaves = by_dotted_name(walked["state"])
    whole_of = viewed(walked.get("views", {}), read_leaf)
    items: dict[str, Any] = {}
    needed = 0
    for name, leaf in leaves.items():
        part = leaf.get("shard", leaf)
        items[name] = whole_of(part) if "tensor" in part else part["value"]
        needed += items[name].nbytes if "tensor" in part else 0
        if "shard" in leaf and shards is not None:
            items[name] = shards(leaf, items[name])
    items[_STATE] = torch.frombuffer(bytearray(saved), dtype=torch.uint8)
    needed += len(saved)
    step = identity.step
    building: Path | None = None
    try:
        claim(home, identity.word)
        if (free := _free(home)) < needed:
            raise _full(home, step, needed, free)
        building = home / f".{identity.number:08}.{identity.word}"
        files = _save(building, items)
        _write_sums(building, identity, files, sums)
        whole = home / f"{identity.number:08}-step{step}"
        building.rename(whole)
        building = None
        _sync(home)
    except (OSError, RuntimeError) as error:
        # A writer of torch may say why its file could not be written only by what it left.
        if building is not None:
            free = _free(home)
            shutil.rmtree(building, ignore_errors=True)
            if free < needed or getattr(error, "errno", None) == errno.ENOSPC:
                raise _full(home, step, needed, free) from error
        if isinstance(error, TierError | NameExistsError):
            raise
        raise TierError(
            f"the snapshot of step {step} cannot be written to {home}: {error}; give a folder that this process may "
            "write. The snapshots before, and those in the pool, are whole"
        ) from error
    return whole


def prune(home: Path, identity: Identity, first: int, left: list[int]) -> list[int]:
    """Removes what an attempt of first number `first` does not need once its version `identity` is there.

    The newest version that every rank has stays, what is newer, and the one before it; and what is below the floor.
    Once both are of this attempt, what the ranks `left` have goes, which the job has no more. Returns those of them
    that still have something.
    """
    own = [(number, at) for number, _, at in named(home) if number >= first]
    homes = [home.with_name(str(rank)) for rank in range(identity.world) if rank != identity.rank]
    newest = [number for number, at in own if all((other / at.name / _SUMS).exists() for other in homes)][-1:]
    if not all(other.is_dir() for other in homes):
        # On other machines' disks.
        newest = [number for number, _ in own[: 1 - _UNSEEN]][-1:]
    if not newest:
        return left
    before = [(number, at) for number, _, at in named(home) if identity.floor <= number < newest[0]]
    spare = [number for number, _ in before if number >= first][-1:]
    stays = spare or [number for number, _ in before][-1:]
    _remove([at for number, at in before if [number] != stays], identity)
    if not spare:
        return left
    return [rank for rank in left if not _clear(home.with_name(str(rank)), identity, first)]


def _remove(versions: list[Path], identity: Identity) -> None:
    for at in versions:
        # First its name, so that nothing which is half removed has one.
        left = at.with_name(f".{at.name.partition('-')[0]}.{identity.word}")
        at.rename(left)
        shutil.rmtree(left)


def _clear(home: Path, identity: Identity, first: int) -> bool:
    """Removes what is not below the floor; false if the folder is of another process or user, or has newer versions."""
    if not home.is_dir() or home.is_symlink():
        return True
    try:
        _expect_own(home.absolute())
        lock = None if _lock_of(home) in _locks() else _lock(home)
    except (NameExistsError, TierError):
        return False
    try:
        there = [(number, at) for number, _, at in named(home) if number >= identity.floor]
        if any(number >= first for number, _ in there):
            return False
        _remove([at for _, at in there], identity)
        for left in _leftovers(home):
            shutil.rmtree(left)
    finally:
        if lock is not None:
            os.close(lock)
    return True


def _free(home: Path) -> int:
    at = os.statvfs(home)
    return at.f_bavail * at.f_frsize


def _full(home: Path, step: int, needed: int, free: int) -> TierFullError:
    return TierFullError(
        f"the snapshot of step {step} needs {needed} bytes in {home}, and {free} are free there; make room, or give "
        "another folder. The snapshots before, and those in the pool, are whole"
    )


class _Summed:
    """A file that is written, and the sum of what it was given: not of what another process may have put there."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sum = hashlib.sha256()
        self.nbytes = 0

    def write(self, piece: Any) -> int:
        """Writes a piece at the end."""
        view = memoryview(piece)
        self.sum.update(view)
        self.nbytes += view.nbytes
        self._file.write(view)
        return view.nbytes

    def tell(self) -> int:
        """How many bytes it has been given."""
        return self.nbytes

    def flush(self) -> None:
        """Hands all to the system."""
        self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _save(folder: Path, items: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """As ``torch.distributed.checkpoint.save`` in a process of its own, which takes part in no collective.

    The bytes and the sum of each file.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystem

    summed: dict[str, _Summed] = {}

    class Files(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Generator[Any]:
            # `x`: nobody else has made it.
            with Path(path).open("xb" if mode == "wb" else mode) as file:
                if mode != "wb":
                    yield file
                    return
                summed[Path(path).name] = stream = _Summed(file)
                yield stream

        def rename(self, path: Any, new_path: Any) -> None:
            super().rename(path, new_path)
            summed[Path(new_path).name] = summed.pop(Path(path).name)

    folder.mkdir(mode=0o755)
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    writer.fs = Files()
    writer.set_up_storage_writer(True)
    planner.set_up_planner(items, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # Not that of the planner, which refuses a part of a DTensor alone.
    plans, metadata = create_default_global_save_plan([plan])
    metadata.planner_data = {name: (name,) for name in items}
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return {name: (stream.nbytes, stream.sum.hexdigest()) for name, stream in summed.items()}


def _own_sum(said: dict[str, Any]) -> str:
    rest = {key: value for key, value in said.items() if key != "sum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_sums(folder: Path, identity: Identity, files: dict[str, tuple[int, str]], tensors: dict[str, str]) -> None:
    said: dict[str, Any] = {"step": identity.step, "identity": identity.said(), "tensors": tensors}
    said["files"] = {name: list(file) for name, file in files.items()}
    said["sum"] = _own_sum(said)
    with (folder / _SUMS).open("x") as sums:
        json.dump(said, sums)
        sums.flush()
        os.fsync(sums.fileno())
    _sync(folder)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# Reading.


def _sums_of(folder: Path) -> dict[str, Any]:
    """What the file of sums says, once it matches its own."""
    at = folder / _SUMS
    try:
        with at.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        said = json.loads(text)
        files = {str(file): (int(size), str(digest)) for file, (size, digest) in said["files"].items()}
        for file in files:
            if Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"it names {file!r}, which is no file of the folder")
        if set(said) != _BEFORE:
            if said["sum"] != _own_sum(said):
                raise ValueError("it does not match its own sum")
            said["tensors"] = {str(name): str(digest) for name, digest in said["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise _corrupt(at, f"cannot be read ({error})") from error
    return {**said, "files": files}


def identity_of(folder: Path, rank: int) -> tuple[Identity, dict[str, str]]:
    """Which version a whole folder is, and the sums of its tensors. One of before has no identity.

    Raises
    ------
    CorruptError
        Its file of sums is missing, or holds other bytes than were written.
    """
    said = _sums_of(folder)
    name = _NAME.fullmatch(folder.name)
    assert name
    if "sum" not in said:
        return Identity.of_before(int(name[2]), rank), {}
    try:
        identity = Identity.parse(said.get("identity"))
        if (identity.number, identity.step, identity.rank) != (int(name[1]), int(name[2]), rank):
            raise ValueError(f"it is of version {identity.number}, step {identity.step} of rank {identity.rank}")
    except ValueError as error:
        raise _corrupt(folder / _SUMS, f"cannot be read ({error})") from error
    return identity, said["tensors"]


def expect_whole(folder: Path) -> None:
    """Holds each file of a folder against its sum.

    Raises
    ------
    CorruptError
        A file is missing, or its bytes are not those that were written.
    """
    for file, (size, digest) in _sums_of(folder)["files"].items():
        try:
            with (folder / file).open("rb") as opened:
                found = os.fstat(opened.fileno()).st_size
                if found == size and hashlib.file_digest(opened, "sha256").hexdigest() == digest:
                    continue
        except OSError as error:
            raise _corrupt(folder / file, f"cannot be read ({error})") from error
        how = "holds other bytes than were written" if found == size else f"has {found} bytes of {size}"
        raise _corrupt(folder / file, how)


def read(folder: Path) -> tuple[Any, Callable[[Leaf], torch.Tensor]]:
    """How the state of a folder is made of its leaves, and what gives the tensor of a leaf.

    Raises
    ------
    CorruptError
        A file is missing, or its bytes are not those that were written.
    """
    expect_whole(folder)
    items = _load(folder)
    saved = deserialize(items[_STATE].numpy().tobytes())
    views: Views = saved.get("views", {})
    parts = {
        leaf.get("shard", leaf)["tensor"]: (name, leaf.get("shard", leaf))
        for name, leaf in by_dotted_name(saved["state"]).items()
        if "tensor" in leaf.get("shard", leaf)
    }

    def of(leaf: Leaf) -> torch.Tensor:
        if leaf["tensor"] not in parts:
            return memory_of(leaf)
        found = items.get(parts[leaf["tensor"]][0])
        if found is not None and "stride" not in leaf:
            return found
        tensor, _ = empty_of(leaf)
        if found is not None:
            # A part of a DTensor may have nothing.
            put_in(tensor, found)
        return tensor

    def memory_of(leaf: Leaf) -> torch.Tensor:
        """Memory that several tensors share, as each of them says."""
        memory = torch.empty(leaf["shape"], dtype=torch.uint8)
        for path, view in views.items():
            if view.get("memory") == leaf["tensor"]:
                name, part = parts[path]
                tensor = torch.empty(0, dtype=part["dtype"])
                tensor.set_(memory.untyped_storage(), view["at"], part["shape"], view["stride"])
                put_in(tensor, items[name])
        return memory

    return saved, viewed(views, of)


def _load(folder: Path) -> dict[str, Any]:
    """All items of a folder; of a DTensor, the part that lies there."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    items: dict[str, Any] = {}
    for name, kind in list(metadata.state_dict_metadata.items()):
        if not isinstance(kind, TensorStorageMetadata):
            continue
        (chunk,) = kind.chunks
        if chunk.sizes != kind.size:
            begin = torch.Size([0] * len(kind.size))
            index = next(index for index in metadata.storage_data if index.fqn == name)
            metadata.storage_data[MetadataIndex(name, begin, 0)] = metadata.storage_data.pop(index)
            chunk = ChunkStorageMetadata(begin, chunk.sizes)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(kind.properties, chunk.sizes, [chunk])
        items[name] = torch.empty(chunk.sizes, dtype=kind.properties.dtype)
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner(items, metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
    reader.read_data(plan, planner).wait()
    return items


def _corrupt(file: Path, how: str) -> CorruptError:
    error = CorruptError(
        f"{file} {how}; remove its folder to restore the snapshot before it, or give a copy of the folder that is whole"
    )
    error.offset = 0
    return error
