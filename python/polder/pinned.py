"""Memory that a GPU copies from and to without a detour: registered with CUDA."""

from typing import Any, cast

import torch

from polder import _core

__all__ = ["register"]


def register(kept: _core.Range) -> bool:
    """Pins a range for copies by a GPU, up to its end; whether there is one to do it."""
    if not torch.cuda.is_available():
        return False
    cuda = cast("Any", torch.cuda.cudart())
    address = kept.address
    torch.cuda.check_error(cuda.cudaHostRegister(address, kept.size, 0))

    def release() -> None:
        # A copy that a GPU has not ended would go on with whatever comes to lie at this address.
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # pyright: ignore[reportPrivateUsage]
                torch.cuda.synchronize(device)
        cuda.cudaHostUnregister(address)

    # It does not hold the range itself, which would then live for ever.
    kept.before_release(release)
    return True
