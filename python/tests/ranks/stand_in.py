"""A stand-in for CUDA: it does what was given to a stream when somebody waits for that, and not before."""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

IS_REAL = sys.argv[3:4] == ["real"]
"""Whether the script runs on a GPU, and without the stand-in."""

real_copy, real_empty, real_cat, real_mul = torch.Tensor.copy_, torch.empty, torch.cat, torch.mul
registered: dict[int, int] = {}
registrations: list[int] = []


class Stream:
    """What a GPU does one after the other."""

    def __init__(self, _device: object = None) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._given = self._ran = 0
        self._at_work = threading.RLock()

    def queue(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._given += 1

    def record_event(self) -> "Event":
        return Event(self, self._given)

    def wait_event(self, event: "Event") -> None:
        self.queue(event.synchronize)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def run(self, until: int) -> None:
        if self._ran >= until:
            # What another thread is at comes later.
            return
        # Copies were checked when they were given.
        with self._at_work, torch.inference_mode():
            while self._ran < until:
                self._work.popleft()()
                self._ran += 1

    def synchronize(self) -> None:
        self.run(self._given)


class Event:
    """A place in what a stream does."""

    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.run(self._place)

    def query(self) -> bool:
        return self._stream._ran >= self._place


class OnGpu(torch.Tensor):
    """A tensor whose bytes only streams touch."""

    is_cuda, is_cpu = True, False
    device = property(lambda _: torch.device("cuda", 0))

    def data_ptr(self) -> int:
        raise AssertionError("the CPU cannot read this")

    def record_stream(self, _stream: Stream) -> None:
        # Python keeps what a queued copy names.
        pass

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that was set, and no view of it."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.grad.__set__(self, value)


def _staying(name: str) -> Callable[..., torch.Tensor]:
    real = getattr(torch.Tensor, name)
    # In a call of torch's that a subclass has come to, views would not be of it.
    return lambda self, *arguments: on_gpu(real(self, *arguments))


for _name in ("detach", "view", "__getitem__"):
    setattr(OnGpu, _name, _staying(_name))


class Cuda:
    """The calls of its runtime."""

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        registrations.append(address)
        registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del registered[address]
        return 0


class Used(threading.local):
    """The current stream of a thread is the last one."""

    def __init__(self) -> None:
        self.streams = [main]


main = Stream()
used = Used()


@contextlib.contextmanager
def using(stream: Stream) -> Iterator[None]:
    used.streams.append(stream)
    yield
    used.streams.pop()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds now, whatever the streams have still to do; its version stays if that is written."""
    return tensor.data.as_subclass(torch.Tensor)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(OnGpu, tensor)


def given(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the GPU that has this value once the current stream has come so far."""
    if IS_REAL:
        torch.cuda._sleep(10_000_000)
        return value.to("cuda", non_blocking=True)
    tensor = on_gpu(torch.full_like(value, 77))
    main.queue(lambda: plain(tensor).copy_(value))
    return tensor


def holds(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether what any stream sees now is this."""
    return torch.equal(tensor.detach().cpu() if IS_REAL else plain(tensor), value)


def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    hosts = [tensor for tensor in (self, source) if not isinstance(tensor, OnGpu)]
    if len(hosts) == 2:
        return real_copy(self, source, non_blocking)
    assert torch.is_inference_mode_enabled() or not self.is_inference()
    for host in hosts:
        at, nbytes = host.data_ptr(), host.nbytes
        assert non_blocking and (not nbytes or any(0 <= at - of < of_bytes for of, of_bytes in registered.items()))
    used.streams[-1].queue(lambda: real_copy(plain(self), plain(source)))
    return self


def empty(*shape: object, device: object = None, **named: object) -> torch.Tensor:
    made = real_empty(*shape, **named)
    return on_gpu(made.fill_(77)) if torch.device(device or "cpu").type == "cuda" else made


def cat(tensors: list[torch.Tensor], *arguments: object, **named: object) -> torch.Tensor:
    if any(isinstance(tensor, OnGpu) for tensor in tensors):
        # It comes behind what its stream was given.
        main.synchronize()
    return real_cat(tensors, *arguments, **named)


def mul(tensor: torch.Tensor, factor: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(out, OnGpu):
        return real_mul(tensor, factor, out=out)
    used.streams[-1].queue(lambda: real_mul(plain(tensor), factor, out=plain(out)))
    return out


def install() -> None:
    """Puts it in CUDA's place in this process."""
    torch.Tensor.copy_, torch.empty, torch.cat, torch.mul = copy, empty, cat, mul
    torch.cuda.is_available, torch.cuda.cudart = lambda: True, Cuda
    torch.cuda.check_error, torch.cuda.device_count = lambda code: None, lambda: 0
    torch.cuda.get_device_capability = lambda _: (8, 0)
    torch.cuda.device = lambda _: contextlib.nullcontext()
    torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Stream, using, lambda _: main
