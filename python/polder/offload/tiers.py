"""Tiers that tensors are placed in: the host's memory, NUMA nodes, and folders on disks."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polder import _core
from polder.errors import ArgumentError
from polder.offload.optimizer import TRAFFIC

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Tier:
    """A kind of memory with its capacity and its rates.

    Parameters
    ----------
    name : str
        What tables call it.
    capacity : int or str
        Bytes that tensors may take of it: a number, or text such as ``"2 GiB"``.
    read, write : float
        Bytes a second.
    folder : str or Path, optional
        A folder on a disk. Its bytes go through buffers in memory, by direct I/O.
    node : int, optional
        A NUMA node. Its bytes are bound there.
    """

    name: str
    capacity: int | str
    read: float
    write: float
    folder: str | Path | None = None
    node: int | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and self.node is not None:
            raise ArgumentError(f"tier {self.name}: expected a folder or a node, found both")
        for key, rate in (("read", self.read), ("write", self.write)):
            if not 0 < rate < float("inf"):
                raise ArgumentError(f"tier {self.name}: {key}: expected bytes a second above 0, found {rate}")
        if self.nbytes <= 0:
            raise ArgumentError(f"tier {self.name}: capacity: expected more than 0 bytes, found {self.capacity!r}")

    @property
    def nbytes(self) -> int:
        """The capacity in bytes."""
        return size(self.capacity)


def size(text: int | str) -> int:
    """A number of bytes.

    >>> size("1.5 GiB"), size("64MiB"), size(4096)
    (1610612736, 67108864, 4096)
    """
    if isinstance(text, int):
        return text
    number = text.rstrip("BKMGTik ")
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip() or "B"])
    except (KeyError, ValueError):
        raise ArgumentError(f"expected a size such as '2 GiB', found {text!r}") from None


def tiers_of(platform: str | Path) -> list[Tier]:
    """The tiers of a machine that ``polder probe --disk FOLDER`` has described: its memory, then its disks.

    Parameters
    ----------
    platform : str or Path
        The description's file.
    """
    return [
        Tier(name, int(capacity), read, write, folder)
        for name, folder, capacity, read, write in _core.offload_tiers(str(platform))
    ]


#: Elements of the pass that memory is measured by: more than caches hold.
_ELEMENTS = 16 << 20
_ROUNDS = 5


def measured(folder: str | Path, *, threads: int = 1, nbytes: int = 256 << 20) -> list[Tier]:
    """Measures memory and a folder's disk now, in about two seconds.

    Memory is measured by the traffic of an optimizer's step with no arithmetic, which reads as it writes.

    Parameters
    ----------
    folder : str or Path
        A folder on a disk.
    threads : int
        Threads that the step will have.
    nbytes : int
        What is written to the disk and read again, three times.
    """
    arrays = [np.ones(_ELEMENTS, np.float32) for _ in range(4)]
    p, g, m, v = (array.ctypes.data for array in arrays)
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        _core.offload_step([(TRAFFIC, 1.0, (p, g, m, v, 0), _ELEMENTS, False)], 1.0, 1.0, threads)
        seconds.append(time.perf_counter() - begin)
    memory = 28 * _ELEMENTS / statistics.median(seconds)
    free, read, write = _core.offload_disk(str(folder), nbytes, 3)
    with Path("/proc/meminfo").open() as lines:
        known = dict(line.split(":", 1) for line in lines)
    available = int(known["MemAvailable"].split()[0]) << 10
    # Of the disk a tenth stays free for others.
    return [Tier("dram", available, memory, memory), Tier("disk", free * 9 // 10, read, write, Path(folder))]
