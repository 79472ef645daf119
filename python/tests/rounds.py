"""Kills a job of several ranks again and again, and looks at what the next one restores: ``rounds.py --rounds 2000``.

In each round one to four ranks restore, train and snapshot into a pool and a folder, until one or all are killed at a
random moment: while they restore, or after. Now and then the pool is lost. The next round must find one attempt on all
ranks, and nothing older than what was confirmed to every rank. ``torch.distributed.checkpoint``'s ``async_save`` takes
the same kills beside it. Every rank is forked from a process that has imported torch.
"""

import argparse
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The first optimizer of a process imports it.
import torch._dynamo  # pyright: ignore[reportUnusedImport]
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import polder
import polder.torch

# torch's checkpoint module leaves the types of states open.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportUnknownVariableType=false

MOST_RANKS = 4
#: More than the steps of all rounds. A weight of 8 bytes holds the round and the step.
STEPS = 1_000_000
#: Of which round, at which step.
Version = tuple[int, int]
NOTHING: Version = (-1, 0)


class Model(torch.nn.Module):
    """Two layers that all ranks have alike, and one of which each rank has some rows."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.alike = torch.nn.ModuleList([torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(2)])
        rows = torch.zeros(8, 4, dtype=torch.float64)
        placed = distribute_tensor(rows, init_device_mesh("cpu", (ranks,)), [Shard(0)], src_data_rank=None)
        self.rows = torch.nn.Parameter(placed)


def own(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def put(model: torch.nn.Module, version: Version) -> None:
    """Makes the state that of a version."""
    with torch.no_grad():
        for parameter in model.parameters():
            own(parameter).fill_(version[0] * STEPS + version[1])


def version_of(model: torch.nn.Module) -> Version:
    """The one version whose state it is."""
    values = {value for parameter in model.parameters() for value in own(parameter).unique().tolist()}
    assert len(values) == 1, f"MIXED in one rank: {sorted(values)}"
    return divmod(int(values.pop()), STEPS)


class Ours:
    """By `polder.torch.snapshot` and `restore`."""

    name = "polder"

    def __init__(self, folder: Path) -> None:
        self.pool = polder.Pool(folder / "pool", size="64MiB", run=folder)
        self.folder = folder / "disk"

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Version:
        """What it has found."""
        try:
            polder.torch.restore("job", model, optimizer, pool=self.pool, folder=self.folder)
        except polder.NotFoundError:
            return NOTHING
        return version_of(model)

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: Version, say: Callable[[str], None]
    ) -> None:
        """Snapshots; says when that is confirmed, in the pool and on disk."""
        pending = polder.torch.snapshot("job", model, optimizer, step=version[1], pool=self.pool, folder=self.folder)
        pending.wait()
        say("pool")
        pending.wait_flushed()
        say("disk")


class Theirs:
    """By ``torch.distributed.checkpoint``: a folder a step, and the newest that has its metadata."""

    name = "async_save"

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "dcp"

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Version:
        """What it has found."""
        del optimizer
        checkpoints = sorted(self.folder.glob("*/.metadata"), key=lambda at: tuple(map(int, at.parent.name.split("-"))))
        if not checkpoints:
            return NOTHING
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=checkpoints[-1].parent)
        model.load_state_dict(state["model"])
        return version_of(model)

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: Version, say: Callable[[str], None]
    ) -> None:
        """Saves, and keeps two."""
        del optimizer
        at = self.folder / f"{version[0]}-{version[1]}"
        saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=at)
        saving.result()
        say("disk")
        if dist.get_rank() == 0:
            found = sorted(self.folder.glob("*-*"), key=lambda at: tuple(map(int, at.name.split("-"))))
            for old in found[:-2]:
                shutil.rmtree(old, ignore_errors=True)


def rank_of(way: Any, folder: Path, number: int, rank: int, ranks: int, out: int) -> None:
    """One rank of a round, until it is killed."""

    def say(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    try:
        store = dist.FileStore(str(folder / f"store-{way.name}-{number}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        model = Model(ranks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by = way(folder)
        dist.barrier()
        say(rank, "begins")
        found = by.restore(model, optimizer)
        say(rank, "found", *found)
        step = found[1]
        while True:
            step += 1
            put(model, (number, step))
            # As an all-reduce of gradients: no rank is a step ahead.
            dist.barrier()
            by.save(model, optimizer, (number, step), lambda where, at=step: say(rank, where, number, at))
    except BaseException as error:
        say(rank, "ended", type(error).__name__, str(error).replace("\n", " ")[:300])
    os._exit(1)


class Kill(NamedTuple):
    """When ranks are killed, and which."""

    in_restore: bool
    seconds: float
    first: list[int]
    #: Seconds until the others are killed too.
    grace: float


class RankOutput(NamedTuple):
    """What the ranks of a round have said, before the first was killed and after."""

    before: list[str]
    after: list[str]


def run(way: Any, folder: Path, number: int, ranks: int, kill: Kill) -> RankOutput:
    """One round."""
    reads, writes = os.pipe()
    children: list[int] = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(reads)
            warnings.simplefilter("ignore")
            rank_of(way, folder, number, rank, ranks, writes)
        children.append(child)
    os.close(writes)
    output = b""
    os.set_blocking(reads, False)

    def listen(seconds: float, enough: Callable[[], bool]) -> None:
        nonlocal output
        until = time.monotonic() + seconds
        while time.monotonic() < until and not enough():
            try:
                output += os.read(reads, 1 << 16)
            except BlockingIOError:
                time.sleep(0.001)

    # The clock begins when all have begun, or the first has restored.
    listen(
        60, lambda: output.count(b"begins") == ranks if kill.in_restore else b"found" in output or b"ended" in output
    )
    listen(kill.seconds, lambda: b"ended" in output)
    listen(0.0005, lambda: False)
    before = len(output)
    for rank in kill.first:
        os.kill(children[rank], signal.SIGKILL)
    listen(kill.grace, lambda: False)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.set_blocking(reads, True)
    while piece := os.read(reads, 1 << 16):
        output += piece
    os.close(reads)
    (folder / f"store-{way.name}-{number}").unlink(missing_ok=True)
    return RankOutput(output[:before].decode().splitlines(), output[before:].decode().splitlines())


#: What a round may come back with, and what else is counted.
ENDS = ["confirmed or newer", "first start", "refused", "killed before", "older", "mixed", "unreadable"]
COLUMNS = ["rounds", "confirmed", *ENDS, "errors"]
WRONG = {"older", "mixed", "unreadable", "errors"}


def is_of_a_kill(line: str) -> bool:
    """Whether a rank says that a peer has gone."""
    return any(word in line.lower() for word in ("connection", "timed out", "gloo", "reset by peer"))


def end_of(restored: dict[str, Version], least: Version, mixed: str, unreadable: str) -> tuple[str, str]:
    """What a round came back with, and what shows it."""
    if mixed or len(set(restored.values())) > 1:
        return "mixed", mixed or f"{restored}"
    if "UnusableError" in unreadable and least == NOTHING:
        # What was whole went with the pool, and the error says so.
        return "refused", ""
    if unreadable:
        return "unreadable", unreadable
    if not restored:
        return "killed before", ""
    if min(restored.values()) < least:
        return "older", f"{restored}, confirmed {least}"
    return "first start" if NOTHING in restored.values() else "confirmed or newer", ""


def judge(
    counts: Counter[str], output: RankOutput, ranks: int, least: Version, faults: list[str]
) -> dict[str, Version]:
    """Counts what a round shows; what was confirmed to all ranks, in the pool and on disk."""
    restored: dict[str, Version] = {}
    told: dict[tuple[str, Version], int] = Counter()
    unreadable = mixed = ""
    for line in [*output.before, *output.after]:
        rank, verb, *rest = line.split(" ", 3)
        if verb == "found":
            restored[rank] = int(rest[0]), int(rest[1])
        elif verb in ("pool", "disk"):
            told[verb, (int(rest[0]), int(rest[1]))] += 1
        elif verb == "ended" and (line in output.before or not is_of_a_kill(line)):
            if "MIXED" in line:
                mixed = line
            elif rank not in restored:
                unreadable = line
            else:
                counts["errors"] += 1
                faults.append(f"error: {line}")
    end, why = end_of(restored, least, mixed, unreadable)
    counts["rounds"] += 1
    counts[end] += 1
    if end in WRONG:
        faults.append(f"{end}: {why}")
    confirmed = {"pool": NOTHING, "disk": NOTHING}
    by_all = [key for key, ranks_told in told.items() if ranks_told == ranks]
    for where, version in by_all:
        confirmed[where] = max(confirmed[where], version)
    counts["confirmed"] += len({version for _, version in by_all})
    return confirmed


def rounds_of(way: Any, rounds: int, seed: int) -> Counter[str]:
    """What so many rounds show."""
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    least = {"pool": NOTHING, "disk": NOTHING}
    with tempfile.TemporaryDirectory(prefix="polder-rounds-", dir="/dev/shm") as name:
        folder = Path(name)
        for number in range(rounds):
            ranks = dice.randint(1, MOST_RANKS)
            first = dice.sample(range(ranks), dice.choice([1, ranks]))
            seconds = dice.choice([0.02, 0.1, 0.3, 0.6]) * dice.random()
            kill = Kill(dice.random() < 0.2, seconds, first, 0.1 * dice.random())
            kill = kill._replace(seconds=0.1 * seconds) if kill.in_restore else kill
            if dice.random() < 0.2:
                (folder / "pool").unlink(missing_ok=True)
                least["pool"] = NOTHING
            refused = counts["refused"]
            now = judge(counts, run(way, folder, number, ranks, kill), ranks, max(least.values()), faults)
            if counts["refused"] > refused:
                # As the error advises, the job begins anew elsewhere.
                shutil.rmtree(folder / "disk")
            least = {where: max(least[where], now[where]) for where in least}
    print("|", way.name, "|", " | ".join(str(counts[column]) for column in COLUMNS), "|", flush=True)
    for fault in faults[:5]:
        print("  ", fault, flush=True)
    return counts


def main() -> int:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--way", choices=[Ours.name, Theirs.name], help="one of the two; both by default")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print("seed", seed, flush=True)
    torch.set_num_threads(1)
    # A rank need not copy what it inherits to find what it can free.
    gc.freeze()
    print("| way |", " | ".join(COLUMNS), "|\n|---|", "---|" * len(COLUMNS), sep="")
    ways = [way for way in (Ours, Theirs) if arguments.way in (None, way.name)]
    counts = {way.name: rounds_of(way, arguments.rounds, seed) for way in ways}
    return 1 if any(counts.get(Ours.name, Counter())[wrong] for wrong in WRONG) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Triton would count what it has not freed.
    os._exit(status)
