"""Where a tensor's bytes lie, for Rust: the way by which an address leaves Python.

A collective's tensors go to Rust themselves. It asks DLPack for their addresses, and `find` where DLPack does not know.

Rust takes the bytes at an address for the values of a tensor, in order. They are not where a tensor has other strides,
is a lazy negative or conjugate, lies on a GPU, or has no memory of its own. `of` refuses such a tensor. `is_plain`
says so beforehand to a front that gives a copy in its place, and `find` gives None.
"""

import torch
from torch.autograd.graph import increment_version

from polder.errors import ArgumentError

__all__ = ["find", "has_memory", "is_plain", "of"]

_STRIDED = torch.strided
_LOW = 1 << 40
"""Addresses below are looked at again: one into a storage that was freed is its offset from nothing."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor in memory of the host, or of its GPU, are its values in order."""
    return (
        tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not (tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()))
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie somewhere: not where its storage was freed, as FSDP does between its uses.

    NumPy takes memory of its own for such a tensor, and a copy of it ends the process by a signal.
    """
    at = tensor.data_ptr()
    return at >= _LOW or not tensor.numel() or bool(at and tensor.untyped_storage().nbytes())


def find(tensor: torch.Tensor, what: str) -> int | None:
    """The address of a tensor in memory of the host whose bytes are its values in order; None for any other tensor.

    Raises
    ------
    ArgumentError
        Says that the tensor has no memory.
    """
    # As `is_plain`, without its call: this runs for every tensor of an operation.
    if (
        not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or (tensor.dtype.is_complex and tensor.is_conj())
    ):
        return None
    at = tensor.data_ptr()
    if at < _LOW and not has_memory(tensor):
        raise ArgumentError(
            f"{what} got a {type(tensor).__name__} of {tensor.numel()} elements that has no memory; give one that has"
        )
    return at


def of(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    count: int | None = None,
    writable: bool = False,
    what: str = "the call",
) -> int:
    """The address of a tensor in memory of the host whose bytes are its values in order.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The type that Rust takes the elements for.
    count : int, optional
        How many elements Rust reads or writes there: all that the tensor has.
    writable : bool
        Whether Rust writes there. The tensor's version goes up, so that autograd sees it as any other change in place.
        An alias from ``.data`` has a version of its own.
    what : str
        The call, for errors.

    Raises
    ------
    ArgumentError
        Names the call, what the tensor is, and what to do about it.

    Examples
    --------
    >>> ones = torch.ones(4, 3)
    >>> of(ones, dtype=torch.float32, count=12) == ones.data_ptr()
    True
    >>> of(ones.t(), what="push")
    Traceback (most recent call last):
        ...
    polder.errors.ArgumentError: push got a tensor of shape [3, 4] with strides [1, 3]; call .contiguous() first
    """
    at = find(tensor, what)
    if (
        at is None
        or (dtype is not None and tensor.dtype is not dtype)
        or (count is not None and tensor.numel() != count)
    ):
        raise _refusal(tensor, dtype, count, what)
    if writable:
        increment_version(tensor)
    return at


def _refusal(tensor: torch.Tensor, dtype: torch.dtype | None, count: int | None, what: str) -> ArgumentError:
    """The error that says why there is no address."""
    if tensor.layout is not torch.strided:
        problem = f"a tensor of layout {tensor.layout}; call .to_dense() first"
    elif not tensor.is_cpu:
        problem = f"a tensor on {tensor.device}; call .cpu() first"
    elif tensor.is_neg() or tensor.is_conj():
        kind, name = ("negative", "neg") if tensor.is_neg() else ("conjugate", "conj")
        problem = f"a lazy {kind}; call .resolve_{name}() first"
    elif not tensor.is_contiguous():
        problem = (
            f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}; call .contiguous() first"
        )
    elif dtype is not None and tensor.dtype is not dtype:
        problem = f"elements of {tensor.dtype} where {dtype} belong"
    else:
        problem = f"{tensor.numel()} elements where {count} belong"
    return ArgumentError(f"{what} got {problem}")
