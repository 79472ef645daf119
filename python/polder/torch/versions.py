"""Versions of a store as tensors: their bytes, and back."""

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polder import _core, address
from polder.errors import ArgumentError
from polder.pool import Pool
from polder.torch.state import Leaf, empty_of, in_order

# torch's stubs leave the types of its copies open.
# pyright: reportUnknownMemberType=false

__all__ = ["bytes_of", "memory_of", "own_rank", "pool_of", "read", "read_leaf", "store_of", "values_of"]


@functools.cache
def default_pool() -> Pool:
    """The pool of this process where a caller names none."""
    return Pool()


def pool_of(pool: Any) -> Pool:
    """The pool that a caller names, or that of this process."""
    if pool is None:
        return default_pool()
    if not isinstance(pool, Pool):
        raise ArgumentError(f"pool is {pool!r}; give a polder.Pool")
    return pool


def own_rank() -> int:
    """The rank of this process in its job; 0 where it has none."""
    return dist.get_rank() if dist.is_initialized() else 0


def store_of(pool: Pool | None, name: str, part: int | str) -> _core.Store:
    """The store of a part of what has this name: that of a rank, or of all."""
    return _core.Store(pool_of(pool), f"{name}/{part}")


def memory_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor on the CPU where they lie."""
    _expect_memory(tensor)
    row = tensor.reshape(-1)
    # One element of a larger tensor keeps the stride that it had there, of which torch makes no bytes.
    return (row.as_strided((1,), (1,)) if row.numel() == 1 else row).view(torch.uint8).numpy()


def _expect_memory(tensor: torch.Tensor) -> None:
    if not address.has_memory(tensor):
        raise ArgumentError(
            f"a tensor of shape {list(tensor.shape)} has no memory for its elements; gather it first if its storage "
            "was freed"
        )


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a dense tensor in the order of its memory, on the CPU. They are copied only if there are gaps."""
    _expect_memory(tensor)
    whole = in_order(tensor.detach().resolve_conj().resolve_neg())
    return memory_of(whole.cpu().contiguous())


def values_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a dense tensor's values in the order of its indices, on the CPU. They are copied only if need be."""
    _expect_memory(tensor)
    return memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def read(version: _core.Version, name: str, nbytes: int | None = None) -> bytearray:
    """The bytes of this name, once they match their checksum. `nbytes` spares a look at the list."""
    into = bytearray(dict(version.tensors())[name] if nbytes is None else nbytes)
    version.read_into(name, into)
    return into


def read_leaf(version: _core.Version, leaf: Leaf) -> torch.Tensor:
    """The tensor of a leaf, with memory of this process alone, and the strides that it had."""
    tensor, ordered = empty_of(leaf)
    if ordered.is_contiguous():
        version.read_into(leaf["tensor"], memory_of(ordered))
        return tensor
    packed = torch.empty(ordered.shape, dtype=ordered.dtype)
    version.read_into(leaf["tensor"], memory_of(packed))
    ordered.copy_(packed)
    return tensor
