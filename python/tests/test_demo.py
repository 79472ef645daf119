"""The demo, in short."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    table = ended.stdout.split("\n\n")[-2].split("weights after")[0].splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in table]
    assert len(table) >= 4
    assert {len(row) for row in cells[1:]} == {4}, table


def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module."""
    found = importlib.util.spec_from_file_location("train", DEMO)
    assert found is not None
    assert found.loader is not None
    train = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "train", train)
    found.loader.exec_module(train)
    return train


def test_the_picture_shows_the_spread_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = loaded(monkeypatch)
    from matplotlib.axes import Axes

    drawn: list[tuple[Any, ...]] = []
    errorbar: Any = Axes.errorbar

    def noted(*arguments: Any, **others: Any) -> Any:
        drawn.append(arguments[1:])
        return errorbar(*arguments, **others)

    monkeypatch.setattr(Axes, "errorbar", noted)
    steps = [
        SimpleNamespace(whole=0.1 * it, forward=0.01, backward=0.03 * it, exposed=0.01, optimizer=0.01)
        for it in (1, 2, 3)
    ]
    train.draw_picture(
        [SimpleNamespace(name=name, losses=[2.0, 1.0], steps=steps) for name in ("polder", "gloo")], tmp_path
    )
    assert [name for name, _, _ in drawn] == ["polder", "gloo"]
    for _, middle, [[below], [above]] in drawn:
        assert middle == pytest.approx(200)
        assert below == pytest.approx(100)
        assert above == pytest.approx(100)


def test_the_bars_end_where_the_whole_step_stands_and_the_loss_is_drawn_in_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = loaded(monkeypatch)
    from matplotlib.axes import Axes

    ends: dict[str, float] = {}
    middles: dict[str, float] = {}
    lines: list[list[float]] = []
    bar, errorbar, plot = Axes.bar, Axes.errorbar, Axes.plot

    def barred(
        axes: Any, names: list[str], heights: list[float], *others: Any, bottom: list[float], **more: Any
    ) -> Any:
        ends.update(zip(names, (low + height for low, height in zip(bottom, heights, strict=True)), strict=True))
        return bar(axes, names, heights, *others, bottom=bottom, **more)

    def noted(axes: Any, name: str, middle: float, *others: Any, **more: Any) -> Any:
        middles[name] = middle
        return errorbar(axes, name, middle, *others, **more)

    def drawn(axes: Any, *values: Any, **more: Any) -> Any:
        lines.extend(value for value in values[-2:] if isinstance(value, list))
        return plot(axes, *values, **more)

    for name, instead in (("bar", barred), ("errorbar", noted), ("plot", drawn)):
        monkeypatch.setattr(Axes, name, instead)
    # Medians of these parts add up to more than the median of their sums.
    parts = [(0.5, 0.1, 0.1), (0.4, 0.5, 0.1), (0.4, 0.1, 0.5), (0.1, 0.5, 0.5), (0.1, 0.4, 0.4), (9.0, 9.0, 9.0)]
    steps = [SimpleNamespace(whole=a + b + c, forward=a, backward=b, exposed=b / 2, optimizer=c) for a, b, c in parts]
    losses = [3.0] * 15 + [9.0] + [3.0] * 9
    runs = [SimpleNamespace(name=name, losses=losses, steps=steps) for name in ("polder", "gloo")]
    train.draw_picture(runs, tmp_path)
    assert ends == pytest.approx(middles)
    means = [line for line in lines if len(line) == 2 and line != [4.5, 14.5]]
    assert means == [pytest.approx([3.0, 3.6])] * 2


@pytest.mark.parametrize("text", ["missing", "."])
def test_without_text_there_is_one_line_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    ended = demo("--text", tmp_path / text)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("demo: ")
    assert ended.stderr.count("\n") == 1
    assert "make demo TEXT=path" in ended.stderr
