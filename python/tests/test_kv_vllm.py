"""The tier of vLLM's offloading, without an engine: against vLLM if it is installed, else against a recorded stub."""

import dataclasses
import importlib.util
import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import vllm_stub

import polder
import polder.kv
import polder.weights
from polder.errors import ArgumentError, MemoryFaultError, RegionError, SettingsError
from polder.kv import fingerprint as of_files
from polder.kv import vllm_plugin
from polder.kv.fingerprint import fingerprint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

HAS_VLLM = importlib.util.find_spec("vllm") is not None
with nullcontext() if HAS_VLLM else mock.patch.dict(sys.modules, vllm_stub.modules()):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from polder.kv import vllm as door
    from polder.kv import vllm_identity
    from polder.kv.vllm_identity import digest_of, environment
    from polder.weights import vllm as loader

CHUNKS, CHUNK_BYTES = 8, 4096
MISS, HIT = door.LookupResult.MISS, door.LookupResult.HIT


def part(kind: str, **values: Any) -> Any:
    """A dataclass, such as vLLM's configuration is made of."""
    return dataclasses.make_dataclass(kind, values)(**values)


class HfConfig:
    """A configuration as transformers has it."""

    def __init__(self, theta: float = 1e4, path: str = "") -> None:
        self._theta, self._path = theta, path

    def to_dict(self) -> dict[str, Any]:
        return {"rope_theta": self._theta, "_name_or_path": self._path}


class VllmConfig:
    """What the door reads of it, and a part of what it does not."""

    def __init__(self, folder: Path) -> None:
        self.model_config = part(
            "ModelConfig",
            model=str(folder),
            revision=None,
            served_model_name="llama",
            seed=0,
            max_model_len=2048,
            quantization=None,
            multimodal_config=None,
            hf_config=HfConfig(path=str(folder)),
            dtype=torch.bfloat16,
        )
        self.load_config = part(
            "LoadConfig", load_format="auto", download_dir=None, ignore_patterns=[], model_loader_extra_config={}
        )
        self.cache_config = part(
            "CacheConfig",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            cache_dtype="fp8",
            kv_cache_dtype_skip_layers=[],
            gpu_memory_utilization=0.9,
            num_gpu_blocks=100,
        )
        self.parallel_config = part("ParallelConfig", tensor_parallel_size=1, data_parallel_rank=0, master_port=1)
        self.scheduler_config = part("SchedulerConfig", max_num_seqs=16)
        self.observability_config = part("ObservabilityConfig", endpoint=None)
        self.kv_transfer_config = part("KVTransferConfig", kv_port=1)
        self.attention_config = part("AttentionConfig", backend=None)
        self.instance_id = "1"
        self.lora_config: Any = None
        self.speculative_config: Any = None


class Engine(VllmConfig):
    """The same with changes, each by the names of fields with dots between them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder)
        for name, value in changes.items():
            within, _, field = name.rpartition(".")
            setattr(getattr(self, within) if within else self, field, value)


def draft_of(folder: Path) -> Any:
    return part("SpeculativeConfig", draft_model_config=part("ModelConfig", model=str(folder), revision=None))


def pages(num_blocks: int = 100, dtype: Any = torch.uint8) -> Any:
    """A KVCacheConfig: the pages of two layers, one after the other."""
    spec = part("FullAttentionSpec", block_size=32, page_size_bytes=2048, dtype=dtype)
    tensor = part("KVCacheTensor", size=num_blocks * 4096, layers=["one", "two"], layer_stride=num_blocks * 2048)
    group = part("KVCacheGroupSpec", layer_names=["one", "two"], kv_cache_spec=spec)
    return part("KVCacheConfig", num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[group])


def config(**changes: Any) -> Any:
    """An OffloadingConfig."""
    given = {"name": "llama", "dtype": "bfloat16", "layout": "NHD", "tp_size": 1, "layers": ("one", "two"), **changes}
    group = part("OffloadingGroupConfig", tokens_per_block=32, layer_names=given["layers"], group_id=0)
    return part(
        "OffloadingConfig",
        groups=(group,),
        model=part("OffloadingModelConfig", name=given["name"], dtype=given["dtype"]),
        cache=part("OffloadingCacheConfig", tokens_per_hash=32, blocks_per_chunk=1),
        parallel=part(
            "OffloadingParallelConfig",
            rank=0,
            world_size=1,
            tp_size=given["tp_size"],
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=given.get("replica", 0),
        ),
        kv_cache_layout=given["layout"],
        canonical_layout=False,
        replicated_layout=False,
        extra_config={"cpu_bytes_to_use": given.get("buffer", 1)},
        engine_id=given.get("engine_id", "engine"),
    )


Maker = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def tier(scratch: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Makes tiers of one pool, each as vLLM's scheduler does."""
    for name, value in (("XDG_CACHE_HOME", model.parent), ("POLDER_RUN", scratch), ("POLDER_COHERENCE", "software")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(door, "VllmConfig", Engine)
    made: list[Any] = []

    def make(
        host: int = 0,
        of: Any = None,
        engine: Engine | None = None,
        layout: Any = None,
        size: str = "64MiB",
        events: bool = False,
        **options: Any,
    ) -> Any:
        pool = scratch / "pool"
        if not pool.exists():
            polder.Pool(pool, size=size).close()
        monkeypatch.setenv("POLDER_HOST", str(host))
        # The tier finds them by these names.
        vllm_config, kv_cache_config = engine or Engine(model), layout or pages()
        view = memoryview(np.zeros((CHUNKS, CHUNK_BYTES), np.int8))
        polder_tier = door.PolderTier(
            offloading_spec=SimpleNamespace(
                config=of or config(), kv_events_config=SimpleNamespace(enable_kv_cache_events=events)
            ),
            primary_kv_view=view,
            tier_type="polder",
            **{"pool": str(pool), **options},
        )
        assert vllm_config and kv_cache_config
        polder_tier.rows = np.asarray(view).view(np.uint8)
        made.append(polder_tier)
        return polder_tier

    yield make
    for it in made:
        it.shutdown()


def keys(*numbers: int, group: int = 0) -> list[bytes]:
    """Keys as vLLM makes them: a hash of 32 bytes, and the index of a group."""
    return [bytes([number]) * 32 + group.to_bytes(4, "big") for number in numbers]


def request(name: str = "request", of: Sequence[bytes] = ()) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, _offload_key_positions=dict.fromkeys(of, 0))


