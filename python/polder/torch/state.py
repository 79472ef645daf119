"""A training state taken apart: tensors by name, and what is no tensor."""

import io
import itertools
import math
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from polder import address
from polder.errors import ArgumentError

# torch's stubs leave state dictionaries without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = [
    "Leaf",
    "Meshes",
    "Views",
    "by_dotted_name",
    "deserialize",
    "dtensor_of",
    "empty_of",
    "in_order",
    "layout_of",
    "put_in",
    "put_together",
    "random_state",
    "serialize",
    "set_random_state",
    "shared",
    "take_apart",
    "viewed",
    "without_parts",
]

Leaf = dict[str, Any]
"""What stands for a tensor (its name, dtype, shape and strides) or for a value."""

_PLAIN = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device}
"""Nobody changes a value of these types, and a snapshot takes them."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DICTS: dict[str, type] = {"OrderedDict": OrderedDict, "Counter": Counter}
_ROWS: dict[str, type] = {"list": list, "tuple": tuple, "size": torch.Size}


Meshes = dict[str, tuple[Any, Any]]
"""The mesh and the placements of each DTensor."""


def take_apart(state: Any, path: str, tensors: dict[str, torch.Tensor], meshes: Meshes | None = None) -> Leaf:
    """The same state with a place in `tensors` instead of each tensor, and copies of all else.

    Parameters
    ----------
    state : Any
        Dictionaries, lists and tuples of dense tensors, of this rank's parts of DTensors, and of what
        ``torch.load(weights_only=True)`` takes.
    path : str
        What the names of its tensors begin with.
    tensors : dict of str to torch.Tensor
        Takes the tensors, each with a name that has a `/`.
    meshes : dict, optional
        Takes where DTensors lie. Without it that goes into the state.

    Raises
    ------
    ArgumentError
        The state holds anything else, which would not come back as it is.
    """
    if isinstance(state, torch.Tensor):
        if hasattr(state, "placements"):
            return _take_shard(state, path, tensors, meshes)
        _expect_dense(state, path)
        tensors[path] = state
        leaf = {"tensor": path, "dtype": state.dtype, "shape": list(state.shape)}
        return leaf if state.is_contiguous() else {**leaf, "stride": list(state.stride())}
    if isinstance(state, dict):
        return _take_dict(state, path, tensors, meshes)
    if isinstance(state, list | tuple):
        return _take_row(state, path, tensors, meshes)
    return {"value": _copy(state, path)}


def _take_dict(state: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor], meshes: Meshes | None) -> Leaf:
    # The kind of a key is part of its name: 0 is not "0".
    walked: Leaf = {
        "dict": [
            (_copy(key, path), take_apart(value, f"{path}/{key!r}", tensors, meshes)) for key, value in state.items()
        ]
    }
    kind = type(state).__name__
    if type(state) is not dict:
        if _DICTS.get(kind) is not type(state):
            raise _refused(path, f"is a {kind}")
        walked["kind"] = kind
        if attributes := vars(state):
            walked["attributes"] = take_apart(dict(attributes), f"{path}/__dict__", tensors, meshes)
    return walked


def _take_row(
    state: list[Any] | tuple[Any, ...], path: str, tensors: dict[str, torch.Tensor], meshes: Meshes | None
) -> Leaf:
    kind = next((kind for kind, made_of in _ROWS.items() if type(state) is made_of), None)
    if kind is None:
        raise _refused(path, f"is a {type(state).__name__}")
    if kind != "size" and all(type(value) in _PLAIN for value in state):
        return {"value": list(state) if kind == "list" else tuple(state)}
    return {kind: [take_apart(value, f"{path}/{index}", tensors, meshes) for index, value in enumerate(state)]}


def _expect_dense(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) not in _TENSORS:
        raise _refused(path, f"is a {type(tensor).__name__}, a kind of tensor of its own")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = (
            "nested"
            if tensor.is_nested
            else "quantized"
            if tensor.is_quantized
            else f"a Tensor of layout {tensor.layout}"
        )
        raise _refused(path, "is on meta, and has no values" if tensor.is_meta else f"is {kind}")
    if not address.has_memory(tensor):
        raise _refused(path, "has no memory for its elements, as after its storage was freed")


def _refused(path: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{path or '/'} {what}; only dense tensors, DTensors, numbers, strings, lists, tuples, dict, OrderedDict and "
        "Counter come back as they are. SnapshotWriter with torch.distributed.checkpoint takes more"
    )


def _take_shard(state: Any, path: str, tensors: dict[str, torch.Tensor], meshes: Meshes | None) -> Leaf:
    layout = layout_of(state)
    if meshes is None:
        layout |= {"device_mesh": state.device_mesh, "placements": state.placements}
    else:
        meshes[path] = state.device_mesh, state.placements
    with torch.no_grad():
        return {"shard": take_apart(state.to_local(), path, tensors), "layout": layout}


def layout_of(tensor: Any) -> dict[str, Any]:
    """How a DTensor lies over ranks, in words: two of the same layout have the same parts on the same ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    return {
        "ranks": mesh.mesh.tolist(),
        "placed": str(tensor.placements),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": list(compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)[1]),
    }


