#!/usr/bin/env python3
"""Runs every benchmark, or those that are named, into data/measured, and fills the pages: `make bench`.

A file of data/measured has the run in its first line, then the rows as `polder-dev bench NAME --json` prints them.
All words and headings stand in the pages; `--tables` only fills them.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "data/measured"
PAGES = ["README.md", "docs/benchmarks.md", "docs/status.md"]
MPICH = ".cache/mpich/bin/mpiexec"
SIZES = "1B,64B,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB"
SWEEP = f"mpi --mpi {MPICH} --figure {{}} --sizes {SIZES} --plot docs/figure{{}}.svg"
# What `polder-dev bench` gets for each file of data/measured.
BENCHES = {name: name for name in ["lines", "ring", "collectives", "torch", "plan", "pages", "sync", "snapshot"]}
BENCHES |= {name: name for name in ["weights", "kv", "objects", "ranks"]}
BENCHES |= {"mpi": f"mpi --mpi {MPICH},.venv/bin/mpiexec"}
BENCHES |= {f"figure{number}": SWEEP.format(number, number) for number in range(5, 9)}
# A cell of the figures of cMPI: its size, its ranks, and over which pool.
CELL = re.compile(r"figure \d .* (\d+ (?:B|KiB|MiB)) (\d+) procs (coherent|software) mpich( with shim)?")
# Beyond it a ratio is no measure of Polder: the peer waited for a core.
ABSURD = 50
# Names of peers in the rows, and those that are libraries of others.
PEERS = {"openmpi": "Open MPI", "gloo": "gloo", "tcp": "the library over TCP", "shm": "the library's shared memory"}
PEERS |= {"safetensors": "a safetensors file"}

Row = dict[str, Any]
Rows = dict[str, list[Row]]


def main() -> int:
    """Runs the benchmarks that are named, or all, and fills the pages."""
    for name in [] if sys.argv[1:] == ["--tables"] else sys.argv[1:] or BENCHES:
        measure(name)
    runs, rows = measured()
    for page in (ROOT / name for name in PAGES):
        page.write_text(filled(page.read_text(), runs, rows))
    return 0


def measure(name: str) -> None:
    """Runs a benchmark into its file."""
    command = f"polder-dev bench {BENCHES[name]}"
    print(command, file=sys.stderr)
    words = [str(ROOT / ".cache/dev/polder-dev"), *command.split()[1:], "--json"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    today = datetime.date.today().isoformat()
    run = {"bench": name, "machine": machine(), "date": today, "commit": commit(), "command": command}
    (MEASURED / f"{name}.jsonl").write_text(json.dumps(run) + "\n" + done.stdout)


def measured() -> tuple[dict[str, Row], Rows]:
    """The run and the rows of each benchmark."""
    runs: dict[str, Row] = {}
    rows: Rows = {}
    for file in sorted(MEASURED.glob("*.jsonl")):
        runs[file.stem], *rows[file.stem] = (json.loads(line) for line in file.read_text().splitlines())
    return runs, rows


def filled(page: str, runs: dict[str, Row], rows: Rows) -> str:
    """A page, with its tables and figures taken anew.

    A table is headed ``<!-- benchmarks NAME -->``, and its first two lines are the page's. A figure stands between
    ``<!-- of NAME -->`` and ``<!-- . -->``. It is one of `counts`, a run, or a case, with ``/ PEER`` for its peer's.
    """

    def table(mark: re.Match[str]) -> str:
        way, _, name = mark[2].rpartition(" of ")
        lines = TABLES[way or name](rows[name] if way else rows, way)
        return mark[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    page = re.sub(r"(<!-- benchmarks (.*) -->\n\|.*\n\|.*\n)(?:\|.*\n)*", table, page)
    figures = figures_of(runs, rows)
    return re.sub(
        r"<!-- of (.*?) -->.*?<!-- \. -->", lambda mark: f"<!-- of {mark[1]} -->{figures[mark[1]]}<!-- . -->", page
    )


def figures_of(runs: dict[str, Row], rows: Rows) -> dict[str, str]:
    """What can stand in a line of a page, by its name."""
    dates = sorted({runs[name]["date"] for name in ("collectives", "torch", "mpi", "ring")})
    figures = {"dates": " and ".join(dates), **counts(rows)}
    figures |= {
        f"run of {name}": "{machine}, {date}, commit {commit}: `{command}`".format(**run) for name, run in runs.items()
    }
    for row in (row for some in rows.values() for row in some):
        # Of several metrics the first counts.
        figures.setdefault(row["case"], figure(row["value"], row["unit"]))
        if "peer_value" in row:
            figures.setdefault(f"{row['case']} / {row['peer']}", figure(row["peer_value"], row["unit"]))
    return figures


def counts(rows: Rows) -> dict[str, str]:
    """How many rows and cells there are beside other libraries, and how many of them Polder loses."""
    named = ("collectives", "torch", "mpi", "weights")
    beside = [row for name in named for row in rows[name] if row.get("peer") in PEERS]
    cells = [row for number in range(5, 9) for row in rows[f"figure{number}"] if CELL.fullmatch(row["case"])]
    worse, slower = ([row for row in some if row["ratio"] < 1] for some in (beside, cells))
    counted = {"rows": len(beside + cells), "rows lost": len(worse + slower), "cells lost": len(slower)}
    counted |= {f"rows lost to {peer}": sum(row["peer"] == peer for row in worse) for peer in PEERS}
    for peer in ("gloo", "openmpi"):
        ratios = [row["ratio"] for row in rows["torch"] if row["peer"] == peer]
        counted |= {f"torch ahead of {peer}": sum(ratio >= 1 for ratio in ratios), f"torch beside {peer}": len(ratios)}
    counted["all-reduces lost"] = sum(row["peer"] == "openmpi" for row in rows["collectives"] if row in worse)
    return {name: f"{count:,}" for name, count in counted.items()}


def figure(value: float, unit: str) -> str:
    """A figure with its unit, such as 1.34 ms."""
    if unit == "us" and value >= 1000:
        return f"{value / 1000:.3g} ms"
    return short(value) + ("%" if unit == "%" else f" {unit}")


def short(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mark(ratio: float | None) -> str:
    """What marks a row of which the peer lost its core."""
    return "†" if ratio is not None and ratio > ABSURD else ""


def times(ratio: float | None) -> str:
    """A ratio, marked where it is none of speeds."""
    return f"{short(ratio)} {mark(ratio)}".rstrip()


def beside(row: Row) -> list[str]:
    """A figure, its peer's, and how many times better it is."""
    own, theirs = (f"{short(row[key])} {row['unit']}" for key in ("value", "peer_value"))
    return [own, theirs + mark(row["ratio"]), short(row["ratio"]) + mark(row["ratio"])]


