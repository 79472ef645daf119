"""The README's commands and its program do what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
# `make test` runs this, and `make demo` has a test of its own.
COMMANDS = [
    line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if not line.startswith("make ")
]


def test_the_first_program_prints_what_stands_below_it() -> None:
    (_, program), (_, output) = BLOCKS[0], BLOCKS[1]
    assert run([sys.executable, "-c", program]) == output
    Path("/dev/shm/readme").unlink()


def test_every_command_runs() -> None:
    assert COMMANDS
    for command in COMMANDS:
        run(command.split())


def run(command: list[str]) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout
