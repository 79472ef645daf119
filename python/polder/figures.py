"""Draws what a command prints as JSON on stdin.

The sweeps of ``polder-dev bench mpi --figure``, which its ``--plot`` starts, the errors of ``polder plan validate``,
the access times of ``polder plan memory``, and a step of ``polder plan train`` with the file that its ``--trace``
writes. A platform is drawn by its name or its file: ``python -m polder.figures plan-platform.svg nvl72-cxl``.
"""

# pyright: basic
# matplotlib says too little of its types.
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from polder import _core, _distribution

CASE = re.compile(r"figure (\d) .* (\d+) (B|KiB|MiB) (\d+) procs (coherent|software) (\w+)( with shim)?")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
WHAT = {
    5: "bandwidth of one-sided messages",
    6: "latency of one-sided messages",
    7: "bandwidth of two-sided messages",
    8: "latency of two-sided messages",
}
LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI", "impi": "Intel MPI"}
STYLES = {
    "tcp": ("tab:gray", "--"),
    "coherent": ("tab:blue", ":"),
    "software": ("tab:orange", ":"),
    "coherent with shim": ("tab:blue", "-"),
    "software with shim": ("tab:orange", "-"),
}

# What the text of cMPI's section 4.2 says of its figures, as data/fabrics/cmpi-figures.toml has it: the figure, the
# path, bytes, ranks (None where the text names no number) and the value in GB/s or us.
PUBLISHED: list[tuple[int, str, int, int | None, float]] = [
    (5, "pool", 16 << 10, 8, 7.42),
    (5, "pool", 16 << 10, 16, 8.6),
    (5, "ethernet", 1 << 20, 32, 0.12),
    (5, "smartnic", 16 << 10, 32, 5.66),
    (5, "smartnic", 8 << 20, 32, 10.15),
    (6, "pool", 1, None, 12),
    (6, "pool", 16 << 10, None, 12),
    (6, "ethernet", 1, None, 630),
    (6, "smartnic", 1, None, 620),
    (7, "pool", 1 << 20, 32, 6.05),
    (7, "ethernet", 1 << 20, 32, 0.12),
    (8, "pool", 1, None, 12),
    (8, "ethernet", 1, None, 160),
    (8, "smartnic", 1, None, 55),
]
MARKERS = {
    "pool": ("*", "published: CXL"),
    "smartnic": ("^", "published: TCP, CX-6 Dx"),
    "ethernet": ("s", "published: TCP, Ethernet"),
}

# Of a panel, its lines: the values by size.
Lines = dict[str, dict[int, float]]


def panels(rows: list[dict[str, Any]]) -> dict[tuple[str, int], Lines]:
    """The lines of each library and number of ranks.

    >>> row = {"case": "figure 8 message 2 KiB 4 procs software mpich", "value": 3.0, "peer": "tcp", "peer_value": 9.0}
    >>> panels([row])
    {('mpich', 4): {'software': {2048: 3.0}, 'tcp': {2048: 9.0}}}
    """
    by_panel: dict[tuple[str, int], Lines] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if case := CASE.fullmatch(row["case"]):
            _, count, unit, ranks, pool, library, shim = case.groups()
            lines, size = by_panel[library, int(ranks)], int(count) * UNITS[unit]
            lines[pool + (shim or "")][size] = row["value"]
            if row.get("peer") == "tcp":
                lines["tcp"][size] = row["peer_value"]
    return {key: dict(lines) for key, lines in by_panel.items()}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """A panel for each number of ranks, below each other for each library."""
    import matplotlib as mpl

    mpl.use("agg")
    # The same rows give the same file.
    mpl.rcParams.update({"svg.hashsalt": "polder", "svg.fonttype": "none"})
    from matplotlib import pyplot

    by_panel = panels(rows)
    first = next(row for row in rows if CASE.fullmatch(row["case"]))
    number = int(first["case"].split()[1])
    libraries = list(dict.fromkeys(library for library, _ in by_panel))
    ranks = sorted({ranks for _, ranks in by_panel})
    size = (2.8 + 2.4 * len(ranks), 1.5 + 2.6 * len(libraries))
    figure, axes = pyplot.subplots(
        len(libraries), len(ranks), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for (library, count), lines in by_panel.items():
        panel = axes[libraries.index(library)][ranks.index(count)]
        for name, (colour, dashes) in STYLES.items():
            if line := sorted(lines.get(name, {}).items()):
                panel.plot(*zip(*line, strict=True), dashes, color=colour, label=f"measured: {name}", linewidth=1.5)
        for of, path, at, their_ranks, value in PUBLISHED:
            if of == number and their_ranks in (None, count):
                marker, label = MARKERS[path]
                panel.plot([at], [value], marker, color="black", markerfacecolor="none", label=label, linestyle="none")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{LIBRARIES[library]}, {count} ranks", fontsize=9)
        panel.set_xticks(
            [1, 1 << 6, 1 << 12, 1 << 18, 1 << 23], ["1 B", "64 B", "4 KiB", "256 KiB", "8 MiB"], rotation=45
        )
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.3)
    figure.suptitle(
        f"{WHAT[number].capitalize()} (cMPI, Figure {number})\nmeasured: two emulated hosts, {machine()}, no CXL",
        fontsize=10,
    )
    figure.supylabel(f"{WHAT[number].split()[0]}, {first['unit']}", fontsize=9)
    figure.supxlabel(
        "bytes of a message\npublished: what cMPI's section 4.2 says of two servers with FPGA-based CXL memory; "
        "in every panel where it names no number of ranks",
        fontsize=8,
    )
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=120)


