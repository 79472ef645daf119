"""Tiers that tensors are placed in: the host's memory, NUMA nodes, and folders on disks."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from polder import _core, arguments
from polder.errors import ArgumentError, TierError
from polder.offload.optimizer import TRAFFIC

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Tier:
    """A kind of memory with its capacity and its rates.

    Parameters
    ----------
    name : str
        What tables call it.
    capacity : number or str
        Bytes that tensors may take of it: a whole number, or text such as ``"2 GiB"``.
    read, write : float
        Bytes a second.
    folder : str or Path, optional
        A folder on a disk. Its bytes go through buffers in memory, by direct I/O.
    node : int, optional
        A NUMA node. Its bytes are bound there.
    device : str or Path, optional
        A dax device such as ``/dev/dax0.0``, or a file in memory in its place. Its bytes are mapped from there.
    """

    name: str
    capacity: float | str
    read: float
    write: float
    folder: str | Path | None = None
    node: int | None = None
    device: str | Path | None = None

    def __post_init__(self) -> None:
        if not arguments.text("the name of a tier", self.name):
            raise ArgumentError("the name of a tier is empty; give the word by which tables and policies call it")
        given = {"folder": self.folder, "node": self.node, "device": self.device}
        for key in ("folder", "device"):
            if given[key] is not None:
                arguments.path(f"tier {self.name}: {key}", given[key])
        if len(found := [name for name, it in given.items() if it is not None]) > 1:
            raise ArgumentError(f"tier {self.name}: expected a folder, a node or a device, found {' and '.join(found)}")
        rates: dict[str, Any] = {"read": self.read, "write": self.write}
        for key, rate in rates.items():
            if not arguments.is_number(rate, Real) or not 0 < rate < float("inf"):
                raise ArgumentError(f"tier {self.name}: {key}: expected bytes a second above 0, found {rate!r}")
        node: Any = self.node
        if node is not None and not (arguments.is_number(node, Integral) and 0 <= node < 1 << 31):
            raise ArgumentError(f"tier {self.name}: node: expected the number of a NUMA node, found {node!r}")
        if isinstance(self.capacity, bool) or self.nbytes <= 0:
            raise ArgumentError(f"tier {self.name}: capacity: expected more than 0 bytes, found {self.capacity!r}")

    @property
    def nbytes(self) -> int:
        """The capacity in bytes."""
        return size(self.capacity)

    @property
    def place(self) -> int | str | None:
        """The node, or the path of the device."""
        return str(self.device) if self.device is not None else self.node

    @property
    def unit(self) -> int:
        """Bytes that pieces in the tier are multiples of: a page, of dax devices as much as they are aligned to."""
        if self.device is None or not Path(self.device).is_char_device():
            return PAGE
        number = Path(self.device).stat().st_rdev
        align = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}/align")
        return int(align.read_text()) if align.is_file() else 2 << 20


#: Bytes of a page.
PAGE = 4096


def size(text: float | str) -> int:
    """A number of bytes.

    >>> size("1.5 GiB"), size("64MiB"), size(4096)
    (1610612736, 67108864, 4096)
    """
    if isinstance(text, Integral):
        return int(text)
    if isinstance(text, float) and text.is_integer():
        return int(text)
    if not isinstance(text, str):
        raise ArgumentError(f"expected a size such as '2 GiB', found {text!r}")
    number = text.rstrip("BKMGTik ")
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip() or "B"])
    except (KeyError, ValueError, OverflowError):
        raise ArgumentError(f"expected a size such as '2 GiB', found {text!r}") from None


def tiers_of(platform: str | Path, threads: int | None = None) -> list[Tier]:
    """The tiers of a machine that ``polder probe`` has described: its memory, other nodes and dax devices, its disks.

    Parameters
    ----------
    platform : str or Path
        The description's file.
    threads : int, optional
        Threads that the step will have; as many as the machine has cores if left out.
    """
    platform = arguments.path("platform", platform)
    if threads is not None:
        threads = arguments.whole("threads", threads, 1)
    return [
        Tier(name, int(capacity), read, write, folder, node, device)
        for name, folder, node, device, capacity, read, write in _core.offload_tiers(str(platform), threads)
    ]


def named(name: str, platform: str | Path | None = None) -> Tier:
    """The tier of memory of a name: ``node:1``, the path of a dax device, or a name of a platform's file.

    Parameters
    ----------
    name : str
        As above.
    platform : str or Path, optional
        The file; ``platform.toml`` in the current folder if left out.

    Raises
    ------
    ArgumentError
        There is no such name, or it is that of a folder.
    """
    arguments.text("the name of a tier", name)
    # Rates are not used where a name alone says where bytes lie.
    kind, _, number = name.partition(":")
    if kind == "node" and number.isdecimal():
        return Tier(name, 1 << 62, 1, 1, node=int(number))
    if "/" in name:
        if Path(name).is_dir():
            raise ArgumentError(f"{name}: a folder's bytes pass through memory; place(...) does that, tier(...) cannot")
        return Tier(name, 1 << 62, 1, 1, device=name)
    path = Path("platform.toml" if platform is None else platform)
    if platform is None and not path.is_file():
        raise ArgumentError(
            f"tier {name!r}: expected node:NUMBER, the path of a dax device, or a name of platform.toml, which is not "
            "in this folder; `polder probe` writes it"
        )
    tiers = {tier.name: tier for tier in tiers_of(path)}
    if name not in tiers:
        raise ArgumentError(f"tier {name!r}: {path} has {', '.join(tiers)}")
    if tiers[name].folder is not None:
        raise ArgumentError(
            f"tier {name!r}: a folder's bytes pass through memory; place(...) does that, tier(...) cannot"
        )
    return tiers[name]


def put(kept: _core.Range, begin: int, nbytes: int, tier: Tier) -> None:
    """Puts a piece of a range into a tier of memory; without a node or a device it lies where the kernel has room.

    Raises
    ------
    TierFullError
        The tier has no room for it.
    TierError
        The tier cannot be used.
    """
    if tier.node is not None:
        kept.bind(begin, nbytes, tier.node)
    elif tier.device is not None:
        kept.map(begin, nbytes, tier.device)


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Puts a page into each tier, and takes it back, so that one that cannot be used is named before the first step.

    Raises
    ------
    TierError
        A tier is not there, may not be used, or has not even that much room.
    """
    for tier in tiers:
        try:
            if tier.folder is not None:
                _core.States([], [(PAGE // 4, tier.folder)])
            else:
                kept = _core.Range(tier.unit)
                put(kept, 0, kept.size, tier)
                kept.where()
        except TierError as error:
            raise type(error)(f"tier {tier.name}: {error}") from None


def memory_limit() -> int:
    """Bytes that this process may still take: what the host has left, and no more than each of its cgroups allows."""
    return _core.available_memory(lambda path: Path(path).read_text())


#: Elements of the pass that memory is measured by: more than caches hold.
_ELEMENTS = 16 << 20
_ROUNDS = 5


def measured(folder: str | Path, *, threads: int = 1, nbytes: int = 256 << 20) -> list[Tier]:
    """Measures memory and a folder's disk now, in about two seconds.

    The capacity of memory is what this process may still take: no more than its container allows. Memory is measured by
    the traffic of an optimizer's step with no arithmetic, which reads as it writes.

    Parameters
    ----------
    folder : str or Path
        A folder on a disk.
    threads : int
        Threads that the step will have.
    nbytes : int
        What is written to the disk and read again, three times.
    """
    folder = arguments.path("folder", folder)
    threads, nbytes = arguments.whole("threads", threads, 1), arguments.whole("nbytes", nbytes, 1)
    arrays = [np.ones(_ELEMENTS, np.float32) for _ in range(4)]
    p, g, m, v = (array.ctypes.data for array in arrays)
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        _core.offload_step([(TRAFFIC, 1.0, (p, g, m, v, 0), _ELEMENTS, False)], 1.0, 1.0, threads)
        seconds.append(time.perf_counter() - begin)
    memory = 28 * _ELEMENTS / statistics.median(seconds)
    # What they take is free again.
    del arrays
    free, read, write = _core.offload_disk(str(folder), nbytes, 3)
    # Of the disk a tenth stays free for others.
    return [Tier("dram", memory_limit(), memory, memory), Tier("disk", free * 9 // 10, read, write, folder)]
