#!/usr/bin/env python3
"""Runs all suites of the model, their mutants and the canaries, and notes all in a ledger: `make verify`.

A run of a suite is a line of data/proved/ledger.jsonl, with the hash of the sources that it judged. docs/evidence.md
has what ran of the sources that ran last; `--tables` only fills the page.
"""

import argparse
import datetime
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "data/proved/ledger.jsonl"
PAGE = ROOT / "docs/evidence.md"
DEV = ROOT / ".cache/dev/polder-dev"
#: Where the protocols, the model and the suites lie.
SOURCES = ["crates/pool", "crates/mem", "crates/kernels", "crates/schedule", "crates/platform"]
MACHINES = ["software", "coherent", "hdm-db"]
DRAWN = "drawn by the seed"

Row = dict[str, Any]


def main() -> int:
    """Runs what was asked for, and fills the page. The status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", help="by the beginnings of their names [default: all, and the canaries]")
    parser.add_argument(
        "--schedules", type=int, default=1_000_000, help="of each suite, as its seeds draw memory, and on hdm-db"
    )
    parser.add_argument("--mutants", type=int, default=100_000, help="schedules of each mutant; 0 for none")
    parser.add_argument("--harmless", type=int, help="schedules of each mutant that is listed as harmless")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--program", type=Path, default=DEV, help="the polder-dev that runs")
    parser.add_argument("--tables", action="store_true", help="only fill the page")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.tables:
        about = {"sources": sources(), "date": datetime.date.today().isoformat(), "machine": machine()}
        for command in commands(arguments):
            print("polder-dev", *command, file=sys.stderr)
            done = subprocess.run(
                [arguments.program, *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
            )
            failed += done.returncode != 0
            on = command[command.index("--coherence") + 1] if "--coherence" in command else DRAWN
            rows = noted([json.loads(line) for line in done.stdout.splitlines()], on)
            LEDGER.parent.mkdir(exist_ok=True)
            with LEDGER.open("a") as ledger:
                ledger.writelines(json.dumps({**about, **row}) + "\n" for row in rows)
    PAGE.write_text(filled(PAGE.read_text(), ledger_rows()))
    return int(failed > 0)


def commands(arguments: argparse.Namespace) -> list[list[str]]:
    """What polder-dev is asked for."""
    seed = ["--seed", str(arguments.seed)]
    drawn = ["verify", *arguments.suites, "-n", str(arguments.schedules), *seed]
    runs = [drawn, [*drawn, "--coherence", "hdm-db"]]
    if not arguments.suites:
        runs.append(["verify", "--canaries", *seed])
    if arguments.mutants:
        harmless = ["--harmless", str(arguments.harmless)] if arguments.harmless else []
        runs.append(["verify", *arguments.suites, "--mutants", "-n", str(arguments.mutants), *seed, *harmless])
    return runs


def sources() -> str:
    """The hash of the sources that are judged; they must be committed."""
    changed = git("status", "--porcelain", "--", *SOURCES)
    if changed:
        sys.exit(f"commit these first, so that the ledger names what it judged:\n{changed}")
    trees = [git("rev-parse", f"HEAD:{folder}") for folder in SOURCES]
    return git("hash-object", "--stdin", told="\n".join(trees))[:12]


def git(*words: str, told: str | None = None) -> str:
    """What git says."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, input=told, capture_output=True, text=True, check=True
    ).stdout.rstrip()


def machine() -> str:
    """This machine, as the benchmarks name it."""
    spec = importlib.util.spec_from_file_location("benchmarks", ROOT / "scripts/benchmarks.py")
    assert spec is not None and spec.loader is not None
    benchmarks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmarks)
    return str(benchmarks.machine())


def noted(printed: list[Row], on: str) -> list[Row]:
    """The lines of the ledger for what polder-dev printed: one a suite or canary, with all mutants of a suite."""
    rows: list[Row] = []
    by_suite: dict[str, list[Row]] = {}
    for row in printed:
        if "mutant" in row or "survived" in row:
            by_suite.setdefault(row["suite"], []).append(row)
        elif "canary" in row:
            rows.append({"kind": "canary", "on": on, **row})
        else:
            rows.append({"kind": "schedules", "on": on, **row})
    for suite, mutants in by_suite.items():
        tried = [row for row in mutants if "mutant" in row]
        caught = sum(row["caught_at"] is not None for row in tried)
        counts = {"mutants": len(tried), "caught": caught, "harmless": len(tried) - caught}
        # The table of a suite with a survivor stands in for its mutants.
        failed = len(mutants) - len(tried)
        rows.append({"kind": "mutants", "on": on, "suite": suite, **counts, "failed": failed})
        rows[-1]["schedules"] = sum(row["schedules"] for row in tried)
        rows[-1]["schedules_of_harmless"] = min(
            (row["schedules"] for row in tried if row["caught_at"] is None), default=0
        )
    return rows


