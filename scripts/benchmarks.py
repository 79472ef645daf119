#!/usr/bin/env python3
"""Runs every benchmark, or those that are named, and writes docs/benchmarks.md: what `make bench` does.

The tables of README.md are taken from that page, from those of one run; `--readme` writes only them.
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
BENCHES = {
    "lines": "Writing and flushing (cMPI, Figure 11), and the rows of its Table 1 that this machine has",
    "ring": "Messages between two processes of two emulated hosts, beside the line operations they need",
    "collectives": "Collectives through Python, beside gloo and Open MPI, in turn in the same processes",
    "torch": "Collectives and messages through torch, beside gloo and Open MPI, in turn in the same processes",
    "mpi": "Stock MPI libraries over a pool of two emulated hosts, beside TCP on this machine and their shared memory",
    "plan": "Layouts of a training step predicted in a second, and the error of predictions beside a constant rate's",
    "pages": "Accesses to pages of four services on two tiers, beside a plain C model that decides the same",
    "sync": "Sums of a parameter service's proxies, beside the same additions on plain memory",
    "snapshot": "Snapshots of a training state and restarts from them, beside torch's own checkpoints in /dev/shm",
    "objects": "A million creates and opens from four processes of two emulated hosts",
    "figure 5": "Bandwidth of one-sided messages (cMPI, Figure 5), in GB/s",
    "figure 6": "Latency of one-sided messages (cMPI, Figure 6), in microseconds",
    "figure 7": "Bandwidth of two-sided messages (cMPI, Figure 7), in GB/s",
    "figure 8": "Latency of two-sided messages (cMPI, Figure 8), in microseconds",
}
MPICH = ".cache/mpich/bin/mpiexec"
SIZES = "1B,64B,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB"
# Beyond it a ratio is no measure of Polder: the peer waited for a core.
ABSURD = 50
PREFACE = f"""\
# Benchmarks

`make bench` measures these sections and writes this page. Each section is a run of its own, minutes after the one
before. So a case that stands in two sections may differ as much as this machine does from minute to minute. Two
benchmarks stand on pages of their own: `polder-dev bench offload` in [offload.md](offload.md), `polder-dev bench fabric` in
[plan-fabric.md](plan-fabric.md). One section alone:

```sh
polder-dev bench ring
```

| column | meaning |
|---|---|
| median, low, high | the median, the least and the greatest; in "lines" the tenth and the ninetieth of a hundred |
| ratio | how many times better Polder is than the peer: above 1 is better. Rows that lose stay |
| † | a ratio beyond {ABSURD}. The peer's processes waited for a core, which two cores and busy pollers cause; \
this says nothing of its transfers |
"""
SWEEP = """\
MPICH over a pool of two emulated hosts. Half of the ranks are origins; each has a target on the other host. In
brackets: how many times better than the same MPICH over TCP on this machine, measured in turn.

