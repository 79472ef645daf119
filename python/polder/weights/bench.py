"""What it takes to load weights from a pool: what ``polder-dev bench weights`` starts.

Weights are published once. Then several processes load them at the same time into memory of their own, as engines do:
from the pool, and in turn from a safetensors file in /dev/shm. Their time counts from a barrier until the last has all.
A row is one JSON object a line on standard output.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import polder
from polder import _core, weights
from polder.bench import ROUNDS, print_row

# torch's stubs leave the types of some functions open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

KINDS = ("coherent", "software")
PEER = "safetensors"
LAYERS, PARTS = 16, 8
"""The tensors of a model, of equal sizes."""
WARM_TURNS = 3
"""A store holds three versions at one time: the third turn is the last that takes memory for the first time."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="polder-dev bench weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--procs", type=int, default=4, help="that load them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
    ) as folder:
        measure(Path(folder), arguments.mib, arguments.procs, arguments.rounds)
    return 0


def measure(folder: Path, mib: int, procs: int, rounds: int) -> None:
    """Publishes, loads and prints the rows."""
    elements = (mib << 20) // (LAYERS * PARTS) // 2
    tensors = {
        f"layers.{layer}.{part}": torch.randn(elements).to(torch.bfloat16)
        for layer in range(LAYERS)
        for part in range(PARTS)
    }
    published: dict[str, list[float]] = {}
    for kind in KINDS:
        _core.format(folder / kind, 4 * (mib << 20) + (64 << 20), hosts=1, processes=procs + 2, coherence=kind)
        with polder.Pool(folder / kind, host=0) as pool:
            for turn in range(WARM_TURNS + rounds):
                # Another first element in each: no version shares a tensor with the one before.
                for tensor in tensors.values():
                    tensor[0] = turn
                begin = time.perf_counter()
                weights.publish("bench", tensors, pool=pool)
                if turn >= WARM_TURNS:
                    published.setdefault(kind, []).append(time.perf_counter() - begin)
    for _ in range(rounds):
        begin = time.perf_counter()
        save_file(tensors, folder / PEER)
        published.setdefault(PEER, []).append(time.perf_counter() - begin)
    forking = multiprocessing.get_context("fork")
    loaded: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way in (*KINDS, PEER):
            began = forking.Barrier(procs + 1)
            ended = forking.Barrier(procs + 1)
            readers = [forking.Process(target=load, args=(folder, way, began, ended)) for _ in range(procs)]
            for reader in readers:
                reader.start()
            began.wait()
            begin = time.perf_counter()
            ended.wait()
            loaded.setdefault(way, []).append(time.perf_counter() - begin)
            for reader in readers:
                reader.join()
                if reader.exitcode != 0:
                    raise RuntimeError(f"a process that loads from {way} ended with {reader.exitcode}")
    for kind in KINDS:
        case = f"{mib} MiB of weights {kind}"
        print_row("weights", f"publish {case}", "time", "s", published[kind], PEER, published[PEER])
        print_row("weights", f"load {case} {procs} procs", "time", "s", loaded[kind], PEER, loaded[PEER])


def load(folder: Path, way: str, began: Barrier, ended: Barrier) -> None:
    """A process that loads all weights into memory of its own, after the barrier."""
    torch.set_num_threads(1)
    began.wait()
    kept: dict[str, Any]
    if way == PEER:
        # What is mapped is no memory of its own yet.
        kept = {name: tensor.clone() for name, tensor in load_file(folder / PEER).items()}
    else:
        with polder.Pool(folder / way, host=0) as pool, weights.open("bench", pool=pool) as found:
            kept = dict(found)
    ended.wait()
    assert len(kept) == LAYERS * PARTS


if __name__ == "__main__":
    sys.exit(main())
