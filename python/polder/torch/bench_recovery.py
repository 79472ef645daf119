"""What a recovery through the pool takes, beside torchft's own transport over HTTP: what ``make recovery`` starts.

One process sends the state of a transformer with AdamW, another receives it. For each round the transports take turns,
each with a state of which every tensor is another than before. A time counts from the call of ``send_checkpoint`` to
the return of ``recv_checkpoint``. A row is one JSON object a line on standard output; it needs torchft.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import polder
from polder import _core
from polder.bench import HOSTS, ROUNDS, print_row
from polder.torch.bench_snapshot import KINDS, RESTART_MILLIONS, WARM_TURNS, model_of, step_of, tensors_of
from polder.torch.recovery import PoolTransport

# torchft is installed beside this one's own environment; torch's stubs leave states without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

TIMEOUT = timedelta(seconds=60)
CHUNKS = {"HTTPTransport": 0, "HTTPTransport 8 chunks": 8}


def main() -> int:
    """Runs the benchmark, or the process that receives."""
    parser = argparse.ArgumentParser(prog="make recovery", description=__doc__)
    parser.add_argument("--millions", type=int, default=RESTART_MILLIONS, help="of parameters")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each transport")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # torch warns that a process is no rank of anything, which is what is wanted.
    warnings.simplefilter("ignore")
    if arguments.receive:
        receive(arguments.receive, arguments.millions)
        return 0
    # Told to end, it removes its pools too.
    signal.signal(signal.SIGTERM, ended)
    with tempfile.TemporaryDirectory(
        prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
    ) as folder:
        measure(Path(folder), arguments.millions, arguments.rounds)
    return 0


def ended(_signal: int, _frame: FrameType | None) -> None:
    """Leaves by an exception, so that what is open is closed."""
    sys.exit(1)


def transports_of(folder: Path, replica: int, state: Callable[[], Any]) -> tuple[dict[str, Any], list[polder.Pool]]:
    """A transport of each kind, and what they are over."""
    from torchft.checkpointing import HTTPTransport  # pyright: ignore

    pools = {kind: polder.Pool(folder / kind, host=0) for kind in KINDS}
    transports: dict[str, Any] = {}
    for kind, pool in pools.items():
        transports[f"{kind}"] = PoolTransport("bench", replica=replica, pool=pool)
        transports[f"{kind} in place"] = PoolTransport("bench-in-place", replica=replica, pool=pool, state_dict=state)
    for name, chunks in CHUNKS.items():
        transports[name] = HTTPTransport(TIMEOUT, chunks)
    return transports, list(pools.values())


def made(millions: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, after a step."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_of(model, optimizer)
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torchft's Manager makes it."""
    user = {"default": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    return {"user": user, "torchft": {"step": 0, "batches_committed": 0}}


def change(tensors: list[torch.Tensor]) -> None:
    """Makes every tensor another, as a step would."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)


def total_of(tensors: list[torch.Tensor]) -> int:
    """The sum of the bits of float32 tensors, as of integers."""
    return sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)


def measure(folder: Path, millions: int, rounds: int) -> None:
    """Sends, lets the other process receive, and prints the rows."""
    model, optimizer = made(millions)
    state_bytes = sum(tensor.nbytes for tensor in tensors_of(model, optimizer))
    for kind in KINDS:
        # Three versions of each of two transports.
        _core.format(folder / kind, 8 * state_bytes + (64 << 20), hosts=HOSTS, processes=4, coherence=kind)
    transports, pools = transports_of(folder, 0, dict)
    seconds: dict[str, list[float]] = {name: [] for name in transports}
    command = [sys.executable, "-P", "-m", "polder.torch.bench_recovery", "--receive", str(folder)]
    command += ["--millions", str(millions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        # The first turns take the memory that later ones use again.
        for turn in range(WARM_TURNS + rounds):
            for name, transport in transports.items():
                change(tensors_of(model, optimizer))
                state = state_of(model, optimizer)
                begin = time.perf_counter()
                transport.send_checkpoint([1], turn, state, TIMEOUT)
                other.stdin.write(f"{name}|{turn}|{transport.metadata()}\n")
                other.stdin.flush()
                answer = other.stdout.readline()
                took = time.perf_counter() - begin
                assert answer == "received\n", f"the process that receives has ended, or said {answer!r}"
                transport.disallow_checkpoint()
                total, expected = int(other.stdout.readline()), total_of(tensors_of(model, optimizer))
                assert total == expected, f"{name} received another state: {total} for {expected}"
                if turn >= WARM_TURNS:
                    seconds[name].append(took)
        other.stdin.close()
    for transport in transports.values():
        transport.shutdown()
    for pool in pools:
        pool.close()
    case = f"recovery {sum(tensor.numel() for tensor in model.parameters()) / 1e6:.1f} M parameters AdamW 2 procs"
    for name in transports:
        if name not in CHUNKS:
            for peer in CHUNKS:
                ours, theirs = ([1e3 * second for second in seconds[which]] for which in (name, peer))
                print_row("snapshot", f"{case} {name}", "time of send and receive", "ms", ours, peer, theirs)


def receive(folder: Path, millions: int) -> None:
    """Receives what lines on standard input name, and prints when it has and the sum of all bits."""
    model, optimizer = made(millions)
    own = state_of(model, optimizer)
    transports, pools = transports_of(folder, 1, lambda: own)
    for line in sys.stdin:
        name, step, metadata = line.rstrip("\n").split("|")
        got = transports[name].recv_checkpoint(0, metadata, int(step), TIMEOUT)["user"]["default"]
        print("received", flush=True)
        moments = [tensor for of in got["optimizer"]["state"].values() for tensor in of.values()]
        print(total_of([*got["model"].values(), *moments]), flush=True)
    for transport in transports.values():
        transport.shutdown()
    for pool in pools:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