jobs = itertools.count()


def job(given: Sequence[bytes], chunks: Sequence[int], is_load: bool = False) -> Any:
    return TransferJob(next(jobs), given, np.array(chunks, np.int32), is_load, request())


def result_of(tier: Any, submit: Callable[[Any], None], submitted: Any) -> Any:
    submit(submitted)
    results: list[Any] = []
    while not results:
        results += tier.get_finished_jobs()
    (result,) = results
    assert result.job_id == submitted.job_id
    return result


def store(tier: Any, given: Sequence[bytes], chunks: Sequence[int]) -> Any:
    return result_of(tier, tier.submit_store, job(given, chunks))


def load(tier: Any, given: Sequence[bytes], chunks: Sequence[int]) -> Any:
    return result_of(tier, tier.submit_load, job(given, chunks, is_load=True))


def look_up(tier: Any, given: Sequence[bytes]) -> list[Any]:
    """The answers in one step of the scheduler."""
    answers = [tier.lookup(key, request()) for key in given]
    tier.on_schedule_end(None)
    return answers


class Watched:
    """A cache that passes on what is not replaced, and counts."""

    def __init__(self, cache: Any, **replaced: Any) -> None:
        self._cache, self._replaced = cache, replaced
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        found = self._replaced.get(name) or getattr(self._cache, name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, len(given[0]) if given else named.get("wait", 0)))
            return found(*given, **named)

        return call


def fails(*_: Any) -> Any:
    raise MemoryFaultError("the device is gone")


# ------------------------------------------------------------------------------------------------ stores and loads


def test_what_one_host_stores_another_finds_and_loads(tier: Maker) -> None:
    first, second = tier(host=0), tier(host=1)
    known = keys(1, 2, 3)
    for chunk in range(3):
        first.rows[chunk] = chunk + 10
    assert look_up(second, known) == [MISS] * 3
    stored = store(first, known, [0, 1, 2])
    assert (stored.success, stored.transfer_bytes) == (True, 3 * CHUNK_BYTES)
    assert look_up(second, [*known, *keys(4)]) == [HIT] * 3 + [MISS]
    assert load(second, known, [7, 0, 3]).success
    assert [set(second.rows[chunk]) for chunk in (7, 0, 3, 1)] == [{10}, {11}, {12}, {0}]


def test_what_is_there_already_is_stored_again_without_an_error(tier: Maker) -> None:
    first, second = tier(host=0), tier(host=1)
    assert (
        store(first, keys(1), [0]).success
        and store(second, keys(1), [0]).success
        and store(first, keys(1), [1]).success
    )


def test_groups_of_layers_do_not_meet(tier: Maker) -> None:
    one = tier()
    assert store(one, keys(1, group=0), [0]).success
    assert look_up(one, keys(1, group=1)) == [MISS]
    assert len({door.key_of(key) for group in range(300) for key in keys(1, 2, group=group)}) == 600
    assert door.key_of(keys(1)[0]) == bytes([1]) * 16


def test_after_the_first_hit_one_call_asks_for_all_keys_of_a_request(tier: Maker) -> None:
    one = tier()
    known = keys(*range(6))
    assert store(one, known[:4], [0, 1, 2, 3]).success
    one._cache = watched = Watched(one._cache)
    ask = request(of=known)
    assert [one.lookup(key, ask) for key in known] == [HIT] * 4 + [MISS] * 2
    assert watched.calls == [("lookup", 1), ("lookup", 5)]
    # The next step asks again, and a request without a hit asks for one key.
    one.on_schedule_end(None)
    strange = keys(*range(50, 60))
    assert one.lookup(strange[0], request("strange", of=strange)) is MISS
    assert watched.calls[2:] == [("lookup", 1)]


# ------------------------------------------------------------------------------------------------------ bad input