def machine() -> str:
    """What the sweep ran on, if it is drawn where it ran."""
    kind = "VM" if "hypervisor" in Path("/proc/cpuinfo").read_text() else "machine"
    return f"one {os.cpu_count()}-core {kind}"


def errors(report: dict[str, Any]) -> tuple[list[str], list[float], list[float]]:
    """Of each judged row its name, Polder's error and that of a constant rate, in per cent.

    >>> row = {"name": "1T", "published_s": 100.0, "anchored_s": 95.0, "constant_s": 119.0, "judged": True}
    >>> tables = [{"table": "sc21", "blind": False, "rows": [row, row | {"judged": False}]}]
    >>> errors({"tables": [*tables, {"table": "titan", "blind": True, "rows": [row]}]})
    (['titan 1T (blind)', 'sc21 1T'], [-5.0, -5.0], [19.0, 19.0])
    """
    tables = sorted(report["tables"], key=lambda table: not table["blind"])
    rows = [(table, row) for table in tables for row in table["rows"] if row["judged"]]

    def error(row: dict[str, Any], of: str) -> float:
        return round(100 * (row[of] / row["published_s"] - 1), 6)

    def name(table: dict[str, Any], row: dict[str, Any]) -> str:
        short = f"{table['table']} {row['name'].removesuffix(' accelerators')}"
        return f"{short} (blind)" if table["blind"] else short

    names = [name(table, row) for table, row in rows]
    return names, [error(row, "anchored_s") for _, row in rows], [error(row, "constant_s") for _, row in rows]


def draw_errors(report: dict[str, Any], out: Path) -> None:
    """A line for each judged row, those that nothing is fitted to first: Polder's error and that of a constant rate."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "polder", "svg.fonttype": "none"})
    from matplotlib import pyplot

    names, ours, constant = errors(report)
    figure, panel = pyplot.subplots(figsize=(8, 0.6 + 0.22 * len(names)), layout="constrained")
    places = range(len(names))
    panel.hlines(places, ours, constant, color="lightgray", linewidth=1)
    panel.plot(constant, places, "o", color="tab:gray", markersize=4, label="a constant rate an accelerator")
    panel.plot(ours, places, "o", color="tab:blue", markersize=5, label="Polder, simulated")
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(places, names, fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("error of the predicted step against the published one, %", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=120)


def parts(step: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What a step's time is made of, as far as there is any: name, seconds that hold it up, seconds beside computation.

    >>> compute = {"forward_s": 1.0, "backward_s": 2.0, "recompute_s": 0.0}
    >>> compute |= {"contention_s": 0.0, "optimizer_s": 0.1}
    >>> nothing = {"exposed_s": 0.0, "hidden_s": 0.0}
    >>> sent = dict.fromkeys(["tensor", "context", "expert", "pipeline"], {"inside": nothing, "between": nothing})
    >>> sent["data"] = {"inside": {"exposed_s": 0.2, "hidden_s": 0.3}, "between": nothing}
    >>> step = {"compute": compute, "communication": sent, "bubble_s": 0.5, "straggle_s": 0.0, "offload": nothing}
    >>> parts(step)[2:]
    [('optimizer', 0.1, 0.0), ('data, inside racks', 0.2, 0.3), ('bubble', 0.5, 0.0)]
    """
    by_label: dict[str, list[float]] = {}
    for key, path, label, is_hidden in _core.plan_names()[2]:
        if key.endswith("_s") and key != "total_s":
            value: Any = step
            for name in path.split("."):
                value = value[name]
            by_label.setdefault(label, [0.0, 0.0])[is_hidden] = value
    return [(label, exposed, hidden) for label, (exposed, hidden) in by_label.items() if exposed + hidden > 0]


