"""What a snapshot costs, beside torch's own checkpoints: what ``polder-dev bench snapshot`` starts.

One process trains a transformer with AdamW, and takes snapshots between its steps. For each round Polder and its peers
take turns: a floor that only copies the tensors, DCP's ``DefaultStager``, and ``async_save`` to a folder in /dev/shm.
Then new processes restore what is there. Their time counts from the call to the end of the first forward pass, without
imports and without the making of the model. A row is one JSON object a line on standard output.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import polder
import polder.torch
from polder import _core
from polder.bench import HOSTS, ROUNDS, print_row

# torch's checkpoints leave the types of states open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

KINDS = ("coherent", "software")
WIDTH, HEADS, TOKENS, BATCH = 256, 4, 16, 4
#: Weights of a layer: four products of attention, two of eight in the feed-forward part, biases and norms.
LAYER = 12 * WIDTH**2 + 13 * WIDTH
#: A restart of ten million parameters is to take less.
RESTART_S, RESTART_MILLIONS = 2.0, 10
FOLDER = "dcp"
#: A store holds three versions at one time: the third turn is the last that takes memory for the first time.
WARM_TURNS = 3


def main() -> int:
    """Runs the benchmark, or one restart of it."""
    parser = argparse.ArgumentParser(prog="polder-dev bench snapshot", description=__doc__)
    parser.add_argument("--millions", type=int, default=RESTART_MILLIONS, help="of parameters")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each library")
    parser.add_argument("--restart", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # That a checkpoint is of one process is what is wanted.
    warnings.simplefilter("ignore")
    if arguments.restart:
        print(restart(arguments.restart, arguments.folder, arguments.millions))
        return 0
    with tempfile.TemporaryDirectory(
        prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
    ) as folder:
        measure(Path(folder), arguments.millions, arguments.rounds)
    return 0


def model_of(millions: int) -> torch.nn.Module:
    """A transformer of so many million parameters, or a little more."""
    layers = -(-millions * 1_000_000 // LAYER)
    return torch.nn.Sequential(
        *(
            torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
    )


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of training, after which every tensor is another."""
    optimizer.zero_grad()
    model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean().backward()
    optimizer.step()


def measure(folder: Path, millions: int, rounds: int) -> None:
    """Measures in this process and in those that restart, and prints the rows."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_of(model, optimizer)
    state_bytes = 3 * sum(tensor.nbytes for tensor in model.parameters())
    pools: dict[str, polder.Pool] = {}
    for kind in KINDS:
        # Three versions, and what each takes in pieces.
        _core.format(folder / kind, 4 * state_bytes + (64 << 20), hosts=HOSTS, processes=4, coherence=kind)
        pools[kind] = polder.Pool(folder / kind, host=0)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    copies = [torch.empty_like(tensor) for tensor in tensors_of(model, optimizer)]
    blocked: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}

    def count(into: dict[str, list[float]], name: str, begin: float, turn: int) -> None:
        if turn >= WARM_TURNS:
            into.setdefault(name, []).append((time.perf_counter() - begin) * 1e3)

    # The first turns take the memory that later ones use again.
    for turn in range(WARM_TURNS + rounds):
        for kind, pool in pools.items():
            step_of(model, optimizer)
            begin = time.perf_counter()
            pending = polder.torch.snapshot("bench", model, optimizer, step=turn, pool=pool)
            count(blocked, kind, begin, turn)
            pending.wait()
            count(whole, kind, begin, turn)
        step_of(model, optimizer)
        begin = time.perf_counter()
        for copy, tensor in zip(copies, tensors_of(model, optimizer), strict=True):
            copy.copy_(tensor)
        count(blocked, "floor", begin, turn)
        step_of(model, optimizer)
        begin = time.perf_counter()
        stager.stage({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        count(blocked, "DefaultStager", begin, turn)
        step_of(model, optimizer)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        begin = time.perf_counter()
        saving: Any = dcp.async_save(
            dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
            storage_writer=FileSystemWriter(folder / FOLDER),
            no_dist=True,
        )
        count(blocked, "async_save", begin, turn)
        saving.result()
        count(whole, "async_save", begin, turn)
    for pool in pools.values():
        pool.close()
    case = f"{sum(tensor.numel() for tensor in model.parameters()) / 1e6:.1f} M parameters AdamW 1 proc"
    for kind in KINDS:
        for peer in ("DefaultStager", "async_save", "floor"):
            print_row("snapshot", f"snapshot {case} {kind}", "time blocked", "ms", blocked[kind], peer, blocked[peer])
    for kind in KINDS:
        print_row(
            "snapshot",
            f"snapshot {case} {kind}",
            "time until whole",
            "ms",
            whole[kind],
            "async_save",
            whole["async_save"],
        )
    restarts = restarts_of(folder, millions, rounds)
    for kind in KINDS:
        rest = f"restore {case} {kind}", "time to first forward", "s", restarts[kind]
        print_row("snapshot", *rest, "dcp.load", restarts[FOLDER])
        if millions == RESTART_MILLIONS:
            print_row("snapshot", *rest, "at most", [RESTART_S])


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of a state."""
    moments = [tensor for state in optimizer.state_dict()["state"].values() for tensor in state.values()]
    return [*model.state_dict().values(), *moments]


def restarts_of(folder: Path, millions: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each restart, in turn."""
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for what in (*KINDS, FOLDER):
            command = [sys.executable, "-P", "-m", "polder.torch.bench_snapshot", "--restart", what]
            command += ["--folder", str(folder), "--millions", str(millions)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds.setdefault(what, []).append(float(done.stdout))
    return seconds


def restart(what: str, folder: Path, millions: int) -> float:
    """Seconds from the call that restores to the end of the first forward pass."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    restored: Callable[[], object]
    if what == FOLDER:

        def load() -> None:
            states = get_state_dict(model, optimizer)
            state: dict[str, Any] = dict(zip(("model", "optimizer"), states, strict=True))
            dcp.load(state, storage_reader=FileSystemReader(folder / FOLDER), no_dist=True)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

        restored = load
    else:

        def restore() -> None:
            with polder.Pool(folder / what, host=0) as pool:
                polder.torch.restore("bench", model, optimizer, pool=pool)

        restored = restore
    inputs = torch.randn(BATCH, TOKENS, WIDTH)
    begin = time.perf_counter()
    restored()
    model(inputs)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
