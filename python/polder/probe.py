"""What ``polder probe`` measures in Python: kernels of the library that trains, on all cores at once, and on a GPU.

Prints one JSON object. Every figure is the median of samples that are taken in turn, for a machine that others share is
fast in one second and slow in the next.
"""

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
#: Seconds of a sample at least.
SAMPLE = 0.02
SAMPLES = 25
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
    print(json.dumps(machine() if importlib.util.find_spec("torch") else None))
    return 0


def machine() -> dict[str, object]:
    """The library, what it does on a core in 32 bits, and what on the first GPU, if there is one, in bf16."""
    import torch

    gpu = on_gpu() if torch.cuda.is_available() else None
    return {"library": f"torch {torch.__version__}", "core": on_cores(), "gpu": gpu}


def on_cores() -> dict[str, object]:
    """What a core does while the others do the same, and how far the slowest is behind."""
    cores = sorted(os.sched_getaffinity(0))[:MOST_CORES]
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(len(cores))
    with ProcessPoolExecutor(len(cores), context, wait_there, (together,)) as workers:
        measured = list(workers.map(on_core, cores))
    what = measured[0][0]
    timed = [samples for _, samples in measured]
    medians = [statistics.median([time for core in timed for time in core[kernel]]) for kernel in range(len(what))]
    return {**reached(what, medians), "straggle": straggle(timed)}


#: Where the cores of a round wait for each other: each of their processes has one.
TOGETHER: list[threading.Barrier] = []


def wait_there(together: threading.Barrier) -> None:
    """Has this process wait there for the others."""
    TOGETHER.append(together)


def on_core(core: int) -> tuple[list[What], list[list[float]]]:
    """Kernels, and samples of each, on one core; all cores begin each round of samples together."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    of_core = kernels(torch.device("cpu"), torch.float32, *ON_A_CORE, heads=8, length=128)
    timed = samples([kernel.call for kernel in of_core], together=lambda: TOGETHER[0].wait(LOST))
    return [kernel.what() for kernel in of_core], timed


def straggle(cores: Sequence[Sequence[Sequence[float]]]) -> float:
    """How much longer the slowest of two cores takes for a round than a core in the mean, as a part.

    Of each core, each kernel and each round its seconds. It is taken to grow with the logarithm of the cores, as in
    ``fitted.straggle`` of a platform.

    >>> straggle([[[1.0, 1.0]], [[1.0, 1.0]]])
    0.0
    >>> straggle([[[1.0, 3.0]], [[3.0, 1.0]]])
    0.5
    >>> straggle([[[1.0, 3.0]]])
    0.0
    """
    if len(cores) == 1:
        return 0.0
    # Kernels weigh alike, however long a sample of each took.
    means = [statistics.fmean(itertools.chain(*of_cores)) for of_cores in zip(*cores, strict=True)]
    rounds = [
        [sum(time / mean for time, mean in zip(times, means, strict=True)) for times in zip(*core, strict=True)]
        for core in cores
    ]
    slowest = statistics.fmean(max(of_cores) for of_cores in zip(*rounds, strict=True))
    return (slowest / len(means) - 1.0) / math.log2(len(cores))


def on_gpu() -> dict[str, object]:
    """What the first GPU does, what it is called, how many there are, and what copies from the host reach."""
    import torch

    device = torch.device("cuda", 0)
    near, far = (
        torch.empty(COPIED, dtype=torch.uint8).pin_memory(),
        torch.empty(COPIED, dtype=torch.uint8, device=device),
    )
    of_gpu = kernels(device, torch.bfloat16, *ON_A_GPU, heads=64, length=4096)
    calls = [kernel.call for kernel in of_gpu]
    timed = samples([*calls, lambda: far.copy_(near, non_blocking=True)], torch.cuda.synchronize)
    *medians, copy = [statistics.median(times) for times in timed]
    return {
        "name": torch.cuda.get_device_name(device),
        "count": torch.cuda.device_count(),
        "capacity": torch.cuda.mem_get_info(device)[1],
        "from_host": COPIED / copy,
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

    found: list[Kernel] = []
    weights = some(max(WEIGHTS // dtype.itemsize, 2 * max(sides) ** 2))
    for side in sides:
        matrices = weights[: len(weights) // side**2 * side**2].view(-1, side, side).unbind()
        operations = 2.0 * side**3
        found.append(Kernel("product", operations, 3 * operations, products(matrices)))
    for size in sizes:
        values, wide = (some(times * size // dtype.itemsize // WIDTH, WIDTH) for times in (1, 4))
        found.append(
            Kernel("moved", 18 / 5 * size, 18.0 * size, lambda values=values, wide=wide: between_products(values, wide))
        )
    found.append(update(device, parameters))
    few = torch.ones(1, dtype=dtype, device=device)
    found.append(Kernel("launch", 1.0, 1.0, lambda: few.add_(1.0)))
    width = 64
    q, k, v = (some(1, heads, length, width) for _ in range(3))
    # Half of 4 s s h operations: what lies in the future is left out.
    operations = 0.5 * 4 * heads * length * length * width

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return [*found, Kernel("attention", operations, operations, attend)]


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


def samples(
    calls: Sequence[Callable[[], object]],
    wait: Callable[[], object] = lambda: None,
    together: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of each call, in samples of many calls that follow each other, taken of all calls in turn.

    ``wait`` returns when all that was called is done; ``together`` is called before each round.

    >>> [len(times) == SAMPLES and min(times) > 0 for times in samples([lambda: sum(range(100))])]
    [True]
    """

    def repeat(call: Callable[[], object], count: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - begin

    def enough(call: Callable[[], object]) -> int:
        count = 1
        # Also warms up.
        while repeat(call, count) < SAMPLE:
            count *= 2
        return count

    counts = [enough(call) for call in calls]
    rounds: list[list[float]] = []
    for _ in range(SAMPLES):
        together()
        rounds.append([repeat(call, count) / count for call, count in zip(calls, counts, strict=True)])
    return [list(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
