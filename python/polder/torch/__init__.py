"""The backend ``polder`` of torch.distributed: collectives through a pool of shared memory.

One line makes a data-parallel program use it::

    torch.distributed.init_process_group("polder")

torch before 2.15 does not look for installed backends: there the program also needs ``import polder.torch``.

Without configuration, the ranks of one machine make a pool in /dev/shm and remove it at the end.
``POLDER_POOL=/dev/dax0.0``, or any path, uses that pool. ``POLDER_HOST`` is the host id of a rank. Without it, ids come
from the pool's keeper. If no keeper gives ids, they come from the c10d store, one for each machine in the order of
ranks. ``POLDER_EMULATE=2`` spreads the ranks of one machine over two host ids, to try what two machines would do.

The backend carries all of c10d on CPU tensors: the collectives, ``send`` and ``recv``, object collectives, coalescing,
``monitored_barrier``, ``split_group``, with ``async_op`` too. CUDA tensors go through memory of the host. docs/torch.md
has the table. If a collective fails, its tensors hold old and new values, as with other backends.

A callback of a future may call collectives and wait for them, as DDP's PowerSGD hook does. All ranks must call a
group's collectives in the same order; callbacks of several operations at once run in no order. `in_order` lets such a
hook finish each bucket before the next begins.

`ParameterService` averages gradients by proxies, processes of their own that sum in the pool; see docs/sync.md.
`snapshot` and `restore` keep versions of a training state in the pool, and on disk, which outlive a worker. A thread
publishes them while training goes on. `SnapshotWriter` and `SnapshotReader` do so for ``torch.distributed.checkpoint``.
`polder.torch.recovery` has a transport for torchft.

Errors are those of `polder.errors`: a rank that dies in an operation gives every other rank a `PeerDeadError`. In a
backward pass of DDP torch makes a RuntimeError of it, whose text is the same and names the host and the process. After
an error the group is broken; leave it with ``destroy_process_group`` and join anew, as torchrun does by restarting.
"""

import functools
from typing import TYPE_CHECKING, Any

# It refuses to run beside another project of this name, whose `polder/__init__.py` may be in our place.
from polder import _distribution

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise _distribution.missing("polder.torch", "torch", error) from error

from polder.torch.backend import DEVICES, ProcessGroupPolder, create
from polder.torch.hooks import in_order
from polder.torch.service import EmulatedLinks, ParameterService, ProxyCount, SyncPlan
from polder.torch.snapshot import PendingSnapshot, Restored, Snapshotted, restore, snapshot

if TYPE_CHECKING:
    from polder.torch.checkpoint import SnapshotReader, SnapshotWriter

__all__ = [
    "EmulatedLinks",
    "ParameterService",
    "PendingSnapshot",
    "ProcessGroupPolder",
    "ProxyCount",
    "Restored",
    "SnapshotReader",
    "SnapshotWriter",
    "Snapshotted",
    "SyncPlan",
    "in_order",
    "register",
    "restore",
    "snapshot",
]


@functools.cache
def register() -> None:
    """Makes the backend known to torch.distributed, once. The import does it; torch calls it by the entry point.

    Programs take the devices that a backend is known for as those that they have.
    """
    devices = DEVICES if torch.cuda.device_count() else ("cpu",)
    dist.Backend.register_backend(  # pyright: ignore[reportUnknownMemberType]
        "polder", create, extended_api=True, devices=[*devices]
    )


def __getattr__(name: str) -> Any:
    if name in ("SnapshotReader", "SnapshotWriter"):
        # Not above: most programs do without, and to import what they derive from takes a second.
        from polder.torch import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


register()