All ranks share the cores of this machine. With more ranks than cores, a message waits until its peer gets a core,
over either. MPICH has the same settings over either, and gives its core up at every poll that finds nothing. Flushes
of windows are the exception: there Polder's provider gives the core up, and the TCP provider does not. From 4 ranks
on, a figure changes up to tenfold when other processes want these cores.
"""
PICTURE = """\
![{name}]({file})
"""
LOST_CORE = (
    f"† The peer is more than {ABSURD} times slower. Its processes waited for a core, which two cores and busy pollers "
    "cause; this says nothing of its transfers."
)
HEAD = ["case", "metric", "median", "low", "high", "unit", "kind", "peer", "peer's", "ratio"]


def main() -> int:
    """Runs the benchmarks that are named, or all; the sections of others stay."""
    page, front = ROOT / "docs/benchmarks.md", ROOT / "README.md"
    if sys.argv[1:] == ["--readme"]:
        front.write_text(with_tables(front.read_text(), page.read_text()))
        return 0
    _, *parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    sections = {part.split("\n", 1)[0]: part for part in parts}
    for name in sys.argv[1:] or BENCHES:
        sections[name] = f"{name}\n\n{section(name)}\n"
        page.write_text(
            "## ".join([PREFACE + "\n", *(sections[name] for name in BENCHES if name in sections)]).rstrip() + "\n"
        )
        front.write_text(with_tables(front.read_text(), page.read_text()))
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
    print(f"polder-dev {' '.join(words)}", file=sys.stderr)
    done = subprocess.run([str(POLDER_DEV), *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    run = f"{datetime.date.today().isoformat()}, {commit()}: `polder-dev {' '.join(words)}`"
    what = f"{BENCHES[name]}. Measured on {machine()}, {run}\n"
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
            cell = f"{short(row['value'])} ({times(row['ratio'])})"
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
        peer = [row.get("peer", ""), short(row.get("peer_value")), times(row.get("ratio"))]
        cells = [row["case"], row["metric"], *figures, row["unit"], row["kind"], *peer]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_tables(front: str, page: str) -> str:
    """The README, with the tables between its markers written anew from the page of all benchmarks."""
    rows, dates = read(page)
    for name, lines in {
        "first": first({row["case"]: row for section in rows.values() for row in section}),
        "all-reduce": all_reduce(rows["collectives"]),
        "lost": lost(rows),
        "torch": through_torch(rows["torch"]),
        "mpi": mpi(rows["mpi"]),
        "floor": floor(rows["ring"] + rows["mpi"]),
    }.items():
        begin, end = f"<!-- benchmarks {name} -->\n", f"<!-- end of {name} -->"
        head, rest = front.split(begin)
        _, tail = rest.split(end)
        front = "".join([head, begin, "\n".join(lines), "\n", end, tail])
    return re.sub(r"(?<=<!-- dates -->).*?(?=<!-- end of dates -->)", dates, front)


def read(page: str) -> tuple[dict[str, list[dict[str, str]]], str]:
    """The rows of each section, as they are printed, and the dates of their runs."""
    sections: dict[str, list[dict[str, str]]] = {}
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        lines = [line.split("|")[1:-1] for line in part.splitlines() if line[:1] == "|"]
        cells = [[cell.strip().removesuffix(" †") for cell in line] for line in lines]
        keys = ["case", "metric", "value", "low", "high", "unit", "kind", "peer", "theirs", "ratio"]
        rows = [dict(zip(keys, row, strict=True)) for row in cells if len(row) == len(HEAD) and row != HEAD]
        sections[part.split("\n", 1)[0]] = [row for row in rows if row["case"].strip("-")]
    days = sorted(set(re.findall(r", (\d{4}-\d\d-\d\d), [^`]*: `polder-dev bench (?:collectives|torch|mpi|ring)\b", page)))
    return sections, " and ".join(days)


def number(text: str) -> float:
    """A figure as it is printed."""
    return float(text.replace(",", "") or "nan")


def beside(row: dict[str, str]) -> str:
    """A figure, its peer's, and how many times better it is; one that lost its core is marked."""
    mark = "†" if number(row["ratio"]) > ABSURD else ""
    return "{value} {unit} | {theirs} {unit}{mark} | {ratio}{mark}".format(**row, mark=mark)


def first(rows: dict[str, dict[str, str]]) -> list[str]:
    """What a reader gets, in absolute figures."""

    def of(case: str) -> str:
        row = rows[case]
        value, unit = row["value"], row["unit"]
        return f"{number(value) / 1000:.3g} ms" if unit == "us" and number(value) >= 1000 else f"{value} {unit}"

    shared = "broadcast 16 MiB 2 procs software"
    rate = (16 << 20) / (number(rows[shared]["value"]) * 1e-6) / 1e9
    message = {mpi: of(f"message 8 B 2 procs software {mpi}") for mpi in ("openmpi", "mpich")}
    lines = ["| you want to | you get | try |", "|---" * 3 + "|"]
    for want, get, command in (
        (
            "share arrays between hosts",
            f"{rate:.3g} GB/s: an array of 16 MiB from one process to another by a broadcast, in {of(shared)}",
            "the program below; [compute together](docs/share.md#compute-together) has broadcasts",
        ),
        (
            "run an MPI program over the pool, unchanged",
            f"8 bytes one way in {message['openmpi']} with Open MPI and {message['mpich']} with MPICH",
            "`polder mpi run -n 4 --emulate 2 -- ./program` for a program of yours; without an "
            "MPI library first `pip install mpich`",
        ),
        (
            "synchronise a PyTorch job on CPUs",
            f"an all-reduce of 16 MiB in {of('all-reduce 16 MiB 2 procs software staged through torch')}, "
            "called through torch by two processes",
            "`make demo`",
        ),
        (
            "train beyond DRAM",
            "optimizer state and activations on a disk or another NUMA node; the weights are bit for bit those of the "
            "unplaced run, which the same memory limit kills",
            "`make offload`",
        ),
        (
            "keep the services of a host on their tier of memory",
            "shares and opt-outs that hold, and settings that are restored after `kill -9`",
            "`make lab`, then `polder doctor`. Its exit status is 1 if this host lacks what tiering needs, "
            "such as slow memory",
        ),
        (
            "plan a training machine",
            "the time of a step on other hardware, simulated; 3.9% off on average for 29 published steps, "
            "with one scalar a table",
            "`polder plan train --model llama3-405b --platform nvl72-ndr --gpus 16384`",
        ),
        (
            "know whether memory keeps Polder's rules",
            "PASS, FAIL or INCONCLUSIVE, from litmus tests between two hosts",
            "on one of two [servers](docs/operate.md#four-servers-on-one-dax-device) "
            "`polder verify --pool /dev/dax0.0 --litmus 0 --host 0`, on the other with 1 in place of 0",
        ),
    ):
        lines.append(f"| {want} | {get} | {command} |")
    return lines


