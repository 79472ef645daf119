"""Traces a training step with PyTorch's own observer, and measures what `polder plan chakra` needs to predict it.

``python step.py trace`` writes trace/rank-0.json, and prints the options of ``polder plan chakra trace``.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver

WIDTH, BATCH, LAYERS = 1024, 256, 6


def median(run: Callable[[], object], rounds: int) -> float:
    """The median time of a call, in seconds."""
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def rates() -> list[str]:
    """What this machine reaches, by three operators alone."""
    one, other, out = torch.rand(3, WIDTH, WIDTH)
    product = median(lambda: torch.mm(one, other, out=out), 15)
    wide, sums = torch.rand(2, 1 << 24)
    added = median(lambda: torch.add(wide, 1.0, out=sums), 15)
    small = torch.rand(1)
    launch = median(lambda: [small.add_(1.0) for _ in range(1000)], 15) / 1000
    return [
        f"--compute={2 * WIDTH**3 / product / 1e9:.2f}GFLOP/s",
        f"--memory={2 * wide.nbytes / added / 1e9:.2f}GB/s",
        f"--launch={launch * 1e9:.0f}ns",
    ]


def main(folder: Path) -> None:
    """Traces and measures a step of a network of linear layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, wanted = torch.rand(2, BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()

    for _ in range(3):
        step()
    measured = median(step, 15)
    folder.mkdir(parents=True, exist_ok=True)
    observer = ExecutionTraceObserver().register_callback(str(folder / "rank-0.json"))
    observer.start()
    step()
    observer.stop()
    observer.unregister_callback()
    print(*rates(), f"--measured={measured * 1e6:.0f}us")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
