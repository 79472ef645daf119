"""The commands and programs of the README and of docs/plan.md do what these say."""

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


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout
