"""What ``polder probe`` measures in Python: kernels of the library that trains, on all cores at once, and on a GPU.

Prints one JSON object. Every figure is the median of samples that are taken in turn, because a shared machine is fast
in one second and slow in the next.
"""

import argparse
import collections
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Sides of square matrices, bytes of what is normed, and parameters that an optimizer updates, which moves more.
ON_A_CORE = ([32, 64, 128, 256, 512, 1024], [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20], 8 << 20)
ON_A_GPU = ([256, 512, 1024, 2048, 4096, 8192], [256 << 10, 2 << 20, 16 << 20, 128 << 20], 128 << 20)
#: Width of what is normed.
WIDTH = 512
#: Bytes of weights that products take in turn, and of each result that is kept: more than caches hold, as in a step.
WEIGHTS = 64 << 20
#: Bytes of a copy between a host's memory and a GPU's.
COPIED = 256 << 20
#: Seconds of a sample at least: a round, of a sample of each kernel, lasts about as long as a small model's step.
SAMPLE = 0.005
SAMPLES = 50
#: Cores that are measured at once at most: each takes a gigabyte.
MOST_CORES = 8
#: Seconds until cores that wait for one that is lost give up.
LOST = 120.0


@dataclass
class Kernel:
    """What is timed: of which kind it is, the operations or bytes of a kernel and of a call, and how it is called."""

    kind: str
    size: float
    amount: float
    call: Callable[[], object]

    def what(self) -> "What":
        """All but the call."""
        return self.kind, self.size, self.amount


#: Kind, size and amount of a kernel.
What = tuple[str, float, float]


def main() -> int:
    """Measures, or prints null where the library is not installed."""
    parser = argparse.ArgumentParser(prog="python -m polder.probe", description=main.__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of each kernel [default: %(default)s]")
    count = parser.parse_args().samples
    if count < 1:
        parser.error(f"--samples: expected 1 or more, found {count}")
    print(json.dumps(machine(count) if importlib.util.find_spec("torch") else None))
    return 0


def machine(count: int) -> dict[str, object]:
    """The library, what it does on a core in 32 bits, and what on the first GPU, if there is one, in bf16."""
    import torch

    gpu = on_gpu(count) if torch.cuda.is_available() else None
    core, noise = on_cores(count)
    return {"library": f"torch {torch.__version__}", "core": core, "noise": noise, "gpu": gpu}


def on_cores(count: int) -> tuple[dict[str, object], float]:
    """What a core does while the others do the same, how far the slowest is behind, and how far samples lie apart."""
    # What a step frees is kept for the next, as by `make demo`; glibc has it zeroed anew.
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_MMAP_THRESHOLD_=str(32 << 20))
    cores = sorted(os.sched_getaffinity(0))[:MOST_CORES]
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(len(cores))
    with ProcessPoolExecutor(len(cores), context, wait_there, (together,)) as workers:
        measured = list(workers.map(on_core, cores, itertools.repeat(count)))
    what = measured[0][0]
    timed = [samples for _, samples in measured]
    medians = [statistics.median([time for core in timed for time in core[kernel]]) for kernel in range(len(what))]
    return {**reached(what, medians), "straggle": straggle(timed, medians)}, noise(timed)


def noise(cores: Sequence[Sequence[Sequence[float]]]) -> float:
    """By what part half of a kernel's samples on a core differ from their median at most: the median of all kernels.

    >>> noise([[[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]]])
    0.0
    >>> noise([[[2.0, 1.0, 2.0, 3.0, 4.0]]])
    0.5
    """
    parts: list[float] = []
    for times in itertools.chain.from_iterable(cores):
        median = statistics.median(times)
        parts.append(statistics.median(abs(time / median - 1.0) for time in times))
    return statistics.median(parts)


#: Where the cores of a round wait for each other: each of their processes has one.
TOGETHER: list[threading.Barrier] = []


def wait_there(together: threading.Barrier) -> None:
    """Has this process wait there for the others."""
    TOGETHER.append(together)


