#!/usr/bin/env python3
"""Runs every benchmark and writes docs/benchmarks.md: what `make bench` does."""

import datetime
import json
import os
import platform
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
    "objects": "A million creates and opens from four processes of two emulated hosts",
}
MPI = ".cache/mpich/bin/mpiexec,.venv/bin/mpiexec"
ARGUMENTS = {"mpi": ["--mpi", MPI]}
PREFACE = """\
# Benchmarks

Measured on {machine}, {date}, by `make bench`. A figure is the median, with the least and the greatest
beside it (of lines, which are many, the tenth and the ninetieth of a hundred); a ratio says how many times better
Polder is than the peer, so above 1 is better. Rows that lose stay.
"""
HEAD = ["case", "metric", "median", "low", "high", "unit", "kind", "peer", "peer's", "ratio"]


def main() -> int:
    """Runs the benchmarks that are named, or all."""
    parts = [PREFACE.format(machine=machine(), date=datetime.date.today().isoformat())]
    for name in sys.argv[1:] or BENCHES:
        print(f"polder bench {name}", file=sys.stderr)
        words = ["bench", name, *ARGUMENTS.get(name, [])]
        done = subprocess.run([str(POLDER), *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        parts += [f"## {name}\n", f"{BENCHES[name]}. `polder {' '.join(words)}`\n", table(rows)]
    (ROOT / "docs/benchmarks.md").write_text("\n".join(parts))
    return 0


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
