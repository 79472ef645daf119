"""What happens beside the other project that is called polder on PyPI."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THEIRS = ["polder/__init__.py", "polder/eager/__init__.py"]
OURS = ["polder/__init__.py", "polder/_core.abi3.so"]


def installed(folder: Path, files: list[str]) -> subprocess.CompletedProcess[str]:
    """Imports Polder where a distribution `polder` of these files is installed as well."""
    about = folder / "polder-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: polder\nVersion: 0.1.0\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", "import polder"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_polder_refuses_to_start_beside_the_other_project_of_its_name(tmp_path: Path) -> None:
    refused = installed(tmp_path, THEIRS)
    assert refused.returncode == 1
    assert "ImportError: the distribution polder 0.1.0 is installed" in refused.stderr, refused.stderr
    assert "run `pip uninstall polder`" in refused.stderr


@pytest.mark.parametrize("files", [OURS, []])
def test_what_this_project_installed_under_its_former_name_is_no_hindrance(tmp_path: Path, files: list[str]) -> None:
    assert installed(tmp_path, files).returncode == 0


def test_the_distribution_has_a_name_of_its_own_and_no_extra_names_the_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "polder-memory"
    wanted = [package for extra in project["optional-dependencies"].values() for package in extra]
    assert not [package for package in wanted if package.startswith("polder") and "polder-memory[" not in package]
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "python/polder").rglob("*.py")]
    for page in pages:
        assert "polder[" not in page.read_text().replace("`polder[", "") or page.suffix == ".py", page
        assert "install 'polder" not in page.read_text(), page