def each(rows: list[Row], _: str) -> list[list[str]]:
    """A line a row, without the cells of a figure."""
    lines: list[list[str]] = []
    for row in rows:
        if not CELL.fullmatch(row["case"]):
            figures = [short(row[key]) for key in ("value", "low", "high")]
            peer = [row.get("peer", ""), short(row.get("peer_value")), times(row.get("ratio"))]
            lines.append([row["case"], row["metric"], *figures, row["unit"], row["kind"], *peer])
    return lines


def sweep(rows: list[Row], way: str) -> list[list[str]]:
    """A line a size, a column for each number of ranks."""
    sizes: dict[str, list[str]] = {}
    for row in rows:
        cell = CELL.fullmatch(row["case"])
        if cell and cell[3] + (cell[4] or "") == way:
            sizes.setdefault(cell[1], [cell[1]]).append(f"{short(row['value'])} ({times(row['ratio'])})")
    return list(sizes.values())


def all_reduce(rows: Rows, _: str) -> list[list[str]]:
    """A line a size and number of processes: what each kind of pool takes, and its peers."""
    kinds = ["coherent staged", "coherent in-pool", "software staged", "software in-pool"]
    lines: list[list[str]] = []
    for procs in ("2", "4"):
        for size in ("4 KiB", "1 MiB", "16 MiB", "128 MiB"):
            prefix = f"all-reduce {size} {procs} procs "
            found = {(row["case"].removeprefix(prefix), row.get("peer")): row for row in rows["collectives"]}
            own = [found[kind, "openmpi"] for kind in kinds]
            gloo, openmpi = (found[peer, None]["value"] for peer in ("gloo", "openmpi"))
            away = mark(gloo / min(row["value"] for row in own))
            cells = [f"{short(row['value'])} us ({short(row['ratio'])})" for row in own]
            lines.append([procs, size, *cells, f"{short(gloo)} us{away}", f"{short(openmpi)} us"])
    return lines


