"""Steps of optimizers beside their peers: what ``polder-dev bench offload`` starts.

- The bf16 step beside DeepSpeed's sequence. Both cast, take the norm, unscale, clip, step and copy.
- The fp32 step beside torch's fused AdamW, DeepSpeedCPUAdam alone, and its floor: the fastest of these and of a loop
  with the same traffic.

All contenders work on the same arrays, in huge pages, and take turns in one run, so that noise meets all of them alike.
Each count of threads has a process of its own, because OpenMP reads it when the process starts. A row is one JSON
object a line.
"""

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polder import _core
from polder.offload.optimizer import TRAFFIC, AdamW

#: Bytes that a step reads and writes for an element: parameter 8, gradient 4, two states 16.
STEP = 28
#: The same with a bf16 gradient (2) and a bf16 copy (2), after one pass over the gradients for their norm (2).
OURS = {"norm": 2, "step and copy": 28}
#: DeepSpeed's passes. What a store reads before it writes is not counted, on either side.
DEEPSPEED = {"cast": 6, "norm": 4, "unscale and clip": 8, "step": STEP, "copy": 6}
#: What the step has to reach: this part of the ratio of bytes, and this multiple of the floor's time.
LEAST_OF_BYTES, MOST_OF_FLOOR = 0.9, 1.05
#: Contenders that move the bytes of the fp32 step. The fastest is its floor.
SAME_BYTES = ("fp32 floor", "fp32 torch fused", "fp32 DeepSpeedCPUAdam")
_LR, _BETAS, _DECAY = 1e-3, (0.9, 0.95), 0.1
_SCALE, _MAX_NORM = 1024.0, 1.0
_HUGE = 2 << 20
MISSING = (
    "polder-dev bench offload: its peer DeepSpeed is missing; get it with `make deepspeed`, "
    "or `pip install deepspeed ninja` beside polder (it needs g++)"
)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="polder-dev bench offload", description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[50, 200], help="elements")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        [threads] = arguments.threads
        torch.set_num_threads(threads)
        for millions in arguments.millions:
            measure(millions, threads, arguments.rounds)
        return 0
    python = with_deepspeed()
    if python is None:
        print(MISSING, file=sys.stderr)
        return 1
    words = ["--worker", "--rounds", str(arguments.rounds), "--millions", *map(str, arguments.millions)]
    for threads in arguments.threads:
        # DeepSpeed would look for a GPU, and uses as many threads as OpenMP says.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
        command = [python, "-P", "-m", "polder.offload.bench", *words, "--threads", str(threads)]
        if status := subprocess.run(command, env=environment, check=False).returncode:
            return status
    return 0


def with_deepspeed() -> str | None:
    """The Python that has DeepSpeed: this one, or that of ``make deepspeed``."""
    if importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    made = Path(sys.prefix).parent / ".cache/deepspeed"
    return str(made / "bin/python") if (made / ".ready").exists() else None


@dataclass
class Arrays:
    """What all contenders step: 32-bit parameters, gradients and moments, 16-bit gradients and parameters."""

    parameters: torch.Tensor
    gradients: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    half_gradients: torch.Tensor
    half_parameters: torch.Tensor


def arrays(elements: int) -> Arrays:
    """Arrays in huge pages, with numbers as in training."""
    draw = torch.Generator().manual_seed(0)
    made = Arrays(*(_huge(elements, torch.float32) for _ in range(4)), *(_huge(elements, torch.bfloat16) for _ in "gp"))
    made.parameters.uniform_(-1, 1, generator=draw)
    made.half_parameters.copy_(made.parameters)
    made.gradients.uniform_(-1e-2, 1e-2, generator=draw)
    made.half_gradients.copy_(made.gradients)
    made.mean.copy_(made.gradients)
    made.square.copy_(made.gradients).square_()
    return made


def _huge(elements: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = elements * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + _HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + nbytes].view(dtype)


