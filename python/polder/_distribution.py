"""Keeps Polder from running beside another project's files, which is ``polder`` on PyPI, or without what it needs."""

import re
from importlib.metadata import PackageNotFoundError, distribution, requires


def missing(module: str, package: str, error: ImportError) -> ImportError:
    """The error of a module whose package is not there: it says how to install a version that Polder runs with."""
    extra = re.compile(rf"({package}\b[^;]*?)\s*;\s*extra == .(?:torch|demo)\b.")
    found = filter(None, map(extra.match, requires("polder-memory") or ()))
    wanted = next((it[1] for it in found), package)
    return ImportError(f"{module} needs {package} ({error}): pip install '{wanted}'")


def _refuse_stranger() -> None:
    """Raises an ImportError where the other project's distribution is installed."""
    try:
        stranger = distribution("polder")
    except PackageNotFoundError:
        return
    files = [str(file) for file in stranger.files or () if str(file).startswith("polder/")]
    # What this project installed under that name in former times has its compiled half, or no files of its own.
    if not files or any(file.startswith("polder/_core") for file in files):
        return
    raise ImportError(
        f"the distribution polder {stranger.version} is installed ({stranger.locate_file(files[0])}); it is another "
        "project with a module of the same name, and its files may have replaced Polder's: "
        "run `pip uninstall polder`, then install Polder (polder-memory) again, as `make setup` does"
    )


_refuse_stranger()
