#!/usr/bin/env python3
"""Runs every benchmark, or those that are named, and writes docs/benchmarks.md: what `make bench` does."""

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
POLDER = ROOT / ".venv/bin/polder"
BENCHES = {
    "lines": "Writing and flushing (cMPI, Figure 11), and the rows of its Table 1 that this machine has",
    "ring": "Messages between two processes of two emulated hosts, beside the line operations they need",
    "collectives": "Collectives through Python, beside gloo and Open MPI, in turn in the same processes",
    "mpi": "Stock MPI libraries over a pool of two emulated hosts, beside TCP on this machine and their shared memory",
    "plan": "Layouts of a training step predicted in a second, and the error of predictions beside a constant rate's",
    "objects": "A million creates and opens from four processes of two emulated hosts",
    "figure 5": "Bandwidth of one-sided messages (cMPI, Figure 5), in GB/s",
    "figure 6": "Latency of one-sided messages (cMPI, Figure 6), in microseconds",
    "figure 7": "Bandwidth of two-sided messages (cMPI, Figure 7), in GB/s",
    "figure 8": "Latency of two-sided messages (cMPI, Figure 8), in microseconds",
}
MPICH = ".cache/mpich/bin/mpiexec"
SIZES = "1B,64B,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB"
PREFACE = """\
# Benchmarks

What `make bench` measures. A figure is the median, with the least and the greatest
beside it (of lines, which are many, the tenth and the ninetieth of a hundred); a ratio says how many times better
Polder is than the peer, so above 1 is better. Rows that lose stay.
"""
SWEEP = """\
MPICH over a pool of two emulated hosts, half of the ranks origins, each with a target on the other host; in brackets
how many times better than the same MPICH over TCP on this machine, in turn. All ranks share the cores of this machine:
with more of them than cores a message waits for its peer's turn, over either. MPICH gives its core up at every poll in
vain but in a flush of a window, with the same settings over either; there Polder's provider does it by itself, and the
TCP provider does not. From 4 ranks on a figure moves up to tenfold with whatever else wants these cores meanwhile.
"""
PICTURE = """\
![{name}]({file})
"""
HEAD = ["case", "metric", "median", "low", "high", "unit", "kind", "peer", "peer's", "ratio"]


def main() -> int:
    """Runs the benchmarks that are named, or all; the sections of others stay."""
    page = ROOT / "docs/benchmarks.md"
    _, *parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    sections = {part.split("\n", 1)[0]: part for part in parts}
    for name in sys.argv[1:] or BENCHES:
        sections[name] = f"{name}\n\n{section(name)}\n"
        page.write_text(
            "## ".join([PREFACE + "\n", *(sections[name] for name in BENCHES if name in sections)]).rstrip() + "\n"
        )
    return 0


def section(name: str) -> str:
    """What a benchmark says, when and where."""
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
    print(f"polder {' '.join(words)}", file=sys.stderr)
    done = subprocess.run([str(POLDER), *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    what = (
        f"{BENCHES[name]}. Measured on {machine()}, {datetime.date.today().isoformat()}: `polder {' '.join(words)}`\n"
    )
    if not name.startswith("figure"):
        return "\n".join([what, table(rows)])
    return "\n".join([what, SWEEP, PICTURE.format(name=name, file=file), *sweep(rows)])


def sweep(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each way: a line a size, a column for each number of ranks; then what was published."""
    said = re.compile(r"figure \d .* (\d+ (?:B|KiB|MiB)) (\d+) procs (coherent|software) mpich( with shim)?")
    ways: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if match := said.fullmatch(row["case"]):
            size, ranks, pool, shim = match.groups()
            cell = f"{short(row['value'])} ({short(row['ratio'])})"
            ways.setdefault(pool + (shim or ""), {}).setdefault(size, {})[ranks] = cell
    parts: list[str] = []
    for way, sizes in sorted(ways.items(), reverse=True):
        ranks = list(next(iter(sizes.values())))
        lines = [f"| {way} | {' | '.join(f'{count} ranks' for count in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
        lines += [f"| {size} | {' | '.join(cells[count] for count in ranks)} |" for size, cells in sizes.items()]
        parts.append("\n".join(lines) + "\n")
    published = [row for row in rows if row["kind"] == "published"]
    return [*parts, "Published, between two hosts on FPGA-based CXL memory (cMPI, section 4.2):\n", table(published)]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        figures = [short(row[key]) for key in ("value", "low", "high")]
        peer = [row.get("peer", ""), short(row.get("peer_value")), short(row.get("ratio"))]
        cells = [row["case"], row["metric"], *figures, row["unit"], row["kind"], *peer]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    """Processor, cores and kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'an unknown CPU')}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"


if __name__ == "__main__":
    sys.exit(main())
