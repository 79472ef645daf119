"""A training state taken apart: tensors by name, and what is no tensor."""

import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from polder.errors import ArgumentError

# torch's stubs leave state dictionaries without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = [
    "Leaf",
    "by_dotted_name",
    "deserialize",
    "put_together",
    "random_state",
    "serialize",
    "set_random_state",
    "take_apart",
]

Leaf = dict[str, Any]
"""What stands for a tensor (its name, dtype and shape) or for a value."""

_PLAIN = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device}
"""Nobody changes a value of these types, and a snapshot takes them."""


def take_apart(state: Any, path: str, tensors: dict[str, torch.Tensor], *, takes_shards: bool = False) -> Leaf:
    """The same state with a place in `tensors` instead of each tensor, and copies of all else.

    Parameters
    ----------
    state : Any
        Dictionaries, lists and tuples of dense tensors and of what ``torch.load(weights_only=True)`` takes.
    path : str
        What the names of its tensors begin with.
    tensors : dict of str to torch.Tensor
        Takes the tensors, each with a name that has a `/`.
    takes_shards : bool
        Takes this rank's part of a DTensor, and how it is laid out over the ranks.

    Raises
    ------
    ArgumentError
        The state holds anything else.
    """
    if isinstance(state, torch.Tensor):
        if takes_shards and hasattr(state, "placements"):
            return _take_shard(state, path, tensors)
        if state.layout != torch.strided or hasattr(state, "placements"):
            raise ArgumentError(
                f"{path} is a {type(state).__name__} of layout {state.layout}; only dense tensors are taken here, and "
                "DTensors by PoolTransport. SnapshotWriter with torch.distributed.checkpoint takes the others"
            )
        tensors[path] = state
        return {"tensor": path, "dtype": state.dtype, "shape": list(state.shape)}
    if isinstance(state, dict):
        # The kind of a key is part of its name: 0 is not "0".
        return {
            "dict": [
                (_copy(key, path), take_apart(value, f"{path}/{key!r}", tensors, takes_shards=takes_shards))
                for key, value in state.items()
            ]
        }
    if isinstance(state, list | tuple):
        if all(type(value) in _PLAIN for value in state):
            return {"value": list(state) if isinstance(state, list) else tuple(state)}
        kind = "list" if isinstance(state, list) else "tuple"
        return {
            kind: [
                take_apart(value, f"{path}/{index}", tensors, takes_shards=takes_shards)
                for index, value in enumerate(state)
            ]
        }
    return {"value": _copy(state, path)}


def _take_shard(state: Any, path: str, tensors: dict[str, torch.Tensor]) -> Leaf:
    layout = {
        "device_mesh": state.device_mesh,
        "placements": state.placements,
        "shape": state.shape,
        "stride": state.stride(),
    }
    with torch.no_grad():
        return {"shard": take_apart(state.to_local(), path, tensors), "layout": layout}


def _copy(value: Any, path: str) -> Any:
    """A copy that nobody changes, as `deserialize` will give it."""
    if type(value) in _PLAIN:
        return value
    try:
        return deserialize(serialize(value))
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"{path or '/'} holds what a snapshot does not take ({error}); keep tensors, numbers, strings, "
            "lists, tuples and dictionaries in state_dict()"
        ) from error


def put_together(walked: Leaf, read: Callable[[Leaf], torch.Tensor]) -> Any:
    """What `take_apart` took apart; `read` gives the tensor of a leaf."""
    if "tensor" in walked:
        return read(walked)
    if "shard" in walked:
        # Its import takes a while, and needs distributed.
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            return DTensor.from_local(put_together(walked["shard"], read), **walked["layout"], run_check=False)
    if "dict" in walked:
        return {key: put_together(value, read) for key, value in walked["dict"]}
    if "list" in walked:
        return [put_together(value, read) for value in walked["list"]]
    if "tuple" in walked:
        return tuple(put_together(value, read) for value in walked["tuple"])
    return walked["value"]


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
        if "tensor" in walked or "value" in walked:
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