# Stages of a timeline that are drawn, the first ones.
STAGES = 8
WORKS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "contention": "tab:olive",
    "offload": "tab:red",
    "data": "tab:purple",
    "optimizer": "tab:green",
    "stragglers": "tab:gray",
}


def draw_step(plan: dict[str, Any], trace: dict[str, Any], out: Path) -> None:
    """What the step's time is made of, and below it the step as it goes by on each stage."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "polder", "svg.fonttype": "none"})
    from matplotlib import pyplot

    named = parts(plan["step"])
    stages = min(plan["layout"]["pp"], STAGES)
    heights = [0.5 + 0.22 * len(named), 0.7 + 0.25 * stages]
    figure, (above, below) = pyplot.subplots(
        2, figsize=(8, 0.5 + sum(heights)), height_ratios=heights, layout="constrained"
    )
    places, (names, exposed, hidden) = range(len(named)), zip(*named, strict=True)
    above.barh(places, exposed, color="tab:blue", height=0.7, label="holds the step up")
    above.barh(places, hidden, left=exposed, color="lightsteelblue", height=0.7, label="beside computation")
    above.set_yticks(places, names, fontsize=7)
    above.set_xlabel("seconds", fontsize=8)
    spent: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        # A process is a stage, its first track what is computed.
        if event["ph"] == "X" and event["tid"] == 0:
            spent[event["cat"], event["pid"]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    for work, colour in WORKS.items():
        for stage in range(stages):
            if spans := spent[work, stage]:
                label = work if stage == 0 else None
                below.broken_barh(
                    spans, (stage - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3, label=label
                )
    below.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=7)
    below.set_xlim(0, plan["step"]["total_s"])
    below.set_xlabel("seconds from the beginning of the step", fontsize=8)
    for panel in (above, below):
        panel.invert_yaxis()
        panel.tick_params(axis="x", labelsize=8)
    above.grid(axis="x", alpha=0.3)
    above.legend(fontsize=8)
    below.legend(fontsize=7, ncols=len(WORKS), loc="upper center", bbox_to_anchor=(0.5, -0.3))
    title = f"{plan['model']} on {plan['platform']}, {plan['accelerators']} accelerators"
    figure.suptitle(f"{title}: {plan['step']['total_s']:.2f} s a step, {plan['kind']}", fontsize=10)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=120)


def draw_memory(curves: dict[str, Any], out: Path) -> None:
    """Mean access time by working set of each configuration; dashed where a memory of the last one ends."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "polder", "svg.fonttype": "none"})
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    sizes = list(dict.fromkeys(point["access_bytes"] for point in curves["points"]))
    figure, panels = pyplot.subplots(
        len(sizes), figsize=(8, 0.8 + 3.2 * len(sizes)), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, bytes_ in zip(panels[:, 0], sizes, strict=True):
        for index, of in enumerate(curves["configurations"]):
            line = [
                (point["working_set_bytes"] / 1e9, point["seconds"][index] * 1e9)
                for point in curves["points"]
                if point["access_bytes"] == bytes_ and point["seconds"][index] is not None
            ]
            panel.plot(*zip(*line, strict=True), label=f"{of['name']}, {of['platform']}", linewidth=1.5)
        end = 0.0
        for tier in curves["configurations"][-1]["tiers"][:-1]:
            end += tier["capacity_bytes"] / 1e9
            panel.axvline(end, color="gray", linestyle="--", linewidth=0.8)
            panel.text(
                end, 1.01, f"end of {tier['name']}", fontsize=7, ha="center", transform=panel.get_xaxis_transform()
            )
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_ylabel(f"mean access time of {bytes_:g} B, ns", fontsize=8)
        panel.tick_params(labelsize=7, which="both")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    panels[-1, 0].set_xlabel("working set, GB", fontsize=8)
    ways = f"memory nodes {curves['nodes']}, memory of a rack that is not coherent by {curves['inside']}"
    figure.suptitle(
        f"Access time by working set, {curves['accelerators']} accelerators, {curves['kind']}\n{ways}", fontsize=10
    )
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=120)


