"""Communication hooks of DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["in_order"]


def in_order(
    hook: Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"],
) -> Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]:
    """Lets a hook finish each bucket before the next begins.

    A hook whose callbacks call collectives, as PowerSGD's does, needs it with several buckets: else the order of its
    collectives differs by rank, on every backend. The backward pass waits for each bucket.

    Parameters
    ----------
    hook : callable
        A hook as `DistributedDataParallel.register_comm_hook` takes it.

    Returns
    -------
    callable
        A hook that takes the same state and gives the same gradients.

    Examples
    --------
    >>> model.register_comm_hook(state, polder.torch.in_order(powerSGD_hook))  # doctest: +SKIP
    """

    def ordered(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return ordered