def test_a_key_that_did_not_load_is_a_miss_until_the_cache_has_lost_it(tier: Maker) -> None:
    one = tier()
    known = keys(1, 2, 3)
    assert store(one, known, [0, 1, 2]).success
    whole = one._cache
    ended = [polder.kv.Done(1000, None, None, [True, False, True], 0.5)]
    one._cache = Watched(whole, submit_get=lambda given, into: 1000, drain=lambda wait: ended)
    result = load(one, known, [3, 4, 5])
    assert (result.success, list(result.successful_keys)) == (False, [known[0], known[2]])
    assert look_up(one, known) == look_up(one, known) == [HIT, MISS, HIT]
    one._cache = Watched(whole, lookup=lambda given: [False] * len(given))
    assert look_up(one, known[1:2]) == [MISS]
    one._cache = whole
    assert look_up(one, known) == [HIT] * 3


def test_a_cache_that_fails_is_a_miss_and_the_engine_goes_on(tier: Maker, caplog: pytest.LogCaptureFixture) -> None:
    one = tier()
    known = keys(1, 2)
    assert store(one, known, [0, 1]).success
    whole = one._cache
    one._cache = Watched(whole, lookup=fails, submit_put=fails, submit_get=fails)
    assert look_up(one, known) == look_up(one, known) == [MISS] * 2
    assert not store(one, keys(3), [2]).success
    result = load(one, known, [3, 4])
    assert (result.success, result.successful_keys) == (False, None)
    said = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert said == [f"polder {what} failed: the device is gone" for what in ("look-up", "store", "load")]
    one._cache = whole
    assert look_up(one, keys(1)) == [MISS] and store(one, keys(3), [2]).success


