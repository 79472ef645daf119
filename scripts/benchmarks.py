#!/usr/bin/env python3
"""Runs every benchmark, or those that are named, and writes their rows into docs/benchmarks.md: what `make bench` does.

All words of the pages stand in the pages: this writes a section's lines from "Measured on".
The tables of docs/status.md and the figures of README.md are taken from that page; `--tables` writes only them.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
POLDER_DEV = ROOT / ".cache/dev/polder-dev"
BENCHES = ["lines", "ring", "collectives", "torch", "mpi", "plan", "pages", "sync", "snapshot", "weights", "objects"]
BENCHES += ["ranks", "figure 5", "figure 6", "figure 7", "figure 8"]
MPICH = ".cache/mpich/bin/mpiexec"
SIZES = "1B,64B,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB"
# Beyond it a ratio is no measure of Polder: the peer waited for a core.
ABSURD = 50
# The pages that take tables and figures from the page of benchmarks.
FRONTS = ["README.md", "docs/status.md"]
# Names of peers in that page, and those that are libraries of others.
PEERS = {"openmpi": "Open MPI", "gloo": "gloo", "tcp": "the library over TCP", "shm": "the library's shared memory"}
HEAD = ["case", "metric", "median", "low", "high", "unit", "kind", "peer", "peer's", "ratio"]


def main() -> int:
    """Runs the benchmarks that are named, or all; the sections of others stay."""
    page = ROOT / "docs/benchmarks.md"
    for name in [] if sys.argv[1:] == ["--tables"] else sys.argv[1:] or BENCHES:
        before, after = page.read_text().split(f"## {name}\n", 1)
        words = re.split(r"^Measured on |^## ", after, maxsplit=1, flags=re.MULTILINE)[0].strip()
        rest = after.partition("\n## ")[1:]
        page.write_text("".join([before, f"## {name}\n\n{words}\n\n{section(name)}".rstrip(), "\n", *rest]))
        write_tables(page)
    write_tables(page)
    return 0


def write_tables(page: Path) -> None:
    """Takes the tables and figures of the other pages from the page of all benchmarks."""
    for other in (ROOT / name for name in FRONTS):
        other.write_text(with_tables(other.read_text(), page.read_text()))


def section(name: str) -> str:
    """What a benchmark prints, when and where."""
    words = ["bench", name]
    file = name.replace(" ", "") + ".svg"
    if name == "mpi":
        words += ["--mpi", f"{MPICH},.venv/bin/mpiexec"]
    elif name.startswith("figure"):
        words = [
            "bench",
            "mpi",
            "--mpi",
            MPICH,
            "--figure",
            name.split()[1],
            "--sizes",
            SIZES,
            "--plot",
            f"docs/{file}",
        ]
    print(f"polder-dev {' '.join(words)}", file=sys.stderr)
    done = subprocess.run([str(POLDER_DEV), *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    run = f"{datetime.date.today().isoformat()}, {commit()}: `polder-dev {' '.join(words)}`"
    what = f"Measured on {machine()}, {run}\n"
    return "\n".join([what, *(sweep(rows) if name.startswith("figure") else [table(rows)])])


def sweep(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each way: a line a size, a column for each number of ranks; then what was published."""
    said = re.compile(r"figure \d .* (\d+ (?:B|KiB|MiB)) (\d+) procs (coherent|software) mpich( with shim)?")
    ways: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if match := said.fullmatch(row["case"]):
            size, ranks, pool, shim = match.groups()
            cell = f"{short(row['value'])} ({times(row['ratio'])})"
            ways.setdefault(pool + (shim or ""), {}).setdefault(size, {})[ranks] = cell
    parts: list[str] = []
    for way, sizes in sorted(ways.items(), reverse=True):
        ranks = list(next(iter(sizes.values())))
        lines = [f"| {way} | {' | '.join(f'{count} ranks' for count in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
        lines += [f"| {size} | {' | '.join(cells[count] for count in ranks)} |" for size, cells in sizes.items()]
        parts.append("\n".join(lines) + "\n")
    published = [row for row in rows if row["kind"] == "published"]
    return [*parts, table(published)]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        figures = [short(row[key]) for key in ("value", "low", "high")]
        peer = [row.get("peer", ""), short(row.get("peer_value")), times(row.get("ratio"))]
        cells = [row["case"], row["metric"], *figures, row["unit"], row["kind"], *peer]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_tables(front: str, page: str) -> str:
    """A page, with the tables and figures between its markers taken anew from the page of all benchmarks.

    A table stands between ``<!-- benchmarks NAME -->`` and ``<!-- end of NAME -->``. A figure stands between
    ``<!-- of NAME -->`` and ``<!-- . -->``. Its name is a count of `counts`, or a case, with ``/ PEER`` for its peer's.
    """
    rows, dates = read(page)
    for name, lines in {
        "all-reduce": all_reduce(rows["collectives"]),
        "lost": lost(rows),
        "torch": through_torch(rows["torch"]),
        "mpi": mpi(rows["mpi"]),
        "floor": floor(rows["ring"] + rows["mpi"]),
    }.items():
        begin, end = f"<!-- benchmarks {name} -->\n", f"<!-- end of {name} -->"
        if begin in front:
            head, rest = front.split(begin)
            _, tail = rest.split(end)
            front = "".join([head, begin, "\n".join(lines), "\n", end, tail])
    figures = {"dates": dates, **counts(rows, page)}
    for row in (row for section in rows.values() for row in section):
        # Of several metrics the first counts.
        figures.setdefault(row["case"], figure(row["value"], row["unit"]))
        figures.setdefault(f"{row['case']} / {row['peer']}", figure(row["theirs"], row["unit"]) if row["peer"] else "")
    return re.sub(
        r"<!-- of (.*?) -->.*?<!-- \. -->", lambda mark: f"<!-- of {mark[1]} -->{figures[mark[1]]}<!-- . -->", front
    )


def figure(value: str, unit: str) -> str:
    """A figure with its unit, such as 1.34 ms."""
    if unit == "us" and number(value) >= 1000:
        return f"{number(value) / 1000:.3g} ms"
    return value + ("%" if unit == "%" else f" {unit}")


def counts(rows: dict[str, list[dict[str, str]]], page: str) -> dict[str, str]:
    """How many rows and cells there are beside other libraries, and how many of them Polder loses."""
    beside = [row for name in ("collectives", "torch", "mpi") for row in rows[name] if row["peer"] in PEERS]
    worse = [row for row in beside if number(row["ratio"]) < 1]
    # Those of the figures of cMPI, beside TCP.
    cells = [number(cell) for cell in re.findall(r" \(([\d.,]+)(?: †)?\) \|", page)]
    slower = sum(ratio < 1 for ratio in cells)
    found = {"rows": len(beside) + len(cells), "rows lost": len(worse) + slower, "cells lost": slower}
    found |= {f"rows lost to {peer}": sum(row["peer"] == peer for row in worse) for peer in PEERS}
    for peer in ("gloo", "openmpi"):
        ratios = [number(row["ratio"]) for row in rows["torch"] if row["peer"] == peer]
        found |= {f"torch ahead of {peer}": sum(ratio >= 1 for ratio in ratios), f"torch beside {peer}": len(ratios)}
    found["all-reduces lost"] = sum(row["peer"] == "openmpi" for row in rows["collectives"] if row in worse)
    return {name: f"{count:,}" for name, count in found.items()}


def read(page: str) -> tuple[dict[str, list[dict[str, str]]], str]:
    """The rows of each section, as they are printed, and the dates of their runs."""
    sections: dict[str, list[dict[str, str]]] = {}
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        lines = [line.split("|")[1:-1] for line in part.splitlines() if line[:1] == "|"]
        cells = [[cell.strip().removesuffix(" †") for cell in line] for line in lines]
        keys = ["case", "metric", "value", "low", "high", "unit", "kind", "peer", "theirs", "ratio"]
        rows = [dict(zip(keys, row, strict=True)) for row in cells if len(row) == len(HEAD) and row != HEAD]
        sections[part.split("\n", 1)[0]] = [row for row in rows if row["case"].strip("-")]
    days = sorted(
        set(re.findall(r", (\d{4}-\d\d-\d\d), [^`]*: `polder-dev bench (?:collectives|torch|mpi|ring)\b", page))
    )
    return sections, " and ".join(days)


def number(text: str) -> float:
    """A figure as it is printed."""
    return float(text.replace(",", "") or "nan")


def beside(row: dict[str, str]) -> str:
    """A figure, its peer's, and how many times better it is; one that lost its core is marked."""
    mark = "†" if number(row["ratio"]) > ABSURD else ""
    return "{value} {unit} | {theirs} {unit}{mark} | {ratio}{mark}".format(**row, mark=mark)


def all_reduce(rows: list[dict[str, str]]) -> list[str]:
    """A line a size and number of processes: what each kind of pool takes, and its peers."""
    kinds = ["coherent staged", "coherent in-pool", "software staged", "software in-pool"]
    lines = ["| processes | size | " + " | ".join(kinds) + " | gloo | Open MPI |", "|---" * 8 + "|"]
    for procs in ("2", "4"):
        for size in ("4 KiB", "1 MiB", "16 MiB", "128 MiB"):
            prefix = f"all-reduce {size} {procs} procs "
            found = {(row["case"].removeprefix(prefix), row["peer"]): row for row in rows}
            own = [found[kind, "openmpi"] for kind in kinds]
            peers = [found["gloo", ""], found["openmpi", ""]]
            slow = number(peers[0]["value"]) > ABSURD * min(number(row["value"]) for row in own)
            cells = [f"{row['value']} us ({row['ratio']})" for row in own]
            cells += [f"{peers[0]['value']} us{'†' if slow else ''}", f"{peers[1]['value']} us"]
            lines.append(f"| {procs} | {size} | {' | '.join(cells)} |")
    return lines


def lost(rows: dict[str, list[dict[str, str]]]) -> list[str]:
    """Every row in which a peer library is faster, the worst first; for the all-reduce those against Open MPI."""
    worse = [row for row in rows["collectives"] if row["peer"] == "openmpi" and number(row["ratio"]) < 1]
    worse += [row for row in rows["mpi"] if row["peer"] in ("tcp", "shm") and number(row["ratio"]) < 1]
    lines = ["| case | peer | Polder | peer takes | ratio |", "|---" * 5 + "|"]
    for row in sorted(worse, key=lambda row: number(row["ratio"])):
        lines.append(f"| {row['case']} | {PEERS[row['peer']]} | {beside(row)} |")
    return lines


def through_torch(rows: list[dict[str, str]]) -> list[str]:
    """A line an operation: how many rows there are, in how many Polder is ahead of each peer, and its worst ratio."""
    lines = ["| operation | rows | ahead of gloo | worst | ahead of Open MPI | worst |", "|---" * 6 + "|"]
    of = {row["case"]: re.sub(r" \d+ [KM]iB .*", "", row["case"]) for row in rows}
    for operation in dict.fromkeys(of.values()):
        cells = [operation]
        for peer in ("gloo", "openmpi"):
            ratios = [number(row["ratio"]) for row in rows if row["peer"] == peer and of[row["case"]] == operation]
            ahead = sum(ratio >= 1 for ratio in ratios)
            if peer == "gloo":
                cells.append(str(len(ratios)))
            cells += [str(ahead), f"{min(ratios):.3g}"] if ratios else ["no peer", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mpi(rows: list[dict[str, str]]) -> list[str]:
    """Small messages, streams and puts of both libraries over a software-coherent pool."""
    lines = ["| library | case | Polder | TCP | times better |", "|---" * 5 + "|"]
    for library, title in (("mpich", "MPICH"), ("openmpi", "Open MPI")):
        for row in rows:
            match = re.fullmatch(rf"(.*) 2 procs software {library}( with shim)?", row["case"])
            if match and row["peer"] in ("tcp", ""):
                shim = ", with the window shim" if match[2] else ", without the shim" if "put" in match[1] else ""
                cells = beside(row) if row["peer"] else f"{row['value']} {row['unit']} | not measured |"
                lines.append(f"| {title} | {match[1]}{shim} | {cells} |")
    return lines


def floor(rows: list[dict[str, str]]) -> list[str]:
    """Round trips and long streams beside the least code that moves the same bytes."""
    rows = [row for row in rows if row["peer"] == "floor" and row["case"].startswith(("round trip", "stream 1 MiB"))]
    lines = ["| case | Polder | floor | share of the floor |", "|---" * 4 + "|"]
    return lines + [f"| {row['case']} | {beside(row)} |" for row in rows]


def short(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def times(ratio: float | None) -> str:
    """A ratio, marked where it is none of speeds."""
    return short(ratio) + (" †" if ratio is not None and ratio > ABSURD else "")


def commit() -> str:
    """The commit that is measured."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return f"commit {git.stdout.strip()}" if git.returncode == 0 else "of no commit"


def machine() -> str:
    """Processor, cores and kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'an unknown CPU')}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"


if __name__ == "__main__":
    sys.exit(main())
