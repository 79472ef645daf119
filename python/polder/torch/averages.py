"""Averages that stay right where the sum of all ranks is too large for the type of their elements."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

# torch's stubs leave the types of arrays open.
# pyright: reportUnknownMemberType=false

__all__ = ["HALVES", "WHOLES", "divided", "mean_of", "scale_of", "scaled"]

HALVES = (torch.float16, torch.bfloat16)
"""Floats that are divided before they are summed, as DDP and NCCL do: 40000 and 40000 of float16 add up to infinity."""
WHOLES = (torch.int32, torch.int64, torch.uint32, torch.uint64)
"""Integers whose quotients and remainders are summed: their own sum wraps around."""


def scaled(tensors: Sequence[torch.Tensor], size: int) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Room on the tensors' device for each of them divided by `size`, and what fills it in."""
    rooms = [torch.empty(it.shape, dtype=it.dtype, device=it.device) for it in tensors]

    def fill() -> None:
        with torch.inference_mode():
            for room, tensor in zip(rooms, tensors, strict=True):
                # The factor is DDP's, and so are the bits.
                torch.mul(tensor, 1 / size, out=room)

    return rooms, fill


def scale_of(dtype: torch.dtype, size: int) -> float:
    """What elements are multiplied by before something sums them and divides by `size`; a power of two, at most 1.

    The mean, divided by it, has the bits that it would have without, but in numbers next to the smallest.

    Examples
    --------
    >>> scale_of(torch.float16, 3), scale_of(torch.float32, 3)
    (0.25, 1.0)
    """
    return 0.5 ** (size - 1).bit_length() if dtype in HALVES else 1.0


def divided(tensor: torch.Tensor, size: int, chunks: int = 1) -> torch.Tensor:
    """The quotients of integers in memory of the host, and the remainders: of each chunk two rows.

    Examples
    --------
    >>> divided(torch.tensor([7, -7]), 2).tolist()
    [[[3, -4], [1, 1]]]
    """
    values = tensor.detach().numpy().reshape(chunks, -1)
    pairs = np.stack(np.divmod(values, values.dtype.type(size)), 1)
    return torch.from_numpy(pairs)


def mean_of(sums: torch.Tensor, size: int) -> torch.Tensor:
    """The average, cut off towards zero, from the sums of all ranks' quotients and remainders.

    Examples
    --------
    >>> halves = divided(torch.tensor([2**63 - 1, -7]), 2)[0]
    >>> mean_of(halves + divided(torch.tensor([2**63 - 1, -8]), 2)[0], 2).tolist()
    [9223372036854775807, -7]
    """
    quotients, remainders = sums.numpy()
    carried, rest = np.divmod(remainders, remainders.dtype.type(size))
    # A sum of quotients may have wrapped around, and wraps back here.
    means = quotients + carried
    return torch.from_numpy(means + ((means < 0) & (rest != 0)))