def _copy(value: Any, path: str) -> Any:
    """A copy that nobody changes, as `deserialize` will give it."""
    if type(value) in _PLAIN:
        return value
    try:
        copy = deserialize(serialize(value))
    except (pickle.PickleError, AttributeError, TypeError) as error:
        # torch tells at length how its files are loaded all the same.
        why = f"a {type(value).__qualname__}" if isinstance(error, pickle.UnpicklingError) else error
        raise ArgumentError(
            f"{path or '/'} holds what a snapshot does not take ({why}); keep tensors, numbers, strings, "
            "lists, tuples and dictionaries in state_dict()"
        ) from error
    if type(copy) is not type(value):
        raise _refused(path, f"is a {type(value).__name__}")
    return copy


def put_together(walked: Leaf, read: Callable[[Leaf], torch.Tensor], part: Callable[[Leaf], Any] | None = None) -> Any:
    """What `take_apart` took apart; `read` gives the tensor of a leaf, and `part` the DTensor of one."""
    if "tensor" in walked:
        return read(walked)
    if "shard" in walked:
        return dtensor_of(walked, read(walked["shard"])) if part is None else part(walked)
    if "dict" in walked:
        made = _DICTS.get(walked.get("kind", ""), dict)(
            {key: put_together(it, read, part) for key, it in walked["dict"]}
        )
        if "attributes" in walked:
            vars(made).update(put_together(walked["attributes"], read, part))
        return made
    for kind, made_of in _ROWS.items():
        if kind in walked:
            return made_of(put_together(value, read, part) for value in walked[kind])
    return walked["value"]


def without_parts(walked: Leaf) -> Leaf:
    """The same, without what a rank's part of a DTensor has of its own."""
    if "shard" in walked:
        return {"shape": list(walked["layout"]["shape"]), "dtype": walked["shard"]["dtype"]}
    if "dict" in walked:
        return {**walked, "dict": [(key, without_parts(value)) for key, value in walked["dict"]]}
    return {key: [without_parts(value) for value in it] if key in _ROWS else it for key, it in walked.items()}


def dtensor_of(leaf: Leaf, local: torch.Tensor, mesh: Any = None, placements: Any = None) -> Any:
    """The DTensor of a leaf, whose part on this rank is `local`."""
    # Its import takes a while, and needs distributed.
    from torch.distributed.tensor import DTensor

    layout = leaf["layout"]
    with torch.no_grad():
        return DTensor.from_local(
            local,
            layout["device_mesh"] if mesh is None else mesh,
            layout["placements"] if placements is None else placements,
            run_check=False,
            shape=torch.Size(layout["shape"]),
            stride=tuple(layout["stride"]),
        )


# Tensors as bytes, in the order in which they lie in memory.