@pytest.mark.parametrize(("given", "chunks"), [((1, 2), (0,)), ((1,), (CHUNKS,)), ((1,), (-1,))])
def test_a_job_for_chunks_that_are_not_there_fails_alone(
    tier: Maker, given: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    one = tier()
    assert not store(one, keys(*given), chunks).success
    assert not load(one, keys(*given), chunks).success
    assert store(one, keys(9), [0]).success
    assert not list(one.get_finished_jobs()), "a job was reported twice"
    assert not one.has_pending_work()


def test_a_cache_that_is_full_keeps_the_newest_blocks_as_they_were(tier: Maker) -> None:
    one = tier(budget="2MiB")
    numbers = range(250)
    for at, number in enumerate(numbers):
        for chunk in range(CHUNKS):
            one.rows[chunk] = number
        # Eight chunks of 4 KiB each time, 8 MiB in all.
        group = [key for part in range(CHUNKS) for key in keys(number, group=part)]
        assert store(one, group, range(CHUNKS)).success, at
    last = [key for part in range(CHUNKS) for key in keys(numbers[-1], group=part)]
    one.rows[:] = 0
    assert load(one, last, range(CHUNKS)).success
    assert (one.rows == numbers[-1]).all()
    assert look_up(one, keys(numbers[0])) == [MISS]


def test_a_budget_of_zero_stores_nothing_and_harms_no_engine(tier: Maker) -> None:
    one = tier(budget=0)
    one.rows[0] = 1
    assert not store(one, keys(1), [0]).success
    assert look_up(one, keys(1)) == [MISS]
    result = load(one, keys(1), [1])
    assert (result.success, list(result.successful_keys)) == (False, [])


def test_a_key_of_fewer_than_16_bytes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a block's hash has 15 bytes, expected 16 or more"):
        door.key_of(bytes(15 + 4))
    assert door.key_of(bytes(range(16)) + bytes(4)) == bytes(range(16))


def test_another_budget_than_that_of_the_cache_is_refused(tier: Maker) -> None:
    tier(budget="8MiB")
    tier()
    with pytest.raises(ArgumentError, match="the budget"):
        tier(budget="16MiB")


def test_a_pool_that_is_not_there_is_an_error_that_names_it(tier: Maker, scratch: Path) -> None:
    with pytest.raises(RegionError, match="nowhere"):
        tier(pool=str(scratch / "nowhere"))


def test_an_unknown_option_is_refused_by_name(tier: Maker) -> None:
    with pytest.raises(
        ArgumentError, match="secondary tier polder: 'bugdet' is no option; the options are pool, cache"
    ):
        tier(bugdet=1)
    tier(backpressure_detector=None)


# ------------------------------------------------------------------------------------------------------- identity


GPU = SimpleNamespace(
    is_cpu=lambda: False,
    device_name="cuda",
    get_device_capability=lambda: (9, 0),
    fp8_dtype=lambda: torch.float8_e4m3fn,
)
ROCM = SimpleNamespace(**vars(GPU) | {"device_name": "rocm"})
FNUZ = SimpleNamespace(**vars(GPU) | {"fp8_dtype": lambda: torch.float8_e4m3fnuz})
OLDER = SimpleNamespace(**vars(GPU) | {"get_device_capability": lambda: (8, 0)})


def images(**changes: Any) -> dict[str, Any]:
    values = {"mm_processor_kwargs": None, "mm_processor_cache_gb": 4, "media_io_kwargs": {}, **changes}
    return {"model_config.multimodal_config": part("MultiModalConfig", **values)}


def identity_of(tier: Maker, monkeypatch: pytest.MonkeyPatch, model: Path, given: dict[str, Any]) -> str:
    """The identity of an engine; what it is given is taken back."""
    files = {model / name: text for name, text in given.get("files", {}).items()}
    before = {path: path.read_bytes() for path in files if path.exists()}
    with monkeypatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        if "seed" in given:
            patch.setenv("PYTHONHASHSEED", given["seed"])
        for name, value in given.get("vllm", {}).items():
            patch.setattr(door, name, value)
        for path, text in files.items():
            path.write_bytes(text)
        made = tier(
            of=config(**given.get("of", {})),
            engine=Engine(model, **given.get("engine", {})),
            layout=given.get("pages"),
            **given.get("options", {}),
        )
    for path in files:
        path.write_bytes(before[path]) if path in before else path.unlink()
    return made._cache.hash


DIFFER = [
    ({}, {"of": {"name": "other"}}),
    ({}, {"of": {"dtype": "fp8"}}),
    ({}, {"of": {"layout": "HND"}}),
    ({}, {"of": {"tp_size": 2}}),
    ({}, {"of": {"layers": ("one",)}}),
    ({}, {"seed": "7"}),
    ({}, {"files": {"model.safetensors": b"other weights"}}),
    ({}, {"files": {"config.json": b'{"rope_theta": 1e6}'}}),
    ({}, {"files": {"modeling_llama.py": b"pass"}}),
    ({}, {"engine": {"model_config.quantization": "fp8"}}),
    ({}, {"engine": {"model_config.hf_config": HfConfig(theta=1e6)}}),
    ({}, {"engine": {"model_config.dtype": torch.float16}}),
    # The factors of longrope, and the temperature of Llama 4, follow from it.
    ({}, {"engine": {"model_config.max_model_len": 4096}}),
    ({}, {"engine": {"cache_config.prefix_caching_hash_algo": "sha256_cbor"}}),
    # One layer of bf16 and one of fp8, in another order, are as large.
    (
        {"engine": {"cache_config.kv_cache_dtype_skip_layers": ["0"]}},
        {"engine": {"cache_config.kv_cache_dtype_skip_layers": ["3"]}},
    ),
    ({}, {"pages": pages(dtype=torch.bfloat16)}),
    ({}, {"engine": {"attention_config.backend": "FLASHINFER"}}),
    # What a later vLLM adds.
    ({}, {"engine": {"attention_config": part("AttentionConfig", backend=None, order_of_heads="reversed")}}),
    ({}, {"engine": {"rotary_config": part("RotaryConfig", factor=2)}}),
    ({}, {"engine": {"load_config.ignore_patterns": ["*.bin"]}}),
    ({}, {"vllm": {"vllm_version": "0.32.1"}}),
    ({}, {"vllm": {"compile_factors": lambda: {"VLLM_CPU_INT4_W4A8": False}}}),
    ({}, {"vllm": {"environment_variables": {"VLLM_VIDEO_LOADER_BACKEND": lambda: "pynvvideocodec"}}}),
    ({"vllm": {"current_platform": GPU}}, {"vllm": {"current_platform": ROCM}}),
    ({"vllm": {"current_platform": GPU}}, {"vllm": {"current_platform": FNUZ}}),
    ({"vllm": {"current_platform": GPU}}, {"vllm": {"current_platform": OLDER}}),
    ({"engine": images()}, {"engine": images(mm_processor_kwargs={"max_pixels": 784})}),
    ({"engine": images()}, {"engine": images(), "files": {"preprocessor_config.json": b'{"size": 224}'}}),
    (
        {"options": {"weights": __file__}},
        {"options": {"weights": __file__}, "files": {"preprocessor_config.json": b'{"size": 224}'}},
    ),
]


@pytest.mark.parametrize(("one", "other"), DIFFER, ids=lambda given: "-".join(map(str, given.values())) or "plain")
def test_engines_whose_blocks_may_differ_have_two_identities(
    tier: Maker, model: Path, monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (identity_of(tier, monkeypatch, model, given) for given in (one, other))
    assert first != second


ALIKE = [
    {"engine": {"scheduler_config.max_num_seqs": 32}},
    {"engine": {"cache_config.gpu_memory_utilization": 0.5, "cache_config.num_gpu_blocks": 7}},
    {"engine": {"model_config.served_model_name": "mine", "model_config.seed": 3}},
    {"engine": {"parallel_config.data_parallel_rank": 1, "parallel_config.master_port": 2}},
    {"engine": {"observability_config.endpoint": "http://a", "instance_id": "2", "kv_transfer_config.kv_port": 2}},
    {"engine": {"model_config.hf_config": HfConfig(path="elsewhere")}},
    {"of": {"engine_id": "other", "replica": 1, "buffer": 2}},
    {"pages": pages(num_blocks=7)},
    {"files": {"tokenizer.json": b"{}", "model.safetensors.index.json": b"{}", "README.md": b"text"}},
    {"vllm": {"compile_factors": lambda: {**FACTORS, "VLLM_DP_RANK": 1, "VLLM_NIXL_SIDE_CHANNEL_PORT": 2}}},
]
FACTORS = {"VLLM_CPU_INT4_W4A8": True}


@pytest.mark.parametrize("other", ALIKE, ids=lambda given: "-".join(map(str, given.values())))
def test_engines_whose_blocks_are_equal_have_one_identity(
    tier: Maker, model: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(door, "compile_factors", lambda: FACTORS)
    assert identity_of(tier, monkeypatch, model, other) == identity_of(tier, monkeypatch, model, {})


def test_engines_of_two_identities_never_meet(tier: Maker, model: Path) -> None:
    one = tier()
    assert store(one, keys(1), [0]).success
    two = tier(engine=Engine(model, **{"model_config.max_model_len": 4096}))
    assert look_up(two, keys(1)) == [MISS]
    assert store(two, keys(2), [0]).success
    assert look_up(two, keys(1, 2)) == [MISS, HIT]
    assert look_up(one, keys(1, 2)) == [HIT, MISS]


def test_the_weights_of_a_draft_model_are_in_the_identity(tier: Maker, model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    hashes: list[str] = []
    for weights in (b"one", b"two", b"one"):
        (draft / "model.safetensors").write_bytes(weights)
        hashes.append(tier(engine=Engine(model, speculative_config=draft_of(draft)))._identity["weights"])
    assert hashes[0] == hashes[2] != hashes[1]
    # Its own draft has no weights beside the model's.
    of_itself = tier(engine=Engine(model, speculative_config=draft_of(model)))._identity["weights"]
    assert of_itself == tier()._identity["weights"]


def test_a_file_that_a_configuration_names_counts_as_what_it_holds(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    digests: list[str] = []
    for text in ("1", "2", "1"):
        scales.write_text(text)
        digests.append(digest_of({"scales": str(scales)}, "config"))
    assert digests[0] == digests[2] != digests[1]
    assert digest_of(f"{scales}" * 1000, "config") != digests[0]


def test_a_value_that_no_other_process_has_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"config\.inner\.hook is a object, of which no text is the same"):
        digest_of({"inner": part("Inner", hook=object())}, "config")


def test_values_that_are_written_alike_have_two_digests() -> None:
    values = [None, "None", 0, "0", False, [0], (0, 0), {0}, {0: 0}, {"0": 0}, b"0", torch.float16, "torch.float16"]
    values += [int, "int", part("A", x=0), part("B", x=0), part("A"), part("A", x=None)]
    assert len({digest_of(value, "config") for value in values}) == len(values)
    assert digest_of({1, 2}, "config") == digest_of({2, 1}, "config")


def test_what_says_when_and_where_has_no_digest() -> None:
    parts = [
        part("KernelConfig", enable_jit_warmup=value, ir_op_priority=value, enable_flashinfer_autotune=value)
        for value in (True, False)
    ]
    assert len({digest_of(value, "config") for value in parts}) == 1
    factors = {"VLLM_BUILD_COMMIT": "a", "VLLM_RPC_PORT": 1, "VLLM_MARLIN_INPUT_DTYPE": "fp8"}
    assert environment(factors, {}) == {"VLLM_MARLIN_INPUT_DTYPE": "fp8"}


def test_an_engine_that_caches_no_prefixes_is_refused_by_name(tier: Maker, model: Path) -> None:
    # vLLM names images by a counter then, and switches it off where a block depends on what comes behind it.
    for changes in ({}, images(mm_processor_cache_gb=0)):
        with pytest.raises(ArgumentError, match=r"prefix caching is off, by --no-enable-prefix-caching or because"):
            tier(engine=Engine(model, **{"cache_config.enable_prefix_caching": False}, **changes))


def test_weights_that_come_back_meet_their_blocks_under_any_file_name(tier: Maker, model: Path) -> None:
    weights = model / "model.safetensors"
    assert store(tier(), keys(1), [0]).success
    weights.write_bytes(b"updated")
    assert look_up(tier(), keys(1)) == [MISS]
    weights.write_bytes(b"weights")
    weights.rename(model / "renamed.safetensors")
    assert look_up(tier(), keys(1)) == [HIT]


def test_a_random_seed_is_refused_by_name(tier: Maker, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(SettingsError, match=r"--prefix-caching-hash-algo xxhash draws a random seed .* PYTHONHASHSEED"):
        tier(engine=Engine(model, **{"cache_config.prefix_caching_hash_algo": "xxhash"}))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    algorithm = "xxhash" if not HAS_VLLM else "sha256"
    tier(engine=Engine(model, **{"cache_config.prefix_caching_hash_algo": algorithm}))


def test_adapters_are_refused_if_nothing_is_said_of_their_weights(tier: Maker, model: Path) -> None:
    engine = Engine(model, lora_config=part("LoRAConfig", max_lora_rank=16))
    with pytest.raises(ArgumentError, match=r'--enable-lora: .* give the tier "adapters"'):
        tier(engine=engine)
    assert store(tier(engine=engine, adapters="1"), keys(1), [0]).success
    assert [look_up(tier(engine=engine, adapters=it), keys(1)) for it in "12"] == [[HIT], [MISS]]


def nowhere(*_: Any, **__: Any) -> Any:
    raise OSError("offline")


def test_weights_without_a_fingerprint_are_refused_by_name(
    tier: Maker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="--load-format dummy: random weights have no fingerprint"):
        tier(engine=Engine(model, **{"load_config.load_format": "dummy"}))
    with pytest.raises(ArgumentError, match=r"holds no weights: no file ends in \.safetensors"):
        tier(engine=Engine(tmp_path))
    # A file can stand for them, but for the processor of images.
    (tmp_path / "version").write_text("17")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=nowhere))
        tier(engine=Engine(tmp_path / "nowhere"), weights=str(tmp_path / "version"))
        with pytest.raises(ArgumentError, match="are in no folder of this machine"):
            tier(engine=Engine(tmp_path / "nowhere", **images()), weights=str(tmp_path / "version"))
    tier(engine=Engine(model, **{"load_config.load_format": "dummy"}), weights=str(tmp_path / "version"))


# --------------------------------------------------------------------------------------------------------- events


def test_routers_are_told_what_was_stored_and_what_was_gone(tier: Maker) -> None:
    one = tier(events=True)
    known = keys(1, 2)
    assert store(one, known, [0, 1]).success
    assert [(event.keys, event.medium, event.removed) for event in one.take_events()] == [
        (known, door.Medium.CPU, False)
    ]
    assert list(one.take_events()) == []
    assert not load(one, [*known, *keys(3)], [2, 3, 4]).success
    assert [(event.keys, event.removed) for event in one.take_events()] == [(keys(3), True)]
    # A failure of the pool says nothing of the blocks.
    one._cache = Watched(one._cache, submit_get=fails)
    assert not load(one, known, [0, 1]).success
    assert list(one.take_events()) == []


def test_nobody_is_told_if_vllm_publishes_no_events(tier: Maker) -> None:
    one = tier()
    assert store(one, keys(1), [0]).success
    assert list(one.take_events()) == []


# ---------------------------------------------------------------------------------------------- changes of weights


def test_a_drain_waits_for_all_transfers_and_their_results_are_kept(tier: Maker) -> None:
    one = tier()
    one._cache = watched = Watched(one._cache)
    submitted = [job(keys(number), [number]) for number in range(CHUNKS)]
    for transfer in submitted:
        one.submit_store(transfer)
    one.drain_jobs()
    assert watched.calls == [("submit_put", 1)] * CHUNKS + [("drain", True), ("close", 0)]
    assert one.has_pending_work()
    assert [(transfer.job_id, transfer.success) for transfer in one.get_finished_jobs()] == [
        (transfer.job_id, True) for transfer in submitted
    ]
    assert not one.has_pending_work()


def test_drains_leave_no_description_of_an_identity_that_nobody_has(tier: Maker, scratch: Path) -> None:
    one = tier()

    def described() -> int:
        return len(one._pool.list("/kv/vllm/id/"))

    assert described() == 1
    for number in range(3):
        one.drain_jobs()
        assert store(one, keys(number), [0]).success
        assert described() == 2
    one.shutdown()
    with polder.Pool(scratch / "pool") as pool:
        assert len(pool.list("/kv/vllm/id/")) == 1


def test_after_a_drain_nobody_knows_the_weights_and_no_old_block_is_met(tier: Maker) -> None:
    one, two = tier(host=0), tier(host=1)
    assert store(one, keys(1), [0]).success
    # In the same step of the scheduler.
    assert two.lookup(keys(1)[0], request()) is HIT
    two.drain_jobs()
    assert look_up(two, keys(1)) == [MISS]
    assert store(two, keys(2), [0]).success
    assert look_up(two, keys(2)) == [HIT] and look_up(one, keys(1, 2)) == [HIT, MISS]


def test_after_a_drain_a_file_that_stands_for_the_weights_is_read_again(tier: Maker, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("1")
    one = tier(weights=str(version))
    assert store(one, keys(1), [0]).success
    for text, expected in (("1", HIT), ("2", MISS), ("1", HIT)):
        version.write_text(text)
        one.drain_jobs()
        assert look_up(one, keys(1)) == [expected]
    version.unlink()
    one.drain_jobs()
    assert look_up(one, keys(1)) == [MISS]


def test_a_tier_that_is_shut_down_lets_go_of_the_primary_tier(tier: Maker) -> None:
    one = tier()
    assert store(one, keys(1), [0]).success
    one.shutdown()
    one._primary_kv_view.release()
    assert look_up(one, keys(2)) == [MISS]


# ---------------------------------------------------------------------------------------------------- fingerprints


@pytest.fixture
def read(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that have been hashed, as if they had been written some time ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    monkeypatch.setattr(of_files, "_SETTLED_SECONDS", -1000)
    names: list[str] = []
    digest = of_files.hashlib.file_digest

    def noted(file: Any, name: str) -> Any:
        names.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(of_files.hashlib, "file_digest", noted)
    return names


def test_a_file_is_read_once_for_its_fingerprint(model: Path, read: list[str]) -> None:
    first = fingerprint(model)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert fingerprint(model) == first and len(read) == 2
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert fingerprint(model) != first and read[2:] == ["model.safetensors"]


def test_what_a_model_computes_with_is_in_its_fingerprint_and_no_name_is(model: Path, read: list[str]) -> None:
    first = fingerprint(model)
    model.rename(model.with_name("elsewhere"))
    elsewhere = model.with_name("elsewhere")
    (elsewhere / "tokenizer.json").write_text("{}")
    assert fingerprint(elsewhere) == first
    (elsewhere / "config.json").write_text('{"rope_theta": 1e6}')
    assert fingerprint(elsewhere) != first


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_files, "_SETTLED_SECONDS", 1000)
    assert fingerprint(model) == fingerprint(model)
    assert len(read) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seen": 1}', "\0"])
def test_a_damaged_note_of_a_hash_is_hashed_again(model: Path, read: list[str], text: str) -> None:
    first = fingerprint(model)
    for note in (model.parent / "polder/fingerprints").iterdir():
        note.write_text(text)
    assert fingerprint(model) == first and len(read) == 4


def test_a_file_that_changes_while_it_is_hashed_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    digest = of_files.hashlib.file_digest

    def changed(file: Any, name: str) -> Any:
        found = digest(file, name)
        Path(file.name).write_bytes(b"a longer text than before")
        return found

    monkeypatch.setattr(of_files.hashlib, "file_digest", changed)
    with pytest.raises(ArgumentError, match="changed while it was hashed"):
        fingerprint(model)


# ------------------------------------------------------------------------------------------------- engines on a CPU


class Region:
    """A primary tier of one worker."""

    def __init__(self, chunks: int, row: int) -> None:
        self.rows = torch.zeros(chunks, row, dtype=torch.int8)
        self._used = 0
        self.is_clean = False

    def create_next_worker_view(self, nbytes: int) -> Any:
        self._used += nbytes
        return self.rows[:, self._used - nbytes : self._used]

    def cleanup(self) -> None:
        self.is_clean = True


def moved(block_ids: list[int], sizes: list[int], first: list[int]) -> SimpleNamespace:
    return SimpleNamespace(block_ids=np.array(block_ids), group_sizes=sizes, block_indices=first)


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_a_worker_on_a_cpu_brings_blocks_back_as_they_were(blocks_per_chunk: int) -> None:
    # Two groups: the first with two tensors of which one has padded pages, the second with a tensor of its own.
    pages = [64, 48, 32]
    tensors = [torch.randint(-128, 127, (12, page), dtype=torch.int8) for page in pages]
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=tensor.shape[1]) for tensor in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=0, page_size_bytes=64), SimpleNamespace(tensor_idx=1, page_size_bytes=40)],
            [SimpleNamespace(tensor_idx=2, page_size_bytes=32)],
        ],
    )
    region = Region(10, sum(pages) * blocks_per_chunk)
    worker = door.CopyingWorker(caches, blocks_per_chunk, region)
    # The first group begins in the middle of a chunk, at the second block of its request.
    group_sizes, first = [5, 4], [1, 3]
    spans = [
        -(-(size + at % blocks_per_chunk) // blocks_per_chunk) for size, at in zip(group_sizes, first, strict=True)
    ]
    chunks = SimpleNamespace(block_ids=np.array([7, 2, 9, 0, 4, 5, 1, 3, 8][: sum(spans)]))
    before = [tensor.clone() for tensor in tensors]
    assert worker.submit_store(1, moved([3, 1, 4, 0, 5, 9, 2, 6, 8], group_sizes, first), chunks)
    target = [11, 10, 7, 3, 1, 0, 11, 4, 5]
    for tensor in tensors:
        tensor.zero_()
    assert worker.submit_load(2, chunks, moved(target, group_sizes, first), expedited=True)
    for old, new in zip([3, 1, 4, 0, 5], target[:5], strict=True):
        assert torch.equal(tensors[0][new], before[0][old])
        assert torch.equal(tensors[1][new, :40], before[1][old, :40]) and not tensors[1][new, 40:].any()
    for old, new in zip([9, 2, 6, 8], target[5:], strict=True):
        assert torch.equal(tensors[2][new], before[2][old])
    results = worker.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in results] == [
        (1, True, 648),
        (2, True, 648),
    ]
    assert worker.get_finished() == []
    worker.shutdown()
    assert region.is_clean


