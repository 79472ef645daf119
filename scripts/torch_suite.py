#!/usr/bin/env python3
"""PyTorch's own distributed tests over gloo and over Polder: which gloo passes on CPU, and which of these Polder does.

The tests are those of torch.testing._internal.distributed.distributed_test, which know backends by name: for them
Polder is called gloo. Each backend runs them in the same processes, one test after another, each with a process group
of its own. A test that crashes or hangs ends the processes, and the next one has new ones. The end is a table of
counts, and one line for each test that gloo passes and Polder does not.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from datetime import timedelta
from pathlib import Path

#: Ranks: tests of subgroups need three.
RANKS = 3
#: Seconds that a wait of a test may take, and that a whole test may.
WAIT, TEST = 20, 60


def main() -> int:
    """Runs the suite; the exit status is 1 if Polder fails a test that gloo passes and that has no reason below."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tests whose names have this in them")
    parser.add_argument("--worker", nargs=4, metavar=("RANK", "FOLDER", "FIRST", "ATTEMPT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        rank, folder, first, attempt = arguments.worker
        work(int(rank), Path(folder), int(first), int(attempt), arguments.only)
        return 0
    outcomes = {backend: run(backend, arguments.only) for backend in ("gloo", "polder")}
    gloo, polder = outcomes["gloo"], outcomes["polder"]
    for backend, of in outcomes.items():
        counts = Counter(outcome for outcome, _ in of.values())
        print(f"{backend}: {len(of)} tests: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    passed = [name for name, (outcome, _) in gloo.items() if outcome == "passed"]
    lost = [name for name in passed if polder[name][0] != "passed"]
    print(f"of {len(passed)} that gloo passes, Polder passes {len(passed) - len(lost)}")
    unexplained = 0
    for name in lost:
        reason = REASONS.get(name)
        unexplained += reason is None
        outcome, said = polder[name]
        print(f"  {name}: {outcome}: {reason or said}")
    return 1 if unexplained else 0


#: Why Polder does not pass a test that gloo passes.
REASONS: dict[str, str] = {
    "test_get_backend": "the backend's name is polder, and the test knows it as gloo",
}


def run(backend: str, only: str) -> dict[str, tuple[str, str]]:
    """What became of each test, and why: passed, failed, skipped, crashed or hung."""
    outcomes: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first = 0
        for attempt in range(1000):
            environment = {
                **os.environ,
                "BACKEND": "gloo",
                "SUITE_BACKEND": backend,
                "WORLD_SIZE": str(RANKS),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--only", only, "--worker"]
            ranks = [
                subprocess.Popen(
                    [*command, str(rank), place, str(first), str(attempt)],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for rank in range(RANKS)
            ]
            logs = [folder / f"{attempt}-{rank}" for rank in range(RANKS)]
            how = watch(ranks, logs)
            for process in ranks:
                process.kill()
                process.wait()
            each = [[json.loads(line) for line in read(log)] for log in logs]
            done = min(map(len, each))
            for at in range(done):
                seen = [of_rank[at][1:] for of_rank in each]
                outcomes[each[0][at][0]] = next(((what, why) for what, why in seen if what == "failed"), tuple(seen[0]))
            names = (folder / "names").read_text().split()
            first += done
            if how != "done":
                rest = [of_rank[done] for of_rank in each if len(of_rank) > done]
                outcomes[names[first]] = (how, next((why for _, what, why in rest if what == "failed"), ""))
                first += 1
            if first >= len(names):
                return outcomes
    return outcomes


def read(log: Path) -> list[str]:
    """The lines of a rank so far."""
    return log.read_text().splitlines() if log.exists() else []


def watch(ranks: list["subprocess.Popen[bytes]"], logs: list[Path]) -> str:
    """Waits until all ranks are through, one has crashed, or none gets on."""
    seen, since = -1, time.monotonic()
    while True:
        codes = [process.poll() for process in ranks]
        if any(codes):
            # What the others have to say of it.
            time.sleep(1)
            return "crashed"
        if all(code == 0 for code in codes):
            return "done"
        now = sum(log.stat().st_size for log in logs if log.exists())
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > TEST:
            return "hung"
        time.sleep(0.1)


def work(rank: int, folder: Path, first: int, attempt: int, only: str) -> None:
    """Runs the tests from `first` on as one rank, and writes a line for each."""
    os.environ["TEMP_DIR"] = str(folder)
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    backend, new_group = os.environ["SUITE_BACKEND"], dist.new_group

    def new_group_of_backend(*arguments: object, **options: object) -> object:
        if options.get("backend") == "gloo":
            options["backend"] = backend
        return new_group(*arguments, **options)

    dist.new_group = new_group_of_backend
    suite = type("Suite", (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase), {})
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    names = [name for name in unittest.TestLoader().getTestCaseNames(suite) if only in name]
    if rank == 0:
        (folder / "names.new").write_text("\n".join(names))
        (folder / "names.new").rename(folder / "names")
    with (folder / f"{attempt}-{rank}").open("w") as log:
        for at, name in enumerate(names[first:], first):
            outcome = one(suite, name, rank, folder / f"{attempt}-{at}-run", reasons, dist, distributed_test)
            log.write(json.dumps([name, *outcome]) + "\n")
            log.flush()
            # The others may still wait for this rank: the next test begins when all are through.
            while any(len(read(folder / f"{attempt}-{other}")) <= at - first for other in range(RANKS)):
                time.sleep(0.02)


def one(suite, name, rank, folder, reasons, dist, tests) -> tuple[str, str]:  # noqa: ANN001 - torch's tests have no types
    """Runs one test in this process."""
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    tests.Barrier.barrier_id = 0
    try:
        test = suite(name)
        test.rank, test.file_name = rank, str(folder / "meet")
        dist.init_process_group(
            init_method=f"file://{folder}/meet",
            backend=os.environ["SUITE_BACKEND"],
            world_size=RANKS,
            rank=rank,
            timeout=timedelta(seconds=WAIT),
        )
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", reasons[end.code]) if end.code in reasons else ("failed", f"exit {end.code}")
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        # Names of groups have this number, also where a group could not be made.
        dist.distributed_c10d._world.group_count = 0
    return "passed", ""


if __name__ == "__main__":
    sys.exit(main())