def on_core(core: int, count: int) -> tuple[list[What], list[list[float]]]:
    """Kernels, and samples of each, on one core; all cores begin each round of samples together."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    of_core = kernels(torch.device("cpu"), torch.float32, *ON_A_CORE, heads=8, length=128)
    timed = samples([kernel.call for kernel in of_core], count, together=lambda: TOGETHER[0].wait(LOST))
    return [kernel.what() for kernel in of_core], timed


def straggle(cores: Sequence[Sequence[Sequence[float]]], medians: Sequence[float]) -> float:
    """How much longer the slowest of two cores takes for a round than the medians of its kernels say, as a part.

    Of each core, each kernel and each round its seconds; of each kernel their median. A round that is interrupted takes
    longer than those on any core. It is taken to grow with the logarithm of the cores, as in ``fitted.straggle`` of a
    platform.

    >>> straggle([[[1.0, 1.0]], [[1.0, 1.0]]], [1.0])
    0.0
    >>> straggle([[[1.0, 3.0]], [[3.0, 1.0]]], [2.0])
    0.5
    >>> straggle([[[1.0, 3.0]]], [2.0])
    0.0
    """
    if len(cores) == 1:
        return 0.0
    # Kernels weigh alike, however long a sample of each took.
    rounds = [
        [sum(time / median for time, median in zip(times, medians, strict=True)) for times in zip(*core, strict=True)]
        for core in cores
    ]
    slowest = statistics.median(max(of_cores) for of_cores in zip(*rounds, strict=True))
    # Of kernels with samples far below their medians a round takes less than those say.
    return max(0.0, slowest / len(medians) - 1.0) / math.log2(len(cores))


def on_gpu(count: int) -> dict[str, object]:
    """What the first GPU does, what it is called, how many there are, and what copies from the host reach."""
    import torch

    device = torch.device("cuda", 0)
    near, far = (
        torch.empty(COPIED, dtype=torch.uint8).pin_memory(),
        torch.empty(COPIED, dtype=torch.uint8, device=device),
    )
    of_gpu = kernels(device, torch.bfloat16, *ON_A_GPU, heads=64, length=4096)
    calls = [kernel.call for kernel in of_gpu]
    copies = [lambda: far.copy_(near, non_blocking=True), lambda: near.copy_(far, non_blocking=True)]
    timed = samples([*calls, *copies], count, torch.cuda.synchronize)
    *medians, copy, back = [statistics.median(times) for times in timed]
    return {
        "name": torch.cuda.get_device_name(device),
        "count": torch.cuda.device_count(),
        "capacity": torch.cuda.mem_get_info(device)[1],
        "from_host": COPIED / copy,
        "to_host": COPIED / back,
        "kernels": {**reached([kernel.what() for kernel in of_gpu], medians), "straggle": 0.0},
    }


def reached(kernels: Sequence[What], seconds: Sequence[float]) -> dict[str, object]:
    """Operations a second of products and of attention, bytes a second of what stands between, seconds of a launch.

    >>> what = [("product", 8.0, 8.0), ("moved", 4.0, 12.0), ("launch", 1.0, 1.0), ("attention", 6.0, 6.0)]
    >>> reached(what, [2.0, 2.0, 2.0, 2.0])
    {'products': [(8.0, 4.0)], 'moved': [(4.0, 6.0)], 'launch_s': 2.0, 'attention': 3.0}
    """

    def of(kind: str) -> list[tuple[float, float]]:
        timed = zip(kernels, seconds, strict=True)
        return [(size, amount / time) for (name, size, amount), time in timed if name == kind]

    [(_, launches)], [(_, attention)] = of("launch"), of("attention")
    return {"products": of("product"), "moved": of("moved"), "launch_s": 1.0 / launches, "attention": attention}


def kernels(
    device: "torch.device",
    dtype: "torch.dtype",
    sides: Sequence[int],
    sizes: Sequence[int],
    parameters: int,
    *,
    heads: int,
    length: int,
) -> list[Kernel]:
    """Products, what stands between them, an optimizer, a launch and attention."""
    import torch
    from torch.nn import functional

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=device).to(dtype)

    listed: list[Kernel] = []
    weights = some(max(WEIGHTS // dtype.itemsize, 2 * max(sides) ** 2))
    for side in sides:
        matrices = weights[: len(weights) // side**2 * side**2].view(-1, side, side).unbind()
        operations = 2.0 * side**3
        listed.append(Kernel("product", operations, 3 * operations, products(matrices)))
    for size in sizes:
        values, wide = (some(times * size // dtype.itemsize // WIDTH, WIDTH) for times in (1, 4))
        listed.append(
            Kernel("moved", 18 / 5 * size, 18.0 * size, lambda values=values, wide=wide: between_products(values, wide))
        )
    listed.append(update(device, parameters))
    listed.append(launches(device, dtype))
    width = 64
    q, k, v = (some(1, heads, length, width) for _ in range(3))
    # Half of 4 s s h operations: what lies in the future is left out.
    operations = 0.5 * 4 * heads * length * length * width

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return [*listed, Kernel("attention", operations, operations, attend)]


def products(matrices: Sequence["torch.Tensor"]) -> Callable[[], object]:
    """Does the three products of a weight: forward, and of both gradients, each with what it transposes.

    Each time of another weight. Activations and gradients of weights are kept, as in a step, until all had their turn.
    """
    in_turn = itertools.cycle(matrices)
    kept: collections.deque[tuple[torch.Tensor, torch.Tensor]] = collections.deque(maxlen=len(matrices))

    def products_of_next() -> None:
        values, weights = next(in_turn), next(in_turn)
        activations, gradient = values @ weights.t(), values @ weights
        kept.append((activations, gradient.t() @ values))

    # Memory that is kept for the first time costs more than the products: the machine hands out zeroed pages.
    for _ in matrices:
        products_of_next()
    return products_of_next


def between_products(values: "torch.Tensor", wide: "torch.Tensor") -> list["torch.Tensor"]:
    """What a block does between its products, a kernel each: two norms, an activation four times as wide, and two sums.

    They move ``values`` 18 times to or from memory. On a core norms and activations compute for longer than they move.
    """
    from torch.nn import functional

    normed = [functional.layer_norm(values, values.shape[-1:]) for _ in range(2)]
    activated = functional.gelu(wide, approximate="tanh")
    return [activated, *(values + branch for branch in normed)]


def update(device: "torch.device", parameters: int) -> Kernel:
    """An optimizer: gradients are read, weights and two states are read and written, more than other kernels move.

    >>> all(18 / 5 * sizes[-1] < 7 * 4 * parameters for _, sizes, parameters in (ON_A_CORE, ON_A_GPU))
    True
    """
    import torch

    weights = torch.zeros(parameters, dtype=torch.float32, device=device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    moved = 7.0 * weights.nbytes

    def step() -> None:
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    return Kernel("moved", moved, moved, step)


def launches(device: "torch.device", dtype: "torch.dtype") -> Kernel:
    """What a kernel takes that has next to nothing to do.

    On a core those of a tiny block: four products and, backward, twice as many; attention, an activation, two norms and
    two sums, and as many backward. A GPU begins a kernel while the host hands it the next.
    """
    import torch
    from torch.nn import functional

    if device.type != "cpu":
        few = torch.ones(1, dtype=dtype, device=device)
        return Kernel("launch", 1.0, 1.0, lambda: few.add_(1.0))
    tokens, width = 2, 16
    norms = [torch.nn.LayerNorm(width, dtype=dtype) for _ in range(2)]
    mixed, attended, up, down = (
        torch.nn.Linear(width * wide, width * narrow, dtype=dtype) for wide, narrow in [(1, 3), (1, 1), (1, 4), (4, 1)]
    )
    values = torch.rand(tokens, width, dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(values)

    def block() -> None:
        q, k, v = mixed(norms[0](values)).view(1, 1, tokens, 3, width).unbind(3)
        x = values + attended(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0])
        x = x + down(functional.gelu(up(norms[1](x)), approximate="tanh"))
        x.backward(gradient)

    forward, backward = 4 + 6, 2 * 4 + 6
    return Kernel("launch", 1.0, forward + backward, block)


def samples(
    calls: Sequence[Callable[[], object]],
    count: int,
    wait: Callable[[], object] = lambda: None,
    together: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of each call, in ``count`` samples of many calls that follow each other, taken of all calls in turn.

    ``wait`` returns when all that was called is done; ``together`` is called before each round.

    >>> [len(times) == 3 and min(times) > 0 for times in samples([lambda: sum(range(100))], 3)]
    [True]
    """

    def repeat(call: Callable[[], object], times: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return time.perf_counter() - begin

    def enough(call: Callable[[], object]) -> int:
        times = 1
        # Also warms up.
        while repeat(call, times) < SAMPLE:
            times *= 2
        return times

    repeats = [enough(call) for call in calls]
    rounds: list[list[float]] = []
    for _ in range(count):
        together()
        rounds.append([repeat(call, times) / times for call, times in zip(calls, repeats, strict=True)])
    return [list(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
