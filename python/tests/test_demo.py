"""The demo, in short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.torch
DEMO = Path(__file__).parents[2] / "examples" / "train.py"


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, DEMO, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_both_backends_end_with_the_same_weights(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    (text / "noise.bin").write_bytes(bytes(range(256)) * 100)
    ended = demo("--text", text, "--out", tmp_path / "out", "--steps", 4)
    assert ended.returncode == 0, ended.stderr
    assert "0.0 MB of text" in ended.stdout
    assert "equal bit for bit on both ranks and both backends" in ended.stdout
    assert (tmp_path / "out" / "train.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "out" / "train.json").read_text())
    assert figures["kind"] == "measured"
    for name in ("polder", "gloo"):
        low, middle, high = figures["steps"][name]
        assert 0 < low <= middle <= high


@pytest.mark.parametrize("text", ["missing", "."])
def test_without_text_there_is_one_line_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    ended = demo("--text", tmp_path / text)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("demo: ")
    assert ended.stderr.count("\n") == 1
    assert "make demo TEXT=path" in ended.stderr