def labels(platform: dict[str, Any], name: str | None = None) -> dict[str, list[str]]:
    """What stands in the boxes of a platform's picture: a kind of rack, the first by default, and its surroundings.

    >>> link = {"rate": "100 GT/s", "lanes": 2}
    >>> switch = {"ports": 8, "latency": "1 us"}
    >>> fabric = {"links": 3, "link": link, "switch": switch, "topology": {"kind": "single-hop"}}
    >>> memory = {"capacity": "1 GB", "read": "2 GB/s", "write": "3 GB/s", "latency": "4 ns"}
    >>> host = {"accelerators": 2, "memory": memory, "attach": {"bandwidth": "5 GB/s"}}
    >>> rack = {"accelerators": 4, "accelerator": {"name": "X", "memory": memory}, "host": host, "fabric": fabric}
    >>> found = labels({"rack": {"r": rack}, "between": fabric | {"topology": {"kind": "clos", "levels": 2}}})
    >>> found["fabric"]
    ['3 links each of 2 lanes at 100 GT/s', 'single-hop, switches of 8 ports, 1 us']
    >>> found["between"][1]
    'clos, levels 2, switches of 8 ports, 1 us'
    >>> found["host"]
    ['1 GB, read 2 GB/s', 'for 2 accelerators']
    >>> found["attach"]
    ['attach: by a link', '5 GB/s']
    >>> card = {"capacity": "1 TB", "channels": 2, "rate": "3 MT/s", "port": {"links": 1}}
    >>> labels({"rack": {"r": rack | {"host": host | {"tier": {"cxl": card}}}}})["tiers"]
    ['tier.cxl: 1 TB, 2 channels at 3 MT/s, behind CXL']
    """

    def memory(table: dict[str, str]) -> str:
        return f"{table['capacity']}, read {table['read']}"

    def fabric(table: dict[str, Any]) -> list[str]:
        link, switch, topology = table["link"], table["switch"], table["topology"]
        how = ", ".join([topology["kind"]] + [f"{key} {value}" for key, value in topology.items() if key != "kind"])
        noun = "link" if table["links"] == 1 else "links"
        return [
            f"{table['links']} {noun} each of {link['lanes']} lanes at {link['rate']}",
            f"{how}, switches of {switch['ports']} ports, {switch['latency']}",
        ]

    rack = platform["rack"][name or next(iter(platform["rack"]))]
    host, pool = rack["host"], platform.get("pool")

    def tier(name: str, table: dict[str, Any]) -> str:
        behind = ", behind CXL" if table.get("port") else ""
        return f"tier.{name}: {table['capacity']}, {table['channels']} channels at {table['rate']}{behind}"

    texts = {
        "accelerator": [rack["accelerator"]["name"], memory(rack["accelerator"]["memory"])],
        "host": [memory(host["memory"]), f"for {host['accelerators']} accelerators"],
        "attach": [f"attach: {host['attach'].get('kind', 'by a link')}", host["attach"]["bandwidth"]],
        "fabric": fabric(rack["fabric"]) if rack.get("fabric") else [],
        "between": fabric(platform["between"]) if platform.get("between") else [],
        "tiers": [tier(*entry) for entry in host.get("tier", {}).items()],
    }
    if pool:
        ports = f"{pool['ports']} ports, for {pool['accelerators']} accelerators"
        texts["pool"] = [memory(pool["memory"]), ports]
    return texts


