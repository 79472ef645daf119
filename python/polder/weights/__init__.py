"""Weights of a model in a pool: a trainer publishes versions, and any number of processes on any host read them.

A version is whole or it is not there, and readers keep what they hold open. Two versions are kept. A tensor that has
not changed since the version before is not copied. Needs torch.

Examples
--------
>>> import tempfile
>>> import polder, polder.weights, torch
>>> folder = tempfile.TemporaryDirectory()
>>> with polder.Pool(f"{folder.name}/pool", size="64MiB") as pool:
...     published = polder.weights.publish("llm", {"w": torch.ones(2, 3)}, label="step 100", pool=pool)
...     with polder.weights.open("llm", pool=pool) as weights:
...         print(weights.number, weights.label, weights["w"].sum().item())
1 step 100 6.0
>>> folder.cleanup()
"""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polder import _distribution

try:
    import torch
except ImportError as error:
    raise _distribution.missing("polder.weights", "torch", error) from error

from polder import _core, address, arguments
from polder.errors import ArgumentError, CorruptError, NotFoundError
from polder.pool import Pool
from polder.torch.versions import memory_of, pool_of, read, values_of

# torch's stubs leave the types of some functions open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

__all__ = ["Layout", "Published", "Weights", "open", "publish", "publish_file", "wait"]

_RECORD = "weights"
"""What a version says of itself. No tensor has this name in the store: theirs begin with a slash."""
_PAUSE_SECONDS = 0.001, 0.05
"""Between two looks for a version: at first, and at most."""


@dataclass(frozen=True)
class Published:
    """A version that has been published.

    Attributes
    ----------
    number : int
        Its number.
    copied, shared : int
        Bytes of tensors that were copied, and of those that have not changed since the version before.
    """

    number: int
    copied: int
    shared: int


@dataclass(frozen=True)
class Layout:
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _store(name: str, pool: Pool | None) -> _core.Store:
    return _core.Store(pool_of(pool), f"weights/{arguments.text('the name of a model', name)}")


def publish(name: str, tensors: Mapping[str, torch.Tensor], *, label: str = "", pool: Pool | None = None) -> Published:
    """Publishes a version of a model's weights. Once this returns, every process finds it, also if this one is killed.

    Until then all find the version before. Two versions are kept, so the pool needs room for three.

    Parameters
    ----------
    name : str
        Of the model.
    tensors : mapping of str to torch.Tensor
        Dense tensors of any dtype, such as ``model.state_dict()``. Those of a GPU are copied to the CPU first. Tensors
        that share memory are stored each.
    label : str
        What the version is to its users, such as a step or a revision.
    pool : Pool, optional
        The default is ``Pool()``.

    Raises
    ------
    ArgumentError
        A value is no dense tensor or has no memory, or a name or the label is no text.
    NameExistsError
        Another process is publishing under this name.
    PoolFullError
        There is no room for a third version. Nothing is left of it.
    """
    arrays: list[tuple[str, Any]] = []
    layouts: dict[str, list[Any]] = {}
    arguments.text("the label", label)
    if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"tensors is a {type(tensors).__name__}; give a mapping, such as model.state_dict()")
    for key, tensor in tensors.items():
        arguments.text("the name of a tensor", key)
        # A caller that hands over a whole state_dict meets this error here, and not in a reader.
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_dense or tensor.is_quantized or tensor.is_nested:
            raise ArgumentError(f"{key!r} is a {type(tensor).__name__}; give dense tensors alone")
        if tensor.is_meta:
            raise ArgumentError(f"{key!r} lies on the meta device and has no values; load it first")
        try:
            if not address.has_memory(tensor):
                raise ArgumentError(
                    f"{key!r} has no memory to read; give dense tensors alone, gathered where that is due"
                )
            arrays.append((f"/{key}", values_of(tensor)))
        except RuntimeError as error:
            # Such as a tensor under torch.func.vmap.
            raise ArgumentError(f"{key!r} has no memory to read ({error}); give dense tensors alone") from error
        layouts[key] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    record = json.dumps({"label": label, "tensors": layouts}).encode()
    store = _store(name, pool)
    try:
        return Published(*store.publish([*arrays, (_RECORD, record)]))
    finally:
        store.close()


