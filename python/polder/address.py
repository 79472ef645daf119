"""Where a tensor's bytes lie, for Rust: the way by which an address leaves Python.

A collective's tensors go to Rust themselves. It asks DLPack for their addresses, and `find` where DLPack does not know.

Rust takes the bytes at an address for the values of a tensor, in order. They are not where a tensor has other strides,
is a lazy negative or conjugate, lies on a GPU, or has no memory of its own. `of` refuses such a tensor. `is_plain`
says so beforehand to a front that gives a copy in its place, and `find` gives None.
"""

import torch
from torch.autograd.graph import increment_version

from polder.errors import ArgumentError

__all__ = ["expect_memory", "find", "has_memory", "is_plain", "of"]

_STRIDED, _TENSOR = torch.strided, torch.Tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor in memory of the host, or of its GPU, are its values in order."""
    return (
        tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()))
    )


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the result of a functional collective stands for, once that is over; any other as it is."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def _pointer(tensor: torch.Tensor) -> int:
    """Where the elements begin; 0 where torch has no address, as under torch.func.vmap."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its storage: not where that was freed, as FSDP does, or made smaller.

    NumPy takes memory of its own for a tensor without any, and a copy of it ends the process by a signal. Behind the
    end of a storage lies what is another's.
    """
    if not tensor.numel():
        return True
    if tensor.is_cpu and not _pointer(tensor):
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


def expect_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises an ArgumentError of a strided tensor that has not all of its memory."""
    if not has_memory(_waited(tensor)):
        is_plain_kind = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        remedy = "give one that has" if is_plain_kind else "give the tensor inside it, as to_local() of a DTensor does"
        raise ArgumentError(
            f"{what} got a {type(tensor).__name__} of {tensor.numel()} elements that has no memory for them; {remedy}"
        )


def find(tensor: torch.Tensor, what: str) -> int | None:
    """The address of a tensor in memory of the host whose bytes are its values in order; None for any other tensor.

    Raises
    ------
    ArgumentError
        Says that the tensor has no memory, or less than its elements take.
    """
    if type(tensor) is not _TENSOR:
        tensor = _waited(tensor)
    # As `is_plain`, without its call.
    if (
        not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or (tensor.dtype.is_complex and tensor.is_conj())
    ):
        return None
    # As `has_memory`, which takes longer: this runs for every message.
    at, end = _pointer(tensor), tensor.nbytes
    if begin := tensor.storage_offset():
        end += begin * tensor.itemsize
    if not at or end > tensor.untyped_storage().nbytes():
        expect_memory(tensor, what)
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
    if tensor.is_nested:
        problem = "a nested tensor; give its values() and its offsets()"
    elif tensor.layout is not torch.strided:
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
