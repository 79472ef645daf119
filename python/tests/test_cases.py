"""What `make cases` says of the programs that it runs."""

import importlib.util
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a folder of programs that is empty."""
    spec = importlib.util.spec_from_file_location("cases", ROOT / "scripts/cases.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "CASES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cases.py"])
    return script


def test_a_right_program_that_measures_shows_its_figures(
    cases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("measures", "checks"):
        (tmp_path / name).write_text(f"echo {name} took 17 us")
    table = {"checks": cases.Start("sh {}"), "measures": cases.Start("sh {}", measures=True)}
    monkeypatch.setattr(cases, "TABLE", table)
    monkeypatch.setattr(cases, "PARTS", set())
    assert cases.main() == 0
    checks, measures, figures = capsys.readouterr().out.splitlines()
    assert checks.startswith("right") and checks.split()[-1] == "checks"
    assert measures.startswith("right") and measures.split()[-1] == "measures"
    assert figures == "    measures took 17 us"


def test_the_cases_by_which_pages_measure_show_their_figures(cases: ModuleType) -> None:
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    measured = [
        name for name in cases.TABLE for page in pages if f"`make cases ONLY={Path(name).stem}` measures" in page
    ]
    assert measured and all(cases.TABLE[name].measures for name in measured), measured


def test_a_program_that_leaves_a_pool_is_wrong(
    cases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if subprocess.run([cases.OWN_SHM, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a /dev/shm of its own")
    (tmp_path / "leaves").write_text("echo > /dev/shm/polder-left")
    monkeypatch.setattr(cases, "TABLE", {"leaves": cases.Start("sh {}")})
    monkeypatch.setattr(cases, "PARTS", set())
    assert cases.main() == 1
    line, why = capsys.readouterr().out.splitlines()
    assert line.startswith("WRONG, exit 1 ") and why == "    left in /dev/shm: /dev/shm/polder-left"
    assert not Path("/dev/shm/polder-left").exists()


#: A case that says which process it is, and runs until it is ended.
INTERRUPTED = """
import pathlib, sys
sys.path.insert(0, {scripts!r})
import cases
cases.CASES = pathlib.Path({folder!r})
cases.TABLE, cases.PARTS = {{"waits": cases.Start("sh {{}}")}}, set()
sys.argv = ["cases.py"]
cases.main()
"""


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_program_ends_with_the_script_that_runs_it(tmp_path: Path, told: signal.Signals) -> None:
    (programs := tmp_path / "programs").mkdir()
    started = tmp_path / "started"
    os.mkfifo(started)
    (programs / "waits").write_text(f"echo $$ >{started}; exec sleep 3600")
    script = INTERRUPTED.format(scripts=str(ROOT / "scripts"), folder=str(programs))
    interruptible = ["env", "--default-signal", sys.executable, "-c", script]
    with subprocess.Popen(interruptible, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        program = os.pidfd_open(int(started.read_text()))
        running.send_signal(told)
    assert running.returncode != 0
    # It has been told, and may yet be about to end.
    assert select.select([program], [], [], 60)[0], "it runs on"
    os.close(program)
