"""Polder's cache of keys and values as an L2 adapter of LMCache 0.5, by its ``native_plugin`` door.

An operator types it, as docs/kv.md says::

    lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "polder.kv.lmcache", "class_name":
        "Connector", "shared": true,
        "adapter_params": {"pool": "/dev/dax0.0", "weights": "/models/llama", "dtype": "bfloat16"}}'

LMCache hands batches to threads that run no Python, and is told of their ends by a descriptor.
"""

from collections.abc import Mapping
from typing import Self

from polder import _core
from polder.errors import ArgumentError
from polder.kv import describe
from polder.kv.fingerprint import fingerprint
from polder.pool import Pool

__all__ = ["Connector"]


class Connector(_core.KvConnector):
    """What LMCache's ``native_plugin`` loads: blocks in a cache of a pool, which several servers share.

    The name of a model, a rank, a group of layers and a salt are in LMCache's keys. Neither the weights nor the type
    of the elements is, nor any option of the engines: those are said here.

    Parameters
    ----------
    weights : str
        A file or folder whose contents stand for the weights, such as the model's folder. Other contents, other blocks.
    dtype : str
        The type of the elements of keys and values, such as ``"bfloat16"`` or ``"fp8_e4m3"``: what the engines say as
        ``--kv-cache-dtype``, or as ``--dtype`` if that is ``auto``. Blocks of two types can have one size.
    pool : str, optional
        The pool's path; the default is that of `polder.Pool`. It has to be there.
    cache : str
        The name of the cache in the pool.
    budget : int or str, optional
        Bytes that the cache may take, such as ``"64GiB"``. The server that makes the cache decides.
    identity : mapping, optional
        What else changes a byte of a block, such as ``{"vllm": "0.32.0", "max_model_len": 8192}``. Servers with another
        one never meet.

    Raises
    ------
    ArgumentError
        The folder holds no weights, the type of the elements is open, or the identity is no JSON or has a name of
        Polder's own.
    """

    def __new__(
        cls,
        *,
        weights: str,
        dtype: str,
        pool: str | None = None,
        cache: str = "lmcache",
        budget: int | str | None = None,
        identity: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> Self:
        """Opens the pool and the cache."""
        if not dtype or dtype == "auto":
            raise ArgumentError(f'dtype: {dtype!r} is no type of elements; give the one in force, such as "bfloat16"')
        own = {"engine": "lmcache", "weights": fingerprint(weights), "dtype": dtype}
        whole = {**(identity or {}), **own}
        if taken := own.keys() & (identity or {}).keys():
            raise ArgumentError(f"identity: {min(taken)!r} is said by Polder itself; give what you add another name")
        return super().__new__(cls, Pool(pool), cache, *describe(whole), budget)
