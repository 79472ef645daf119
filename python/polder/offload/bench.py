"""The fused AdamW step beside torch's and the floor of the same traffic: what ``polder bench offload`` starts.

All contenders take turns in one run, so that noise meets all of them alike. A row is one JSON object a line.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from polder import _core
from polder.offload.optimizer import TRAFFIC, AdamW

#: Bytes that a step moves for an element of 32 bits: parameter 8, gradient 4, two states 16.
BYTES = 28
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="polder bench offload", description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[50], help="elements")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for millions in arguments.millions:
        step = contenders(millions * 1_000_000)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            seconds: dict[str, list[float]] = {name: [] for name in step}
            for turn in range(arguments.rounds + 1):
                for name, call in step.items():
                    begin = time.perf_counter()
                    call()
                    if turn > 0:
                        seconds[name].append(time.perf_counter() - begin)
            print_rows(seconds, millions, threads)
    return 0


def contenders(elements: int) -> dict[str, Callable[[], object]]:
    """A step of each over arrays of its own, ours first."""

    def parameter() -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.rand(elements))
        made.grad = torch.rand(elements) * 1e-2
        return made

    ours, theirs, moved = parameter(), parameter(), parameter()
    mean, square = torch.zeros(elements), torch.zeros(elements)
    assert moved.grad is not None
    addresses = (moved.data_ptr(), moved.grad.data_ptr(), mean.data_ptr(), square.data_ptr(), 0)

    def floor() -> None:
        # The tensors live as long as this does.
        assert moved.grad is not None and mean.data_ptr() == addresses[2] and square.data_ptr() == addresses[3]
        _core.offload_step([(TRAFFIC, 1.0, addresses, elements, False)], 1.0, 1.0, torch.get_num_threads())

    fused = torch.optim.AdamW([theirs], **_SETTINGS, fused=True)

    def torch_fused() -> None:
        fused.step()  # pyright: ignore[reportUnknownMemberType]

    return {"fused step": AdamW([ours], **_SETTINGS).step, "torch fused": torch_fused, "floor": floor}


def print_rows(seconds: dict[str, list[float]], millions: int, threads: int) -> None:
    """The time of an element beside each peer, and the bandwidth that it is."""
    elements = millions * 1e6
    ours = [time * 1e9 / elements for time in seconds["fused step"]]
    row: dict[str, object] = {
        "bench": "offload",
        "case": f"AdamW fp32 {millions} M elements {threads} threads",
        "metric": "time",
        "value": statistics.median(ours),
        "low": min(ours),
        "high": max(ours),
        "unit": "ns",
        "kind": "measured",
    }
    for peer in ("torch fused", "floor"):
        other = statistics.median(seconds[peer]) * 1e9 / elements
        beside = {"peer": peer, "peer_value": other, "ratio": other / statistics.median(ours)}
        print(json.dumps(row | beside), flush=True)
    rates = sorted(BYTES / it for it in ours)
    rate = {
        "metric": "bandwidth",
        "value": statistics.median(rates),
        "low": rates[0],
        "high": rates[-1],
        "unit": "GB/s",
    }
    print(json.dumps(row | rate), flush=True)


if __name__ == "__main__":
    sys.exit(main())
