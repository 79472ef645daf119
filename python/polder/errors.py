"""What can go wrong, as one tree under `PolderError`.

Every message comes from the compiled half. It names the offender, the value, the limit and the remedy.
"""

__all__ = [
    "ArgumentError",
    "BrokenError",
    "ClosedError",
    "CorruptError",
    "EvictedError",
    "HostLiveError",
    "MembershipError",
    "MemoryFaultError",
    "MismatchError",
    "NameExistsError",
    "NoSlotError",
    "NotAPoolError",
    "NotFoundError",
    "PeerDeadError",
    "PeerError",
    "PeerGaveUpError",
    "PeerTimeoutError",
    "PlacementError",
    "PlacementWarning",
    "PolderError",
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


class PolderError(Exception):
    """The base of everything that Polder raises."""


class SettingsError(PolderError, ValueError):
    """A setting in the environment or a config file cannot be used."""


class ArgumentError(PolderError, ValueError):
    """An argument that the operation does not take, an unusable name, or a geometry that no pool can have."""


class RegionError(PolderError, OSError):
    """The device or file cannot be opened, mapped or made: missing, without permission, of a wrong size."""


class NotAPoolError(PolderError):
    """The region holds no pool, or is too short for one."""


class VersionError(PolderError):
    """The pool was formatted by another version of Polder."""


class TooSmallError(PolderError):
    """The region cannot hold a pool of the asked geometry."""


class CorruptError(PolderError):
    """The pool holds bytes that no correct writer left there.

    Attributes
    ----------
    offset : int
        Where, in bytes from the start of the region.
    """

    offset: int


class MemoryFaultError(PolderError):
    """The memory itself failed: poison, a lost link or a truncated file.

    Attributes
    ----------
    offset : int
        The first byte that failed, in bytes from the start of the region.
    """

    offset: int


class MembershipError(PolderError):
    """This process cannot be a member of the pool."""


class HostLiveError(MembershipError):
    """The host id is in use by another machine.

    Attributes
    ----------
    host : int
        The host id.
    """

    host: int


class EvictedError(MembershipError):
    """This host was taken out of the pool.

    Attributes
    ----------
    host, epoch : int
        The host id, and the epoch of the view that no longer holds it.
    """

    host: int
    epoch: int


class NoSlotError(MembershipError):
    """Every process slot of this host is taken."""


class NameExistsError(PolderError):
    """An object of this name exists already."""


class NotFoundError(PolderError, LookupError):
    """There is no object of this name."""


class UnusableError(PolderError):
    """There is something of this name that this job cannot use.

    It is no `NotFoundError`: to start anew would pass it over.
    """


class PoolFullError(PolderError):
    """The pool, its directory, the job's quota or this process's table of open objects has no room left."""


class QuotaError(PoolFullError):
    """The job has used up its quota on this host."""


class PeerError(PolderError, RuntimeError):
    """Another process is the reason. The array of the call may hold old and new values.

    It is a RuntimeError too, because that is what programs on torch.distributed catch.

    Attributes
    ----------
    host, pid, epoch, sequence : int
        The host of that process; its process id, 0 if unknown; the epoch of the pool's view; the number of the
        operation. An attribute that the kind of error does not have is 0.
    rank : int or None
        The process's rank, where the operation is one of a group.
    """

    host: int = 0
    pid: int = 0
    epoch: int = 0
    sequence: int = 0
    rank: int | None = None


class PeerDeadError(PeerError):
    """A peer died while this process waited for it, or runs under another kernel and gave no sign of life for 5 s."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A peer lives but did not come within the timeout. One that is stopped under the same kernel lives."""


class PeerGaveUpError(PeerError):
    """A peer ended the operation, for an error of its own or because this process was late."""


class MismatchError(PeerError):
    """The members of a group called different operations."""


class BrokenError(PeerError):
    """An earlier failure has ended this group; `__cause__` is that failure."""


class ClosedError(PolderError):
    """The pool, group or object was closed, or belongs to the process that this one was forked from."""


class PlacementError(PolderError, ValueError):
    """There is no such placement: an unknown policy, fractions that do not add up, or tiers that are too small."""


class TierError(PolderError, OSError):
    """A tier cannot be used: no such node or folder, a full disk, a file that something has truncated."""


class TierFullError(TierError):
    """A tier is there, and has no room for so many bytes."""


class PlacementWarning(UserWarning):
    """Bytes do not lie where they were to be placed; the message names the object, the tier and the reason."""
