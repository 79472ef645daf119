"""The commands and programs of the README and of docs/plan.md do what these say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"```(\w*)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


BLOCKS = blocks("README.md")
PLAN = blocks("docs/plan.md")
# `make test` runs this, and `make demo` has a test of its own.
COMMANDS = [
    line for kind, block in BLOCKS + PLAN if kind == "sh" for line in block.splitlines() if not line.startswith("make ")
]


def test_the_first_program_prints_what_stands_below_it() -> None:
    (_, program), (_, output) = BLOCKS[0], BLOCKS[1]
    assert run([sys.executable, "-c", program]) == output
    Path("/dev/shm/readme").unlink()


def test_the_program_of_the_plan_page_runs() -> None:
    (program,) = [block for kind, block in PLAN if kind == "python"]
    assert "True" in run([sys.executable, "-c", program])


def test_every_command_runs() -> None:
    assert COMMANDS
    for command in COMMANDS:
        run(command.split())


def test_every_page_that_a_source_names_is_there() -> None:
    rooms = [*(ROOT / "crates").glob("*/src"), *(ROOT / "crates").glob("*/tests"), ROOT / "python", ROOT / "examples"]
    sources = [file for room in rooms for kind in ("*.rs", "*.py") for file in room.rglob(kind)]
    named = {page for file in sources for page in re.findall(r"docs/[a-z0-9-]+\.md", file.read_text())}
    assert {page for page in named if not (ROOT / page).exists()} == set()
    assert len(named) > 10, "no source names a page: are they read?"


def test_the_tables_of_the_readme_are_those_of_the_page_of_benchmarks() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks", ROOT / "scripts/benchmarks.py")
    assert spec is not None and spec.loader is not None
    benchmarks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmarks)
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/benchmarks.md").read_text()
    assert benchmarks.with_tables(readme, page) == readme, "run scripts/benchmarks.py --readme"
    rows, _ = benchmarks.read(page)
    losses = [row for row in rows["collectives"] if row["peer"] == "openmpi" and benchmarks.number(row["ratio"]) < 1]
    assert losses, "no row is lost: is the page read?"
    for row in losses:
        assert "| {case} | Open MPI | {value} us | {theirs} us | {ratio} |".format(**row) in readme


def run(command: list[str]) -> str:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout
