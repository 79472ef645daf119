import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make torch` installs it")

import polder  # noqa: E402
import polder.weights  # noqa: E402
from polder import _core  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def pool(scratch: Path) -> Iterator[polder.Pool]:
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as made:
        yield made


def filled(step: int) -> dict[str, torch.Tensor]:
    """Tensors of several types, one of which no step changes."""
    draw = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.arange(3000, dtype=torch.float32).reshape(10, 20, 15),
        "half": torch.randn(7, 33, generator=draw).to(torch.bfloat16),
        "byte": torch.randint(256, (5,), dtype=torch.uint8, generator=draw),
        "scalar": torch.tensor(float(step)),
        "none": torch.empty(0, 4),
    }


def same(found: polder.weights.Weights, wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        read = found[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape) and torch.equal(read, tensor), name


def test_versions_are_published_and_two_are_kept(pool: polder.Pool) -> None:
    for step in (1, 2, 3):
        published = polder.weights.publish("llm", filled(step), label=f"step {step}", pool=pool)
        assert published.number == step
        assert (published.shared >= 12_000) == (step > 1), "what is frozen is copied once"
    with polder.weights.open("llm", pool=pool) as newest, polder.weights.open("llm", 2, pool=pool) as older:
        assert (newest.number, newest.label, older.number) == (3, "step 3", 2)
        same(newest, filled(3))
        same(older, filled(2))
        polder.weights.publish("llm", filled(4), pool=pool)
        polder.weights.publish("llm", filled(5), pool=pool)
        same(older, filled(2))
    with pytest.raises(polder.NotFoundError, match="keeps no version 2 in this pool"):
        polder.weights.open("llm", 2, pool=pool)
    missing = r"no weights other were published in this pool; .*polder\.weights\.publish"
    for number in (None, 1):
        with pytest.raises(polder.NotFoundError, match=missing):
            polder.weights.open("other", number, pool=pool)


def test_a_fingerprint_is_of_the_contents(pool: polder.Pool) -> None:
    def of(tensors: dict[str, torch.Tensor], label: str = "") -> str:
        number = polder.weights.publish("llm", tensors, label=label, pool=pool).number
        with polder.weights.open("llm", number, pool=pool) as found:
            return found.fingerprint

    first = of(filled(1))
    assert of(filled(2)) != first
    assert of(dict(reversed(filled(1).items())), "rolled back") == first
    assert of({**filled(1), "half": filled(1)["half"].view(torch.float16)}) != first
    assert of({**filled(1), "half": filled(1)["half"].reshape(33, 7)}) != first


def test_a_model_loads_a_version_and_strides_do_not_matter(pool: polder.Pool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    polder.weights.publish("net", model.state_dict(), pool=pool)
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2))
    with polder.weights.open("net", pool=pool) as weights:
        other.load_state_dict(weights)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    lazy = torch.complex(torch.ones(3), torch.ones(3)).conj()
    polder.weights.publish("net", {"z": lazy}, pool=pool)
    with polder.weights.open("net", pool=pool) as weights:
        assert torch.equal(weights["z"], lazy)


def test_parts_are_read_as_a_worker_of_tensor_parallelism_does(pool: polder.Pool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    whole = {f"t{dims}": torch.randn([dice.randint(1, 6) for _ in range(dims)]) for dims in range(1, 5)}
    polder.weights.publish("llm", whole, pool=pool)
    with polder.weights.open("llm", pool=pool) as weights:
        for _ in range(300):
            name = dice.choice(list(whole))
            tensor = whole[name]
            first = [dice.randrange(size) for size in tensor.shape]
            shape = [dice.randint(0, size - begin) for begin, size in zip(first, tensor.shape, strict=True)]
            into = torch.full(shape, torch.nan)
            weights.read_into(name, into, first)
            part = tensor[tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True))]
            assert torch.equal(into, part), (name, first, shape)
        into = torch.empty(2, 2)
        for bad, offset, what in [
            (torch.empty(7), None, "not inside"),
            (torch.empty(1), (7,), "not inside"),
            (torch.empty(1), (-1,), "offset is -1"),
            (torch.empty(1, 1), None, "not inside"),
            (torch.empty(1, dtype=torch.float64), None, "dtype"),
        ]:
            with pytest.raises(polder.ArgumentError, match=what):
                weights.read_into("t1", bad, offset)
        with pytest.raises(polder.ArgumentError, match="contiguous"):
            weights.read_into("t2", into.T, (0, 0))
        one = torch.full((5, 2), torch.nan)[:1, :1]
        weights.read_into("t2", one, (0, 0))
        assert one.item() == whole["t2"][0, 0]
        with pytest.raises(KeyError, match="'t9' is no tensor of the weights llm, version 1"):
            weights["t9"]


def test_one_element_of_a_larger_tensor_is_published(pool: polder.Pool) -> None:
    polder.weights.publish("llm", {"w": torch.arange(10.0).reshape(5, 2)[2:3, 1:]}, pool=pool)
    with polder.weights.open("llm", pool=pool) as weights:
        assert torch.equal(weights["w"], torch.tensor([[5.0]]))


def test_a_timeout_that_is_no_number_of_seconds_is_refused(pool: polder.Pool) -> None:
    for timeout in (float("nan"), -1, "1", True):
        with pytest.raises(polder.ArgumentError, match=r"timeout is .*; give seconds, 0 or more"):
            polder.weights.wait("llm", timeout=timeout, pool=pool)  # type: ignore[arg-type]


def test_a_number_that_no_version_can_have_is_refused(pool: polder.Pool) -> None:
    polder.weights.publish("m", {"w": torch.ones(2)}, pool=pool)
    for number in (float("nan"), float("inf"), "1", None, True, -1):
        with pytest.raises(polder.ArgumentError, match="newer_than is"):
            polder.weights.wait("m", number, timeout=60, pool=pool)  # type: ignore[arg-type]
    with polder.weights.wait("m", np.int64(0), timeout=60, pool=pool) as weights:  # type: ignore[arg-type]
        for offset in (0, (True,), (0.0,), "0", (-1,)):
            with pytest.raises(polder.ArgumentError, match="offset is"):
                weights.read_into("w", torch.ones(1), offset)  # type: ignore[arg-type]
        weights.read_into("w", torch.ones(1), np.array([1]))  # type: ignore[arg-type]
        with pytest.raises(polder.ArgumentError, match="and not a ndarray"):
            weights.read_into("w", np.ones(2, np.float32))  # type: ignore[arg-type]
    for number in (-1, 2**64, "1", True):
        with pytest.raises(polder.ArgumentError, match="number is"):
            polder.weights.open("m", number, pool=pool)  # type: ignore[arg-type]
    for given in (0, "pool"):
        with pytest.raises(polder.ArgumentError, match=f"pool is {given!r}; give a polder.Pool"):
            polder.weights.open("m", pool=given)  # type: ignore[arg-type]
    with pytest.raises(polder.ArgumentError, match="tensors is a Linear; give a mapping, such as"):
        polder.weights.publish("m", torch.nn.Linear(1, 1), pool=pool)  # type: ignore[arg-type]


def test_names_and_labels_that_are_no_text_leave_the_version_before(pool: polder.Pool) -> None:
    polder.weights.publish("m", {"w": torch.ones(2)}, label="good", pool=pool)
    for label in (5, None, ["a"], float("nan"), b"a", "\ud800"):
        with pytest.raises(polder.ArgumentError, match="the label is"):
            polder.weights.publish("m", {"w": torch.zeros(2)}, label=label, pool=pool)  # type: ignore[arg-type]
    for key in (5, None, b"w", "\ud800"):
        with pytest.raises(polder.ArgumentError, match="the name of a tensor is"):
            polder.weights.publish("m", {key: torch.zeros(2)}, pool=pool)  # type: ignore[dict-item]
        with pytest.raises(polder.ArgumentError, match="the name of a model is"):
            polder.weights.publish(key, {"w": torch.zeros(2)}, pool=pool)  # type: ignore[arg-type]
    with polder.weights.open("m", pool=pool) as read:
        assert (read.number, read.label) == (1, "good")


def test_a_backward_pass_sees_that_a_tensor_was_filled(pool: polder.Pool) -> None:
    polder.weights.publish("m", {"w": torch.ones(2, 3)}, pool=pool)
    with polder.weights.open("m", pool=pool) as read:
        for shape in [(2, 3), (1, 2)]:
            x, w = torch.ones(shape, requires_grad=True), torch.zeros(shape)
            loss = (x * w).sum()
            read.read_into("w", w)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        read.read_into("w", torch.nn.Parameter(torch.zeros(2, 3)))
        with torch.inference_mode():
            read.read_into("w", torch.zeros(2, 3))


def test_the_files_that_an_index_names_are_published_or_none(pool: polder.Pool, scratch: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, scratch / "model-1.safetensors")
    save_file({"a": torch.zeros(2)}, scratch / "consolidated.safetensors")
    index = scratch / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    with pytest.raises(polder.ArgumentError, match=r"lacks model-2\.safetensors"):
        polder.weights.publish_file("m", scratch, pool=pool)
    save_file({"b": torch.ones(3)}, scratch / "model-2.safetensors")
    polder.weights.publish_file("m", scratch, pool=pool)
    with polder.weights.open("m", pool=pool) as read:
        assert {name: tensor.sum().item() for name, tensor in read.items()} == {"a": 2.0, "b": 3.0}
    for text in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(text)
        with pytest.raises(polder.ArgumentError, match="no index of files"):
            polder.weights.publish_file("m", scratch, pool=pool)
    os.mkfifo(scratch / "pipe.safetensors")
    with pytest.raises(polder.ArgumentError, match="is no file"):
        polder.weights.publish_file("m", scratch / "pipe.safetensors", pool=pool)


def test_damage_is_found_in_a_part_too(pool: polder.Pool) -> None:
    polder.weights.publish("llm", {"w": torch.ones(100, 100)}, pool=pool)
    with polder.weights.open("llm", pool=pool) as weights:
        at = Path(pool.path).read_bytes().index(bytes(torch.ones(1000).numpy()))
        for offset in (at + 4096, at + 20_000):
            damage(pool, offset)
            for _ in range(2):
                with pytest.raises(polder.CorruptError):
                    weights.read_into("w", torch.empty(1, 1), (99, 99))
            with pytest.raises(polder.CorruptError):
                weights["w"]
            damage(pool, offset)
        weights.read_into("w", part := torch.empty(1, 1), (99, 99))
        assert part == 1


def damage(pool: polder.Pool, offset: int) -> None:
    """Changes a bit, or changes it back."""
    with Path(pool.path).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_record_that_does_not_fit_is_corrupt(pool: polder.Pool) -> None:
    store = _core.Store(pool, "weights/llm")
    good = {"label": "", "tensors": {"w": ["float32", [2]]}}
    for bad in [
        None,
        [],
        {},
        {**good, "label": 1},
        {**good, "tensors": {"w": ["float32", [3]]}},
        {**good, "tensors": {"w": ["float32", [-1, -2]]}},
        {**good, "tensors": {"w": ["nn", [2]]}},
        {**good, "tensors": {"v": ["float32", [2]]}},
        {**good, "tensors": {"w": 1}},
    ]:
        store.publish([("/w", bytes(8)), ("weights", json.dumps(bad).encode())])
        with pytest.raises(polder.CorruptError, match="does not say what it holds"):
            polder.weights.open("llm", pool=pool)
    store.publish([("/w", bytes(8)), ("weights", json.dumps(good).encode())])
    with polder.weights.open("llm", pool=pool) as found:
        assert found["w"].tolist() == [0, 0]
    store.close()


def test_what_is_no_tensor_is_refused_before_anything_is_published(pool: polder.Pool) -> None:
    for bad in (1, torch.ones(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(polder.ArgumentError, match="'bad'"):
            polder.weights.publish("llm", {"good": torch.ones(2), "bad": bad}, pool=pool)  # pyright: ignore[reportArgumentType]
    with pytest.raises(polder.PoolFullError):
        polder.weights.publish("llm", {"large": torch.empty(80 << 20, dtype=torch.uint8)}, pool=pool)
    assert pool.list("/version/weights/llm/") == [] or all(
        not it.name.endswith("/1") for it in pool.list("/version/weights/llm/")
    )


def test_a_tensor_whose_storage_was_freed_is_refused_both_ways(pool: polder.Pool) -> None:
    freed = torch.ones(64, 32)
    turned, part = freed.t(), freed[1:]
    freed.untyped_storage().resize_(0)
    short = torch.ones(64, 32)
    cut = [short, short.t(), short[1:]]
    short.untyped_storage().resize_(short.nbytes - 1)
    for bad in (freed, part, turned, *cut):
        with pytest.raises(polder.ArgumentError, match="'bad' has no memory to read"):
            polder.weights.publish("llm", {"good": torch.ones(2), "bad": bad}, pool=pool)
    polder.weights.publish("llm", {"w": torch.ones(64, 32)}, pool=pool)
    with polder.weights.open("llm", pool=pool) as weights:
        for into, offset in ((freed, (0, 0)), (part, (1, 0)), (short, (0, 0)), (cut[2], (1, 0))):
            with pytest.raises(polder.ArgumentError, match=r"32\] has no memory for its elements; gather it first"):
                weights.read_into("w", into, offset)


def test_a_reader_waits_for_the_next_version(pool: polder.Pool) -> None:
    with pytest.raises(TimeoutError, match="no version of the weights llm above 0"):
        polder.weights.wait("llm", timeout=0, pool=pool)
    polder.weights.publish("llm", filled(1), pool=pool)
    with polder.weights.wait("llm", timeout=0, pool=pool) as weights:
        assert weights.number == 1
    later = threading.Timer(0.05, lambda: polder.weights.publish("llm", filled(2), pool=pool))
    later.start()
    with polder.weights.wait("llm", 1, timeout=60, pool=pool) as weights:
        same(weights, filled(2))
    later.join()


def test_safetensors_go_in_and_come_out(pool: polder.Pool, scratch: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    folder = scratch / "model"
    folder.mkdir()
    with pytest.raises(polder.ArgumentError, match=r"has no file that ends in \.safetensors"):
        polder.weights.publish_file("llm", folder, pool=pool)
    tensors = filled(1)
    names = list(tensors)
    for index, part in enumerate((names[:2], names[2:])):
        safetensors.save_file({name: tensors[name] for name in part}, folder / f"model-{index}.safetensors")
    polder.weights.publish_file("llm", folder, label="v1", pool=pool)
    out = scratch / "out.safetensors"
    with polder.weights.open("llm", pool=pool) as found:
        found.save(out)
        with pytest.raises(FileNotFoundError):
            found.save(scratch / "missing" / "out.safetensors")
    back = safetensors.load_file(out)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in names)
    assert not list(scratch.glob(".out*"))
    polder.weights.publish("odd", {"odd": torch.ones(2, dtype=torch.complex128)}, pool=pool)
    refused = pytest.raises(polder.ArgumentError, match=r"file has no elements of torch\.complex128")
    with polder.weights.open("odd", pool=pool) as weights, refused:
        weights.save(scratch / "odd.safetensors")
    safetensors.save_file({names[0]: tensors[names[0]]}, folder / "again.safetensors")
    with pytest.raises(polder.ArgumentError, match="two files"):
        polder.weights.publish_file("llm", folder, pool=pool)
    (folder / "bad.safetensors").write_text("none")
    with pytest.raises(polder.ArgumentError, match=r"bad\.safetensors holds no safetensors .*check the path"):
        polder.weights.publish_file("llm", folder / "bad.safetensors", pool=pool)


PUBLISHER = """
import sys, torch, polder, polder.weights
with polder.Pool(sys.argv[1]) as pool:
    step = int(sys.argv[2])
    while True:
        step += 1
        polder.weights.publish("llm", {"a": torch.full((40_000,), step), "b": torch.full((10,), step)}, pool=pool)
        print(step, flush=True)
"""


def test_a_killed_trainer_leaves_the_last_whole_version(pool: polder.Pool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    rounds, published = 8, 0
    for _ in range(rounds):
        command = [sys.executable, "-c", PUBLISHER, str(pool.path), str(published)]
        environment = {**os.environ, "POLDER_RUN": str(Path(pool.path).parent)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout
            for _ in range(dice.randint(1, 12)):
                published = int(child.stdout.readline())
            threading.Event().wait(dice.random() * 0.01)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                with contextlib.suppress(ValueError):
                    published = max(published, int(line))
        with polder.weights.open("llm", pool=pool) as weights:
            values = {value for tensor in weights.values() for value in tensor.unique().tolist()}
        assert len(values) == 1 and min(values) in (published, published + 1), (values, published)
        published = int(values.pop())
    print(rounds, "kills")