def contenders(of: Arrays) -> dict[str, Callable[[], object]]:
    """A step of each, by name."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore

    settings: dict[str, Any] = {"lr": _LR, "betas": _BETAS, "weight_decay": _DECAY}
    elements = of.parameters.numel()

    def wide() -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(of.parameters)
        parameter.grad = of.gradients
        return parameter

    def started(optimizer: Any, parameter: torch.Tensor, **more: Any) -> Any:
        optimizer.state[parameter] = {"exp_avg": of.mean, "exp_avg_sq": of.square, **more}
        return optimizer

    # Apart from DeepSpeed's: where others write a parameter, its master is made anew.
    half = torch.nn.Parameter(of.half_parameters.data)
    half.grad = of.half_gradients
    ours: Any = AdamW([half], **settings, max_norm=_MAX_NORM)
    started(ours, half, step=torch.tensor(1.0), master=of.parameters)
    ours.grad_scale = torch.tensor(_SCALE)  # as GradScaler does
    parameters = wide(), wide(), wide()
    single = started(AdamW([parameters[0]], **settings), parameters[0], step=torch.tensor(1.0))
    fused = started(torch.optim.AdamW([parameters[1]], **settings, fused=True), parameters[1], step=torch.tensor(1.0))
    theirs: Any = started(DeepSpeedCPUAdam([parameters[2]], **settings), parameters[2], step=1)

    def deepspeed() -> None:
        # The calls of deepspeed/runtime/zero/stage3.py 0.19.8, by function. Its passes that look for NaN are left out,
        # and the norm is taken of the cast gradients: its own casts them once more.
        wide_gradients: Any = of.gradients
        wide_gradients.copy_(of.half_gradients)  # _offload_grad_partition_at_boundary
        norm = wide_gradients.norm(2)  # _constant_buffered_norm2
        clip = torch.clamp(((norm / _SCALE) + 1e-6) / _MAX_NORM, min=1.0)  # unscale_and_clip_grads
        wide_gradients.mul_(1.0 / (clip * _SCALE))
        theirs.step()  # _optimizer_step
        of.half_parameters.copy_(of.parameters)  # _reassign_or_swap_out_partitioned_parameters

    def traffic(gradients: torch.Tensor, copy: int) -> None:
        p, g, m, v = (it.data_ptr() for it in (of.parameters, gradients, of.mean, of.square))
        is_half = gradients.dtype == torch.bfloat16
        _core.offload_step([(TRAFFIC, 1.0, (p, g, m, v, copy), elements, is_half)], 1.0, 1.0, torch.get_num_threads())

    def half_floor() -> None:
        _core.offload_squares([(of.half_gradients.data_ptr(), elements, True)], torch.get_num_threads())
        traffic(of.half_gradients, of.half_parameters.data_ptr())

    return {
        "bf16": ours.step,
        "bf16 DeepSpeed": deepspeed,
        "bf16 floor": half_floor,
        "fp32": single.step,
        "fp32 floor": lambda: traffic(of.gradients, 0),
        "fp32 torch fused": fused.step,
        "fp32 DeepSpeedCPUAdam": theirs.step,
    }


def measure(millions: int, threads: int, rounds: int) -> None:
    """Takes turns, and prints the rows."""
    steps = contenders(arrays(millions * 1_000_000))
    times: dict[str, list[float]] = {name: [] for name in steps}
    # The first round touches memory and compiles DeepSpeed's operator.
    for turn in range(rounds + 1):
        for name, call in steps.items():
            begin = time.perf_counter()
            call()
            if turn > 0:
                times[name].append((time.perf_counter() - begin) * 1e3 / millions)
    for row in rows(times, millions, threads):
        print(json.dumps(row), flush=True)


def rows(times: dict[str, list[float]], millions: int, threads: int) -> list[dict[str, object]]:
    """The rows of nanoseconds an element by contender.

    Three kinds of rows: the times beside each peer's, counted bytes, and how much of the target is reached.
    """
    times = times | {"fp32 floor": min((times[it] for it in SAME_BYTES), key=statistics.median)}
    many = f"{millions} M elements {threads} {'thread' if threads == 1 else 'threads'}"

    def row(case: str, metric: str, values: list[float], unit: str, peer: str, other: float, ratio: float) -> Any:
        return {
            "bench": "offload",
            "case": f"AdamW {case} {many}",
            "metric": metric,
            "value": statistics.median(values),
            "low": min(values),
            "high": max(values),
            "unit": unit,
            "kind": "measured",
            "peer": peer,
            "peer_value": other,
            "ratio": ratio,
        }

    def beside(ours: str, peer: str) -> Any:
        other = statistics.median(times[f"{ours} {peer}"])
        return row(ours, "time", times[ours], "ns", peer, other, other / statistics.median(times[ours]))

    deepspeed = beside("bf16", "DeepSpeed")
    moved, theirs = sum(OURS.values()), sum(DEEPSPEED.values())
    share = deepspeed["ratio"] * moved / theirs
    floor = beside("fp32", "floor")
    over = 1 / floor["ratio"]
    rates = [STEP / it for it in times["fp32"]]
    return [
        deepspeed,
        row("bf16", "counted bytes", [moved], "B", "DeepSpeed", theirs, theirs / moved),
        row("bf16", "time gained over bytes saved", [share], "", "at least", LEAST_OF_BYTES, share / LEAST_OF_BYTES),
        beside("bf16", "floor"),
        floor,
        row("fp32", "time over floor", [over], "", "at most", MOST_OF_FLOOR, MOST_OF_FLOOR / over),
        beside("fp32", "torch fused"),
        beside("fp32", "DeepSpeedCPUAdam"),
        row("fp32", "bandwidth", rates, "GB/s", "floor", STEP / floor["peer_value"], floor["ratio"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
