"""Polder's cache of keys and values as a tier of vLLM's offloading, for vLLM 0.30 to 0.33.

A user types it into vLLM's ``--kv-transfer-config``, as docs/kv.md says::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "polder", "pool": "/dev/dax0.0"}]}}

vLLM calls a tier in its scheduler's process, under one lock. A look-up is answered in place. A thread stores and
another loads, so that a load never waits for a store; they run no Python.
"""

import importlib.metadata
import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

try:
    import torch
    from vllm.config import VllmConfig
    from vllm.envs import compile_factors, environment_variables
    from vllm.platforms import current_platform
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    from vllm.v1.kv_offload.base import (
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingWorker,
        RequestOffloadingContext,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
    from vllm.version import __version__ as vllm_version
except ImportError as error:
    raise ImportError(f"polder.kv.vllm needs vLLM 0.30 to 0.33 beside Polder, in one environment: {error}") from error

from polder.errors import ArgumentError, PolderError, SettingsError
from polder.kv import Cache, Done
from polder.kv.fingerprint import fingerprint, fingerprint_of_settings
from polder.kv.vllm_identity import decisive, digest_of, environment, loaded_by
from polder.pool import Pool
from polder.weights.vllm import fingerprint_of

# vLLM is no part of the environment in which Polder is checked.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportPrivateUsage=false

__all__ = ["PolderCpuSpec", "PolderTier"]

_KEY_BYTES = 16
_GROUP_BYTES = 4
"""At the end of vLLM's key: the index of a group of layers."""
_UNKNOWN = "unknown since "
"""What the fingerprint of weights begins with that nobody knows: no two engines have the same."""
_PACKAGES = ("transformers", "mistral-common", "flashinfer-python", "flash-attn", "amd-aiter")
"""What prepares images and sound, and what vLLM takes attention from if it is there."""
_log = logging.getLogger(__name__)


def key_of(offload_key: bytes) -> bytes:
    """The key of a chunk in the cache, of vLLM's key for it.

    The first 16 bytes of the hash keep its resistance to collisions. The index of the group goes into the last 4.

    Raises
    ------
    ArgumentError
        The hash is shorter.
    """
    digest, group = offload_key[:-_GROUP_BYTES], int.from_bytes(offload_key[-_GROUP_BYTES:], "big")
    if len(digest) < _KEY_BYTES:
        raise ArgumentError(
            f"a block's hash has {len(digest)} bytes, expected {_KEY_BYTES} or more; "
            "take --prefix-caching-hash-algo sha256"
        )
    tail = int.from_bytes(digest[_KEY_BYTES - _GROUP_BYTES : _KEY_BYTES], "big") ^ group
    return digest[: _KEY_BYTES - _GROUP_BYTES] + tail.to_bytes(_GROUP_BYTES, "big")


# ------------------------------------------------------------------------------------------------------- identity


def engine_config() -> tuple[Any, Any]:
    """The configuration of the engine that is being made, a ``VllmConfig``, and of its pages, a ``KVCacheConfig``.

    vLLM hands a tier only a part of them. So they are taken from the functions of vLLM that are making the tier.
    """
    engine, pages, frame = None, None, inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        engine = found if engine is None and isinstance(found, VllmConfig) else engine
        found = frame.f_locals.get("kv_cache_config")
        pages = found if pages is None and hasattr(found, "kv_cache_groups") else pages
        if engine is not None and pages is not None:
            return engine, pages
        frame = frame.f_back
    raise ArgumentError("no VllmConfig and KVCacheConfig on the stack: PolderTier is made by vLLM's scheduler alone")


def identity_of(
    config: Any, engine: Any, pages: Any, chunk_bytes: int, weights: str, settings: str | None, adapters: str | None
) -> dict[str, str | int | None]:
    """What has to be equal for two engines to use each other's blocks.

    Parameters
    ----------
    config : OffloadingConfig
        The part of the configuration that vLLM hands to a tier.
    engine : VllmConfig
        All of it.
    pages : KVCacheConfig
        The groups of layers, and how the pages of each lie.
    chunk_bytes : int
        The bytes of a chunk, those of all workers together.
    weights : str
        The fingerprint of the weights in force.
    settings : str, optional
        The fingerprint of what lies beside the weights, such as the settings of the processor of images.
    adapters : str, optional
        What the operator says of the adapters in force.

    Raises
    ------
    SettingsError
        The seed of the hashes is random, so no other engine has equal keys.
    ArgumentError
        The engine caches no prefixes, or nothing is said of the adapters of an engine that takes them.
    """
    cache = engine.cache_config
    if not cache.enable_prefix_caching:
        raise ArgumentError(
            "prefix caching is off, by --no-enable-prefix-caching or because vLLM cannot do it for this model: then "
            "equal names of blocks do not mean equal bytes, such as where vLLM counts images and does not hash them; "
            "turn it on, or take the tier polder away"
        )
    algorithm = cache.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise SettingsError(
            f"--prefix-caching-hash-algo {algorithm} draws a random seed in each process, so no engine finds another's "
            "blocks; set PYTHONHASHSEED to one value for all engines, or take sha256"
        )
    if engine.lora_config is not None and adapters is None:
        raise ArgumentError(
            "--enable-lora: a block's key has the name and the path of an adapter, not its weights; give the "
            'tier "adapters", another text whenever one changes'
        )
    parts = {
        **decisive(engine),
        "load_config": loaded_by(engine.load_config),
        "kv_cache_config": pages,
        "offloading": config,
        "environment": environment(compile_factors(), environment_variables),
    }
    return {
        "engine": f"vllm {vllm_version}",
        "packages": " ".join(filter(None, map(_release, _PACKAGES))),
        "device": _device(),
        "model": config.model.name,
        "weights": weights,
        "settings": settings,
        "adapters": adapters,
        "dtype": config.model.dtype,
        "chunk_bytes": chunk_bytes,
        # As vLLM resolves it, which is after it has made the tiers.
        "seed": resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        "parts": " ".join(f"{name} {digest_of(part, name)}" for name, part in parts.items()),
    }


def _release(package: str) -> str | None:
    """A package with its version, if it is there."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package)}"
    return None


def _device() -> str:
    """The kind of device that wrote a block.

    CPUs pack keys by what their instructions need. Of GPUs the platform and the capability decide which attention is
    chosen, and so how pages lie; two that are both called cuda may have two kinds of fp8.
    """
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
    return f"{current_platform.device_name} {current_platform.get_device_capability()} {current_platform.fp8_dtype()}"


def model_folder(model: Any, load: Any) -> Path:
    """The folder of a ``ModelConfig``, from which an engine has loaded its weights.

    Raises
    ------
    ArgumentError
        It has loaded none from a folder of this machine.
    """
    if Path(model.model).exists():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"the weights of {model.model} are in no folder of this machine ({str(error).splitlines()[0]}); name a "
            'file or folder that stands for them, as "weights" of the tier'
        ) from error
    return Path(folder)


def fingerprint_in_force(engine: Any, stands_for: Path | None) -> str:
    """The fingerprint of what stands for an engine's weights; without that, of the weights that it has loaded.

    Those of a draft model are among them, because it has pages of its own in a block.

    Raises
    ------
    ArgumentError
        It is not known which those are.
    """
    if stands_for is not None:
        return fingerprint(stands_for)
    model, load = engine.model_config, engine.load_config
    draft = engine.speculative_config and engine.speculative_config.draft_model_config
    if str(load.load_format) == "dummy":
        raise ArgumentError("--load-format dummy: random weights have no fingerprint, and no other engine has them")
    found = fingerprint_of(load) if str(load.load_format) == "polder" else fingerprint(model_folder(model, load))
    if draft and draft.model != model.model:
        found += f" {fingerprint(model_folder(draft, load))}"
    return found


def settings_in_force(engine: Any, stands_for: Path | None) -> str | None:
    """The fingerprint of the settings that lie beside the weights; none if there is no folder for what stands for them.

    Raises
    ------
    ArgumentError
        There is no folder, although the model's processor of images is in it.
    """
    try:
        return fingerprint_of_settings(model_folder(engine.model_config, engine.load_config))
    except ArgumentError:
        if stands_for is None or engine.model_config.multimodal_config is not None:
            raise
        return None


# ----------------------------------------------------------------------------------------------------------- tier


class PolderTier(SecondaryTierManager):
    """vLLM's secondary tier ``polder``: a cache in a pool, which engines of one identity share.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type
        From vLLM.
    pool : str, optional
        The pool's path; the default is that of `polder.Pool`. It has to be there.
    cache : str
        The name of the cache in the pool. Engines with other identities can share it: their blocks never meet.
    budget : int or str, optional
        Bytes that the cache may take, such as ``"64GiB"``. The engine that makes the cache decides. Others say the
        same, or nothing.
    weights : str, optional
        A file or folder whose contents stand for the weights in force, also those of a draft model. The default is the
        folders of both.
    adapters : str, optional
        A text that stands for the weights of all LoRA adapters; an engine that takes adapters needs it.
    **others
        What the vLLM in use hands to each tier.

    Raises
    ------
    ArgumentError
        An unknown option, weights that have no fingerprint, or an engine that caches no prefixes.
    SettingsError
        The seed of the hashes is random.
    """

    medium: ClassVar[Any] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        pool: str | None = None,
        cache: str = "vllm",
        budget: int | str | None = None,
        weights: str | None = None,
        adapters: str | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - inspect.signature(SecondaryTierManager.__init__).parameters.keys())
        if unknown:
            raise ArgumentError(
                f"secondary tier {tier_type}: {unknown[0]!r} is no option; "
                "the options are pool, cache, budget, weights, adapters"
            )
        super().__init__(
            offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type, **others
        )
        engine, pages = engine_config()
        self._weights = Path(weights) if weights else None
        self._name, self._budget = cache, budget
        self._view = primary_kv_view.cast("B")
        self._chunk_bytes = self._view.nbytes // len(primary_kv_view)
        found = fingerprint_in_force(engine, self._weights)
        settings = settings_in_force(engine, self._weights)
        identity = identity_of(offloading_spec.config, engine, pages, self._chunk_bytes, found, settings, adapters)
        self._pool = Pool(pool)
        try:
            self._cache: Cache | None = self._open(identity)
        except BaseException:
            self._pool.close()
            raise
        self._identity = identity
        # vLLM's jobs by the cache's numbers, and the results of those that have ended.
        self._running: dict[int, Any] = {}
        self._results: list[Any] = []
        events = getattr(offloading_spec, "kv_events_config", None)
        self._events: list[Any] | None = [] if events is not None and events.enable_kv_cache_events else None
        # Keys that did not load although the cache had them when it was asked.
        self._failed: set[bytes] = set()
        # What the cache said in this step, and the requests that had a hit in it.
        self._answers: dict[bytes, bool] = {}
        self._hit: set[str] = set()
        self._warned: set[str] = set()

    def _open(self, identity: dict[str, str | int | None]) -> Cache:
        return Cache(self._pool, self._name, identity=identity, block=self._chunk_bytes, budget=self._budget)

    def _warn(self, doing: str, error: Exception) -> None:
        """Says once of each kind of error that the engine goes on without the cache."""
        kind = f"{doing}: {type(error).__name__}"
        (_log.debug if kind in self._warned else _log.warning)("%s %s failed: %s", self.tier_type, doing, error)
        self._warned.add(kind)

    # ------------------------------------------------------------------------------------------------- look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """No request is offloaded otherwise than vLLM would."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Answers in place. After a request's first hit in a step, one call asks for all its other keys."""
        if key not in self._answers:
            asked = [key]
            if req_context.req_id in self._hit:
                # vLLM knows a request's keys beforehand from 0.31 on.
                others = getattr(req_context, "_offload_key_positions", ())
                asked += [other for other in others if other != key and other not in self._answers]
            self._answers.update(zip(asked, self._ask(asked), strict=True))
        is_there = self._answers[key]
        if key in self._failed:
            # It is forgotten when the cache no longer has it: from then on another engine may have stored it anew.
            if not is_there:
                self._failed.discard(key)
            return LookupResult.MISS
        if is_there:
            self._hit.add(req_context.req_id)
        return LookupResult.HIT if is_there else LookupResult.MISS

    def _ask(self, keys: list[bytes]) -> Sequence[bool]:
        if self._cache is None:
            return [False] * len(keys)
        try:
            return self._cache.lookup([key_of(key) for key in keys])
        except PolderError as error:
            self._warn("look-up", error)
            return [False] * len(keys)

    def on_schedule_end(self, context: Any) -> None:
        """A step ends: the next one asks the cache again."""
        self._answers.clear()
        self._hit.clear()

    # ----------------------------------------------------------------------------------------- stores and loads

    def submit_store(self, job_metadata: Any) -> None:
        """Hands chunks to the thread that stores."""
        self._submit(job_metadata, lambda cache, keys, chunks: cache.submit_put(keys, chunks))

    def submit_load(self, job_metadata: Any) -> None:
        """Hands chunks to the thread that loads."""
        self._submit(job_metadata, lambda cache, keys, chunks: cache.submit_get(keys, chunks))

    def _submit(self, job: Any, begin: Callable[[Cache, list[bytes], list[memoryview]], int]) -> None:
        if self._cache is None:
            self._end(job, Done(0, None, None, None, 0.0))
            return
        try:
            chunks = self._chunks(job)
            self._running[begin(self._cache, [key_of(key) for key in job.keys], chunks)] = job
        except Exception as error:
            # Whatever it is, the engine goes on without the cache.
            self._end(job, Done(0, error, None, None, 0.0))

    def _end(self, job: Any, done: Done) -> None:
        """Notes the result of a job. A key that did not load is a miss from then on."""
        keys, loaded = list(job.keys), None
        if done.error is not None:
            self._warn("load" if job.is_promotion else "store", done.error)
        if done.found is not None:
            loaded = [key for key, is_there in zip(keys, done.found, strict=True) if is_there]
        is_good = (done.put is not None and not done.put.refused) or (loaded is not None and len(loaded) == len(keys))
        if job.is_promotion and not is_good:
            lost = set(keys).difference(loaded or ())
            self._failed.update(lost)
            if loaded is not None:
                self._tell(lost, is_removed=True)
        elif is_good and not job.is_promotion:
            self._tell(keys, is_removed=False)
        self._results.append(
            JobResult(
                job_id=job.job_id,
                success=is_good,
                successful_keys=loaded,
                transfer_time=done.seconds,
                transfer_bytes=len(keys) * self._chunk_bytes,
            )
        )

    def _collect(self, *, wait: bool) -> None:
        """Notes the results of all jobs that have ended; with `wait`, of all."""
        if self._cache is not None and self._running:
            for done in self._cache.drain(wait=wait):
                self._end(self._running.pop(done.job), done)

    def _tell(self, keys: Iterable[bytes], *, is_removed: bool) -> None:
        if self._events is not None:
            self._events.append(OffloadingEvent(keys=list(keys), medium=self.medium, removed=is_removed))

    def take_events(self) -> Iterable[Any]:
        """What routers are told, once: keys that this engine has stored, and keys that were gone when it loaded them.

        There are none unless vLLM publishes events of its own cache.
        """
        events, self._events = self._events, [] if self._events is not None else None
        return events or ()

    def _chunks(self, job: Any) -> list[memoryview]:
        """The chunks of a job in the primary tier."""
        whole, size = self._view, self._chunk_bytes
        at = np.asarray(job.chunk_ids).tolist()
        if len(at) != len(job.keys) or not all(0 <= chunk < whole.nbytes // size for chunk in at):
            raise IndexError(
                f"job {job.job_id}: {len(job.keys)} keys for the chunks {at} of a primary tier of "
                f"{whole.nbytes // size}"
            )
        return [whole[chunk * size : (chunk + 1) * size] for chunk in at]

    def get_finished_jobs(self) -> Iterable[Any]:
        """The results of all jobs that have ended, each once."""
        self._collect(wait=False)
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        """Whether vLLM has to ask for results."""
        return bool(self._running or self._results)

    def drain_jobs(self) -> None:
        """Waits until no thread touches the primary tier, then asks which weights are in force.

        vLLM calls it when weights may have changed, and does not say whether they have. Contents of `weights` answer
        that. Without this option nobody knows: the files of the model say what was loaded, not what was changed since.
        Then the engine goes on with an identity of its own. It neither meets nor leaves blocks of other weights.
        """
        self._collect(wait=True)
        self._answers.clear()
        self._hit.clear()
        self._failed.clear()
        unknown = f"{_UNKNOWN}{uuid.uuid4()}"
        try:
            weights = fingerprint(self._weights) if self._weights else unknown
        except (OSError, PolderError) as error:
            self._warn("look at the weights", error)
            weights = unknown
        if weights != self._identity["weights"]:
            self._leave()
            self._identity = {**self._identity, "weights": weights}
            self._reopen()

    def _leave(self) -> None:
        """Lets go of the cache, and of an identity that no engine will have again."""
        if self._cache is None:
            return
        if str(self._identity["weights"]).startswith(_UNKNOWN):
            try:
                self._cache.retire()
            except PolderError as error:
                self._warn("change of weights", error)
        self._cache.close()
        self._cache = None

    def _reopen(self) -> None:
        try:
            self._cache = self._open(self._identity)
        except PolderError as error:
            self._warn("change of weights", error)
            self._cache = None

    def shutdown(self) -> None:
        """Waits for what runs, and lets go of the pool and of vLLM's memory."""
        self._collect(wait=True)
        self._leave()
        self._pool.close()
        # A job that has failed may have left its chunks in a traceback.
        with suppress(BufferError):
            self._view.release()


# ------------------------------------------------------------------------------------------------- engines on a CPU


class PolderCpuSpec(TieringOffloadingSpec):
    """vLLM's offloading with tiers for an engine that runs on a CPU, which vLLM's own spec refuses.

    It is named as ``"spec_name": "PolderCpuSpec"`` in place of ``"TieringOffloadingSpec"``.
    """

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker of this process, which copies."""
        if self.config.canonical_layout:
            raise ArgumentError("canonical_layout is not there for engines on a CPU; remove it")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies between the blocks of an engine on a CPU and the primary tier, on the calling thread."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        # Of each tensor: pages by block, and pages by chunk and place in it.
        self._pages = [
            (
                cached.tensor.view(torch.int8).view(-1, cached.page_size_bytes),
                region.create_next_worker_view(cached.page_size_bytes * blocks_per_chunk).unflatten(
                    1, (blocks_per_chunk, -1)
                ),
            )
            for cached in kv_caches.tensors
        ]
        self._results: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Copies blocks into chunks."""
        return self._copied(job_id, self._parts(src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Copies chunks into blocks."""
        return self._copied(job_id, ((there, here) for here, there in self._parts(dst_spec, src_spec)))

    def _copied(self, job_id: int, pairs: Iterable[tuple[Any, Any]]) -> bool:
        began, size = time.monotonic(), 0
        for (source, source_at), (target, target_at) in pairs:
            moved = source[source_at]
            target[target_at] = moved
            size += moved.nbytes
        self._results.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=time.monotonic() - began)
        )
        return True

    def _parts(self, blocks: Any, chunks: Any) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
        """Each tensor with the indices of pages, at home and in the primary tier.

        The blocks of a group follow one another in a request; the first may lie in the middle of a chunk.
        """
        block_ids, chunk_ids = (torch.as_tensor(np.asarray(it.block_ids, np.int64)) for it in (blocks, chunks))
        block, chunk = 0, 0
        for refs, count, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            at = torch.arange(count) + first % self._blocks_per_chunk
            in_chunks = chunk_ids[chunk + at // self._blocks_per_chunk]
            for ref in refs:
                here, there = self._pages[ref.tensor_idx]
                used = slice(ref.page_size_bytes)
                yield (
                    (here, (block_ids[block : block + count], used)),
                    (there, (in_chunks, at % self._blocks_per_chunk, used)),
                )
            block += count
            chunk += int(at[-1]) // self._blocks_per_chunk + 1

    def get_finished(self) -> list[Any]:
        """All transfers since the last call: each has ended when it was submitted."""
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Lets go of the primary tier."""
        self._pages.clear()
        self._region.cleanup()
