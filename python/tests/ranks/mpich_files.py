"""MPICH's files of this process in /dev/shm: a rank that is killed, or that ends with an error, leaves them there."""

import contextlib
from pathlib import Path


def remove_mapped_files() -> None:
    """Removes the names of the files that this process has mapped; it goes on with the files themselves."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if path.startswith("/dev/shm/mpich_shm_"):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