def _laid_out(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sizes without those that repeat, and the dimensions from the longest stride to the shortest."""
    sizes = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    return sizes, sorted(range(len(sizes)), key=lambda dim: (-stride[dim], -sizes[dim]))


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, each once: contiguous unless there are gaps."""
    if tensor.is_contiguous():
        return tensor
    sizes, dims = _laid_out(tensor.shape, tensor.stride())
    if 0 in tensor.stride():
        steps = [step or 1 for step in tensor.stride()]
        tensor = tensor.as_strided(sizes, steps, tensor.storage_offset())
    return tensor.permute(dims)


def empty_of(leaf: Leaf) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the tensor of a leaf: the tensor, and what `in_order` gives of it."""
    shape = leaf["shape"]
    stride = leaf.get("stride")
    if stride is None:
        tensor = torch.empty(shape, dtype=leaf["dtype"])
        return tensor, tensor
    sizes, dims = _laid_out(shape, stride)
    tensor = torch.empty_strided(sizes, [step or 1 for step in stride], dtype=leaf["dtype"])
    return tensor.as_strided(shape, stride), tensor.permute(dims)


def put_in(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes each element of `tensor` once, also where it repeats or overlaps some."""
    sizes, _ = _laid_out(tensor.shape, tensor.stride())
    bare = values[tuple(slice(0, size) for size in sizes)]
    if _is_plain(tensor):
        tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset()).copy_(bare)
        return
    for index in itertools.product(*map(range, sizes)):
        tensor[index] = bare[index]


# Tensors that share memory.

Views = dict[str, Leaf]
"""Of each tensor that is a view: whose memory it is part of, at which byte."""
_ALIGNED = 64


def shared(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Views]:
    """Those of the tensors that have memory of their own, and how the others are made of these.

    Where tensors overlap and none is all of them, their memory as a whole is kept, as bytes.
    """
    # By address, because to ask for the storage of each takes longer than all else.
    spans = [(*_span(tensor), path) for path, tensor in tensors.items()]
    views: Views = {}
    added: dict[str, torch.Tensor] = {}
    for cluster in _clusters([span for span in spans if span[0] < span[1]]):
        if len(cluster) > 1 or not _is_plain(tensors[cluster[0][2]]):
            _share(cluster, tensors, views, added)
    return {path: it for path, it in tensors.items() if path not in views} | added, views


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    sizes, _ = _laid_out(tensor.shape, tensor.stride())
    return 1 + sum((n - 1) * step for n, step in zip(sizes, tensor.stride(), strict=True)) >= math.prod(sizes)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that it lies at."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous() or tensor.numel() == 0:
        return begin, begin + tensor.nbytes
    last = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _clusters(spans: list[tuple[int, int, str]]) -> Iterator[list[tuple[int, int, str]]]:
    """Spans that overlap, together."""
    cluster: list[tuple[int, int, str]] = []
    end = 0
    for span in sorted(spans, key=lambda span: span[:2]):
        if cluster and span[0] >= end:
            yield cluster
            cluster = []
        end = max(span[1], end)
        cluster.append(span)
    if cluster:
        yield cluster


def _share(
    cluster: list[tuple[int, int, str]], tensors: dict[str, torch.Tensor], views: Views, added: dict[str, torch.Tensor]
) -> None:
    begin, end = cluster[0][0], max(span[1] for span in cluster)
    paths = sorted((path for *_, path in cluster), key=list(tensors).index) if len(cluster) > 1 else [cluster[0][2]]
    first = tensors[paths[0]]

    def is_same(tensor: torch.Tensor) -> bool:
        kind = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        return kind == (first.dtype, first.shape, first.stride(), first.is_conj(), first.is_neg())

    if len(set(span[:2] for span in cluster)) == 1 and all(is_same(tensors[path]) for path in paths):
        if _is_plain(first):
            views.update({path: {"same": paths[0]} for path in paths[1:]})
            return
    elif any(tensors[path].is_conj() or tensors[path].is_neg() for path in paths):
        # Each is what it says, and the bits below say something else.
        return
    storage = first.untyped_storage()
    if any(tensors[path].untyped_storage().data_ptr() != storage.data_ptr() for path in paths):
        # Memory of others, which torch has taken twice.
        return
    begin, end = begin - storage.data_ptr(), end - storage.data_ptr()
    begin -= begin % _ALIGNED
    memory = torch.empty(0, dtype=torch.uint8, device=first.device)
    memory.set_(storage, begin, (end - begin,), (1,))
    name = f"{paths[0]}/memory"
    added[name] = memory
    for path in paths:
        tensor = tensors[path]
        at = tensor.storage_offset() - begin // tensor.element_size()
        views[path] = {"memory": name, "bytes": end - begin, "at": at, "stride": list(tensor.stride())}