def publish_file(name: str, path: str | os.PathLike[str], *, label: str = "", pool: Pool | None = None) -> Published:
    """Publishes the weights of a ``.safetensors`` file, or of all such files of a folder. Needs safetensors.

    If the folder has an index, such as ``model.safetensors.index.json``, the files that it names are taken, and no
    others.

    Raises
    ------
    ArgumentError
        The folder has no such file, or lacks one that its index names; two files have a tensor of one name; `path` is
        neither a file nor a folder; a file holds no safetensors.
    OSError
        A file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    at = Path(path)
    files = _files_of(at) if at.is_dir() else [at]
    if not files:
        raise ArgumentError(f"{at} has no file that ends in .safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if file.exists() and not file.is_file():
            raise ArgumentError(f"{file} is no file; name a file, or a folder of such files")
        try:
            # Mapped, so that nothing is read before it is copied to the pool.
            held = load_file(file)
        except SafetensorError as error:
            raise ArgumentError(
                f"{file} holds no safetensors ({error}); check the path, or write the file again"
            ) from error
        for key, tensor in held.items():
            if tensors.setdefault(key, tensor) is not tensor:
                raise ArgumentError(f"two files of {at} have a tensor {key!r}; remove one of them")
    return publish(name, tensors, label=label, pool=pool)


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder's weights: those that an index names, else all."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return sorted(folder.glob("*.safetensors"))
    names = set[str]()
    for index in indexes:
        try:
            names.update(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"{index} is no index of files ({error!r}); write it again, or move it away") from error
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ArgumentError(f"{folder} lacks {', '.join(missing)}, which its index names; complete it")
    return sorted(folder / name for name in names)


def open(name: str, number: int | None = None, *, pool: Pool | None = None) -> "Weights":
    """The newest version of a model's weights, or the one of this number.

    Raises
    ------
    NotFoundError
        There is none. The error names those that are kept, if any was published.
    CorruptError
        It holds other bytes than were written.
    """
    store = _store(name, pool)
    try:
        version = store.open(number)
    except NotFoundError as error:
        if store.marked() > 0:
            raise
        raise NotFoundError(
            f"no weights {name} were published in this pool; name the pool that has them, publish them "
            "(polder.weights.publish), or let polder.weights.wait wait for them"
        ) from error
    finally:
        store.close()
    return Weights(name, version)


def wait(name: str, newer_than: int = 0, *, timeout: float | None = None, pool: Pool | None = None) -> "Weights":
    """The newest version of a model's weights, as soon as its number is above `newer_than`.

    Parameters
    ----------
    name : str
        Of the model.
    newer_than : int
        The number of the version that the caller has; 0 if it has none.
    timeout : float, optional
        Seconds. Without it, the call waits for as long as it takes.
    pool : Pool, optional
        The default is ``Pool()``.

    Raises
    ------
    TimeoutError
        There is no such version yet.
    CorruptError
        It holds other bytes than were written.
    """
    timeout = math.inf if timeout is None else arguments.seconds("timeout", timeout)
    # No number is above NaN, so that the call would wait for ever.
    newer_than = arguments.whole("newer_than", newer_than, expected="the number of a version,")
    store = _store(name, pool)
    until = time.monotonic() + timeout
    pause, longest = _PAUSE_SECONDS
    try:
        while True:
            if store.marked() > newer_than:
                try:
                    version = store.open(None)
                except NotFoundError:
                    # Its publisher removed it between the two looks.
                    version = None
                if version is not None and version.number > newer_than:
                    return Weights(name, version)
                if version is not None:
                    version.close()
            if time.monotonic() >= until:
                raise TimeoutError(f"no version of the weights {name} above {newer_than} within {timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
    finally:
        store.close()


class Weights(Mapping[str, torch.Tensor]):
    """A version of a model's weights: a mapping of names to tensors, which are read when they are asked for.

    It is held open until `close`, or as a context manager: a publisher that removes it leaves its bytes where they are.
    Made by `open` and `wait`. ``model.load_state_dict(weights)`` loads all of it.

    Attributes
    ----------
    name : str
        Of the model.
    number : int
        The number of the version.
    label : str
        What its publisher called it.
    layouts : dict of str to Layout
        The dtype and the shape of each tensor.
    """

    def __init__(self, name: str, version: _core.Version) -> None:
        self.name, self.number, self._version = name, version.number, version
        try:
            sizes = dict(version.tensors())
            self.label, self.layouts = _parse(bytes(read(version, _RECORD, sizes.get(_RECORD, 0))), sizes)
        except BaseException as error:
            version.close()
            if isinstance(error, ValueError | TypeError | KeyError | AttributeError):
                raise CorruptError(
                    f"version {version.number} of the weights {name} does not say what it holds ({error}); "
                    "publish it again"
                ) from error
            raise

    @property
    def fingerprint(self) -> str:
        """A hash of all names, dtypes, shapes and bytes, in hexadecimal digits. Equal weights have equal ones."""
        sums = dict(self._version.sums())
        said = [
            [key, str(layout.dtype), list(layout.shape), f"{sums[f'/{key}']:032x}"]
            for key, layout in sorted(self.layouts.items())
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def __getitem__(self, key: str) -> torch.Tensor:
        """A tensor in memory of this process alone. Raises `CorruptError` for other bytes than were written."""
        layout = self._layout(key)
        tensor = torch.empty(layout.shape, dtype=layout.dtype)
        self._version.read_into(f"/{key}", memory_of(tensor), fresh=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    def read_into(self, key: str, tensor: torch.Tensor, offset: Sequence[int] | None = None) -> None:
        """Fills a tensor with the part of a stored one that begins at `offset` and has the shape of `tensor`.

        The first read of a part of a tensor reads all of it once, to hold it against its checksum.

        Parameters
        ----------
        key : str
            The name of the stored tensor.
        tensor : torch.Tensor
            A contiguous tensor in memory of the host, of the stored dtype and as many dimensions.
        offset : sequence of int, optional
            The first index of each dimension; zeros by default.

        Raises
        ------
        ArgumentError
            The part is not inside the stored tensor, or has another dtype.
        CorruptError
            The stored tensor holds other bytes than were written. `tensor` holds nothing of use then.
        """
        layout = self._layout(key)
        is_plain = isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and tensor.is_cpu  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_plain or tensor.dtype != layout.dtype or tensor.is_neg() or tensor.is_conj():
            raise ArgumentError(
                f"{key!r} has dtype {layout.dtype}; give a contiguous tensor of it in memory of the host, and not "
                f"{_said(tensor)}"
            )
        shape = tuple(tensor.shape)
        first = (0,) * len(shape)
        if offset is not None:
            if not isinstance(offset, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentError(f"offset is {offset!r}; give an index for each dimension")
            first = tuple(arguments.whole("an index of offset", it) for it in offset)
        is_inside = len(first) == len(shape) == len(layout.shape) and all(
            begin >= 0 and begin + size <= whole for begin, size, whole in zip(first, shape, layout.shape, strict=True)
        )
        if not is_inside:
            raise ArgumentError(f"the part {list(shape)} at {list(first)} is not inside {key!r} {list(layout.shape)}")
        if not tensor.numel():
            return
        if not tensor.is_inference():
            # A backward pass that needs what was there before fails, as after any other change in place.
            torch.autograd.graph.increment_version(tensor)
        if shape == layout.shape:
            self._version.read_into(f"/{key}", memory_of(tensor.detach()))
            return
        size = tensor.element_size()
        for at, (row, step), part in _rows(first, shape, layout.shape, tensor.detach()):
            self._version.read_rows(f"/{key}", at * size, row * size, step * size, memory_of(part))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it to a ``.safetensors`` file, with name, number and label in its metadata.

        Raises
        ------
        OSError
            The file cannot be written. Nothing is left of it then.
        ArgumentError
            A tensor has a type that such a file does not know.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        whole = Path(path)
        building = whole.with_name(f".{whole.name}.{os.getpid()}")
        said = {"name": self.name, "number": str(self.number), "label": self.label, "format": "pt"}
        try:
            # Why a file cannot be made, safetensors tells in its own words alone.
            building.touch()
            save_file(dict(self), building, metadata=said)
            building.replace(whole)
        except SafetensorError as error:
            raise OSError(f"{whole} cannot be written: {error}") from error
        except KeyError as error:
            raise ArgumentError(f"{whole} cannot be written: a .safetensors file has no elements of {error}") from error
        finally:
            building.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of it. Closing twice is harmless."""
        self._version.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _layout(self, key: str) -> Layout:
        try:
            return self.layouts[key]
        except KeyError:
            raise KeyError(f"{key!r} is no tensor of the weights {self.name}, version {self.number}") from None


