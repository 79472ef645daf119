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
    points = set()
    for row in rows:
        number, published = int(row["at"].split()[1]), row["published"]
        value = published.get("judged") or published.get("fitted") or published.get("not-judged", {}).get("says")
        if number <= 8 and value:
            count, unit = row["of"]["bytes"].split()
            figure, of = value.split()
            scale = 1000 if of == "MB/s" else 1
            path = row["of"]["path"].rsplit("-", 1)[1]
            points.add((number, path, int(count) * units[unit], row["of"].get("processes"), float(figure) / scale))
    assert points == set(figures.PUBLISHED)


@pytest.mark.parametrize(
    ("name", "racks", "texts"),
    [
        ("finetuning-b", 1, ["tier.cxl: ", "behind CXL"]),
        ("nvl72-cxl", 2, ["pool: memory nodes", "rack.nvl72: 72 accelerators"]),
        ("mixed-nvlink-ualink-cxl", 2, ["rack.nvl72: ", "rack.ualink: "]),
        ("nvl72", 1, ["rack.nvl72: 72 accelerators"]),
        ("ualink-cxl", 2, ["rack.ualink: 72 accelerators", "pool: memory nodes"]),
    ],
)
def test_a_platform_is_drawn_with_what_it_has_and_no_more(
    name: str, racks: int, texts: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "platform.svg"
    subprocess.run([sys.executable, "-m", "polder.figures", out, name], check=True)
    drawn = out.read_text()
    for words in texts:
        assert words in drawn, words
    assert drawn.count(">rack.") == racks + drawn.count(".fabric<")
    # By its file too, which may extend another.
    other = tmp_path / "ours.toml"
    other.write_text(f'extends = "{name}"\ntitle = "ours"\nsource = "x"\n')
    subprocess.run([sys.executable, "-m", "polder.figures", out, other], check=True)
    assert ">ours<" in out.read_text()
    alone = subprocess.run(
        [sys.executable, "-m", "polder.figures", out, "memserver"], capture_output=True, text=True, check=False
    )
    assert alone.returncode and "expected a platform with racks" in alone.stderr
