"""The door to LMCache: through its own adapter where that is installed, by `make kvpeers`, else through a stub."""

import importlib.util
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import polder
from polder.errors import ArgumentError
from polder.kv.lmcache import Connector

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
SIZES = 65536, 4096
METHODS = (
    "event_fd",
    "submit_batch_get",
    "submit_batch_set",
    "submit_batch_exists",
    "drain_completions",
    "close",
)
"""What LMCache 0.5.6 asks of a native plug-in, or refuses it."""
PATIENCE_SECONDS = 60


class Found:
    """What LMCache calls a bitmap."""

    def __init__(self, found: Sequence[bool]) -> None:
        self._found = found

    def test(self, index: int) -> bool:
        return self._found[index]


class Adapter:
    """What LMCache's NativeConnectorL2Adapter does with a connector, without its thread and its locks."""

    def __init__(self, client: Any) -> None:
        assert all(callable(getattr(client, it, None)) for it in METHODS)
        self._client, self._poll = client, select.poll()
        self._poll.register(int(client.event_fd()), select.POLLIN)
        self._tasks: dict[int, int] = {}
        self._ended: dict[int, Any] = {}

    def _submitted(self, future: Any, keys: Sequence[Any]) -> int:
        self._tasks[int(future)] = len(keys)
        return int(future)

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        names, views = [name_of(key) for key in keys], [it.byte_array for it in objects]
        return self._submitted(self._client.submit_batch_set(names, views), keys)

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], _layouts: dict[int, Any]) -> int:
        return self._submitted(self._client.submit_batch_exists([name_of(key) for key in keys]), keys)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        names, views = [name_of(key) for key in keys], [it.byte_array for it in objects]
        return self._submitted(self._client.submit_batch_get(names, views), keys)

    def _drain(self) -> None:
        if self._poll.poll(0):
            for future, is_good, _error, found in self._client.drain_completions():
                count = self._tasks.pop(int(future))
                given = found if found is not None else [is_good] * count
                self._ended[int(future)] = (is_good, Found(given if is_good else [False] * count))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        self._drain()
        ended, self._ended = self._ended, {}
        return {task: SimpleNamespace(is_successful=lambda good=good: good) for task, (good, _) in ended.items()}

    def query_lookup_and_lock_result(self, task: int) -> Any:
        self._drain()
        return self._ended.pop(task, (None, None))[1]

    query_load_result = query_lookup_and_lock_result

    def close(self) -> None:
        self._client.close()


def name_of(key: Any) -> str:
    """As LMCache's adapter writes a key."""
    name = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{name}@{key.cache_salt}" if key.cache_salt else name


Maker = Callable[..., Any]


