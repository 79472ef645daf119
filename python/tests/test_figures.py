"""What is drawn says what it is."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polder import figures

ROOT = Path(__file__).parents[2]


def test_a_sweep_is_drawn_with_axes_units_its_machine_and_the_papers_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"case": f"figure {number} {what} {size} {ranks} procs {pool} mpich", "unit": unit, "value": 3.0, "peer": "tcp"}
        | {"peer_value": 9.0, "kind": "measured"}
        for number, what, unit in [(5, "put stream", "GB/s"), (8, "message", "us")]
        for size in ("1 B", "16 KiB")
        for ranks in (2, 8)
        for pool in ("coherent", "software")
    ]
    for number, words in [
        (5, ["bandwidth, GB/s", "published: CXL", "measured: software", "measured: tcp"]),
        (8, ["latency, us", "published: CXL", "published: TCP, CX-6 Dx", "published: TCP, Ethernet"]),
    ]:
        out = tmp_path / f"{number}.svg"
        lines = "".join(json.dumps(row) + "\n" for row in rows if row["case"].startswith(f"figure {number} "))
        subprocess.run([sys.executable, "-m", "polder.figures", out], input=lines, text=True, check=True)
        drawn = out.read_text()
        for word in [*words, "bytes of a message", "measured: two emulated hosts, one ", "no CXL"]:
            assert f">{word}" in drawn or word in drawn, word


def test_the_papers_points_are_those_of_its_text_that_the_simulator_is_judged_by() -> None:
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    rows = tomllib.loads((ROOT / "data/fabrics/cmpi-figures.toml").read_text())["row"]
    said = set()
    for row in rows:
        number, value = int(row["at"].split()[1]), row["published"].get("judged", row["published"].get("fitted"))
        if number <= 8 and value:
            count, unit = row["of"]["bytes"].split()
            figure, of = value.split()
            scale = 1000 if of == "MB/s" else 1
            path = row["of"]["path"].rsplit("-", 1)[1]
            said.add((number, path, int(count) * units[unit], row["of"].get("processes"), float(figure) / scale))
    assert said == set(figures.PUBLISHED)
