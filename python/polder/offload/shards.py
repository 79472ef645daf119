"""What a tensor holds in this process, and tensors over memory that torch did not allocate."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch.nn.parameter import is_lazy

from polder import address
from polder.errors import ArgumentError, TierError

#: Copies below this stay in memory: a file takes whole pages.
_LEAST = 64 << 10


def storages(model: torch.nn.Module) -> set[int]:
    """Where what a model's parameters and buffers have now is stored."""
    return {storage_of(it) for it in (*model.parameters(), *model.buffers())}


def arrays() -> list[torch.Tensor]:
    """Tensors of numbers in this process's memory that Python knows: no scalars, and of DTensors what is here."""
    gc.collect()
    types = (torch.Tensor, torch.nn.Parameter)
    found = [it for it in gc.get_objects() if type(it) in types and it.device.type == "cpu" and it.ndim]
    return [it for it in found if it.is_floating_point() and it.untyped_storage().nbytes()]


def check_materialised(model: torch.nn.Module) -> None:
    """Refuses parameters that have no shape yet, and what is no module.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    for name, it in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(it):
            raise ArgumentError(
                f"{name} of a lazy module has no shape before the first call: call the model once, then go on"
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that this process has; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return cast("torch.Tensor", to_local())


class Held:
    """Tensors whose bytes are copied by address: they stay until the copy has ended, whatever other threads do to them.

    Parameters
    ----------
    until : str
        What ends when their storages may be resized, as by ``untyped_storage().resize_(0)``. That alone frees bytes
        which others hold, and raises a TierError at the end.
    """

    def __init__(self, until: str) -> None:
        self._until = until
        self._kept: list[tuple[torch.Tensor, int]] = []

    def __enter__(self) -> Self:
        return self

    def address(self, tensor: torch.Tensor, dtype: torch.dtype | None = None, count: int | None = None) -> int:
        """Where the bytes begin, of as many elements of a type as Rust takes them for.

        They stay if the program drops the tensor, or gives it other data.
        """
        own = tensor.detach()
        self._kept.append((own, own.untyped_storage().data_ptr()))
        return address.of(own, dtype=dtype, count=count, what="polder.offload")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        gone = next((it for it, begin in self._kept if it.untyped_storage().data_ptr() != begin), None)
        self._kept.clear()
        if gone is not None and kind is None:
            raise TierError(
                f"tensor of shape {tuple(gone.shape)}, {gone.dtype}: its storage was resized while it was copied, so "
                f"that numbers may be wrong; leave it alone until {self._until}, and load a checkpoint"
            )


def whole(like: Any, shard: torch.Tensor) -> torch.Tensor:
    """A shard as a DTensor, where ``like`` is one of the same type of numbers.

    Not by ``DTensor.from_local``: that moves a shard to a GPU if the others of the mesh compute there.
    """
    if not hasattr(like, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    return cast("Any", DTensor)(shard, like._spec, requires_grad=False)


def ungraphed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for a hook to keep. A result would keep the graph that it ends, and the graph keeps the hook."""
    return tensor if tensor.is_leaf else tensor.detach()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether bytes at an address, a shape and strides are all that a tensor is.

    Wrappers such as DTensors, quantized and sparse ones are more. So are views whose numbers are conjugated or negated
    when they are read.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def storage_of(tensor: torch.Tensor) -> int:
    """What views of one tensor share, on the meta device too, where nothing has an address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def mapped(like: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """A contiguous tensor like another one: in a file of ``folder`` that has no name, or in memory.

    The file lies in the page cache only as long as there is room.
    """
    if folder is None or like.nbytes < _LEAST:
        return torch.empty(like.shape, dtype=like.dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A mapped file without room ends the process when it is written.
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
            named = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(named, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
    except OSError as error:
        raise TierError(
            f"{folder}: no room for {like.nbytes} bytes of a state dict: {error.strerror}; "
            "free some, or place less there"
        ) from None


def check_version(tensor: torch.Tensor, version: int, shape: torch.Size | None = None) -> None:
    """Raises torch's own error where a saved tensor, or what it shares its version with, was changed in place since."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} of shape {tuple(tensor.shape if shape is None else shape)} is at version "
            f"{tensor._version}; expected version {version} instead"
        )
