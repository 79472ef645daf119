"""Snapshots: processes are killed, and others go on with the same bits."""

# torch's checkpoint module does not say what it exports.
# pyright: reportPrivateImportUsage=false

import hashlib
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Rank, killed_after, torchrun

import polder
from polder import _core

JOB = """
import hashlib, os, random, signal, sys
import torch
import polder.torch

killed, last = int(sys.argv[1]), 8
torch.manual_seed(1)
random.seed(2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).bfloat16()
model.register_buffer("seen", torch.tensor(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if sys.argv[2] == "restore":
    restored = polder.torch.restore("job", model, optimizer)
    step = restored.step
    print("restored", step, flush=True)
while step < last:
    if step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.randn(5, 8).bfloat16() * random.random()).float().square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.seen += 1
    step += 1
    if step % 2 == 0:
        polder.torch.snapshot("job", model, optimizer, step=step).wait()
bits = hashlib.sha256()
for tensor in [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]:
    bits.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
print("bits", bits.hexdigest(), int(model.seen), flush=True)
"""

FLUSHER = """
import sys
import torch
import polder, polder.torch

pool = polder.Pool(sys.argv[1], run=sys.argv[2])
step = int(sys.argv[4])
model = torch.nn.Linear(300, 300)
while True:
    step += 1
    with torch.no_grad():
        model.weight.fill_(step)
    polder.torch.snapshot("job", model, step=step, pool=pool, folder=sys.argv[3]).wait_flushed()
    print(step, flush=True)
"""

FULL = """
import sys
import torch
import polder, polder.torch

pool = polder.Pool(sys.argv[1], run=sys.argv[2])
for step, width in enumerate((8, 400, 8), 1):
    model = torch.nn.Linear(width, width)
    pending = polder.torch.snapshot(f"job{width}", model, step=step, pool=pool, folder=sys.argv[3])
    print(pending.wait().version, end=" ")
    try:
        print("on disk", pending.wait_flushed().name)
    except polder.TierFullError as error:
        print(error)
"""

WRITER = """
import sys
import numpy as np
import polder
from polder import _core

with polder.Pool(sys.argv[1], run=sys.argv[2]) as pool:
    store = _core.Store(pool, "s")
    step = int(sys.argv[3])
    while True:
        step += 1
        store.publish([(str(index), np.full(200_000, step)) for index in range(3)] + [("frozen", np.ones(1000))])
        print(step, flush=True)
"""


def job(scratch: Path, killed: int, mode: str) -> tuple[str, int]:
    """What a job has printed, and its exit code."""
    with Rank(JOB, killed, mode, POLDER_POOL=str(scratch / "pool"), POLDER_RUN=str(scratch)) as process:
        return process.communicate(timeout=120)[0], process.wait()


@pytest.mark.torch
def test_after_sigkill_another_process_goes_on_with_the_same_bits(scratch: Path) -> None:
    pytest.importorskip("torch")
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        pass
    whole, code = job(scratch, -1, "anew")
    assert code == 0, whole
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        _core.Store(pool, "job/0").remove()
    died, code = job(scratch, 5, "anew")
    assert code == -signal.SIGKILL, died
    after, _ = job(scratch, -1, "restore")
    assert after.splitlines() == ["restored 4", whole.strip()]


