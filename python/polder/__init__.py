"""Memory that several hosts share: named objects and collectives over one pool.

Examples
--------
>>> import tempfile
>>> import polder
>>> folder = tempfile.TemporaryDirectory()
>>> with polder.Pool(f"{folder.name}/pool", size="64MiB") as pool:
...     weights = pool.create("/train/weights", shape=(2, 3), dtype="float32")
...     with weights.write() as array:
...         array[:] = 1.5
...     with weights.read() as array:
...         print(array.sum())
9.0
>>> folder.cleanup()
"""

# First of all, because the rest may be another project's.
from polder import _distribution  # noqa: F401  # pyright: ignore[reportUnusedImport]
from polder.errors import (
    ArgumentError,
    BrokenError,
    ClosedError,
    CorruptError,
    EvictedError,
    HostLiveError,
    MembershipError,
    MemoryFaultError,
    MismatchError,
    NameExistsError,
    NoSlotError,
    NotAPoolError,
    NotFoundError,
    PeerDeadError,
    PeerError,
    PeerGaveUpError,
    PeerTimeoutError,
    PlacementError,
    PolderError,
    PoolFullError,
    QuotaError,
    RegionError,
    SettingsError,
    TierError,
    TierFullError,
    TooSmallError,
    UnusableError,
    VersionError,
)
from polder.group import Group
from polder.pool import Entry, Object, Pool

__all__ = [
    "ArgumentError",
    "BrokenError",
    "ClosedError",
    "CorruptError",
    "Entry",
    "EvictedError",
    "Group",
    "HostLiveError",
    "MembershipError",
    "MemoryFaultError",
    "MismatchError",
    "NameExistsError",
    "NoSlotError",
    "NotAPoolError",
    "NotFoundError",
    "Object",
    "PeerDeadError",
    "PeerError",
    "PeerGaveUpError",
    "PeerTimeoutError",
    "PlacementError",
    "PolderError",
    "Pool",
    "PoolFullError",
    "QuotaError",
    "RegionError",
    "SettingsError",
    "TierError",
    "TierFullError",
    "TooSmallError",
    "UnusableError",
    "VersionError",
]
