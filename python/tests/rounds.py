"""Kills a job of several ranks again and again, and looks at what the next one restores: ``rounds.py --rounds 2000``.

In each round one to four ranks restore, train and snapshot into a pool and a folder, until one or all are killed at a
random moment. Now and then the pool is lost. The next round must find one attempt on all ranks, and nothing older than
what was confirmed to every rank. ``torch.distributed.checkpoint``'s ``async_save`` takes the same kills beside it.
"""

import argparse
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
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import polder
import polder.torch

# torch's checkpoint module leaves the types of states open.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

MOST_RANKS = 4
#: Of which round, at which step.
Version = tuple[int, int]
NOTHING = (-1, 0)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose every weight says of which round and step it is."""
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(4)])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def put(model: torch.nn.Module, version: Version) -> None:
    """Makes the state that of a version."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version[0] * 10_000 + version[1])


def version_of(model: torch.nn.Module) -> Version:
    """The one version whose state it is."""
    values = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    assert len(values) == 1, f"MIXED in one rank: {values}"
    return divmod(int(values.pop()), 10_000)


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
        found = sorted(self.folder.glob("*/.metadata"), key=lambda at: tuple(map(int, at.parent.name.split("-"))))
        if not found:
            return NOTHING
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=found[-1].parent)
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
        backend = "gloo" if way is Ours else "cpu:gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        model, optimizer = make()
        by = way(folder)
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


def run(way: Any, folder: Path, number: int, ranks: int, seconds: float, killed: list[int], grace: float) -> list[str]:
    """One round: what its ranks have said. `killed` are killed first, the others after `grace` seconds."""
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
    said = b""
    os.set_blocking(reads, False)

    def listen(until: float, enough: Callable[[bytes], bool]) -> None:
        nonlocal said
        while time.monotonic() < until and not enough(said):
            try:
                said += os.read(reads, 1 << 16)
            except BlockingIOError:
                time.sleep(0.001)

    # The clock begins when the first has restored, or before.
    listen(time.monotonic() + 60, lambda said: b"found" in said or b"ended" in said or seconds < 0.03)
    listen(time.monotonic() + seconds, lambda said: b"ended" in said)
    for rank in killed:
        os.kill(children[rank], signal.SIGKILL)
    listen(time.monotonic() + grace, lambda said: False)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.set_blocking(reads, True)
    while piece := os.read(reads, 1 << 16):
        said += piece
    os.close(reads)
    return said.decode().splitlines()


def judge(counts: Counter[str], said: list[str], ranks: int, least: Version, faults: list[str]) -> dict[str, Version]:
    """Counts what a round shows; what was confirmed to all ranks, in the pool and on disk."""
    found: dict[str, Version] = {}
    told: dict[tuple[str, Version], int] = Counter()
    for line in said:
        rank, verb, *rest = line.split(" ", 3)
        if verb == "found":
            found[rank] = int(rest[0]), int(rest[1])
        elif verb in ("pool", "disk"):
            told[verb, (int(rest[0]), int(rest[1]))] += 1
        elif "Connection" not in line and "timed out" not in line.lower() and "gloo" not in line.lower():
            counts["errors"] += 1
            faults.append(f"error: {line}")
    if len(set(found.values())) > 1:
        counts["mixed"] += 1
        faults.append(f"mixed: {found}")
    if found and min(found.values()) < least:
        counts["older than confirmed"] += 1
        faults.append(f"older: {found}, confirmed {least}")
    counts["restores"] += bool(found) and min(found.values()) > NOTHING
    confirmed = {"pool": NOTHING, "disk": NOTHING}
    for (where, version), ranks_told in told.items():
        if ranks_told == ranks:
            confirmed[where] = max(confirmed[where], version)
            counts["confirmed"] += 1
    return confirmed


def main() -> int:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ours", action="store_true", help="without async_save")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print("seed", seed, flush=True)
    torch.set_num_threads(1)
    columns = ["rounds", "confirmed", "restores", "mixed", "older than confirmed", "errors"]
    print("| way |", " | ".join(columns), "|\n|---|", "---|" * len(columns), sep="")
    is_right = True
    for way in (Ours,) if arguments.ours else (Ours, Theirs):
        dice = random.Random(seed)
        counts: Counter[str] = Counter()
        faults: list[str] = []
        least = {"pool": NOTHING, "disk": NOTHING}
        with tempfile.TemporaryDirectory(prefix="polder-rounds-", dir="/dev/shm") as name:
            folder = Path(name)
            for number in range(arguments.rounds):
                ranks = dice.randint(1, MOST_RANKS)
                killed = dice.sample(range(ranks), dice.choice([1, ranks]))
                seconds = dice.choice([0.05, 0.3, 0.6, 1.2]) * dice.random()
                is_lost = way is Ours and dice.random() < 0.2
                if is_lost:
                    (folder / "pool").unlink(missing_ok=True)
                    least["pool"] = NOTHING
                said = run(way, folder, number, ranks, seconds, killed, dice.random() * 0.2)
                now = judge(counts, said, ranks, max(least.values()), faults)
                least = {where: max(least[where], now[where]) for where in least}
                counts["rounds"] += 1
        print("|", way.name, "|", " | ".join(str(counts[column]) for column in columns), "|", flush=True)
        for fault in faults[:5]:
            print("  ", fault, flush=True)
        is_right &= way is not Ours or not (counts["mixed"] or counts["older than confirmed"] or counts["errors"])
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
