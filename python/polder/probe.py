"""What ``polder probe`` measures in Python: kernels of the library that trains, on one core, and on a GPU where one is.

Prints one JSON object. Every figure is the median of a few samples.
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Sides of square matrices, bytes of what is normed, and parameters that an optimizer updates, which moves more.
ON_A_CORE = ([32, 64, 128, 256, 512, 1024], [8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20], 8 << 20)
ON_A_GPU = ([256, 512, 1024, 2048, 4096, 8192], [512 << 10, 4 << 20, 32 << 20, 256 << 20], 128 << 20)
#: Width of what is normed.
WIDTH = 512
#: Bytes of a copy between a host's memory and a GPU's.
COPIED = 256 << 20
#: Seconds of a sample at least.
SAMPLE = 0.02
SAMPLES = 5


def main() -> int:
    """Measures, or prints null where the library is not installed."""
    print(json.dumps(machine() if importlib.util.find_spec("torch") else None))
    return 0


def machine() -> dict[str, object]:
    """The library, what it does on one core in 32 bits, and what on the first GPU, if there is one, in bf16."""
    import torch

    torch.set_num_threads(1)
    core = kernels(torch.device("cpu"), torch.float32, *ON_A_CORE, heads=8, length=512)
    gpu = on_gpu() if torch.cuda.is_available() else None
    return {"library": f"torch {torch.__version__}", "core": core, "gpu": gpu}


def on_gpu() -> dict[str, object]:
    """What the first GPU does, what it is called, how many there are, and what copies from the host reach."""
    import torch

    device = torch.device("cuda", 0)
    near, far = (
        torch.empty(COPIED, dtype=torch.uint8).pin_memory(),
        torch.empty(COPIED, dtype=torch.uint8, device=device),
    )
    copy = seconds(lambda: far.copy_(near, non_blocking=True), torch.cuda.synchronize)
    return {
        "name": torch.cuda.get_device_name(device),
        "count": torch.cuda.device_count(),
        "capacity": torch.cuda.mem_get_info(device)[1],
        "from_host": COPIED / copy,
        "kernels": kernels(device, torch.bfloat16, *ON_A_GPU, heads=64, length=4096),
    }


def kernels(
    device: "torch.device",
    dtype: "torch.dtype",
    sides: Sequence[int],
    sizes: Sequence[int],
    parameters: int,
    *,
    heads: int,
    length: int,
) -> dict[str, object]:
    """Operations a second of products and of attention, bytes a second of what stands between, seconds of a launch."""
    import torch
    from torch.nn import functional

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=device).to(dtype)

    products: list[tuple[float, float]] = []
    for side in sides:
        a, b = some(side, side), some(side, side)
        operations = 2.0 * side**3
        products.append((operations, operations / seconds(lambda a=a, b=b: a @ b, wait)))
    moved: list[tuple[float, float]] = []
    for size in sizes:
        values = some(size // dtype.itemsize // WIDTH, WIDTH)
        seven = 7.0 * values.nbytes
        moved.append((seven / 3, seven / seconds(lambda values=values: between_products(values), wait)))
    moved.append(update(device, parameters, wait))
    few = torch.ones(1, dtype=dtype, device=device)
    width = 64
    q, k, v = (some(1, heads, length, width) for _ in range(3))
    # Half of 4 s s h operations: what lies in the future is left out.
    operations = 0.5 * 4 * heads * length * length * width
    attention = seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), wait)
    return {
        "products": products,
        "moved": moved,
        "launch_s": seconds(lambda: few.add_(1.0), wait),
        "attention": operations / attention,
    }


def between_products(values: "torch.Tensor") -> "torch.Tensor":
    """What a block does between its products, a kernel each: a norm, an activation and a sum.

    They move ``values`` seven times to or from memory. On a core the first two compute for longer than they move.
    """
    from torch.nn import functional

    normed = functional.layer_norm(values, values.shape[-1:])
    return values + functional.gelu(normed, approximate="tanh")


def update(device: "torch.device", parameters: int, wait: Callable[[], object]) -> tuple[float, float]:
    """Bytes that an optimizer moves, and bytes a second.

    Gradients are read, weights and two states are read and written: more than other kernels move.

    >>> all(7 * sizes[-1] / 3 < 7 * 4 * parameters for _, sizes, parameters in (ON_A_CORE, ON_A_GPU))
    True
    """
    import torch

    weights = torch.zeros(parameters, dtype=torch.float32, device=device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    moved = 7.0 * weights.nbytes

    def step() -> None:
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    return moved, moved / seconds(step, wait)


def seconds(call: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of a call among many, the median of samples; ``wait`` returns when all are done.

    >>> 0 < seconds(lambda: sum(range(100))) < 1
    True
    """

    def repeat(count: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - begin

    count = 1
    # Also warms up.
    while repeat(count) < SAMPLE:
        count *= 2
    return statistics.median(repeat(count) for _ in range(SAMPLES)) / count


if __name__ == "__main__":
    raise SystemExit(main())
