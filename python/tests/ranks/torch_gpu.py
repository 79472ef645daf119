"""Every call of c10d on tensors of a GPU, with a stand-in for CUDA where there is none: ``real`` asks for a GPU.

The stand-in does what was given to a stream when somebody waits for that, and not before.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch_meet import meet

IS_REAL = sys.argv[3] == "real"
real_copy = torch.Tensor.copy_
registered: dict[int, int] = {}
registrations: list[int] = []


class Stream:
    """What a GPU does one after the other."""

    def __init__(self, _device: object = None) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._given = self._ran = 0

    def queue(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._given += 1

    def wait_stream(self, other: "Stream") -> None:
        self.queue(partial(other.run, other._given))

    def run(self, until: int) -> None:
        while self._ran < until:
            self._ran += 1
            self._work.popleft()()

    def synchronize(self) -> None:
        self.run(self._given)


class OnGpu(torch.Tensor):
    """A tensor whose bytes only streams touch."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, is_cpu = True, False
    device = property(lambda _: torch.device("cuda", 0))

    def data_ptr(self) -> int:
        raise AssertionError("the CPU cannot read this")


class Cuda:
    """The calls of its runtime."""

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        registrations.append(address)
        registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del registered[address]
        return 0


main = Stream()
used = [main]


@contextlib.contextmanager
def using(stream: Stream) -> Iterator[None]:
    used.append(stream)
    yield
    used.pop()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    hosts = [tensor for tensor in (self, source) if not isinstance(tensor, OnGpu)]
    if len(hosts) == 2:
        return real_copy(self, source, non_blocking)
    at, nbytes = hosts[0].data_ptr(), hosts[0].nbytes
    assert non_blocking and (not nbytes or any(0 <= at - of < of_bytes for of, of_bytes in registered.items()))
    used[-1].queue(lambda: real_copy(plain(self), plain(source)))
    return self


meet()
rank, size = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % size, (rank - 1) % size
if not IS_REAL:
    torch.Tensor.copy_ = copy
    torch.cuda.is_available, torch.cuda.cudart = lambda: True, Cuda
    torch.cuda.check_error, torch.cuda.device_count = lambda code: None, lambda: 0
    torch.cuda.get_device_capability = lambda _: (8, 0)
    torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Stream, using, lambda _: main


def given(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the GPU that has this value once the current stream has come so far."""
    if IS_REAL:
        torch.cuda._sleep(1_000_000)
        return value.to("cuda", non_blocking=True)
    tensor = torch.Tensor._make_subclass(OnGpu, torch.full_like(value, 77))
    main.queue(lambda: plain(tensor).copy_(value))
    return tensor


def holds(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether what any stream sees now is this."""
    return torch.equal(tensor.cpu() if IS_REAL else plain(tensor), value)


def mine(count: int = 1000, source: int = rank) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10_000 * source


def hollow(*shape: int) -> torch.Tensor:
    return given(torch.zeros(*shape))


def everyones(count: int = 1000) -> list[torch.Tensor]:
    return [mine(count, source) for source in range(size)]


total = torch.stack(everyones()).sum(0)

# Collectives that return when they are over.
dist.all_reduce(sums := given(mine()))
assert holds(sums, total)
dist.broadcast(told := given(mine()), 1)
assert holds(told, mine(source=1))
dist.reduce(sums := given(mine()), 1)
assert rank != 1 or holds(sums, total)
dist.all_gather(listed := [hollow(1000) for _ in range(size)], given(mine()))
assert all(map(holds, listed, everyones()))
dist.all_gather_into_tensor(whole := hollow(size * 1000), given(mine()))
assert holds(whole, torch.cat(everyones()))
dist.reduce_scatter(part := hollow(1000), [given(mine() + to) for to in range(size)])
assert holds(part, total + size * rank)
dist.reduce_scatter_tensor(part := hollow(500), given(mine()))
assert holds(part, total[500 * rank : 500 * (rank + 1)])
dist.gather(given(mine()), listed := [hollow(1000) for _ in range(size)] if rank == 1 else None, 1)
assert listed is None or all(map(holds, listed, everyones()))
dist.scatter(part := hollow(1000), [given(mine() + to) for to in range(size)] if rank == 1 else None, 1)
assert holds(part, mine(source=1) + rank)
dist.all_to_all_single(swapped := hollow(1000), given(mine()))
assert holds(swapped, torch.cat([each[500 * rank : 500 * (rank + 1)] for each in everyones()]))
dist.all_to_all_single(swapped := hollow(4 * (rank + 1)), given(mine(6)), [2 * (rank + 1)] * 2, [2, 4])
assert holds(swapped, torch.cat([each.split([2, 4])[rank] for each in everyones(6)]))
dist.all_to_all(listed := [hollow(3), hollow(3)], [given(mine(3) + to) for to in range(size)])
assert all(map(holds, listed, [each + rank for each in everyones(3)]))

# Strided and empty ones, other types, and what requires a gradient.
dist.all_reduce(strided := given(mine(12).view(3, 4).t()))
assert holds(strided, total[:12].view(3, 4).t())
dist.all_reduce(empty := hollow(0))
assert holds(empty, torch.zeros(0))
dist.all_reduce(flags := given(torch.tensor([[rank == 0, False]])), dist.ReduceOp.MAX)
assert holds(flags, torch.tensor([[True, False]]))
dist.broadcast(weight := given(mine()).requires_grad_(), 0)
assert holds(weight.detach(), mine(source=0))

# Those that go on behind: the result is there after the wait, and for a future's callback.
work = dist.all_reduce(sums := given(mine()), async_op=True)
assert work is not None and work.wait() and holds(sums, total) and work.result()[0] is sums
future = dist.all_reduce(sums := given(mine()), async_op=True).get_future()
assert future.then(lambda done: done.value()[0] is sums and holds(sums, total)).wait()
with dist._coalescing_manager(async_ops=True) as several:
    dist.all_reduce(one := given(mine()))
    dist.all_reduce(other := given(mine() + 1))
several.wait()
assert holds(one, total) and holds(other, total + size)

# Messages. What a stream still reads of a tensor that receives is what was there before.
batch = [dist.P2POp(dist.isend, given(mine()), after), dist.P2POp(dist.irecv, came := hollow(1000), before)]
seen: list[torch.Tensor] = []
if not IS_REAL:
    main.queue(lambda: seen.append(plain(came).clone()))
for request in dist.batch_isend_irecv(batch):
    request.wait()
assert holds(came, mine(source=before)) and (IS_REAL or holds(seen[0], torch.zeros(1000)))
if rank == 0:
    dist.send(given(mine()), 1, tag=3)
elif rank == 1:
    came = hollow(1000)
    assert dist.recv(came, tag=3) == 0 and holds(came, mine(source=0))

# Registered memory is used again, and given back with the last group.
if not IS_REAL:
    before = len(registrations)
    for _ in range(5):
        dist.all_reduce(given(mine()))
    assert len(registrations) == before == len(registered)
dist.barrier()
dist.destroy_process_group()
assert not registered
print("equal")
