"""Snapshots: whole versions of a training state in the pool, which outlive the process that made them.

`snapshot` and `restore` are for one process or for the ranks of a job. `polder.torch.checkpoint` gives the same storage
to ``torch.distributed.checkpoint``. docs/state.md says which bytes lie where, and what the errors mean.
"""

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future as ThreadFuture
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polder import _core, arguments
from polder.errors import (
    ArgumentError,
    CorruptError,
    NotFoundError,
    PolderError,
    TierError,
    UnusableError,
)
from polder.pool import Pool
from polder.torch import disk
from polder.torch.attempts import IDENTITY, STATE, Attempt, Here, Look, begin, job_of, look
from polder.torch.identity import Part, Seen, newest_whole, step_of
from polder.torch.resharding import Resharded, expect_replicated
from polder.torch.staging import PendingSnapshot, Snapshotted, flusher, publisher, staging_of
from polder.torch.state import (
    Leaf,
    Meshes,
    Views,
    deserialize,
    dtensor_of,
    in_order,
    put_together,
    random_state,
    serialize,
    set_random_state,
    shared,
    take_apart,
    viewed,
    without_parts,
)
from polder.torch.versions import pool_of, read, read_leaf, store_of

# torch's stubs leave state dictionaries and plans without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["PendingSnapshot", "Restored", "Snapshotted", "restore", "snapshot"]

_LOOKS, _PAUSE_SECONDS = 200, 0.005
"""How often ranks look for a version that all have, beside a job that publishes."""
_log = getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What `restore` has found.

    Attributes
    ----------
    version, step : int
        The number of the version, and the step at which it was made.
    folder : Path or None
        Where it was read, if that was on disk.
    attempt : str
        The attempt that made it.
    """

    version: int
    step: int
    folder: Path | None = None
    attempt: str = field(default="", compare=False)


def snapshot(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    pool: Pool | None = None,
    folder: str | os.PathLike[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> PendingSnapshot:
    """Publishes a version of a training state in the pool: parameters, buffers, optimizer, step and random states.

    The call copies the state and returns. A thread computes checksums, copies to the pool what has changed since the
    version before, and publishes the version last. Until then the version before is the newest, also if this process
    is killed. ``wait()`` of the result returns when the version is whole. An interpreter that ends waits for it too.

    Two versions are kept, so the pool needs room for three, and for four while a disk is slower than the snapshots. The
    copy of the state stays in memory of this process for the next snapshot.

    In a job of torch.distributed each rank calls it, and keeps its own state. A version counts once every rank has
    published its part: until then `restore` takes the one before. So ranks snapshot the same steps. If the job has not
    restored, the first call is a collective of all ranks.

    One process at a time snapshots under a name (and rank); calls of several threads follow each other. A replica of
    torchft, which has ``REPLICA_GROUP_ID``, has snapshots of its own.

    Parameters
    ----------
    name : str
        The name of the snapshots; that of the job, say.
    model : torch.nn.Module
        Its ``state_dict()``: dense tensors of any shapes, strides and dtypes, and DTensors. Tensors of a GPU are copied
        to the CPU.
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
    extra : dict, optional
        More objects with ``state_dict()``, such as a scheduler, a GradScaler or a sampler, and ``torch.Generator``.

    Returns
    -------
    PendingSnapshot

    Raises
    ------
    PolderError
        The snapshot before this one was not published, and ``wait()`` of it has not said so: its error. See there.
    NameExistsError
        Another process that lives has this name, in the pool or in the folder. The error names it.
    ArgumentError
        The state holds what would not come back as it is, or `step` is no whole number.

    Examples
    --------
    >>> polder.torch.snapshot("job", model, optimizer, step=step)  # doctest: +SKIP
    """
    step = step_of(step)
    pool, name, at = pool_of(pool), replica_name(name), _folder(folder)
    _expect_states(model, optimizer, extra)
    job = job_of(pool, name)
    with job.lock:
        attempt = job.attempt_now()
        if attempt is None:
            attempt = _begin(pool, name, at)
            job.enter(attempt)
        attempt.pool = pool
        store = store_of(pool, name, attempt.here.rank)
        home = None if at is None else disk.home_of(at, name, attempt.here.rank)
        staging = staging_of((str(pool.path), store.name))
        staging.settle()
        store.own()
        if home is not None:
            # Another error is for the thread that writes there to say.
            with contextlib.suppress(TierError, OSError):
                disk.claim(home, f"{attempt.word:016x}")
        state: dict[str, Any] = {"model": model.state_dict(), "random": random_state()}
        if optimizer is not None:
            state["optimizer"] = optimizer.state_dict()
        if extra:
            state["extra"] = {key: _state_of(key, value) for key, value in extra.items()}
        meshes: Meshes = {}
        tensors: dict[str, torch.Tensor] = {}
        walked = take_apart(state, "", tensors, meshes)
        owned, views = shared(tensors)
        staged = staging.stage([in_order(tensor) for tensor in owned.values()])
        taken = _Snapshot(name, step, attempt, store, walked, views, meshes)
        arrays: list[tuple[str, Any]] = list(zip(owned, staged, strict=True))
        published = publisher().submit(taken.publish, attempt.next_number(), arrays, home is not None)
        flushed = None if home is None else flusher().submit(taken.flush, home)
        if flushed is not None:
            staging.flushes.append(flushed)
        staging.last = PendingSnapshot(step, published, flushed)
        return staging.last


class _Snapshot:
    """A snapshot on its way to the pool and to disk."""

    def __init__(
        self, name: str, step: int, attempt: Attempt, store: _core.Store, walked: Leaf, views: Views, meshes: Meshes
    ) -> None:
        self._name, self._step, self._attempt, self._store = name, step, attempt, store
        self._walked, self._views, self._meshes = walked, views, meshes
        self._handed: ThreadFuture[tuple[_core.Version, bytes, str]] = ThreadFuture()

    def publish(self, number: int, arrays: list[tuple[str, Any]], is_flushed: bool) -> Snapshotted:
        """Publishes it, and hands it to `flush`."""
        attempt, store, step = self._attempt, self._store, self._step
        try:
            saved = serialize({"step": step, "state": self._walked, "views": self._views})
            plain = _plain_sum(self._walked)
            said = json.dumps({**attempt.identity(step, number, store).said(), "plain": plain}).encode()
            of_bytes = [(STATE, np.frombuffer(saved, np.uint8)), (IDENTITY, np.frombuffer(said, np.uint8))]
            done = store.publish_in(attempt.terms, attempt.others, attempt.left(), number, [*arrays, *of_bytes])
            version, copied, unchanged = done
            attempt.has_published(version)
            if is_flushed:
                # Held, so that it stays until it is on disk.
                self._handed.set_result((store.open(version), saved, plain))
        except BaseException as error:
            _log.error("the snapshot %s of step %d was not published: %s", self._name, step, error)
            if not self._handed.done():
                self._handed.set_exception(error)
            raise
        finally:
            store.close()
        return Snapshotted(version, step, copied, unchanged)

    def flush(self, home: Path) -> Path:
        """Writes what was published to disk."""
        version, saved, plain = self._handed.result()
        try:
            identity = self._attempt.identity(self._step, version.number, None)
            sums = {key: f"{value:032x}" for key, value in version.sums() if "/" in key}

            def shard(leaf: Leaf, part: torch.Tensor) -> torch.Tensor:
                return dtensor_of(leaf, part, *self._meshes[leaf["shard"]["tensor"]])

            written = disk.write(
                home, identity, saved, lambda leaf: read_leaf(version, leaf), {**sums, "plain": plain}, shard
            )
            self._attempt.has_flushed(home, identity)
            return written
        except BaseException as error:
            _log.error("the snapshot %s of step %d is not on disk: %s", self._name, self._step, error)
            raise
        finally:
            version.close()


def replica_name(name: str) -> str:
    """The name under which this process snapshots: a replica of torchft has one of its own."""
    arguments.text("the name of the snapshots", name)
    replica = os.environ.get("REPLICA_GROUP_ID")
    return name if replica is None else f"{name}/replica-{replica}"


def _folder(given: str | os.PathLike[str] | None) -> Path | None:
    return None if given is None else arguments.path("folder", given)


def _expect_states(model: Any, optimizer: Any, extra: Any) -> None:
    """That there is a state of each, before anything is done."""
    for what, it in (("model", model), ("optimizer", optimizer)):
        has_state = hasattr(it, "state_dict") and hasattr(it, "load_state_dict")
        if not has_state and (what == "model" or it is not None):
            raise ArgumentError(f"{what} is a {type(it).__name__}, which has no state_dict(); give one that has")
    if extra is not None and not isinstance(extra, Mapping):
        raise ArgumentError(f"extra is a {type(extra).__name__}; give a mapping of names to objects")


def _state_of(key: str, value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise ArgumentError(
            f"extra[{key!r}] is a {type(value).__name__}, which has no state_dict(); give objects that have one, or a "
            "torch.Generator"
        )
    return value.state_dict()


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


def _plain_sum(walked: Leaf) -> str:
    """A sum of all that is no tensor, to compare ranks. Random states are a rank's own."""
    alike = [(key, without_parts(value)) for key, value in walked["dict"] if key != "random"]
    return hashlib.sha256(serialize(alike)).hexdigest()


def _begin(pool: Pool, name: str, folder: Path | None) -> Attempt:
    """The attempt of a job that has restored nothing: it comes after all that is there."""
    here = Here.of(None)
    with ExitStack() as held:
        found = look(pool, name, folder, here, held)
        all_seen, words = here.gather(found)
    whole = newest_whole(all_seen, here.size, here.ranks, here.world)
    is_known = any(part.identity.whole for seen in all_seen for part in seen.parts)
    parts = whole[0] if whole else {}
    made_by = next(iter(parts.values())).identity.world if parts else 0
    is_foreign = made_by not in (0, here.size) or (not whole and is_known) or any(seen.damaged for seen in all_seen)
    return begin(pool, name, here, words, all_seen, parts, is_foreign=is_foreign)


def restore(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    pool: Pool | None = None,
    folder: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    version: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Restored:
    """Puts a model, an optimizer and the random states back to the newest whole version of `snapshot`.

    In a job of torch.distributed each rank calls it. The ranks take the newest version of which every rank of its
    attempt has its part, in the pool or in the folder. The job may have another number of ranks than the one that made
    it: what all ranks have alike comes from any of them, and DTensors are laid out anew. A rank that the other job did
    not have keeps its own random states.

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
        The folder that `snapshot` was given. Where it has a newer version than the pool, that is taken. Its metadata is
        a pickle, as in all of ``torch.distributed.checkpoint``: give one that you trust.
    group : ProcessGroup, optional
        The ranks that restore; all by default. Fewer may be left than made the snapshot: each takes its own.
    version : int, optional
        The number of a version that is kept; the newest by default. So a version before a damaged one is taken.
    extra : dict, optional
        The objects that `snapshot` was given; ``load_state_dict`` fills them.

    Returns
    -------
    Restored

    Raises
    ------
    NotFoundError
        There is nothing of this name, or nothing that was ever whole: this is the first start.
    UnusableError
        There is something, and this job cannot use it. The error says what, and what to do. Nothing is changed.
    CorruptError
        The newest version holds other bytes than were written. The error names the newest that is older. Nothing is
        changed, and older damage is no error.
    ArgumentError
        An optimizer or an object of `extra` is given, and the snapshot has none.
    RuntimeError
        The state does not fit the model, from ``load_state_dict``.
    """
    pool, name, at = pool_of(pool), replica_name(name), _folder(folder)
    version = None if version is None else arguments.whole("version", version, 1, expected="the number of a version")
    _expect_states(model, optimizer, extra)
    job = job_of(pool, name)
    with job.lock:
        here = Here.of(group)
        staging_of((str(pool.path), f"{name}/{here.rank}")).drain()
        if (before := job.attempt_now()) is not None:
            staging_of((str(pool.path), f"{name}/{before.here.rank}")).drain()
        for again in range(_LOOKS, -1, -1):
            with ExitStack() as held:
                found = look(pool, name, at, here, held)
                all_seen, words = here.gather(found)
                whole = newest_whole(all_seen, here.size, here.ranks, here.world, version)
                if again and version is None and _is_between(all_seen, whole):
                    time.sleep(_PAUSE_SECONDS)
                    continue
                if not whole:
                    nothing = _nothing(name, found, all_seen, version, at, here)
                    if isinstance(nothing, NotFoundError):
                        # All ranks know it: the first snapshot need not ask them.
                        job.enter(begin(pool, name, here, words, all_seen, {}, is_foreign=False))
                    raise nothing
                _expect_undamaged(all_seen, whole, version)
                taken = _Taken(pool, name, here, whole, model, optimizer, held, found)
                state, error = None, None
                try:
                    state = taken.state(extra)
                except (PolderError, OSError) as failed:
                    error = failed
                errors = here.gather_errors(error)
                if again and any(isinstance(failed, NotFoundError) for failed in errors):
                    # A newer one has been published, and it was removed.
                    continue
                _raise_of(errors, here, error, whole)
                assert state is not None
                break
        else:
            raise AssertionError("the last look returns or raises")
        model.load_state_dict(state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        for key, value in (extra or {}).items():
            _set_state(value, state["extra"][key])
        if taken.has_own:
            set_random_state(state["random"])
        job.enter(begin(pool, name, here, words, all_seen, whole[0], is_foreign=False))
    identity = taken.mine.identity
    return Restored(taken.mine.number, identity.step, taken.mine.folder, identity.word)


def _is_between(all_seen: list[Seen], whole: list[dict[int, Part]]) -> bool:
    """Whether ranks have looked while a job published: some have seen the next version, and others not."""
    due = max((part.identity.whole for seen in all_seen for part in seen.parts), default=0)
    newest = next(iter(whole[0].values())).identity.number if whole else 0
    return newest < due


def _nothing(
    name: str, found: Look, all_seen: list[Seen], version: int | None, folder: Path | None, here: Here
) -> PolderError:
    """What says that there is nothing to restore, or that there is something, which cannot be restored."""
    parts = [part for seen in all_seen for part in seen.parts]
    damaged = [damage for seen in all_seen for damage in seen.damaged]
    steps = {part.identity.step for part in found.seen.parts if part.folder is None}
    kept = ", ".join(map(str, sorted(steps))) or "none"
    where = ""
    if folder is not None:
        steps = {part.identity.step for part in found.seen.parts if part.folder is not None}
        home = disk.home_of(folder, name, here.rank)
        where = f"; {home} keeps steps: {', '.join(map(str, sorted(steps))) or 'none'}"
    if damaged and version is None:
        return _corrupt(f"{damaged[0][1]}; no version of the snapshot {name} is whole beside it")
    store = f"{name}/{here.rank}"
    text = f"no step of the snapshot {name} is whole on every rank; the store {store} keeps steps: {kept}{where}"
    known = max((part.identity.whole for part in parts), default=0)
    if version is not None and parts:
        numbers = sorted({part.identity.number or part.number for part in parts})
        return UnusableError(f"version {version} is not kept; {text}, as versions {', '.join(map(str, numbers))}")
    if known == 0 and all(part.identity.generation for part in parts):
        return NotFoundError(f"{text}; check the name and POLDER_POOL, or start anew")
    missing: list[str] = []
    for key in sorted({part.identity.key for part in parts}, reverse=True)[:2]:
        of = [part.identity for part in parts if part.identity.key == key]
        lost = sorted(set(range(of[0].world or here.size)) - {it.rank for it in of})
        lacks = ", ".join(map(str, lost))
        missing.append(f"version {of[0].number} of step {of[0].step} lacks the parts of ranks {lacks}")
    return UnusableError(
        f"{text}; {'; '.join(missing)}. Version {known} was whole: give the pool and the folder where its parts are, "
        "or snapshot under another name. Nothing was changed"
    )


def _expect_undamaged(all_seen: list[Seen], whole: list[dict[int, Part]], version: int | None) -> None:
    """No version is damaged that is newer than the one that is restored."""
    identity = next(iter(whole[0].values())).identity
    number = identity.number or max(part.number for part in whole[0].values())
    for seen in all_seen:
        for damaged, why in seen.damaged:
            if damaged > number and version is None:
                raise _corrupt(f"{why}; {_instead(whole[0])}")


def _instead(parts: dict[int, Part]) -> str:
    part = next(iter(parts.values()))
    number = part.identity.number or part.number
    step = part.identity.step
    return f"version {number} of step {step}, which is older, is whole: restore(…, version={number}) takes it"


def _corrupt(text: str, offset: int = 0) -> CorruptError:
    error = CorruptError(text)
    error.offset = offset
    return error


def _raise_of(
    errors: list[BaseException | None], here: Here, own: BaseException | None, whole: list[dict[int, Part]]
) -> None:
    """Raises the error of any rank on all, so that none goes on alone."""
    for rank, found in enumerate(errors):
        if found is None:
            continue
        error = own or found
        whose = "" if own is not None or here.size == 1 else f"rank {rank}: "
        if isinstance(error, CorruptError):
            older = f"; {_instead(whole[1])}" if len(whole) > 1 else ""
            raise _corrupt(f"{whose}{error}{older}", getattr(error, "offset", 0)) from own
        if own is not None:
            raise own
        raise type(error)(f"{whose}{error}")


class _Taken:
    """The version that is restored: this rank's part, and those of all."""

    def __init__(
        self,
        pool: Pool,
        name: str,
        here: Here,
        whole: list[dict[int, Part]],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        held: ExitStack,
        found: Look,
    ) -> None:
        self._pool, self._name, self._held, self._found = pool, name, held, found
        self._model, self._optimizer = model, optimizer
        self._here, self._parts = here, whole[0]
        made_by = next(iter(self._parts.values())).identity.world or here.size
        own = here.rank if made_by == here.size else here.ranks[here.rank] if made_by == here.world else None
        self.has_same_ranks = own is not None
        rank = here.rank if own is None else own
        self.has_own = rank < made_by
        self.mine = self._parts[rank % made_by]
        if self.mine.identity.generation == 0:
            warnings.warn(
                f"the snapshot {name} of step {self.mine.identity.step} was made before versions had identities; it is "
                "taken for one of the last attempt",
                stacklevel=4,
            )

    def reader(self, part: Part) -> tuple[Any, Callable[[Leaf], torch.Tensor]]:
        """How the state of a part is made of its leaves, and what gives the tensor of a leaf."""
        if part.folder is not None:
            return disk.read(part.folder)
        version = self._found.open(self._pool, self._name, part, self._held)
        saved = deserialize(read(version, STATE))
        return saved, viewed(saved.get("views", {}), lambda leaf: read_leaf(version, leaf))

    def sums(self, part: Part) -> dict[str, str]:
        """A sum of each tensor of a part, and of all that is no tensor."""
        if part.folder is not None:
            return disk.identity_of(part.folder, part.identity.rank)[1]
        version = self._found.open(self._pool, self._name, part, self._held)
        sums = {key: f"{value:032x}" for key, value in version.sums() if "/" in key}
        return {**sums, "plain": json.loads(read(version, IDENTITY))["plain"]}

    def state(self, extra: Mapping[str, Any] | None) -> Any:
        """The whole state, with nothing changed yet."""
        saved, of = self.reader(self.mine)
        keys = {key for key, _ in saved["state"]["dict"]}
        if self._optimizer is not None and "optimizer" not in keys:
            raise ArgumentError(f"the snapshot {self._name} has no optimizer; restore without one, or make it with one")
        kept = next((walked for key, walked in saved["state"]["dict"] if key == "extra"), {"dict": []})
        for key in extra or {}:
            if key not in {name for name, _ in kept["dict"]}:
                raise ArgumentError(
                    f"the snapshot {self._name} has no extra {key!r}; restore without it, or make it with it"
                )
        if not self.has_same_ranks and self._here.rank == 0:
            expect_replicated(self._name, saved, self._parts, self.sums)
        resharded = Resharded(
            self._name, self.mine, self._parts, self.reader, self._model, self._optimizer, self.has_same_ranks
        )
        return put_together(saved["state"], of, lambda leaf: resharded.of(leaf, saved, of))