def viewed(views: Views, read: Callable[[Leaf], torch.Tensor]) -> Callable[[Leaf], torch.Tensor]:
    """As `read`, which reads what `shared` keeps, for all tensors."""
    known: dict[str, torch.Tensor] = {}
    wanted = {name for view in views.values() for name in (view.get("same"), view.get("memory")) if name}

    def read_once(leaf: Leaf) -> torch.Tensor:
        name = leaf["tensor"]
        if name not in known:
            known[name] = read(leaf)
        return known[name]

    def of(leaf: Leaf) -> torch.Tensor:
        view = views.get(leaf["tensor"])
        if view is None:
            return read_once(leaf) if leaf["tensor"] in wanted else read(leaf)
        if "same" in view:
            return read_once({**leaf, "tensor": view["same"]})
        whole = read_once({"tensor": view["memory"], "dtype": torch.uint8, "shape": [view["bytes"]]})
        tensor = torch.empty(0, dtype=leaf["dtype"])
        return tensor.set_(whole.untyped_storage(), view["at"], leaf["shape"], view["stride"])

    return of


def by_dotted_name(walked: Leaf) -> dict[str, Leaf]:
    """The leaves by the names that ``torch.distributed.checkpoint`` gives them, such as ``model.0.weight``.

    Where two have one name, the later one gets another.

    Examples
    --------
    >>> walked = take_apart({"model": {"w": torch.zeros(2)}, "list": [{"lr": 0.5}]}, "", {})
    >>> {name: leaf.get("value", leaf.get("tensor")) for name, leaf in by_dotted_name(walked).items()}
    {'model.w': "/'model'/'w'", 'list.0.lr': 0.5}
    """
    found: dict[str, Leaf] = {}

    def visit(walked: Leaf, parts: tuple[str, ...]) -> None:
        for kind in ("list", "tuple"):
            for index, value in enumerate(walked.get(kind, [])):
                visit(value, (*parts, str(index)))
        for key, value in walked.get("dict", []):
            visit(value, (*parts, str(key)))
        if "tensor" in walked or "value" in walked or "shard" in walked:
            name = ".".join(parts)
            found[repr(parts) if name in found else name] = walked

    visit(walked, ())
    return found


class _Pickler(pickle.Pickler):
    """Numbers, strings, containers and types of tensors; all else goes into `strange`, which torch saves."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.strange: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if value is _dtype or value is _strange:
            return NotImplemented
        if isinstance(value, torch.dtype):
            return _dtype, (str(value).removeprefix("torch."),)
        self.strange.append(value)
        return _strange, (len(self.strange) - 1,)


class _Unpickler(pickle.Unpickler):
    """What `_Pickler` writes. It calls nothing but the two functions below."""

    def __init__(self, file: io.BytesIO, strange: list[Any]) -> None:
        super().__init__(file)
        self._found = {_dtype.__name__: _dtype, _strange.__name__: strange.__getitem__}

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module != __name__ or name not in self._found:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no state holds")
        return self._found[name]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise pickle.UnpicklingError(f"torch has no type {name}")
    return found


def _strange(index: int) -> Any:
    raise pickle.UnpicklingError(f"value {index} is read by deserialize alone")


_HEAD_BYTES = 8


def serialize(value: Any) -> bytes:
    """The bytes that `deserialize` takes."""
    plain, strange = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(plain)
    pickler.dump(value)
    if pickler.strange:
        torch.save(pickler.strange, strange)
    return b"".join([plain.tell().to_bytes(_HEAD_BYTES, "little"), plain.getbuffer(), strange.getbuffer()])


def deserialize(saved: bytes | bytearray) -> Any:
    """What was serialized, without running anything that it may hold."""
    end = _HEAD_BYTES + int.from_bytes(saved[:_HEAD_BYTES], "little")
    # torch reads plain values in Python, one after another.
    strange = torch.load(io.BytesIO(saved[end:]), weights_only=True) if len(saved) > end else []
    return _Unpickler(io.BytesIO(saved[_HEAD_BYTES:end]), strange).load()


def random_state() -> dict[str, Any]:
    """The states of the generators of torch, Python, NumPy, and CUDA where it is in use."""
    drawn: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = drawn
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Puts the generators back to what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