@pytest.fixture
def server(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Makes adapters over one pool, each as a server of its host does."""
    for name, value in (("XDG_CACHE_HOME", scratch), ("POLDER_RUN", scratch), ("POLDER_COHERENCE", "software")):
        monkeypatch.setenv(name, str(value))
    polder.Pool(scratch / "pool", size="64MiB").close()
    weights = scratch / "weights"
    weights.write_bytes(b"weights")
    made: list[Any] = []

    def make(host: int = 0, **given: Any) -> Any:
        monkeypatch.setenv("POLDER_HOST", str(host))
        given = {"pool": str(scratch / "pool"), "weights": str(weights), "dtype": "bfloat16", **given}
        made.append(adapter_of(given))
        return made[-1]

    yield make
    for it in made:
        it.close()


def adapter_of(given: dict[str, Any]) -> Any:
    if not HAS_LMCACHE:
        return Adapter(Connector(**given))
    door: Any = importlib.import_module("lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter")
    config = door.NativePluginL2AdapterConfig.from_dict(
        {"module_path": "polder.kv.lmcache", "class_name": "Connector", "adapter_params": given}
    )
    return door._create_native_plugin_l2_adapter(config)


def keys(*numbers: int, **others: Any) -> list[Any]:
    parts = {"model_name": "llama", "kv_rank": 0, "object_group_id": 0, "cache_salt": "", **others}
    hashes = [bytes([number]) * 32 for number in numbers]
    if HAS_LMCACHE:
        api: Any = importlib.import_module("lmcache.v1.distributed.api")
        return [api.ObjectKey(chunk_hash=it, **parts) for it in hashes]
    return [SimpleNamespace(chunk_hash=it, **parts) for it in hashes]


def objects(*fills: int, size: int = SIZES[0]) -> list[Any]:
    """What LMCache hands over: memory whose bytes it shows."""
    return [SimpleNamespace(byte_array=memoryview(bytearray([fill]) * size)) for fill in fills]


def until(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while (found := ask()) is None or found in ({}, False):
        assert time.monotonic() < end, "no answer"
    return found


def store(server: Any, given: list[Any], blocks: list[Any]) -> bool:
    task = server.submit_store_task(given, blocks)
    return until(server.pop_completed_store_tasks)[task].is_successful()


def look_up(server: Any, given: list[Any]) -> list[bool]:
    task = server.submit_lookup_and_lock_task(given, {})
    found = until(lambda: server.query_lookup_and_lock_result(task))
    return [found.test(index) for index in range(len(given))]


def load(server: Any, given: list[Any], into: list[Any]) -> list[bool]:
    task = server.submit_load_task(given, into)
    found = until(lambda: server.query_load_result(task))
    return [found.test(index) for index in range(len(given))]


def test_what_one_server_stores_another_finds_and_loads(server: Maker) -> None:
    first, second = server(host=0), server(host=1)
    known = keys(1, 2, 3)
    assert look_up(second, known) == [False] * 3
    assert store(first, known, objects(11, 12, 13))
    assert look_up(second, [*known, *keys(4)]) == [True] * 3 + [False]
    into = objects(0, 0, 0, 0)
    assert load(second, [*known, *keys(4)], into) == [True] * 3 + [False]
    assert [set(it.byte_array) for it in into[:3]] == [{11}, {12}, {13}]
    assert store(second, known[:1], objects(11)), "it is there already"


def test_models_ranks_groups_salts_and_weights_never_meet(server: Maker, scratch: Path) -> None:
    one = server()
    assert store(one, keys(1), objects(1))
    for other in ({"model_name": "other"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "user"}):
        assert look_up(one, keys(1, **other)) == [False], other
    assert look_up(server(dtype="float16"), keys(1)) == [False]
    assert look_up(server(identity={"max_model_len": 8192}), keys(1)) == [False]
    for name in ("engine", "weights", "dtype"):
        with pytest.raises(polder.ArgumentError, match=f"identity: '{name}' is said by Polder itself"):
            server(identity={name: "mine"})
    with pytest.raises(polder.ArgumentError, match="dtype: 'auto' is no type of elements"):
        server(dtype="auto")
    (scratch / "weights").write_bytes(b"updated")
    assert look_up(server(), keys(1)) == [False]
    (scratch / "weights").write_bytes(b"weights")
    assert look_up(server(), keys(1)) == [True]


def test_blocks_of_two_sizes_lie_in_one_cache_and_a_block_of_another_size_is_a_miss(server: Maker) -> None:
    one, two = server(), server(host=1)
    small = keys(2, object_group_id=1)
    blocks = [*objects(1), *objects(2, size=SIZES[1])]
    assert store(one, [*keys(1), *small], blocks)
    # In one batch, also by a server that has put none of either.
    assert look_up(two, [*keys(1), *small]) == [True, True]
    into = [*objects(0), *objects(0, size=SIZES[1])]
    assert load(two, [*keys(1), *small], into) == [True, True]
    assert [set(it.byte_array) for it in into] == [{1}, {2}]
    assert load(two, keys(1), objects(0, size=SIZES[1])) == [False]


def test_a_cache_without_room_fails_the_store_and_stays_in_use(server: Maker) -> None:
    one = server(budget=0)
    assert not store(one, keys(1), objects(1))
    assert look_up(one, keys(1)) == [False]
    assert load(one, keys(1), objects(0)) == [False]


def test_a_key_that_is_not_lmcaches_is_named(scratch: Path, server: Maker) -> None:
    server()
    connector = Connector(pool=str(scratch / "pool"), weights=str(scratch / "weights"), dtype="bfloat16")
    block = bytearray(SIZES[0])
    jobs = [
        connector.submit_batch_exists(["llama@0@0@0011"]),
        connector.submit_batch_set(["x"], [block]),
        connector.submit_batch_get(["llama@0@0@" + "00" * 32], []),
    ]
    ended: dict[int, Any] = {}
    until(lambda: ended.update({it[0]: it[1:] for it in connector.drain_completions()}) or len(ended) == len(jobs))
    assert [ended[job][0] for job in jobs] == [False] * 3
    assert "llama@0@0@0011" in ended[jobs[0]][1] and "blake3" in ended[jobs[1]][1]
    assert "one for each key" in ended[jobs[2]][1]
    # Buffers are let go of, and a batch that cannot begin is refused at once.
    block.clear()
    with pytest.raises(ArgumentError, match="read-only"):
        connector.submit_batch_get(["llama@0@0@" + "00" * 32], [bytes(SIZES[0])])
    connector.close()
    connector.close()
    with pytest.raises(polder.ClosedError):
        connector.event_fd()


def test_weights_that_are_not_there_are_an_error(scratch: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Connector(weights=str(scratch / "nowhere"), dtype="bfloat16")


@pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed")
def test_the_stub_is_as_lmcache() -> None:
    door: Any = importlib.import_module("lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter")
    assert all(name_of(key) == door._object_key_to_string(key) for key in [*keys(1), *keys(2, cache_salt="user")])
    for name in vars(Adapter):
        assert name.startswith("_") or callable(getattr(door.NativeConnectorL2Adapter, name)), name
