"""What vLLM calls in each of its processes, so that a user can name Polder's classes in vLLM's configuration."""

import functools
import importlib
from contextlib import suppress

# The registries have no stubs where vLLM is not installed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Registers the tier ``polder`` and the spec ``PolderCpuSpec``, which are imported when they are used.

    The load format ``polder`` too, whose class vLLM wants at once.
    """
    with suppress(ImportError):
        importlib.import_module("polder.weights.vllm")
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ModuleNotFoundError:
        # An older vLLM has no tiers; it says so to a user who asks for one.
        return
    SecondaryTierFactory.register_tier("polder", "polder.kv.vllm", "PolderTier")
    OffloadingSpecFactory.register_spec("PolderCpuSpec", "polder.kv.vllm", "PolderCpuSpec")
