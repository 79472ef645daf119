"""`polder offload check`: what it finds in a script, what it predicts, and that what it says to paste runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


from polder.offload import check  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, torch
from torch.nn import Embedding, Linear, Sequential, Tanh
model = Sequential(Embedding(64, 64), Linear(64, 512), Tanh(), Linear(512, 64))
mine = torch.optim.AdamW(model.parameters())
ids = torch.zeros(2, int(sys.argv[1]), dtype=torch.long)
for step in range(1000):
    mine.zero_grad()
    model(ids).square().mean().backward()
    mine.step()
    print("after the first step")
"""


def checked(tmp_path: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "polder.offload.check", *map(str, arguments)]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_check_runs_no_module_of_the_folder_in_which_it_starts(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the planted module ran')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/beside.py").write_text("length = 96")
    (tmp_path / "own/train.py").write_text(SCRIPT.replace("int(sys.argv[1])", "__import__('beside').length"))
    command = [Path(sys.executable).with_name("polder"), "offload", "check", "--json", "own/train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and json.loads(ended.stdout)["context"] == 96, ended.stderr


def test_a_check_stops_a_script_after_one_step_and_prints_its_memory(tmp_path: Path) -> None:
    ended = checked(tmp_path, SCRIPT, "--json", "train.py", 96)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    weights = 4 * (64 * 64 + 64 * 512 + 512 + 512 * 64 + 64)
    assert found["bytes"]["cpu"]["weights"] == found["bytes"]["cpu"]["gradients"] == weights
    # Both moments and a step count for each of five tensors.
    assert found["bytes"]["cpu"]["optimizer states"] == 2 * weights + 5 * 4
    # Indices, the embedding, its tanh, and the squared output.
    assert found["bytes"]["cpu"]["activations"] == 2 * 96 * (8 + 4 * (64 + 512 + 64))
    assert (found["context"], found["batch"]) == (96, 2)
    assert found["first_too_long"] > 96
    assert found["paste"][1] == "mine = polder.offload.AdamW(mine.param_groups)"
    assert found["paste"][2].startswith('placed = polder.offload.place(model, mine, "optimal", tiers=')
    assert found["paste"][3] == "placed.cover(model)"
    said = checked(tmp_path, SCRIPT, "train.py", 96).stdout
    assert "optimizer states" in said and "first context that will not fit in " in said and "after the" not in said


def test_the_first_context_that_will_not_fit_is_where_the_bytes_pass_the_room() -> None:
    # 500 bytes that stay, 400 + 100 that grow.
    of = {"cpu": {"weights": 500, "activations": 500}}
    found = check.Found(of, {"cpu": 100}, 0, 10, 1, [(1000, 500), (900, 100)], [], "")
    # 1000 + 40 a token + 1 a token squared.
    assert check.first_too_long(found, 1000 + 40 * 50 + 50 * 50) == 51
    assert check.first_too_long(found, 1000 + 40 * 50 + 50 * 50 - 1) == 50
    # A moment at which nothing grows is a limit of its own.
    found.moments = [(1001, 500), (1200, 0)]
    assert check.first_too_long(found, 1000 + 40 * 3 + 3 * 3) == 1
    assert check.first_too_long(found, 1001 + 40 * 30 + 30 * 30) == 31
    found.moments = [(1000, 0)]
    assert check.first_too_long(found, 1 << 40) == 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('nothing')", "ended without a step of a torch.optim.Optimizer"),
        ("import sys; sys.exit(3)", "ended with 3 before its first step"),
        ("raise ValueError('no data')", "failed before its first step ended: ValueError: no data"),
    ],
)
def test_a_check_of_a_script_that_takes_no_step_is_one_clear_error(tmp_path: Path, script: str, said: str) -> None:
    ended = checked(tmp_path, script, "train.py")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"polder: train.py: {said}")


def test_a_check_of_a_script_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert checked(tmp_path, SCRIPT, "other.py").stderr == "polder: other.py: no such script\n"


def test_the_command_passes_everything_after_the_script_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("sys.argv[1]", "sys.argv[sys.argv.index('--context') + 1]"))
    polder = Path(sys.executable).with_name("polder")
    command = [polder, "offload", "check", "--json", "train.py", "--context", "48", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["context"] == 48
    (tmp_path / "train.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("polder: train.py: killed before its first step ended; if the kernel did it, ")
