"""A transport for torchft: a replica that recovers reads a version in the pool, which outlives its sender.

The module runs without torchft. With it, `PoolTransport` is one of torchft's transports.
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.tensor  # pyright: ignore[reportUnusedImport]  # Lets torch.load take parts of DTensors.

from polder import _core, arguments
from polder.errors import ArgumentError, CorruptError, NotFoundError, PeerTimeoutError
from polder.pool import Pool
from polder.torch.state import Leaf, Views, deserialize, put_together, serialize, shared, take_apart, viewed
from polder.torch.versions import bytes_of, pool_of, read, read_leaf

if TYPE_CHECKING:
    CheckpointTransport = object
else:
    try:
        from torchft.checkpointing.transport import CheckpointTransport
    except ModuleNotFoundError:
        CheckpointTransport = object

# torch's stubs leave state dictionaries without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["PoolTransport"]

_SENT = "sent"
_STATE = "state"
"""What holds the step and the sender, and all that is no tensor. The name of a tensor has a `/`."""
_TIMEOUT = timedelta(seconds=60)
"""That of torchft's Manager."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.0005, 0.02


class PoolTransport(CheckpointTransport):
    """Sends a replica's state through the pool, for ``torchft.Manager(checkpoint_transport=)``.

    Each rank of each replica has a store of its own. `send_checkpoint` returns when the state is a whole version there.
    From then on the sender may die: the version stays. A store keeps the newest version and the one before, and the
    pool needs room for a third. A tensor that has not changed since the version before is not copied again.

    Parameters
    ----------
    name : str
        The name of the job, the same on all replicas.
    replica : str or int, optional
        What tells this replica from others, the same after a restart; ``REPLICA_GROUP_ID`` by default.
    rank : int, optional
        The rank in the replica; ``RANK`` by default, else 0.
    pool : Pool, optional
        The default is ``Pool()``. All replicas name the same, with ``POLDER_POOL``.
    state_dict : callable, optional
        Gives a state of this replica, in the structure of the state that is sent. Tensors are received into those that
        stand at the same places of it. Else they are received into new ones on the CPU.

    Raises
    ------
    ArgumentError
        `replica` is not known, or the names are not those of a store.

    Examples
    --------
    >>> manager = torchft.Manager(checkpoint_transport=PoolTransport("job"), ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        *,
        replica: str | int | None = None,
        rank: int | None = None,
        pool: Pool | None = None,
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        replica = os.environ.get("REPLICA_GROUP_ID") if replica is None else replica
        if replica is None:
            raise ArgumentError(
                "PoolTransport does not know which replica this is; give replica=, or set REPLICA_GROUP_ID. It stays "
                "the same when a replica starts again"
            )
        replica = replica if isinstance(replica, str) else arguments.whole("replica", replica)
        rank = int(os.environ.get("RANK", "0")) if rank is None else arguments.whole("rank", rank)
        arguments.text("the name of the job", name)
        self._pool = pool_of(pool)
        self._store = _core.Store(self._pool, f"{name}/torchft/{replica}/{rank}")
        # What an earlier process of this replica has sent at the same step may be another state.
        self._session = secrets.token_hex(8)
        self._state_dict = state_dict

    def metadata(self) -> str:
        """What a receiver needs to find this sender's versions, as JSON."""
        return json.dumps({"pool": self._pool.uuid, "store": self._store.name, "session": self._session})

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta | None = None
    ) -> None:
        """Publishes a state as a version. Once this returns, it is whole in the pool, also when this process is killed.

        Parameters
        ----------
        dst_ranks : list of int
            The replicas that may receive it; any may.
        step : int
            Its step.
        state_dict : Any
            Dictionaries, lists and tuples of tensors and of what ``torch.load(weights_only=True)`` takes. Tensors are
            dense or DTensors, of any dtype, shape and strides. Tensors that share memory are sent once, and share it
            again. Tensors of a GPU are copied to the CPU. A forward pass may change tensors of up to 1 MiB meanwhile,
            such as a running mean. If a larger one changes, its checksum does not match at the receiver.
        timeout : timedelta, optional
            Has no effect: nobody is waited for.

        Raises
        ------
        PoolFullError
            There is no room for another version. Those before are whole.
        ArgumentError
            The state holds anything else. It names the place.
        NameExistsError
            Another live process has the same `replica` and `rank`, and is sending.
        """
        del dst_ranks, timeout
        tensors: dict[str, torch.Tensor] = {}
        walked = take_apart(state_dict, "", tensors)
        owned, views = shared(tensors)
        saved = serialize({"state": walked, "views": views})
        arrays: list[tuple[str, Any]] = [(path, bytes_of(tensor)) for path, tensor in owned.items()]
        sent = json.dumps({"session": self._session, "step": step}).encode()
        arrays += [(_STATE, np.frombuffer(saved, np.uint8)), (_SENT, np.frombuffer(sent, np.uint8))]
        self._store.publish(arrays)

    def disallow_checkpoint(self) -> None:
        """Has no effect: what was sent is a copy."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None) -> Any:
        """Receives a whole state, waiting until it is published.

        With `state_dict`, tensors of it hold old and new values after an error.

        Parameters
        ----------
        src_rank : int
            The replica that sends, for errors.
        metadata : str
            What `metadata` of the sender gave.
        step : int
            The step that it sends.
        timeout : timedelta, optional
            How long to wait; 60 seconds by default.

        Returns
        -------
        Any
            The state. A DTensor is laid out as at the sender, over the process groups of the same names here.

        Raises
        ------
        PeerTimeoutError
            The sender has not published this step in time.
        CorruptError
            The bytes of a tensor are not those that were sent. It names the tensor.
        ArgumentError
            The sender has another transport or another pool, or a tensor of `state_dict` has another shape or dtype.
        """
        store, session = self._whose(src_rank, metadata)
        version = self._await(store, session, step, src_rank, timeout or _TIMEOUT)
        try:
            what = "what is no tensor"
            try:
                saved = deserialize(read(version, _STATE))
                targets: dict[str, torch.Tensor] = {}
                if self._state_dict is not None:
                    take_apart(self._state_dict(), "", targets)
                views: Views = saved["views"]

                def read_named(leaf: Leaf) -> torch.Tensor:
                    nonlocal what
                    what = f"the tensor {leaf['tensor']}"
                    target = targets.get(leaf["tensor"])
                    if target is None or not _is_in_place(leaf, target):
                        return read_leaf(version, leaf)
                    version.read_into(leaf["tensor"], bytes_of(target))
                    return target

                read_any = viewed(views, read_named)

                def of(leaf: Leaf) -> torch.Tensor:
                    target = targets.get(leaf["tensor"])
                    if target is None:
                        return read_any(leaf)
                    _expect_fits(leaf, target)
                    found = read_any(leaf)
                    if found is target:
                        return target
                    with torch.no_grad():
                        return target.copy_(found)

                return put_together(saved["state"], of)
            except CorruptError as error:
                raise _corrupt(f"{what} of step {step}", store, error) from error
        finally:
            version.close()

    def shutdown(self, wait: bool = True) -> None:
        """Keeps what was sent, because a replica may be about to receive it; `remove` frees it."""
        del wait

    def remove(self) -> None:
        """Frees what this rank has sent, once no replica needs it. One that is receiving it goes on."""
        self._store.remove()

    def _whose(self, src_rank: int, metadata: str) -> tuple[_core.Store, str]:
        """The store of a sender, and what it calls itself."""
        try:
            sender = json.loads(metadata)
            uuid, name, session = str(sender["pool"]), str(sender["store"]), str(sender["session"])
        except (ValueError, TypeError, KeyError) as error:
            raise ArgumentError(
                f"replica {src_rank} sends by another transport, for its metadata is {metadata!r}; give the Manager of "
                "each replica a PoolTransport"
            ) from error
        if uuid != self._pool.uuid:
            raise ArgumentError(
                f"replica {src_rank} sends through the pool {uuid}, and this one has {self._pool.path} "
                f"({self._pool.uuid}); set POLDER_POOL to one that all replicas map"
            )
        return _core.Store(self._pool, name), session

    def _await(self, store: _core.Store, session: str, step: int, src_rank: int, timeout: timedelta) -> _core.Version:
        """The version of a step, held open."""
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE_SECONDS
        others: dict[int, Any] = {}
        while True:
            for number in reversed(store.versions()):
                if number in others:
                    continue
                try:
                    version = store.open(number)
                except NotFoundError:
                    continue
                try:
                    sent = json.loads(read(version, _SENT))
                except BaseException as error:
                    version.close()
                    if isinstance(error, CorruptError):
                        raise _corrupt("the head of a version", store, error) from error
                    raise
                if (sent["session"], sent["step"]) == (session, step):
                    return version
                version.close()
                others[number] = sent
            if time.monotonic() >= deadline:
                raise self._late(store, session, step, src_rank, timeout, list(others.values()))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _late(
        self, store: _core.Store, session: str, step: int, src_rank: int, timeout: timedelta, others: list[Any]
    ) -> PeerTimeoutError:
        steps = sorted({sent["step"] for sent in others if sent["session"] == session})
        error = PeerTimeoutError(
            f"timed out after {timeout.total_seconds():g} s: replica {src_rank} has not sent step {step} to "
            f"{store.name} in the pool {self._pool.path}; it has sent steps: {', '.join(map(str, steps)) or 'none'}. "
            "See its log, or raise the timeout of the Manager"
        )
        error.rank = src_rank
        return error


def _is_in_place(leaf: Leaf, target: torch.Tensor) -> bool:
    """Whether the bytes of a leaf may be read straight into a tensor."""
    is_same = (target.dtype, list(target.shape)) == (leaf["dtype"], list(leaf["shape"]))
    return is_same and target.is_cpu and target.is_contiguous() and "stride" not in leaf and not _is_flagged(target)


def _is_flagged(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _expect_fits(leaf: Leaf, target: torch.Tensor) -> None:
    if (target.dtype, list(target.shape)) != (leaf["dtype"], list(leaf["shape"])):
        raise ArgumentError(
            f"{leaf['tensor']} has {list(leaf['shape'])} elements of {leaf['dtype']} at the sender and "
            f"{list(target.shape)} of {target.dtype} in state_dict; give states of the same model"
        )


def _corrupt(what: str, store: _core.Store, error: CorruptError) -> CorruptError:
    raised = CorruptError(
        f"{what} from {store.name} is not what was sent ({error}); the next send is whole again. A tensor that changes "
        "while it is sent gives this error too"
    )
    raised.offset = error.offset
    return raised
