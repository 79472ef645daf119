"""What the workers of a parameter service exchange: with their proxies through the pool, and with each other."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from polder import _core, address
from polder.errors import ArgumentError
from polder.torch import averages, gpu
from polder.torch.expect import EmulatedLinks, expect_links
from polder.torch.meeting import Attachment, attachments
from polder.torch.survivors import Survivors

# torch's stubs leave collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["Exchange", "Route", "Run", "attachment_of", "name_of"]

_APART = 1 << 20
"""Gradients of so many bytes are averaged where they are; smaller ones are copied together first."""
_WINDOW = 8
"""A window of the pool has room for so many of the largest shards: some are pushed while others are summed."""


@dataclass
class Run:
    """Gradients that come together and lie one behind the other: of a parameter, or of a bucket of DDP."""

    flat: torch.Tensor
    sizes: list[int]
    """Elements of each parameter in it."""
    gradient: torch.Tensor | None = None
    """What a plain module's parameter has as its gradient, where it stays there."""
    version: int = 0
    """The version of that when it was taken."""


@dataclass
class Route:
    """Which elements of a run the proxies sum: the first `count` of `total`, as tensor `tensor` of the exchange."""

    tensor: int
    count: int
    total: int
    dtype: torch.dtype


class Exchange:
    """A worker's part in the exchange: its proxies, its connection to all of them, and the averages of the workers."""

    _group: dist.ProcessGroup | None
    _attachment: Attachment
    _survivors: Survivors | None
    _rank: int
    _size: int
    _proxies: int
    _timeout: float
    first_layers_first: bool
    _parameters: list[torch.nn.Parameter]
    _is_early: bool
    """Whether the next forward pass begins before all parameters have come."""
    _failed: bool
    _leaving: "list[tuple[Callable[[torch.Tensor], None], torch.Tensor, list[Any]]]"
    """Gradients on their way from a GPU, in order: what pushes them, where they come to, events behind the copies."""
    _entering: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """What a GPU gets once sums have come, by its key: the tensor there, and where its bytes come to."""
    _busy_until: float
    """When the emulated link of this worker is free."""
    _client: "_core.ServiceClient | None"
    _children: "list[subprocess.Popen[bytes]]"

    @property
    def emulated(self) -> EmulatedLinks | None:
        """Links to emulate."""
        return self._emulated

    @emulated.setter
    def emulated(self, value: EmulatedLinks | None) -> None:
        expect_links(value)
        if value is not None and len(value.proxies) != self._proxies:
            raise ArgumentError(f"{len(value.proxies)} emulated links for {self._proxies} proxies; give one each")
        self._emulated = value

    def _open_service(self) -> None:
        """Starts this worker's proxies and joins the service with them."""
        name = f"/sync/{self._token()}"
        self._children = [
            _start(self._attachment, name, proxy, self._proxies, self._size, self._timeout)
            for proxy in range(self._rank, self._proxies, self._size)
        ]
        try:
            self._client = _core.ServiceClient(
                self._attachment.pool,
                name,
                self._rank,
                self._size,
                self._proxies,
                timeout=self._timeout,
                given_up=self._has_lost_one,
            )
        except BaseException:
            self._failed = True
            self._close_service()
            raise

    def _close_service(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                client.abandon() if self._failed else client.close()
        finally:
            children, self._children = self._children, []
            for child in children:
                _end(child)

    def _abandon(self) -> None:
        """Leaves a service that has lost a proxy, which can agree on nothing any more."""
        failed, self._failed = self._failed, True
        try:
            self._close_service()
        finally:
            self._failed = failed

    def _token(self) -> str:
        """A word that worker 0 draws."""
        token = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(token, group_src=0, group=self._group)
        return bytes(token.tolist()).hex()

    def _service(self) -> "_core.ServiceClient":
        if self._client is None:
            raise ArgumentError("the service is closed; make another one")
        return self._client

    def _has_lost_one(self) -> bool:
        """Whether a proxy that this worker has started is gone, or a worker without which the others could go on."""
        has_lost_worker = self._survivors is not None and self._survivors.have_lost()
        return has_lost_worker or any(child.poll() is not None for child in self._children)

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """Remembers a failure: then the service is not ended together."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _begin(
        self,
        shards: list[tuple[int, int, int, int]],
        dtypes: Iterable[torch.dtype],
        groups: Sequence[int] = (),
        *,
        moments: int = 0,
        reuses: bool = True,
    ) -> None:
        """Exchanges these shards from now on, of tensors of these types; in windows that they share, if it `reuses`."""
        links = [] if self.emulated is None else list(self.emulated.proxies)
        # Where the first layers overtake others, all have to be there.
        window = 0 if self._is_early or not reuses else _WINDOW * max((nbytes for _, _, nbytes, _ in shards), default=0)
        names = [name_of(dtype) for dtype in dtypes]
        order = self.first_layers_first
        self._service().begin(shards, self._proxies, names, order, links, groups, window, moments)

    def _span(self, tensor: torch.Tensor, dtype: torch.dtype, count: int, *, writable: bool) -> tuple[int, int]:
        """Where `count` elements lie that are pushed, or pulled to."""
        what = "the parameter service"
        return address.of(tensor, dtype=dtype, count=count, writable=writable, what=what), count

    def _leave(self, tensor: torch.Tensor, push: Callable[[torch.Tensor], None]) -> None:
        """Pushes a tensor, one on a GPU through memory of the host as soon as its bytes are there."""
        if not tensor.is_cuda:
            push(tensor)
            return
        (room,) = gpu.copied_out([tensor])
        self._leaving.append((push, room, gpu.begun()))
        self._push_left(waits=False)

    def _push_left(self, *, waits: bool = True) -> None:
        """Pushes what has left a GPU; all that is on its way, if it `waits`."""
        while self._leaving:
            push, room, events = self._leaving[0]
            if not waits and not all(event.query() for event in events):
                return
            for event in events:
                event.synchronize()
            del self._leaving[0]
            push(room)

    def _room(self, key: int, tensor: torch.Tensor) -> torch.Tensor:
        """Where the bytes of a tensor come to: there, or where `_enter` brings them to its GPU from."""
        if not tensor.is_cuda:
            return tensor
        (room,) = gpu.room_for([tensor])
        self._entering[key] = (tensor, room)
        return room

    def _enter(self, keys: Iterable[int] | None = None) -> None:
        """Brings what has come of these keys, or of all, to the GPU."""
        pairs = [
            self._entering.pop(key) for key in (list(self._entering) if keys is None else keys) if key in self._entering
        ]
        if pairs:
            gpu.copy_in(*zip(*pairs, strict=True))

    def _average(self, flats: list[torch.Tensor]) -> Callable[[], None]:
        """Begins to average `flats` by the workers; what it returns waits for it."""
        if not flats:
            return lambda: None
        of = {
            dtype: [flat for flat in flats if flat.nbytes < _APART and flat.dtype is dtype]
            for dtype in dict.fromkeys(flat.dtype for flat in flats if flat.nbytes < _APART)
        }
        together = [torch.cat(small) for small in of.values()]
        reduced = [*together, *(flat for flat in flats if flat.nbytes >= _APART)]
        for flat in (flat for flat in reduced if flat.dtype in averages.HALVES):
            # As DDP does, whose factor this is: a sum may be too large for them.
            torch.mul(flat, 1 / self._size, out=flat)
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in reduced]
        nbytes = sum(flat.nbytes for flat in reduced)
        until = self._reserve(nbytes)

        def finish() -> None:
            for work in works:
                assert work is not None
                work.wait()
            time.sleep(max(until - time.perf_counter(), 0))
            for flat in reduced:
                if flat.dtype not in averages.HALVES:
                    flat.div_(self._size)
            for small, whole in zip(of.values(), together, strict=True):
                for flat, part in zip(small, whole.split([flat.numel() for flat in small]), strict=True):
                    flat.copy_(part)

        return finish

    def _reserve(self, nbytes: int) -> float:
        """When an all-reduce of so many bytes would be over, where links are emulated."""
        if self.emulated is None:
            return 0.0
        ring = 2 * (self._size - 1) / self._size
        self._busy_until = max(self._busy_until, time.perf_counter()) + ring * nbytes / self.emulated.workers
        return self._busy_until

    def _agreed(self, seconds: list[float]) -> list[float]:
        """The mean of what all workers measured, the same bits on each."""
        means = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(means, group=self._group)
        return means.div_(self._size).tolist()


def name_of(dtype: torch.dtype) -> str:
    """What Rust calls the elements."""
    return str(dtype).removeprefix("torch.")


def attachment_of(group: dist.ProcessGroup) -> Attachment:
    """The attachment of a group of the backend ``polder``; an ArgumentError for another."""
    for attachment in attachments.values():
        if group in attachment.groups:
            return attachment
    raise ArgumentError('the group is none of the backend polder; make it with backend="polder"')


def _start(
    attachment: Attachment, name: str, proxy: int, proxies: int, clients: int, timeout: float
) -> "subprocess.Popen[bytes]":
    """Starts a proxy on this worker's host; it ends when this process does, because its standard input does."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "polder.proxy",
        "--pool",
        attachment.path,
        "--host",
        str(attachment.pool.host),
    ]
    command += ["--service", name, "--proxy", str(proxy), "--proxies", str(proxies), "--clients", str(clients)]
    command += ["--timeout", str(timeout), "--tied", *(["--own"] if attachment.share is not None else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Waits for a proxy that has been told to end, and ends one that does not."""
    with contextlib.suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
