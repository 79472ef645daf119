"""Keeps Polder from running beside the files of another project, which has the name ``polder`` on PyPI."""

from importlib.metadata import PackageNotFoundError, distribution


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