def draw_platform(platform: dict[str, Any], out: Path) -> None:
    """Racks with what is in them, the fabric of each, and that between them; each box with the key that says it.

    Two kinds of rack are drawn, or two racks of one kind where a fabric joins them, or the only rack.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "polder", "svg.fonttype": "none"})
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    kinds = list(platform["rack"])
    names = kinds[:2] if len(kinds) > 1 else kinds * (2 if platform.get("between") else 1)
    texts = labels(platform)
    figure, panel = pyplot.subplots(figsize=(9, 5.6), layout="constrained")

    def box(place: tuple[float, float, float, float], lines: list[str], colour: str, key: str = "") -> None:
        x, y, width, height = place
        style = "round,pad=0,rounding_size=0.6"
        panel.add_patch(
            FancyBboxPatch((x, y), width, height, style, facecolor=colour, edgecolor="black", linewidth=0.7)
        )
        text = "\n".join(([key] if key else []) + lines)
        panel.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=6.5, linespacing=1.3)

    def wire(x: float, low: float, high: float) -> None:
        panel.plot([x, x], [low, high], color="black", linewidth=1.1, zorder=0)

    for left, name in zip((1, 51), names, strict=False):
        rack, texts = platform["rack"][name], labels(platform, name)
        panel.add_patch(
            FancyBboxPatch(
                (left, 24), 47, 50, "round,pad=0,rounding_size=1", facecolor="none", edgecolor="gray", ls="--"
            )
        )
        panel.text(
            left + 1, 72, f"rack.{name}: {rack['accelerators']} accelerators", fontsize=7.5, weight="bold", va="center"
        )
        if texts["fabric"]:
            box((left + 5.5, 28, 36, 7.5), texts["fabric"], "#f3d9a4", f"rack.{name}.fabric")
        for index, x in enumerate((left + 2, left + 24.5)):
            if texts["fabric"]:
                wire(x + 10, 35.5, 42)
            wire(x + 10, 49.5, 56)
            panel.text(x + 10.7, 52.7, "\n".join(texts["attach"]), fontsize=6.2, va="center", linespacing=1.2)
            last = index == 1
            box((x, 42, 20.5, 7.5), texts["accelerator"], "#bcd3ea", "accelerator" + (" …" if last else ""))
            box((x, 56, 20.5, 7.5), texts["host"], "#d9d9d9", "host" + (" …" if last else ""))
            if texts["tiers"]:
                box((x, 65, 20.5, 2.2 * len(texts["tiers"]) + 1.2), texts["tiers"], "#c9e3c1")
                wire(x + 10, 63.5, 65)
            if texts["between"]:
                wire(x + (1.5 if index == 0 else 19), 14.5, 42)
    if texts["between"]:
        box((1, 7, 97, 7.5), texts["between"], "#f0bfa6", "between")
    if "pool" in texts:
        box((30, -6, 39, 7.5), texts["pool"], "#c9e3c1", "pool: memory nodes")
        wire(49.5, 1.5, 7)
    panel.set_xlim(0, 99 if len(names) > 1 else 49)
    panel.set_ylim(-7 if "pool" in texts else 5 if texts["between"] else 23, 75)
    panel.axis("off")
    figure.suptitle(platform["title"], fontsize=10)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=120)


if __name__ == "__main__":
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(str(_distribution.missing("polder.figures", "matplotlib", error)))
    if sys.argv[2:] and not sys.argv[2].endswith(".json"):
        described = json.loads(_core.plan_platform(sys.argv[2]))
        if not described["rack"]:
            sys.exit(f"{sys.argv[2]}: expected a platform with racks, found servers alone; name another")
        draw_platform(described, Path(sys.argv[1]))
        sys.exit()
    said = [json.loads(line) for line in sys.stdin]
    if "tables" in said[0]:
        draw_errors(said[0], Path(sys.argv[1]))
    elif "configurations" in said[0]:
        draw_memory(said[0], Path(sys.argv[1]))
    elif "step" in said[0]:
        draw_step(said[0], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[1]))
    else:
        draw(said, Path(sys.argv[1]))
