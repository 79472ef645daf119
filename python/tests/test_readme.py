"""The commands and programs of the README and of docs/plan.md do what these say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import POLDER_DEV, python_of

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"```(\w*)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


README = blocks("README.md")
PLAN = blocks("docs/plan.md")
# Each command, with the lines below it: a part of what it prints.
COMMANDS = [
    (command, *(line for line in answer.splitlines() if line != "..."))
    for kind, block in README
    if kind == "console"
    for command, answer in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
HAS_ONE_NODE = Path("/sys/devices/system/node/has_memory").read_text().strip() == "0"


def test_the_first_program_prints_what_stands_below_it() -> None:
    (_, program), (_, output) = README[0], README[1]
    assert run([sys.executable, "-c", program]) == output
    Path("/dev/shm/readme").unlink()


@pytest.mark.parametrize("command, answer", [(command, answer) for command, *answer in COMMANDS])
def test_a_command_of_the_readme_prints_what_stands_below_it(command: str, answer: list[str], tmp_path: Path) -> None:
    for program in (block for kind, block in README if kind == "python" and block.startswith("# ")):
        (tmp_path / program.split()[1]).write_text(program)
    programs = Path(sys.executable).parent
    if command.startswith("pip install"):
        return  # `make mpi` has installed it.
    if command.startswith("polder mpi"):
        programs = python_of("mpich").parent
    if command.startswith("torchrun"):
        pytest.importorskip("torch")
    said = run(command.split(), tmp_path, programs, can_fail=command == "polder doctor").splitlines()
    if command != "polder doctor" or HAS_ONE_NODE:
        assert set(answer) - set(said) == set()


def test_the_program_of_the_plan_page_runs() -> None:
    (program,) = [block for kind, block in PLAN if kind == "python"]
    assert "True" in run([sys.executable, "-c", program])


def test_every_command_of_the_plan_page_runs() -> None:
    commands = [line for kind, block in PLAN if kind == "sh" for line in block.splitlines()]
    assert commands
    for command in commands:
        program, *words = command.split()
        run([str(POLDER_DEV) if program == "polder-dev" else program, *words])


def test_the_readme_has_a_command_for_each_kind_of_user_and_at_most_110_lines() -> None:
    assert {command.split()[1] for command, *_ in COMMANDS if command.startswith("polder ")} == {
        "mpi",
        "doctor",
        "plan",
    }
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_every_page_that_a_source_names_is_there() -> None:
    rooms = [*(ROOT / "crates").glob("*/src"), *(ROOT / "crates").glob("*/tests"), ROOT / "python", ROOT / "examples"]
    sources = [file for room in rooms for kind in ("*.rs", "*.py") for file in room.rglob(kind)]
    named = {page for file in sources for page in re.findall(r"docs/[a-z0-9-]+\.md", file.read_text())}
    assert {page for page in named if not (ROOT / page).exists()} == set()
    assert len(named) > 10, "no source names a page: are they read?"


def test_every_name_of_the_page_of_lives_is_in_its_file() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/life.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows) > 40
    defines = r"(?:fn|def|class|struct|enum|trait|type|macro_rules!|impl<.*>) {}\b"
    for _, files, names, _ in rows:
        texts = {file: (ROOT / file).read_text() for file in re.findall(r"`(.*?)`", files)}
        parts = {part for name in re.findall(r"`(.*?)`", names) for part in re.split(r"::|\.", name)} - {"new"}
        found = {
            part: {file for file, text in texts.items() if re.search(defines.format(part), text)} for part in parts
        }
        assert not [part for part in parts if not found[part]], f"not in {files}"
        assert set(texts) == set().union(*found.values()), f"a file has no name of its row: {names}"
    for file in re.findall(r"`((?:crates|python)/.*?)`", (ROOT / "docs/life.md").read_text()):
        assert (ROOT / file).exists(), file


def test_the_tables_and_figures_of_the_pages_are_those_of_the_measured_rows() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks", ROOT / "scripts/benchmarks.py")
    assert spec is not None and spec.loader is not None
    benchmarks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmarks)
    runs, rows = benchmarks.measured()
    pages = {page: (ROOT / page).read_text() for page in benchmarks.PAGES}
    for name, page in pages.items():
        assert benchmarks.filled(page, runs, rows) == page, "run scripts/benchmarks.py --tables"
        assert page.count("<!-- of ") > 3, f"{name} takes no figures"
    for name in runs:
        assert f"<!-- benchmarks rows of {name} -->\n" in pages["docs/benchmarks.md"], (
            f"{name} is measured and on no page"
        )
    losses = [row for row in rows["collectives"] if row.get("peer") == "openmpi" and row["ratio"] < 1]
    assert losses, "no row is lost: are the rows read?"
    for row in losses:
        assert f"| {row['case']} | Open MPI | {benchmarks.short(row['value'])} us |" in pages["docs/status.md"]


def the_ledger() -> ModuleType:
    """The script that keeps it."""
    spec = importlib.util.spec_from_file_location("ledger", ROOT / "scripts/ledger.py")
    assert spec is not None and spec.loader is not None
    ledger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ledger)
    return ledger


def test_a_line_of_the_ledger_says_how_many_schedules_a_harmless_mutant_survived() -> None:
    printed = [{"suite": "s", "mutant": str(at), "schedules": 300, "caught_at": at} for at in (299, None)]
    [row] = the_ledger().noted(printed, "software")
    assert (row["caught"], row["harmless"], row["schedules_of_harmless"]) == (1, 1, 300)
    assert the_ledger().of_mutants([row]) == [["`s`", "2", "1", "1", "300", "0"]]


def test_the_page_of_evidence_is_that_of_the_ledger() -> None:
    ledger = the_ledger()
    rows = ledger.ledger_rows()
    page = ledger.PAGE.read_text()
    assert ledger.filled(page, rows) == page, "run scripts/ledger.py --tables"
    assert page.count("<!-- ledger ") == len(ledger.TABLES), "the page lacks a table"
    shown = [lines for kind in ("schedules", "mutants") for lines in ledger.shown(rows, kind).values()]
    assert len(shown) > 30 and not [row for lines in shown for row in lines if row["failed"]], "a run of a suite failed"


def test_schedules_count_together_where_no_seed_is_counted_twice() -> None:
    ledger = the_ledger()
    counts = {"software": 100, "coherent": 0, "hdm-db": 0, "failed": 0}

    def ran(first_seed: int, sources: str) -> dict[str, object]:
        return {
            "kind": "schedules",
            "on": "x",
            "suite": "s",
            "sources": sources,
            "first_seed": first_seed,
            "schedules": 100,
            **counts,
        }

    rows = [ran(0, "older"), ran(0, "new"), ran(100, "new"), ran(150, "new")]
    # The newest of two that overlap, and no run of other sources.
    assert ledger.of_schedules(rows) == [["`s`", "200", "none", "none", "0"]]
    assert ledger.shown(rows, "schedules") == {("s", "x"): [rows[3], rows[1]]}


def run(command: list[str], folder: Path = ROOT, programs: Path | None = None, can_fail: bool = False) -> str:
    """What a command prints, also on stderr; by the programs of a folder, and then those beside this Python."""
    path = ":".join([str(programs or ""), str(Path(sys.executable).parent), os.environ["PATH"]]).lstrip(":")
    env = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode and not can_fail:
        pytest.fail(f"{' '.join(command)}: {done.stdout}")
    return done.stdout
