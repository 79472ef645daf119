"""What ``polder probe`` measures in Python: kernels of the library that trains, in 32 bits on one core.

Prints one JSON object. Every figure is the median of a few samples.
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable

#: Sides of square matrices.
SIDES = [32, 64, 128, 256, 512, 1024]
#: Bytes that a kernel reads and writes.
SIZES = [16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20]
#: Seconds of a sample at least.
SAMPLE = 0.02
SAMPLES = 5


def main() -> int:
    """Measures, or prints null where the library is not installed."""
    print(json.dumps(kernels() if importlib.util.find_spec("torch") else None))
    return 0


def kernels() -> dict[str, object]:
    """Operations a second of products and of attention, bytes a second of what only moves, seconds of a launch."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    products: list[tuple[float, float]] = []
    for side in SIDES:
        a, b = torch.rand(side, side), torch.rand(side, side)
        operations = 2.0 * side**3
        products.append((operations, operations / seconds(lambda a=a, b=b: a @ b)))
    moved: list[tuple[float, float]] = []
    for size in SIZES:
        values = torch.ones(size // 8)
        moved.append((size, size / seconds(lambda values=values: values.mul_(1.0))))
    few = torch.ones(1)
    q, k, v = (torch.rand(1, 8, 512, 64) for _ in range(3))
    # Half of 4 s s h operations: what lies in the future is left out.
    operations = 0.5 * 4 * 8 * 512 * 512 * 64
    attention = seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return {
        "library": f"torch {torch.__version__}",
        "products": products,
        "moved": moved,
        "launch_s": seconds(lambda: few.add_(1.0)),
        "attention": operations / attention,
    }


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call, the median of samples.

    >>> 0 < seconds(lambda: sum(range(100))) < 1
    True
    """

    def repeat(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begin

    count = 1
    # Also warms up.
    while repeat(count) < SAMPLE:
        count *= 2
    return statistics.median(repeat(count) for _ in range(SAMPLES)) / count


if __name__ == "__main__":
    raise SystemExit(main())
