"""Bytes that a forward pass saves for its backward pass: which of them a placement moves, and how many there are."""

import contextlib
import copy
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from polder.errors import ArgumentError
from polder.offload.shards import check_materialised, is_plain, storage_of, storages, ungraphed

#: Saved tensors below this stay where they are: their own bookkeeping costs as much.
_LEAST = 64 << 10
#: Whole numbers that are computed for real, in bytes of a tensor at most.
_LOOKED_AT = 64 << 20
_ATEN = torch.ops.aten
#: Kernels of which fake tensors do not know how much they save.
_OF_UNKNOWN_SIZE = (_ATEN.mkldnn_rnn_layer.default, _ATEN._cudnn_rnn.default, _ATEN.miopen_rnn.default)


def is_placed(tensor: torch.Tensor, weights: set[int]) -> bool:
    """Whether a saved tensor is one that a placement moves. ``weights`` are storages that stay."""
    return (
        (is_plain(tensor) or type(tensor) is FakeTensor)
        and tensor.nbytes >= _LEAST
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and storage_of(tensor) not in weights
    )


def stretch(tensor: torch.Tensor) -> tuple[int, ...]:
    """The bytes that a contiguous tensor is made of. Of those that are saved several times one copy is enough."""
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes, tensor._version


class Live:
    """Bytes that are in use: each key counts once, however many use it."""

    def __init__(self) -> None:
        self.bytes = self.most = 0
        self._users: Counter[Hashable] = Counter()

    def add(self, key: Hashable, nbytes: int) -> bool:
        """One more user. Whether there has never been as much."""
        self._users[key] += 1
        self.bytes += nbytes if self._users[key] == 1 else 0
        is_most = self.bytes > self.most
        self.most = max(self.most, self.bytes)
        return is_most

    def drop(self, key: Hashable, nbytes: int) -> None:
        """One user less."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.bytes -= nbytes


class Kept:
    """A saved tensor, which counts until the graph lets go of it. ``is_held`` says whether its bytes stay as long."""

    def __init__(self, tensor: torch.Tensor, is_held: bool = True) -> None:
        self.tensor = ungraphed(tensor) if is_held else None
        # As long as this is there, no other storage has the same name.
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._counts: list[tuple[Live, Hashable, int]] = []

    def count(self, live: Live, key: Hashable, nbytes: int) -> bool:
        """Counts it. Whether there has never been as much."""
        self._counts.append((live, key, nbytes))
        return live.add(key, nbytes)

    def __del__(self) -> None:
        for it in self._counts:
            it[0].drop(*it[1:])


def saved_bytes(model: torch.nn.Module, *inputs: Any, **named: Any) -> int:
    """Bytes that a forward pass of ``model`` saves for its backward pass and that can be placed, at most at once.

    They are those of the device that the inputs lie on, else the model: kernels of a CPU and of a GPU save different
    tensors. A model on the meta device is taken to train on a CPU. Bytes that are saved several times count once.

    The model runs on fake tensors, whose operations choose the kernels of that device: no number is computed, and no
    memory is taken, whatever the size. Of whole numbers and truth values among the inputs the values count, because
    programs look at them. A model that looks at other numbers, or cannot be copied, runs once for real, and what it
    saves is dropped at once.

    Parameters
    ----------
    model : torch.nn.Module
        In training mode, with the checkpointing that it will have.
    inputs, named
        As in a step. Of tensors of floating point only shapes and types count.

    Raises
    ------
    ArgumentError
        A lazy module has parameters without shapes, or a model on the meta device looks at numbers.

    Examples
    --------
    >>> saved_bytes(torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh()), torch.zeros(128, 64))
    262144
    """
    check_materialised(model)
    tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor)]
    tensors += [*model.parameters(), *model.buffers()]
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), torch.device("cpu"))
    # Training goes on with the numbers that it would have drawn.
    drawing = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=drawing):  # pyright: ignore[reportUnknownMemberType]
        with contextlib.suppress(Exception):
            return _on_fakes(model, device, inputs, named)
        if any(tensor.is_meta for tensor in tensors):
            raise ArgumentError(
                "model: it lies on the meta device and looks at numbers, or cannot be copied, so that it would have to "
                "run for real; make it on a CPU or a GPU"
            )
        return _for_real(model, device, inputs, named)


def _on_fakes(model: torch.nn.Module, device: torch.device, inputs: Sequence[Any], named: dict[str, Any]) -> int:
    """`saved_bytes` of a copy of the model that has no numbers."""
    fake = _Fakes(allow_non_fake_inputs=True)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if not (_is_without_numbers(tensor) or tensor.is_meta):
            # The program may change them.
            return tensor.to(device, copy=True)
        if tensor.device == device:
            return fake.from_tensor(tensor)
        with fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)

    known = {id(tensor): there(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with FakeCopyMode(fake):
        model = copy.deepcopy(model, known)
    inputs, named = tree_map_only(torch.Tensor, there, (tuple(inputs), named))
    return _counted(storages(model), True, [fake, _Numbers()], lambda: model(*inputs, **named))


def _for_real(model: torch.nn.Module, device: torch.device, inputs: Sequence[Any], named: dict[str, Any]) -> int:
    """`saved_bytes` of the model itself, whose buffers stay as they are."""
    buffers = {name: it.clone() for name, it in model.named_buffers()}
    weights = storages(model) | {storage_of(it) for it in buffers.values()}
    inputs, named = tree_map_only(torch.Tensor, lambda it: it.to(device), (tuple(inputs), named))
    return _counted(weights, False, [], lambda: torch.func.functional_call(model, buffers, inputs, named))


def _counted(weights: set[int], is_held: bool, modes: Sequence[Any], run: Any) -> int:
    """Bytes that ``run`` saves and a placement moves, at most at once."""
    live = Live()

    def pack(tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor, is_held)
        if is_placed(tensor, weights):
            kept.count(live, stretch(tensor), tensor.nbytes)
        return kept

    with contextlib.ExitStack() as inside:
        for mode in modes:
            inside.enter_context(mode)
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda it: it.tensor))
        # What it returns has the graph.
        made = run()
    del made
    return live.most


class _Fakes(FakeTensorMode):
    """Does not put eight GPUs where there is none, as torch does for good: autograd starts a thread for each."""

    @property
    def avoid_device_init(self) -> bool:
        return False


class _Numbers(TorchDispatchMode):
    """Operations on whole numbers alone are computed, because programs look at them; all else has no numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func in _OF_UNKNOWN_SIZE:
            return _sized(func, args, kwargs)
        if any(map(_is_without_numbers, given)):
            return func(*args, **kwargs)
        with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
            fake = func(*args, **kwargs)
            made = [leaf for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor)]
            if any(leaf.is_floating_point() or leaf.is_complex() or leaf.nbytes > _LOOKED_AT for leaf in made):
                return fake
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_without_numbers(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.is_complex()


def _sized(func: Any, args: Any, kwargs: Any) -> Any:
    """Fake tensors of the sizes that a kernel makes of zeros."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    with unset_fake_temporarily():
        args, kwargs = tree_map_only(torch.Tensor, zeros, (args, kwargs))
        made = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, empty, made)