def test_a_group_without_blocks_moves_nothing() -> None:
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=torch.ones(4, 64, dtype=torch.int8), page_size_bytes=64)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=64)]] * 2,
    )
    region = Region(4, 64)
    worker = door.CopyingWorker(caches, 1, region)
    worker.submit_store(1, moved([2], [0, 1], [0, 0]), SimpleNamespace(block_ids=np.array([3])))
    assert region.rows.sum(1).tolist() == [0, 0, 0, 64]


# --------------------------------------------------------------------------------------------------- what vLLM sees


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_one_line_says_what_is_missing() -> None:
    ended = subprocess.run([sys.executable, "-c", "import polder.kv.vllm"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: polder.kv.vllm needs vLLM 0.30 to 0.33 beside Polder, in one environment: No module named 'vllm'"
    )


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed, and has loaded the plug-in")
def test_the_plugin_registers_all_classes_and_harms_no_vllm_without_tiers() -> None:
    vllm_plugin.register.__wrapped__()
    if not HAS_VLLM:
        assert {"polder": loader.PolderLoader} == vllm_stub.LOADERS
    with mock.patch.dict(sys.modules, vllm_stub.modules()):
        vllm_plugin.register.__wrapped__()
        names = [
            vllm_stub.MODULES[f"{vllm_stub.OFFLOAD}.{module}"][registry].names
            for module, registry in (("tiering.factory", "SecondaryTierFactory"), ("factory", "OffloadingSpecFactory"))
        ]
    assert names == [
        {"polder": ("polder.kv.vllm", "PolderTier")},
        {"PolderCpuSpec": ("polder.kv.vllm", "PolderCpuSpec")},
    ]
    assert all(hasattr(door, name) for _, name in (*names[0].values(), *names[1].values()))


class Tiny(torch.nn.Module):
    """Loads as vLLM's models do: it says what it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def load_weights(self, weights: Any) -> set[str]:
        loaded = {name for name, tensor in weights if self.get_parameter(name).data.copy_(tensor) is not None}
        return loaded


def load_config(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(load_format="polder", model_loader_extra_config=options)


def test_an_engine_loads_a_version_and_its_cache_knows_which(
    tier: Maker, model: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier().shutdown()
    at = str(scratch / "pool")
    made, config_of = [Tiny(), Tiny()], SimpleNamespace(quantization=None)
    with polder.Pool(at) as pool:
        numbers = [polder.weights.publish("llm", model.state_dict(), pool=pool).number for model in (*made, made[0])]
    loaded = Tiny()
    for number, published in ((1, made[0]), (2, made[1]), (None, made[0])):
        given = {"name": "llm", "pool": at} | ({"number": numbers[number - 1]} if number else {})
        if number == 1:
            # Two are kept.
            with pytest.raises(polder.NotFoundError, match="keeps no version 1"):
                loader.PolderLoader(load_config(**given)).load_weights(loaded, config_of)
            continue
        loader.PolderLoader(load_config(**given)).load_weights(loaded, config_of)
        assert all(
            torch.equal(one, other) for one, other in zip(loaded.parameters(), published.parameters(), strict=True)
        )

    def identity(**options: Any) -> str:
        engine = Engine(model)
        engine.load_config = load_config(name="llm", pool=at, **options)
        return tier(engine=engine)._identity["weights"]

    assert identity(number=2) != identity(number=3)
    assert identity(number=2) == identity(number=2)
    with pytest.raises(ArgumentError, match='give --model-loader-extra-config a "number"'):
        identity()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ArgumentError, match="2 workers load these weights"):
        loader.PolderLoader(load_config(name="llm", pool=at)).load_weights(loaded, config_of)


def test_what_an_engine_cannot_load_is_named(tier: Maker, scratch: Path) -> None:
    tier().shutdown()
    at = str(scratch / "pool")
    for options, what in [
        ({}, "say whose weights"),
        ({"name": 3}, "'name' is 3"),
        ({"name": "llm", "number": "3"}, "'number' is '3'"),
        ({"name": "llm", "path": "/x"}, "'path' is '/x'"),
    ]:
        with pytest.raises(ArgumentError, match=what):
            loader.PolderLoader(load_config(**options)).download_model(None)
    with polder.Pool(at) as pool:
        polder.weights.publish("llm", {"first.weight": torch.ones(4, 3)}, pool=pool)
    part = loader.PolderLoader(load_config(name="llm", pool=at))
    with pytest.raises(
        ArgumentError, match=r"version 1 of the weights llm lacks first\.bias, second\.bias, second\.weight"
    ):
        part.load_weights(Tiny(), SimpleNamespace(quantization=None))


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_vllm_finds_the_tier_and_the_spec_by_their_names() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    load_general_plugins()
    assert type(get_model_loader(LoadConfig(load_format="polder"))) is loader.PolderLoader
    assert SecondaryTierFactory.get_tier_class({"type": "polder"}) is door.PolderTier
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "PolderCpuSpec"}) is door.PolderCpuSpec


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_stub_has_the_signatures_of_vllm() -> None:
    for path, names in vllm_stub.MODULES.items():
        real = importlib.import_module(path)
        for name, ours in names.items():
            theirs = getattr(real, name)
            if isinstance(ours, str | dict):
                assert isinstance(theirs, type(ours)) and set(ours) <= set(theirs), name
            elif dataclasses.is_dataclass(ours):
                assert fields(ours) == fields(theirs), name
            elif inspect.isclass(ours):
                assert abstract(ours) == abstract(theirs), name
                assert [member.name for member in getattr(ours, "__members__", {}).values()] == [
                    *getattr(theirs, "__members__", ())
                ]
                for method, function in vars(ours).items():
                    if inspect.isfunction(function) and not method.startswith("_generate"):
                        assert parameters(function) == parameters(getattr(theirs, method)), f"{name}.{method}"
            elif inspect.isfunction(ours):
                assert parameters(ours) == parameters(theirs), name
            else:
                used = vars(ours).keys() - {"names"}
                assert used and all(hasattr(theirs, attribute) for attribute in used), name


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_what_is_alike_are_fields_of_vllm() -> None:
    import vllm.config
    from vllm.v1 import kv_cache_interface
    from vllm.v1.kv_offload import config as offloading

    places = (vllm.config, kv_cache_interface, offloading)
    for kind, names in vllm_identity._ALIKE.items():
        if kind != "PreTrainedConfig":
            found = next(getattr(place, kind) for place in places if hasattr(place, kind))
            # vLLM 0.31 has had one more.
            missing = set(names.split()) - {it.name for it in dataclasses.fields(found)}
            assert missing <= {"user_specified_mamba_block_size"}, kind


def abstract(of: Any) -> set[str]:
    return set(getattr(of, "__abstractmethods__", ()))


def fields(of: Any) -> list[tuple[str, str]]:
    return [(it.name, str(it.default)) for it in dataclasses.fields(of)]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(it.name, it.kind, it.default) for it in inspect.signature(function).parameters.values()]
