"""What the workers of a parameter service exchange: with their proxies through the pool, and with each other."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from polder import _core, address
from polder.errors import ArgumentError
from polder.torch.expect import EmulatedLinks, expect_links
from polder.torch.meeting import Attachment, attachments
from polder.torch.survivors import Survivors

# torch's stubs leave collectives without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["Exchange", "Route", "Run", "attachment_of"]

_APART = 1 << 20
"""Gradients of so many bytes are averaged where they are; smaller ones are copied together first."""


@dataclass
class Run:
    """Gradients that come together and lie one behind the other: of a parameter, or of a bucket of DDP."""

    flat: torch.Tensor
    sizes: list[int]
    """Elements of each parameter in it."""


@dataclass
class Route:
    """Which elements of a run the proxies sum: the first `count` of `total`, as tensor `tensor` of the exchange."""

    tensor: int
    count: int
    total: int


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
    _type: torch.dtype
    _dtype: str
    _failed: bool
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

    def _begin(self, shards: list[tuple[int, int, int, int]], groups: Sequence[int] = ()) -> None:
        links = [] if self.emulated is None else list(self.emulated.proxies)
        self._service().begin(shards, self._proxies, self._dtype, self.first_layers_first, links, groups)

    def _span(self, tensor: torch.Tensor, count: int, *, writable: bool) -> tuple[int, int]:
        """Where `count` elements lie that are pushed, or pulled to."""
        what = "the parameter service"
        return address.of(tensor, dtype=self._type, count=count, writable=writable, what=what), count

    def _average(self, flats: list[torch.Tensor]) -> Callable[[], None]:
        """Begins to average `flats` by the workers; what it returns waits for it."""
        if not flats:
            return lambda: None
        small = [flat for flat in flats if flat.nbytes < _APART]
        together = [torch.cat(small)] if small else []
        reduced = [*together, *(flat for flat in flats if flat.nbytes >= _APART)]
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in reduced]
        nbytes = sum(flat.nbytes for flat in reduced)
        until = self._reserve(nbytes)

        def finish() -> None:
            for work in works:
                assert work is not None
                work.wait()
            time.sleep(max(until - time.perf_counter(), 0))
            for flat in reduced:
                flat.div_(self._size)
            for whole in together:
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