def test_a_writer_that_is_killed_leaves_the_version_before_whole(scratch: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice, last = random.Random(seed), 0
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        store = _core.Store(pool, "s")
        for _ in range(8):
            published = killed_after(WRITER, dice, 0.03, scratch / "pool", scratch, last)
            version = store.open()
            assert dict(version.tensors()) == {"0": 1_600_000, "1": 1_600_000, "2": 1_600_000, "frozen": 8000}
            steps = set[int]()
            for name in "012":
                array = np.empty(200_000, int)
                version.read_into(name, array)
                steps |= set(np.unique(array).tolist())
            version.close()
            assert len(steps) == 1, f"steps {steps} in one version"
            last = steps.pop()
            assert last >= published, f"step {published} was published, {last} is the newest"
            assert len(store.versions()) >= min(2, last)
        store.remove()
        assert pool.list("/version") == []


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_has_the_values_of_tensors_of_any_strides(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    import polder.torch

    count = torch.arange(48.0)
    state = {
        "turned": count.view(8, 6).t(),
        "channels": count.view(2, 2, 3, 4).to(memory_format=torch.channels_last),
        "columns": count.view(8, 6)[:, ::2],
        "repeated": count[:4].expand(3, 4),
        "conjugate": torch.complex(count, count + 1).view(8, 6).t().conj(),
    }
    dcp.save(state, storage_writer=polder.torch.SnapshotWriter("dcp", pool=pool), no_dist=True)
    for order in (torch.contiguous_format, torch.preserve_format):
        into = {name: torch.zeros_like(tensor, memory_format=order) for name, tensor in state.items()}
        dcp.load(into, storage_reader=polder.torch.SnapshotReader("dcp", pool=pool), no_dist=True)
        for name, tensor in state.items():
            assert torch.equal(into[name], tensor), name
    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(dcp.CheckpointException, match=r"shape \[64\] has no memory"):
        dcp.save({"w": freed}, storage_writer=polder.torch.SnapshotWriter("dcp", pool=pool), no_dist=True)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_through_the_pool(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    import polder.torch

    def state(value: int) -> dict[str, object]:
        weights = torch.full((5, 3), value, dtype=torch.bfloat16)
        return {"w": weights, "none": torch.empty(0), "deep": {"step": value, "list": [torch.tensor(value)]}}

    reader, writer = polder.torch.SnapshotReader("dcp", pool=pool), polder.torch.SnapshotWriter("dcp", pool=pool)
    for value in (1, 2):
        dcp.save(state(value), storage_writer=writer, no_dist=True)
    into = state(0)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["w"], torch.full((5, 3), 2, dtype=torch.bfloat16))  # pyright: ignore[reportArgumentType]
    assert str(into["deep"]) == str(state(2)["deep"])
    saving: Any = dcp.async_save(state(3), storage_writer=writer, no_dist=True)
    saving.result()
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert str(into) == str(state(3))
    # A rank has written its part, and nobody has published the metadata: the checkpoint before counts.
    store = _core.Store(pool, "dcp/0")
    store.publish([("w", np.zeros(3))])
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert str(into) == str(state(3))
    # The next one is over the part that counts, not over that.
    dcp.save(state(4), storage_writer=writer, no_dist=True)
    dcp.load(into, storage_reader=polder.torch.SnapshotReader("dcp", pool=pool, version=3), no_dist=True)
    assert str(into) == str(state(3))
    assert len(store.versions()) == 2


@pytest.mark.torch
def test_what_is_missing_or_does_not_fit_is_named(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    model = torch.nn.Linear(3, 2)
    with pytest.raises(polder.NotFoundError, match=r"no step of the snapshot absent is whole.* keeps steps: none"):
        polder.torch.restore("absent", model, pool=pool)
    made = polder.torch.snapshot("job", model, step=7, pool=pool).wait()
    assert (made.version, made.step, made.copied > 32, made.shared) == (1, 7, True, 0)
    again = polder.torch.snapshot("job", model, step=8, pool=pool).wait()
    assert again.version == 2
    with pytest.raises(polder.ArgumentError, match="the snapshot job has no optimizer"):
        polder.torch.restore("job", model, torch.optim.SGD(model.parameters(), 0.1), pool=pool)
    before = torch.get_rng_state()
    torch.rand(3)
    assert polder.torch.restore("job", model, pool=pool) == polder.torch.Restored(2, 8)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(polder.ArgumentError, match="begins with /"):
        polder.torch.snapshot("/job", model, pool=pool)
    # None of these is a name, a folder or a version that somebody meant.
    for name, given, said in (
        (None, {}, "the name of the snapshots is None; give text"),
        ("job", {"folder": ""}, "folder is ''; give a path"),
        ("job", {"folder": 5}, "folder is 5; give a path"),
        ("job", {"pool": "pool"}, "pool is 'pool'; give a polder.Pool"),
        ("job", {"extra": [1]}, "extra is a list; give a mapping"),
        ("job", {"optimizer": {}}, r"optimizer is a dict, which has no state_dict\(\)"),
        ("job", {"model": None}, r"model is a NoneType, which has no state_dict\(\)"),
    ):
        for call in (polder.torch.snapshot, polder.torch.restore):
            with pytest.raises(polder.ArgumentError, match=said):
                call(name, **{"model": model, "pool": pool, **given})
    for make in (polder.torch.SnapshotWriter, polder.torch.SnapshotReader):
        with pytest.raises(polder.ArgumentError, match="the name of the checkpoints is 5; give text"):
            make(5, pool=pool)
    with pytest.raises(polder.ArgumentError, match="version is True; give the number of a checkpoint from 0 on"):
        polder.torch.SnapshotReader("job", pool=pool, version=True)
    for version in (-1, 0, True, "2"):
        with pytest.raises(polder.ArgumentError, match=f"version is {version!r}; give the number of a version from 1"):
            polder.torch.restore("job", model, pool=pool, version=version)  # type: ignore[arg-type]
    store = _core.Store(pool, "job/0")
    with pytest.raises(polder.NotFoundError, match="keeps no version 9 in this pool; it keeps 1 and 2"):
        store.open(9)


@pytest.mark.torch
def test_what_training_does_after_the_call_is_not_in_the_snapshot(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 3).double())
    optimizer = torch.optim.AdamW(model.parameters())
    # Not in a row, empty, of one element.
    model.register_buffer("seen", torch.arange(6).reshape(2, 3).t())
    model.register_buffer("none", torch.empty(0))
    for step in range(1, 4):
        with torch.no_grad():
            model[1].weight.fill_(step)
        pending = polder.torch.snapshot("job", model, optimizer, step=step, pool=pool)
        with torch.no_grad():
            model[1].weight.fill_(-1)
        # What has not changed is not copied again.
        assert (pending.wait().shared >= 4 * 500 * 501) == (step > 1)
        assert pending.done()
    assert polder.torch.restore("job", model, optimizer, pool=pool).step == 3
    assert (model[1].weight == 3).all()
    assert torch.equal(model.seen, torch.arange(6).reshape(2, 3).t())


@pytest.mark.torch
def test_the_next_snapshot_says_that_the_last_was_not_published(scratch: Path) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    with polder.Pool(scratch / "pool", size="8MiB", run=scratch) as pool:
        small, large = torch.nn.Linear(8, 8), torch.nn.Linear(2000, 2000)
        polder.torch.snapshot("job", small, step=1, pool=pool)
        polder.torch.snapshot("job", large, step=2, pool=pool)
        with pytest.raises(polder.PoolFullError):
            polder.torch.snapshot("job", small, step=3, pool=pool)
        # It has been told.
        assert polder.torch.snapshot("job", small, step=3, pool=pool).wait().version == 2
        pending = polder.torch.snapshot("job", large, step=4, pool=pool)
        with pytest.raises(polder.PoolFullError):
            pending.wait()
        assert polder.torch.snapshot("job", small, step=5, pool=pool).wait().version == 3
        assert polder.torch.restore("job", small, pool=pool) == polder.torch.Restored(3, 5)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_new_pool_goes_on_from_disk(scratch: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    import polder.torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        for step in range(1, 4):
            loss = model[0](torch.randn(4, 3)).sum() + model[1](torch.randn(4, 2).bfloat16()).float().sum()
            loss.backward()
            optimizer.step()
            pending = polder.torch.snapshot("job", model, optimizer, step=step, pool=pool, folder=scratch / "disk")
        at = pending.wait_flushed()
        home = scratch / "disk/job/0"
        assert sorted(entry.name for entry in home.iterdir()) == ["00000002-step2", "00000003-step3"]
        assert at == home / "00000003-step3"
        drawn = torch.rand(3)
    (scratch / "pool").unlink()
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16())
    fresh = torch.optim.AdamW(other.parameters())
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        with pytest.raises(polder.NotFoundError, match=r"keeps steps: none; .*/disk/other/0 keeps steps: none"):
            polder.torch.restore("other", other, fresh, pool=pool, folder=scratch / "disk")
        restored = polder.torch.restore("job", other, fresh, pool=pool, folder=scratch / "disk")
        assert restored == polder.torch.Restored(3, 3, at)
        assert torch.equal(torch.rand(3), drawn)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
        assert str(fresh.state_dict()) == str(optimizer.state_dict())
        # What the pool has counts from now on, and disk goes on behind what is there.
        polder.torch.snapshot("job", other, fresh, step=4, pool=pool, folder=scratch / "disk").wait_flushed()
        assert polder.torch.restore("job", other, fresh, pool=pool, folder=scratch / "disk").folder is None
    into = {"model": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16()).state_dict()}
    dcp.load(into, checkpoint_id=at, no_dist=True)
    assert str(into["model"]) == str(model.state_dict())
    with polder.Pool(scratch / "new", size="64MiB", run=scratch) as pool:
        for file, how in (("__0_0.distcp", "holds other bytes"), (".metadata", "has 3 bytes of")):
            damaged = home / "00000004-step4" / file
            whole = damaged.read_bytes()
            flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
            damaged.write_bytes(flipped if file == "__0_0.distcp" else b"bad")
            with pytest.raises(polder.CorruptError, match=rf"{file} {how}.*remove its folder"):
                polder.torch.restore("job", other, fresh, pool=pool, folder=scratch / "disk")
            damaged.write_bytes(whole)
        (home / "00000004-step4" / "polder.json").unlink()
        with pytest.raises(polder.CorruptError, match=r"polder\.json cannot be read"):
            polder.torch.restore("job", other, fresh, pool=pool, folder=scratch / "disk")
        with pytest.raises(polder.ArgumentError, match=r"has a part \. or \.\."):
            polder.torch.snapshot("../job", other, pool=pool, folder=scratch / "disk")


@pytest.mark.torch
def test_a_process_that_is_killed_while_it_writes_to_disk_leaves_the_snapshot_before(scratch: Path) -> None:
    torch = pytest.importorskip("torch")
    from polder.torch import disk

    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice, last = random.Random(seed), 0
    home = disk.home_of(scratch / "disk", "job", 0)
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        for _ in range(3):
            published = killed_after(FLUSHER, dice, 0.05, *(scratch / name for name in ("pool", ".", "disk")), last)
            kept = disk.kept(home)
            assert len(kept) >= min(2, published)
            for step, folder in kept.items():
                saved, read_leaf = disk.read(folder)
                (weight,) = (leaf for key, leaf in saved["state"]["dict"][0][1]["dict"] if key == "weight")
                assert saved["step"] == step
                assert torch.equal(read_leaf(weight), torch.full((300, 300), float(step)))
            last = max(kept)
            assert last >= published, f"step {published} was on disk, {last} is the newest"


@pytest.mark.torch
def test_a_disk_that_is_full_is_named_and_stops_nobody(scratch: Path) -> None:
    pytest.importorskip("torch")
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        pass
    full = scratch / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=256k tmpfs {full}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace of its own")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", FULL]
    command += [str(scratch / "pool"), str(scratch), str(full)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert (first, third) == ("1 on disk 00000001-step1", "2 on disk 00000002-step3")
    needed = re.match(r"1 the snapshot of step 2 needs (\d+) bytes in .* and \d+ are free there; make room", second)
    assert needed and int(needed[1]) > 4 * 400 * 401, second
    assert "the snapshot job400 of step 2 is not on disk" in done.stderr


@pytest.mark.torch
def test_a_folder_that_cannot_be_written_is_named(pool: polder.Pool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    (tmp_path / "file").touch()
    pending = polder.torch.snapshot("job", torch.nn.Linear(2, 2), pool=pool, folder=tmp_path / "file")
    assert pending.wait().version == 1
    with pytest.raises(polder.TierError, match=r"cannot be written to .*file/job/0: .*give a folder that this process"):
        pending.wait_flushed()


@pytest.mark.torch
def test_only_what_comes_back_safely_is_taken(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"odd": Path("/")}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(
        polder.ArgumentError, match=r"/'model'/'_extra_state'/'odd' holds what a snapshot does not take"
    ):
        polder.torch.snapshot("job", Odd(2, 2), pool=pool)


@pytest.mark.torch
def test_a_step_that_nobody_could_restore_is_refused_before_anything_is_taken(scratch: Path) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        model = torch.nn.Linear(2, 2)
        for step in (100.0, True, None, "7", float("nan"), 1 << 70, -(1 << 63) - 1, np.float32(7), torch.tensor(7.5)):
            with pytest.raises(polder.ArgumentError, match=r"step is .*; give a whole number from -922"):
                polder.torch.snapshot("job", model, step=step, pool=pool, folder=scratch / "disk")  # type: ignore[arg-type]
        assert not pool.list("/version/") and not (scratch / "disk").exists()
        for step in (np.int64(7), torch.tensor(8), -(1 << 63), (1 << 64) - 1):
            job = f"job{int(step)}"
            polder.torch.snapshot(job, model, step=step, pool=pool, folder=scratch / "disk").wait_flushed()  # type: ignore[arg-type]
            with polder.Pool(scratch / f"pool{int(step)}", size="64MiB", run=scratch) as other:
                for place in (pool, other):
                    assert polder.torch.restore(job, model, pool=place, folder=scratch / "disk").step == int(step)


@pytest.mark.torch
@pytest.mark.parametrize("where", ["pool", "disk"])
def test_ranks_of_torchrun_go_on_from_the_newest_step_that_all_have(scratch: Path, where: str) -> None:
    torch = pytest.importorskip("torch")
    ended = torchrun("torch_snapshot.py", scratch, where)
    # As if nobody had died: what each rank draws is its own.
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    torch.manual_seed(7)
    model = torch.nn.Linear(20, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        for draw in draws:
            model(torch.randn(4, 20, generator=draw)).square().sum().backward()
        optimizer.step()
    bits = hashlib.sha256(b"".join(it.detach().numpy().tobytes() for it in model.parameters())).hexdigest()
    assert sorted(ended.stdout.split()) == [f"rank-{rank}-from-{where}-3-{bits}" for rank in range(2)]