def ledger_rows() -> list[Row]:
    """All lines of the ledger, from the oldest on."""
    return [json.loads(line) for line in LEDGER.read_text().splitlines()] if LEDGER.exists() else []


def shown(rows: list[Row], kind: str) -> dict[tuple[str, str], list[Row]]:
    """The lines of each suite or canary that the page has, on each kind of memory: of the sources that ran last.

    Schedules count together where their seeds differ; of mutants and canaries the newest line stands.
    """
    of_kind = [row for row in rows if row["kind"] == kind]
    sources = {row["on"]: row.get("sources") for row in of_kind}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in reversed(of_kind):
        if row.get("sources") == sources[row["on"]]:
            newer = found.setdefault((row.get("suite") or row["canary"], row["on"]), [])
            if not newer or (kind == "schedules" and not any(overlap(row, other) for other in newer)):
                newer.append(row)
    # In the order of the ledger.
    return dict(reversed(found.items()))


def overlap(one: Row, other: Row) -> bool:
    """Whether two runs of a suite have a seed in common."""
    seeds = [range(row["first_seed"], row["first_seed"] + row["schedules"]) for row in (one, other)]
    return max(span.start for span in seeds) < min(span.stop for span in seeds)


def filled(page: str, rows: list[Row]) -> str:
    """The page, with its tables taken anew.

    A table is headed ``<!-- ledger NAME -->``, and its first two lines are the page's.
    """

    def table(mark: re.Match[str]) -> str:
        return mark[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in TABLES[mark[2]](rows))

    return re.sub(r"(<!-- ledger (.*) -->\n\|.*\n\|.*\n)(?:\|.*\n)*", table, page)


def of_schedules(rows: list[Row]) -> list[list[str]]:
    """A row for each suite, with the worlds that ran on each kind of memory, and the schedules that failed."""
    found = shown(rows, "schedules")

    def total(suite: str, what: str, on: str = "") -> int:
        return sum(
            row[what] for (name, of), lines in found.items() if name == suite and on in ("", of) for row in lines
        )

    def cell(suite: str, machine: str) -> str:
        # Worlds that seeds draw on a machine may be those that run on it anyway.
        count = total(suite, machine, machine) or total(suite, machine)
        return f"{count:,}" if count else "none"

    return [
        [f"`{suite}`", *(cell(suite, machine) for machine in MACHINES), f"{total(suite, 'failed'):,}"]
        for suite in dict.fromkeys(suite for suite, _ in found)
    ]


def of_faults(rows: list[Row]) -> list[list[str]]:
    """A row for each way that memory is chosen: what all schedules of it went through."""
    found = shown(rows, "schedules")
    counted = ["schedules", "operations", "process_deaths", "host_deaths", "pauses"]

    def total(on: str, what: str) -> str:
        return f"{sum(row[what] for (_, other), lines in found.items() if other == on for row in lines):,}"

    return [[on, *(total(on, what) for what in counted)] for on in dict.fromkeys(on for _, on in found)]


def of_mutants(rows: list[Row]) -> list[list[str]]:
    """A row for each suite that has mutants of its own."""
    counted = ["mutants", "caught", "harmless", "schedules_of_harmless", "failed"]
    return [
        [f"`{suite}`", *(f"{row[what]:,}" for what in counted)] for (suite, _), [row] in shown(rows, "mutants").items()
    ]


def of_canaries(rows: list[Row]) -> list[list[str]]:
    """One row: how many canaries there are, and after how many schedules the last was caught."""
    found = [row for [row] in shown(rows, "canary").values()]
    caught = [row["schedules"] for row in found if row["caught_at"] is not None]
    return [[str(len(found)), str(len(caught)), f"{max(caught, default=0):,}"]]


def of_runs(rows: list[Row]) -> list[list[str]]:
    """A row for each run that a figure of the page comes from."""
    runs: dict[tuple[str, ...], set[int]] = {}
    for kind in ("schedules", "mutants", "canary"):
        for row in (row for lines in shown(rows, kind).values() for row in lines):
            key = (row["kind"], row["on"], row["sources"], row["date"], row["machine"])
            runs.setdefault(key, set()).add(row.get("first_seed", 0))
    return [[*key, ", ".join(map(str, sorted(seeds)))] for key, seeds in runs.items()]


TABLES = {
    "schedules": of_schedules,
    "faults": of_faults,
    "mutants": of_mutants,
    "canaries": of_canaries,
    "runs": of_runs,
}

if __name__ == "__main__":
    sys.exit(main())