def _said(given: Any) -> str:
    """What was given in place of a tensor that can be filled."""
    if not isinstance(given, torch.Tensor):
        return f"a {type(given).__name__}"
    kind = "" if given.is_contiguous() else " that is not contiguous"
    return f"one of {given.dtype} on {given.device}{kind}"


def _parse(said: bytes, sizes: Mapping[str, int]) -> tuple[str, dict[str, Layout]]:
    """The label and the layouts that a record holds, which fit the bytes that are there."""
    record = json.loads(said)
    label, layouts = record["label"], dict[str, Layout]()
    for key, (dtype, shape) in record["tensors"].items():
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{key!r} has dtype {dtype!r} and shape {shape!r}")
        if math.prod(shape) * torch_dtype.itemsize != sizes.get(f"/{key}"):
            raise ValueError(f"{key!r} has {sizes.get(f'/{key}')} bytes")
        layouts[key] = Layout(torch_dtype, tuple(shape))
    if not isinstance(label, str):
        raise TypeError("its label is no text")
    return label, layouts


def _rows(
    first: Sequence[int], shape: Sequence[int], whole: Sequence[int], tensor: torch.Tensor
) -> Iterator[tuple[int, tuple[int, int], torch.Tensor]]:
    """Cuts a part into rows that lie at equal distances in the whole.

    Of each cut: the element that it begins with, the elements of a row and from row to row, and where it goes.
    """
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    last = max(dim for dim in range(len(shape)) if shape[dim] != whole[dim])
    row = shape[last] * strides[last]
    if last == 0:
        yield first[0] * strides[0], (row, row), tensor
        return
    plane = slice(last - 1, last + 1)
    at = sum(begin * stride for begin, stride in zip(first[plane], strides[plane], strict=True))
    outer = [range(begin, begin + size) for begin, size in zip(first[: last - 1], shape, strict=False)]
    parts = tensor.reshape(-1, shape[last - 1] * row)
    for index, part in zip(itertools.product(*outer), parts, strict=True):
        begin = at + sum(place * stride for place, stride in zip(index, strides, strict=False))
        yield begin, (row, strides[last - 1]), part