def all_reduce(rows: list[dict[str, str]]) -> list[str]:
    """A line a size and number of processes: what each kind of pool takes, and its peers."""
    kinds = ["coherent staged", "coherent in-pool", "software staged", "software in-pool"]
    lines = ["| processes | size | " + " | ".join(kinds) + " | gloo | Open MPI |", "|---" * 8 + "|"]
    is_marked = False
    for procs in ("2", "4"):
        for size in ("4 KiB", "1 MiB", "16 MiB", "128 MiB"):
            prefix = f"all-reduce {size} {procs} procs "
            found = {(row["case"].removeprefix(prefix), row["peer"]): row for row in rows}
            own = [found[kind, "openmpi"] for kind in kinds]
            peers = [found["gloo", ""], found["openmpi", ""]]
            slow = number(peers[0]["value"]) > ABSURD * min(number(row["value"]) for row in own)
            is_marked |= slow
            cells = [f"{row['value']} us ({row['ratio']})" for row in own]
            cells += [f"{peers[0]['value']} us{'†' if slow else ''}", f"{peers[1]['value']} us"]
            lines.append(f"| {procs} | {size} | {' | '.join(cells)} |")
    return [*lines, "", "In brackets: how many times faster than Open MPI.", *([LOST_CORE] if is_marked else [])]


def lost(rows: dict[str, list[dict[str, str]]]) -> list[str]:
    """Every row in which a peer library is faster, the worst first; for the all-reduce those against Open MPI."""
    worse = [row for row in rows["collectives"] if row["peer"] == "openmpi" and number(row["ratio"]) < 1]
    worse += [row for row in rows["mpi"] if row["peer"] in ("tcp", "shm") and number(row["ratio"]) < 1]
    names = {"openmpi": "Open MPI", "tcp": "the library over TCP", "shm": "the library's shared memory"}
    count = sum(row["peer"] == "openmpi" for row in worse)
    lines = [f"{count} of these are all-reduces against Open MPI.", ""]
    lines += ["| case | peer | Polder | peer takes | ratio |", "|---" * 5 + "|"]
    for row in sorted(worse, key=lambda row: number(row["ratio"])):
        lines.append(f"| {row['case']} | {names[row['peer']]} | {beside(row)} |")
    return lines


def through_torch(rows: list[dict[str, str]]) -> list[str]:
    """A line an operation: how many rows there are, in how many Polder is ahead of each peer, and its worst ratio."""
    lines = ["| operation | rows | ahead of gloo | worst | ahead of Open MPI | worst |", "|---" * 6 + "|"]
    of = {row["case"]: re.sub(r" \d+ [KM]iB .*", "", row["case"]) for row in rows}
    totals = dict.fromkeys(["gloo", "openmpi"], (0, 0))
    for operation in dict.fromkeys(of.values()):
        cells = [operation]
        for peer in totals:
            ratios = [number(row["ratio"]) for row in rows if row["peer"] == peer and of[row["case"]] == operation]
            ahead = sum(ratio >= 1 for ratio in ratios)
            totals[peer] = (totals[peer][0] + ahead, totals[peer][1] + len(ratios))
            if peer == "gloo":
                cells.append(str(len(ratios)))
            cells += [str(ahead), f"{min(ratios):.3g}"] if ratios else ["no peer", ""]
        lines.append(f"| {' | '.join(cells)} |")
    gloo, openmpi = ("{} of {}".format(*totals[peer]) for peer in totals)
    return [*lines, "", f"In all: ahead of gloo in {gloo} rows, of Open MPI, called past torch, in {openmpi}."]


def mpi(rows: list[dict[str, str]]) -> list[str]:
    """Small messages, streams and puts of both libraries over a software-coherent pool."""
    lines = ["| library | case | Polder | TCP | times better |", "|---" * 5 + "|"]
    marks = False
    for library, title in (("mpich", "MPICH"), ("openmpi", "Open MPI")):
        for row in rows:
            match = re.fullmatch(rf"(.*) 2 procs software {library}( with shim)?", row["case"])
            if match and row["peer"] in ("tcp", ""):
                shim = ", with the window shim" if match[2] else ", without the shim" if "put" in match[1] else ""
                cells = beside(row) if row["peer"] else f"{row['value']} {row['unit']} | not measured |"
                marks |= "†" in cells
                lines.append(f"| {title} | {match[1]}{shim} | {cells} |")
    return [*lines, *(["", LOST_CORE] if marks else [])]


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
