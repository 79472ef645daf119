"""Pools and the objects in them."""

import ast
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from math import prod
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from numpy.typing import DTypeLike, NDArray

from polder import _core, arguments
from polder._core import Entry
from polder.errors import ArgumentError, ClosedError, NameExistsError, NotFoundError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Entry", "Object", "Pool"]


class Pool(_core.Pool):
    """A pool of shared memory that this process has attached, as a context manager or until `close`.

    A setting is taken from the argument, else from the environment (``POLDER_POOL``, ``POLDER_HOST``,
    ``POLDER_COHERENCE``, ``POLDER_JOB``, ``POLDER_QUOTA``, ``POLDER_TIMEOUT``, ``POLDER_RUN``), else from the config
    file (``$POLDER_CONFIG``, ``./polder.toml``, ``~/.config/polder/config.toml``, ``/etc/polder/config.toml``), else
    it is the default.

    Parameters
    ----------
    path : path, optional
        A dax device or a file. The default is ``/dev/shm/polder-UID/pool``, in a folder that no other user enters; it
        is made if it is missing. A path that is named, here or in ``POLDER_POOL``, is made only with `size`.
    size : int or str, optional
        If the file is missing, makes it with this size, such as ``"8GiB"``, rounded down to whole pages. A pool that is
        there has to have this size. A device is never formatted here: ``polder pool format`` does that.
    host : int, optional
        This machine's id in the pool; 0 for a file of this machine's own, required for a device.
    coherence : {"auto", "coherent", "software", "hdm-db"}, optional
        Whether one kernel's hardware, Polder or the device keeps the caches of several hosts equal. ``"auto"`` is as
        the pool was formatted, else software for dax memory.
    job : int, optional
        The job that objects are booked to.
    quota : int or str, optional
        Bytes that the job may hold on this host.
    timeout : float, optional
        Seconds that a call may wait for another process, attaching included.
    run : path, optional
        Directory for this host's files outside the pool. All processes of a host need the same one. The default is
        ``/dev/shm``, and ``/dev/shm/polder-UID`` for a pool that only its owner UID may write.
    launched : int, optional
        The id that a launcher gives this machine. It is used if nothing sets `host` and no keeper gives an id.

    Raises
    ------
    RegionError
        The path is missing, not permitted, or no memory that can be mapped.
    NotAPoolError, VersionError, CorruptError, TooSmallError
        The path holds no pool that this program can use.
    ArgumentError
        The pool that is there has another size than `size`.
    HostLiveError, NoSlotError, EvictedError
        This process cannot be a member.

    Examples
    --------
    >>> import tempfile, polder
    >>> folder = tempfile.TemporaryDirectory()
    >>> with polder.Pool(f"{folder.name}/pool", size="64MiB") as pool:
    ...     one = pool.create("/one", 4096)
    ...     [(entry.name, entry.nbytes) for entry in pool.list()]
    [('/one', 4096)]
    >>> folder.cleanup()
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create(
        self,
        name: str,
        nbytes: int | None = None,
        *,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: DTypeLike | None = None,
        exist_ok: bool = False,
    ) -> "Object":
        """Makes an object, visible to every host when this returns.

        Parameters
        ----------
        name : str
            Such as ``"/train/weights"``.
        nbytes : int, optional
            Its size. Give this or `shape`.
        shape : int or sequence of int, optional
            The array that it holds, of `dtype`.
        dtype : dtype, optional
            What the array's elements are; bytes by default. The pool keeps dtype and shape, unless `nbytes` alone is
            given.
        exist_ok : bool
            If there is an object of this name, opens it. It has to be what is asked for, and keeps what it holds.

        Raises
        ------
        NameExistsError
            There is one of this name.
        ArgumentError
            With `exist_ok`: the one that there is has another size, dtype or shape.
        PoolFullError, QuotaError
            No room; nothing is held.
        """
        layout = _Layout(shape, dtype)
        if (nbytes is None) == (shape is None):
            raise ArgumentError("give nbytes or shape, one of them")
        whole = layout.nbytes if nbytes is None else arguments.whole("nbytes", nbytes)
        while True:
            try:
                return Object(self, name, whole, layout)
            except NameExistsError:
                if not exist_ok:
                    raise
            try:
                made = Object(self, name, None, layout)
            except NotFoundError:
                # Another process has destroyed it meanwhile.
                continue
            if made.nbytes != whole:
                made.close()
                raise ArgumentError(
                    f"{name} has {made.nbytes} bytes, not {whole}; give its shape and dtype, or destroy it first"
                )
            return made

    def open(
        self,
        name: str,
        *,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: DTypeLike | None = None,
    ) -> "Object":
        """Opens the object that any host has made under `name`.

        Parameters
        ----------
        name : str
            Such as ``"/train/weights"``.
        shape, dtype : optional
            What it has to be. By default it is the array that it was made as. If the pool keeps no dtype and shape of
            it, as for an object of C, it is an array of bytes that fills it unless they are given.

        Raises
        ------
        NotFoundError
            There is none.
        ArgumentError
            It holds an array of another dtype or shape, or has fewer bytes than `shape` and `dtype` need.
        """
        return Object(self, name, None, _Layout(shape, dtype))

    def __repr__(self) -> str:
        try:
            return f"<polder.Pool {self.path} host={self.host} coherence={self.coherence}>"
        except ClosedError:
            return f"<polder.Pool {self.path} closed>"


class _Layout:
    """A shape, or the open end that fills an object, and a dtype: as they were given, or as a pool keeps them."""

    def __init__(self, shape: SupportsIndex | Sequence[SupportsIndex] | None, dtype: DTypeLike | None) -> None:
        self._is_bare = dtype is None
        self.dtype: np.dtype[Any] = np.dtype("uint8" if dtype is None else dtype)
        if self.dtype.hasobject:
            raise ArgumentError(f"dtype {self.dtype} holds Python objects, which are of this process only")
        if self.dtype.itemsize == 0:
            raise ArgumentError(f"dtype is {self.dtype.str!r}, of 0 bytes; give its elements a size")
        try:
            _ = np.empty(0, self.dtype).data
        except ValueError as error:
            raise ArgumentError(
                f"dtype is {self.dtype}, which has no buffers ({error}); share it as integers or bytes"
            ) from None
        self.shape = None if shape is None else _sides(shape)
        if self.shape is not None and any(side < 0 for side in self.shape):
            raise ArgumentError(f"shape is {self.shape}; sides are 0 or more")
        sides = len(self.shape or (0,))
        try:
            _ = np.empty((0,) * sides, self.dtype)
        except ValueError as error:
            raise ArgumentError(
                f"shape has {sides} sides, of which NumPy makes no array ({error}); give fewer"
            ) from None

    @property
    def nbytes(self) -> int | None:
        """The array's bytes; None when it takes what the object has."""
        return None if self.shape is None else prod(self.shape) * self.dtype.itemsize

    def within(self, nbytes: int) -> tuple[int, ...]:
        """The shape in an object of `nbytes`, which holds it."""
        return (nbytes // self.dtype.itemsize,) if self.shape is None else self.shape

    def note(self, nbytes: int) -> str:
        """What the pool keeps of an array in an object of `nbytes`: nothing, where bytes alone were asked for."""
        if self._is_bare and self.shape is None:
            return ""
        descr = dtype_to_descr(self.dtype)
        if descr_to_dtype(descr) != self.dtype:
            raise ArgumentError(
                f"dtype {self.dtype} is an array of its own, which the pool cannot keep; put its dimensions into shape"
            )
        return repr((descr, self.within(nbytes)))

    def checked(self, name: str, note: str) -> "_Layout":
        """The layout of an object of which the pool keeps `note`: that, if nothing else was given here."""
        if not note:
            return self
        try:
            descr, shape = ast.literal_eval(note)
            kept = _Layout(shape, descr_to_dtype(descr))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise ArgumentError(
                f"{name}: the pool keeps {note!r} of it, which this Polder cannot read ({error}); open it with the "
                "Polder that made it"
            ) from None
        is_other = (not self._is_bare and self.dtype != kept.dtype) or self.shape not in (None, kept.shape)
        if is_other:
            asked = "any shape" if self.shape is None else f"shape {self.shape}"
            raise ArgumentError(
                f"{name} holds an array of {kept.dtype} and shape {kept.shape}, and {self.dtype} of {asked} is asked "
                "for; leave dtype and shape out, and view or reshape what read() gives"
            )
        return kept


def _sides(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    sides = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    try:
        if any(isinstance(side, bool) for side in sides):
            raise TypeError
        return tuple(map(index, sides))
    except TypeError:
        raise ArgumentError(f"shape is {shape!r}; give a whole number or a sequence of them") from None


class Object(_core.Object):
    """Named bytes in a pool, seen as a NumPy array inside `read` and `write`.

    An array is never a window into the pool: it is a copy, taken at a moment that the program chooses, so that nothing
    in it is silently stale, torn by a later writer, or a crash when the memory fails.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __new__(cls, pool: Pool, name: str, nbytes: int | None, layout: _Layout) -> Self:
        """Made by `Pool.create` and `Pool.open`."""
        made = super().__new__(cls, pool, name, nbytes, "" if nbytes is None else layout.note(nbytes))
        try:
            layout = layout.checked(name, made.note)
            made.hold(str(layout.dtype), layout.nbytes)
        except BaseException:
            made.close()
            raise
        made.dtype = layout.dtype
        made.shape = layout.within(made.nbytes)
        return made

    @contextmanager
    def read(self) -> Generator[NDArray[Any]]:
        """The object as it is now in the pool, as a read-only array.

        Sees all that was published before. While another process publishes, words of 8 bytes may be new or old.

        Raises
        ------
        MemoryFaultError
            The memory failed.
        """
        array = np.empty(self.shape, self.dtype)
        super().read_into(array)
        array.flags.writeable = False
        yield array

    @contextmanager
    def write(self, *, fresh: bool = False) -> Generator[NDArray[Any]]:
        """The object as a writable array, which is published when the block ends, and not when it raises.

        All of the array is published. Every host sees it once the block has ended. Of two writers at the same time the
        object may hold parts of both, also afterwards: let writers take turns.

        Parameters
        ----------
        fresh : bool
            Start from zeros instead of what is in the pool.

        Raises
        ------
        MemoryFaultError
            The memory failed.

        Examples
        --------
        >>> import tempfile, polder
        >>> folder = tempfile.TemporaryDirectory()
        >>> with polder.Pool(f"{folder.name}/pool", size="64MiB") as pool:
        ...     counts = pool.create("/counts", shape=3, dtype="int64")
        ...     with counts.write(fresh=True) as array:
        ...         array += 7
        ...     with counts.read() as array:
        ...         array
        array([7, 7, 7])
        >>> folder.cleanup()
        """
        array = np.zeros(self.shape, self.dtype)
        if not fresh:
            super().read_into(array)
        yield array
        super().write_from(array)

    def read_into(self, array: "Buffer | NDArray[Any]") -> None:
        """Fills `array` with the object as it is now in the pool.

        Parameters
        ----------
        array : buffer
            Of the object's dtype and shape, or as many bytes; C-contiguous and writable.

        Raises
        ------
        ArgumentError
            It is another array.
        MemoryFaultError
            The memory failed.
        """
        self._expect_alike(array)
        super().read_into(array)

    def write_from(self, array: "Buffer | NDArray[Any]") -> None:
        """Publishes `array` as the object.

        Parameters
        ----------
        array : buffer
            Of the object's dtype and shape, or as many bytes; C-contiguous.

        Raises
        ------
        ArgumentError
            It is another array.
        MemoryFaultError
            The memory failed.
        """
        self._expect_alike(array)
        super().write_from(array)

    def _expect_alike(self, array: "Buffer | NDArray[Any]") -> None:
        given: NDArray[Any] = array if isinstance(array, np.ndarray) else np.asarray(memoryview(array))
        is_bytes = (
            given.ndim == 1 and given.dtype == np.uint8 and given.nbytes == prod(self.shape) * self.dtype.itemsize
        )
        if not is_bytes and (given.dtype != self.dtype or given.shape != self.shape):
            raise ArgumentError(
                f"{self.name} has dtype {self.dtype} and shape {self.shape}, the array {given.dtype} and "
                f"{given.shape}; give one that is alike, or as many bytes"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<polder.Object {self.name} shape={self.shape} dtype={self.dtype}>"
