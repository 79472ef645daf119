"""What of vLLM's configuration decides the bytes of a block: all of it, but the fields that are named here.

So a field that a later vLLM adds gives an engine that sets it another identity, and a cold cache, until it is named
here. A list of the fields that matter would lack it, and give wrong bytes.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from typing import Any

from polder.errors import ArgumentError
from polder.kv.fingerprint import fingerprint

# What lies in a configuration has any type.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

__all__ = ["decisive", "digest_of", "environment", "loaded_by"]

_ALIKE = {
    "VllmConfig": """
        scheduler_config offload_config compilation_config optimization_level performance_mode
        structured_outputs_config watermark_config reasoning_config aux_output_config
        observability_config logging_config profiler_config instance_id shutdown_timeout
        kv_transfer_config kv_events_config ec_transfer_config ec_manager_config weight_transfer_config
        quant_config load_config""",
    "ModelConfig": """
        seed served_model_name hf_token allowed_local_media_path allowed_media_domains io_processor_plugin
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enforce_eager renderer_num_workers
        return_sampling_mask max_logprobs logprobs_mode logits_processors use_fp64_gumbel enable_trace_replay
        disable_cascade_attn generation_config override_generation_config
        enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
        enable_nccl_comm_suspend enable_cumem_allocator""",
    "MultiModalConfig": """
        limit_per_prompt skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb""",
    "CacheConfig": """
        gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_gpu_blocks_override num_cpu_blocks
        kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend
        user_specified_block_size user_specified_mamba_block_size _block_size_resolved
        prefix_cache_retention_interval""",
    "ParallelConfig": """
        data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb elastic_ep_max_dp_size
        data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port master_addr master_port
        _data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank dp_sync_interval
        node_rank nnodes rank placement_group distributed_executor_backend max_parallel_loading_workers
        ray_workers_use_nsight ray_runtime_env numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
        distributed_timeout_seconds cpu_distributed_timeout_seconds disable_nccl_for_dp_synchronization
        enable_fault_tolerance fault_tolerance_config""",
    "KernelConfig": """
        enable_flashinfer_autotune enable_jit_warmup enable_cutedsl_warmup enable_rocm_segmented_attn_autotune
        ir_op_priority""",
    "LoRAConfig": "max_loras max_cpu_loras",
    "LoadConfig": """
        download_dir use_tqdm_on_load safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size""",
    "KVCacheConfig": "num_blocks prefix_cache_retention_interval hisparse_host_num_blocks",
    "KVCacheTensor": "size layer_stride offset",
    "OffloadingConfig": "engine_id extra_config enable_kv_cache_events",
    "OffloadingParallelConfig": "data_parallel_index data_parallel_size data_parallel_rank_local",
    "PreTrainedConfig": "_name_or_path transformers_version",
}
"""By class: fields in which two engines may differ and still compute the same bytes.

They say when, where and in what memory an engine computes, what it samples and what it tells. ``compilation_config``
is here because compiled code computes the same function: its bytes may differ by rounding, as those of two GPUs may.
``quant_config`` follows from the model's configuration and its files. Of ``load_config`` see `loaded_by`. The sizes
of ``KVCacheTensor`` follow from the memory that there is.
"""
_PLACES = "PORT HOST HOSTNAME IP IPS NIC DP RANK RAY OMP RESERVED HOME TIMEOUT LOG LOGGING DEBUG USAGE"
"""Words in the name of a variable of vLLM's environment that says where an engine runs, or what it tells."""
_BUILDS = """
    VLLM_IMAGE_TAG VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_DISABLE_COMPILE_CACHE
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_LORA_RESOLVER_CACHE_DIR VLLM_PROCESS_NAME_PREFIX"""
"""Variables that say what an image is called, and where compiled code and adapters lie."""
_MEDIA = "VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR"
"""Variables of which vLLM does not compile anew. The hash of a video may be that of its file, not of its frames."""


def decisive(of: Any) -> dict[str, Any]:
    """The fields of a configuration that decide bytes, by name."""
    alike = {name for kind in type(of).__mro__ for name in _ALIKE.get(kind.__name__, "").split()}
    if hasattr(of, "to_dict"):
        found = of.to_dict()
        alike |= set(_ALIKE["PreTrainedConfig"].split())
    else:
        found = {it.name: getattr(of, it.name, None) for it in fields(of)} if is_dataclass(of) else vars(of)
    return {name: value for name, value in found.items() if name not in alike}


def loaded_by(load: Any) -> dict[str, Any]:
    """What a ``LoadConfig`` says of the bytes of the weights, beside their fingerprint: which of the files are read.

    A version in a pool has a fingerprint that says all of it.
    """
    found = decisive(load)
    if str(load.load_format) == "polder":
        found.pop("model_loader_extra_config", None)
    return found


def environment(factors: Mapping[str, Any], variables: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Of vLLM's variables those that decide bytes: it compiles anew for them, or decodes media by them."""
    places = set(_PLACES.split())
    alike = set(_BUILDS.split())
    found = {name: it for name, it in factors.items() if name not in alike and places.isdisjoint(name.split("_"))}
    return found | {name: variables[name]() for name in _MEDIA.split() if name in variables}


def digest_of(value: Any, name: str) -> str:
    """The first 16 bytes of the SHA-256 of a value, in hexadecimal digits.

    A path of a file counts as what the file holds.

    Raises
    ------
    ArgumentError
        Something in it has no text that is the same in each process.

    Examples
    --------
    >>> digest_of({"a": 1, "b": 2}, "config") == digest_of({"b": 2, "a": 1}, "config")
    True
    >>> digest_of({"a": 1}, "config") == digest_of({"a": "1"}, "config")
    False
    """
    return sha256(_text(_plain(value, name)).encode()).hexdigest()[:32]


def _text(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True)


def _plain(value: Any, name: str) -> Any:
    """A value as JSON can write it; each kind of value in another form."""
    match value:
        case Enum():
            plain = {"of": type(value).__qualname__, "name": value.name}
        case None | bool() | int() | float():
            plain = value
        case str() | os.PathLike():
            path = os.fspath(value)
            # Path.is_file raises where a text is too long for a name.
            is_file = os.sep in path and os.path.isfile(path)  # noqa: PTH113
            plain = {"file": fingerprint(path)} if is_file else path
        case bytes():
            plain = {"bytes": value.hex()}
        case Mapping():
            items = [[_plain(key, name), _plain(it, f"{name}.{key}")] for key, it in value.items()]
            plain = {"map": sorted(items, key=_text)}
        case Set():
            plain = {"set": sorted((_plain(it, name) for it in value), key=_text)}
        case Sequence():
            plain = [_plain(it, f"{name}[{index}]") for index, it in enumerate(value)]
        case _ if hasattr(value, "__qualname__"):
            plain = {"code": f"{value.__module__}.{value.__qualname__}"}
        case _ if is_dataclass(value) or getattr(value, "__dict__", None):
            within = {key: _plain(it, f"{name}.{key}") for key, it in decisive(value).items()}
            plain = {"of": type(value).__qualname__, "is": within}
        case _:
            plain = {"text": repr(value)}
            if " at 0x" in plain["text"]:
                raise ArgumentError(
                    f"{name} is a {type(value).__qualname__}, of which no text is the same in each process, so no "
                    "other engine could share blocks; take it away"
                )
    return plain