def lost(rows: Rows, _: str) -> list[list[str]]:
    """Every row in which a peer is faster, the worst first; for the all-reduce those against Open MPI."""
    worse = [row for row in rows["collectives"] if row.get("peer") == "openmpi" and row["ratio"] < 1]
    others = (row for name in ("mpi", "weights") for row in rows[name])
    worse += [row for row in others if row.get("peer") in PEERS and row["ratio"] < 1]
    return [[row["case"], PEERS[row["peer"]], *beside(row)] for row in sorted(worse, key=lambda row: row["ratio"])]


def through_torch(rows: Rows, _: str) -> list[list[str]]:
    """A line an operation: how many rows there are, in how many Polder is ahead of each peer, and its worst ratio."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in rows["torch"]:
        operation = re.sub(r" \d+ [KM]iB .*", "", row["case"])
        ratios.setdefault(operation, {"gloo": [], "openmpi": []})[row["peer"]].append(row["ratio"])
    lines: list[list[str]] = []
    for operation, peers in ratios.items():
        ahead = [[str(sum(ratio >= 1 for ratio in some)), short(min(some))] for some in peers.values()]
        lines.append([operation, str(len(peers["gloo"])), *ahead[0], *ahead[1]])
    return lines


def mpi(rows: Rows, _: str) -> list[list[str]]:
    """Small messages, streams and puts of both libraries over a software-coherent pool."""
    lines: list[list[str]] = []
    for library, title in (("mpich", "MPICH"), ("openmpi", "Open MPI")):
        for row in rows["mpi"]:
            match = re.fullmatch(rf"(.*) 2 procs software {library}( with shim)?", row["case"])
            if match and row.get("peer", "tcp") == "tcp":
                shim = ", with the window shim" if match[2] else ", without the shim" if "put" in match[1] else ""
                cells = beside(row) if "peer" in row else [f"{short(row['value'])} {row['unit']}", "not measured", ""]
                lines.append([title, match[1] + shim, *cells])
    return lines


def floor(rows: Rows, _: str) -> list[list[str]]:
    """Round trips and long streams beside the least code that moves the same bytes."""
    near = [row for row in rows["ring"] + rows["mpi"] if row.get("peer") == "floor"]
    return [[row["case"], *beside(row)] for row in near if row["case"].startswith(("round trip", "stream 1 MiB"))]


TABLES: dict[str, Callable[[Any, str], list[list[str]]]] = {
    "rows": each,
    **{way: sweep for way in ("coherent", "software", "coherent with shim", "software with shim")},
    **{"all-reduce": all_reduce, "lost": lost, "torch": through_torch, "mpi": mpi, "floor": floor},
}


def commit() -> str:
    """The commit that is measured."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else "unknown"


def machine() -> str:
    """Processor, cores and kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'an unknown CPU')}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"


if __name__ == "__main__":
    sys.exit(main())
