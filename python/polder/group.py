"""Groups of processes that compute together."""

from types import TracebackType
from typing import Self

from polder import _core

__all__ = ["Group"]


class Group(_core.Group):
    """Ranks that call the same operations in the same order, with the same sizes.

    Arrays are anything contiguous with the buffer protocol: floats of 2, 4 and 8 bytes, integers and bools. Results are
    the same bits on every rank. The GIL is released while an operation runs.

    If an operation raises a `PeerError` or a `MemoryFaultError`, its array holds old and new values. Fill the array
    again before you use it, or give the operation a copy.

    Parameters
    ----------
    pool : Pool
        The pool that all ranks have attached.
    name : str
        The group's name in it, the same on every rank and used by no other group at the same time.
    rank, size : int
        This process's place among `size` ranks.
    timeout : float, optional
        Seconds that one wait for another rank may take; the pool's timeout by default.
    given_up : callable, optional
        Called now and then while the join waits for ranks. A true result ends the join.

    Raises
    ------
    PeerDeadError
        From any operation: a rank died before it had done its part.
    PeerTimeoutError, PeerGaveUpError
        A rank lives but did not come, or left the operation.
    MismatchError
        The ranks called different operations. If these were their last operations, `close` raises it on the rank that
        leaves later.
    BrokenError
        An earlier error has ended the group; join a new one.

    Examples
    --------
    >>> import tempfile, numpy as np, polder
    >>> folder = tempfile.TemporaryDirectory()
    >>> with (
    ...     polder.Pool(f"{folder.name}/pool", size="64MiB") as pool,
    ...     polder.Group(pool, "/sums", rank=0, size=1) as group,
    ... ):
    ...     gradients = np.ones(4, "float32")
    ...     group.all_reduce(gradients, "average")
    ...     gradients
    array([1., 1., 1., 1.], dtype=float32)
    >>> folder.cleanup()
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
