"""What a snapshot promises: which version, whose folder, which attempt, and which tensor."""

import collections
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RANKS, Rank

import polder
from polder import _core

torch = pytest.importorskip("torch")
import polder.torch  # noqa: E402
from polder.torch import disk  # noqa: E402
from polder.torch.state import serialize  # noqa: E402

pytestmark = pytest.mark.torch

HOLDER = """
import sys, time
import torch
import polder, polder.torch

pool = polder.Pool(sys.argv[1], size="32MiB", run=sys.argv[2])
model = torch.nn.Linear(4, 4)
polder.torch.snapshot("job", model, step=1, pool=pool, folder=sys.argv[3]).wait_flushed()
print("holds", flush=True)
sys.stdin.read() if sys.argv[4:] else time.sleep(100)
"""

WRITER = """
import itertools, sys
import torch
import polder, polder.torch

pool = polder.Pool(sys.argv[1], run=sys.argv[2])
model = torch.nn.Linear(30, 30)
for step in itertools.count(1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    polder.torch.snapshot("job", model, step=step, pool=pool).wait()
    if step == 3:
        print("begun", flush=True)
"""


def start(
    scratch: Path, ranks: int, number: object, to: object, *acts: object, script: str = "state_job.py"
) -> list[str]:
    """What each rank of a job has said; a start of its own each."""
    with contextlib.ExitStack() as ended:
        job = [
            ended.enter_context(Rank(RANKS / script, rank, ranks, scratch, number, to, *acts)) for rank in range(ranks)
        ]
        said = [process.communicate(timeout=120)[0].strip() for process in job]
        assert [process.returncode for process in job] == [0] * ranks, said
    return said


def filled(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


@pytest.mark.parametrize("where", ["pool", "folder", "new pools"])
def test_two_attempts_are_never_mixed(scratch: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to = "-" if where == "pool" else scratch / "disk"
    starts = [
        ("fill=1", "snap=100", "wait", "fill=2", "0:snap=200"),
        ("restore", "say", "wait", "fill=3", "1:snap=200"),
        ("restore", "say"),
    ]
    lines: list[str] = []
    for number, acts in enumerate(starts):
        monkeypatch.setenv("STATE_POOL", str(scratch / (f"pool-{number}" if where == "new pools" else "pool")))
        lines = start(scratch, 2, number, to, *acts)
        assert number == 0 or lines == ["100 1.0", "100 1.0"]


@pytest.mark.parametrize("where", ["pool", "folder"])
def test_what_a_dead_attempt_left_goes_once_the_next_has_a_whole_version(scratch: Path, where: str) -> None:
    to = "-" if where == "pool" else scratch / "disk"
    start(scratch, 2, 0, to, "fill=1", "snap=1", "snap=2", "wait", "0:snap=3")
    # The last one ends before it prunes; the one before it knows that 5 is whole, and keeps 4 beside it.
    start(scratch, 2, 1, to, "restore", *(act for step in range(3, 7) for act in ("wait", f"snap={step}")), "wait")
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        for rank in range(2):
            assert max(_core.Store(pool, f"job/{rank}").versions()) == 7
            assert 3 not in _core.Store(pool, f"job/{rank}").versions()
    if where == "folder":
        numbers = {number for number, _, _ in disk.named(scratch / "disk/job/0")}
        assert {7, 6} <= numbers and not {1, 2, 3} & numbers


@pytest.mark.parametrize("where", ["pool", "folder"])
def test_what_ranks_left_goes_once_a_smaller_job_has_two_versions_of_its_own(scratch: Path, where: str) -> None:
    to = "-" if where == "pool" else scratch / "disk"
    start(scratch, 4, 0, to, "fill=1", "snap=1", "snap=2")

    def kept() -> dict[int, set[int]]:
        """The versions of each rank."""
        if where == "folder":
            return {rank: {number for number, *_ in disk.named(scratch / f"disk/job/{rank}")} for rank in range(4)}
        with polder.Pool(scratch / "pool", run=scratch) as pool:
            return {rank: set(_core.Store(pool, f"job/{rank}").versions()) for rank in range(4)}

    # A job that restores nothing leaves all alone, also when it has versions.
    assert start(
        scratch, 3, 1, to, "fill=2", *(act for step in range(3, 7) for act in ("wait", f"snap={step}")), "wait"
    )
    assert all({1, 2} <= numbers for numbers in kept().values())
    # The spare of the first version is that of the ranks before.
    assert start(scratch, 2, 2, to, "restore", "say", "snap=7", "wait") == ["6 2.0"] * 2
    assert kept()[2] >= {1, 2, 6}
    assert (
        start(scratch, 2, 3, to, "restore", *(act for step in range(8, 12) for act in ("wait", f"snap={step}"))) != []
    )
    assert kept()[2] == kept()[3] == {1, 2}
    # A job that has read what is below goes on from there alone.
    assert start(scratch, 4, 4, to, "restore", "say") == ["11 2.0"] * 4


def test_an_old_pool_does_not_win_over_a_newer_folder(scratch: Path) -> None:
    folder = scratch / "disk"
    with (
        polder.Pool(scratch / "x", size="16MiB", run=scratch) as x,
        polder.Pool(scratch / "y", size="16MiB", run=scratch) as y,
    ):
        began: list[int] = []
        for pool, steps in ((x, 2), (y, 8), (x, 2), (y, 1)):
            model, step = filled(0), 0
            with contextlib.suppress(polder.NotFoundError):
                step = polder.torch.restore("job", model, pool=pool, folder=folder).step
            began.append(step)
            for after in range(step + 1, step + steps + 1):
                model = filled(after)
                polder.torch.snapshot("job", model, step=after, pool=pool, folder=folder).wait_flushed()
        assert began == [0, 2, 10, 12]
        assert list(disk.kept(folder / "job/0")) == [12, 13]


@pytest.mark.parametrize("where", ["pool", "folder"])
def test_another_number_of_ranks_goes_on_or_is_refused(scratch: Path, where: str) -> None:
    to = "-" if where == "pool" else scratch / "disk"
    assert start(scratch, 2, 0, to, "fill=5", "snap=1000", "say") == ["1000 5.0"] * 2
    assert start(scratch, 3, 1, to, "restore", "say", "fill=6", "snap=1100") == ["1000 5.0"] * 3
    assert start(scratch, 1, 2, to, "restore", "say", "fill=7", "snap=1200") == ["1100 6.0"]
    # Of ranks that do not have the same, others cannot go on; those of before do.
    assert start(scratch, 2, 3, to, "restore", "say", "1:fill=8", "snap=1300")[0] == "1200 7.0"
    lines = start(scratch, 3, 4, to, "restore", "fill=9", "snap=1")
    for line in lines:
        assert line.startswith("UnusableError") and "2 ranks made version" in line, lines
        assert "/'model'/'weight' of rank 1 is not that of rank 0; restore it on 2 ranks" in line, lines
    # What that job has published since, which restored nothing, comes after; nothing of the others has gone.
    assert start(scratch, 3, 5, to, "restore", "say") == ["1 9.0"] * 3


@pytest.mark.parametrize("where", ["pool", "folder"])
@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_dtensors_are_laid_out_anew_on_other_ranks(scratch: Path, where: str, ranks: int) -> None:
    to = "-" if where == "pool" else scratch / "disk"
    made = start(scratch, 2, 0, to, "save", script="state_shards.py")
    if where == "folder":
        (scratch / "pool").unlink()
    assert start(scratch, ranks, 1, to, "load", script="state_shards.py") == made[:1] * ranks


def test_a_part_that_was_never_whole_is_a_first_start_and_one_that_was_is_not(scratch: Path) -> None:
    assert start(scratch, 2, 0, "-", "0:restore", "1:restore", "fill=1", "0:snap=1") != []
    said = start(scratch, 2, 1, "-", "restore", "fill=2", "snap=2", "wait", "snap=3", "wait", "snap=4")
    assert all(line.startswith("NotFoundError no step of the snapshot job is whole on every rank") for line in said)
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        _core.Store(pool, "job/1").remove()
    for line in start(scratch, 2, 2, "-", "restore"):
        assert line.startswith("UnusableError") and "lacks the parts of ranks 1" in line and "was whole" in line


def test_a_reader_beside_a_writer_never_goes_back_and_always_finds_one(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="16MiB", run=scratch) as pool:
        with Rank(WRITER, scratch / "pool", scratch) as writer:
            assert writer.stdout.readline() == "begun\n"
            model, last = torch.nn.Linear(30, 30), 0
            for _ in range(150):
                step = polder.torch.restore("job", model, pool=pool).step
                assert step >= last
                assert all(bool((it == float(step)).all()) for it in model.parameters())
                last = step
        assert last > 3


def test_a_second_job_of_one_name_is_refused_and_told_which_process_has_it(scratch: Path) -> None:
    folder = scratch / "disk"
    with (
        polder.Pool(scratch / "other", size="16MiB", run=scratch) as other,
        Rank(HOLDER, scratch / "pool", scratch, folder) as holder,
    ):
        assert holder.stdout.readline() == "holds\n"
        with polder.Pool(scratch / "pool", run=scratch) as pool:
            with pytest.raises(polder.NameExistsError, match=rf"job/0 is being written by host 0 pid {holder.pid}"):
                polder.torch.snapshot("job", filled(1), step=5, pool=pool)
            # It may read.
            assert polder.torch.restore("job", filled(1), pool=pool).step == 1
            said = rf"disk/job/0 is in use by host .*, process {holder.pid}, attempt [0-9a-f]{{16}}; one process"
            with pytest.raises(polder.NameExistsError, match=said):
                polder.torch.snapshot("job", filled(1), step=5, pool=other, folder=folder)
            holder.kill()
            holder.wait()
            # What a dead one has is taken over.
            polder.torch.restore("job", filled(1), pool=pool, folder=folder)
            at = polder.torch.snapshot("job", filled(2), step=2, pool=pool, folder=folder).wait_flushed()
            assert at == folder / "job/0/00000002-step2"


def test_a_job_that_has_restored_does_not_publish_over_what_another_has_published_since(scratch: Path) -> None:
    start(scratch, 1, 0, "-", "snap=1")
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        model = torch.nn.Linear(4, 4, bias=False)
        polder.torch.restore("job", model, pool=pool)
        start(scratch, 1, 1, "-", "restore", "snap=2")
        with pytest.raises(polder.NameExistsError, match=r"would come after 2, which another attempt has published"):
            polder.torch.snapshot("job", model, step=3, pool=pool).wait()
        assert polder.torch.restore("job", model, pool=pool).step == 2
        assert polder.torch.snapshot("job", model, step=3, pool=pool).wait().version == 3


def test_threads_of_one_name_follow_each_other(pool: polder.Pool) -> None:
    def save(value: int) -> None:
        for step in range(20):
            polder.torch.snapshot("job", filled(value), step=value * 100 + step, pool=pool)

    threads = [threading.Thread(target=save, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = filled(0)
    step = polder.torch.restore("job", model, pool=pool).step
    assert (model.weight == step // 100).all()


def test_a_replica_of_torchft_has_snapshots_of_its_own(pool: polder.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for replica in ("a", "b"):
        monkeypatch.setenv("REPLICA_GROUP_ID", replica)
        polder.torch.snapshot("job", filled(ord(replica)), step=1, pool=pool).wait()
    names = {entry.name.rsplit("/", 2)[0] for entry in pool.list("/version/job/")}
    assert names == {"/version/job/replica-a", "/version/job/replica-b"}
    model = filled(0)
    monkeypatch.setenv("REPLICA_GROUP_ID", "a")
    polder.torch.restore("job", model, pool=pool)
    assert (model.weight == ord("a")).all()


# A folder of mine.


def test_what_is_not_a_leftover_of_a_snapshot_stays_in_the_folder(pool: polder.Pool, tmp_path: Path) -> None:
    home = tmp_path / "job/0"
    (home / ".git").mkdir(parents=True)
    (home / ".gitkeep").touch()
    (home / ".00000001.0123456789abcdef").mkdir()
    (home / ".00000001.0123456789abcdef/piece").touch()
    polder.torch.snapshot("job", filled(1), step=1, pool=pool, folder=tmp_path).wait_flushed()
    assert {it.name for it in home.iterdir()} == {".git", ".gitkeep", "00000001-step1"}


def test_a_link_in_the_place_of_a_folder_is_refused(pool: polder.Pool, tmp_path: Path) -> None:
    (tmp_path / "home/.ssh").mkdir(parents=True)
    for at in ("a/job/0", "b/job"):
        link = tmp_path / at
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "home")
        pending = polder.torch.snapshot("job", filled(1), step=1, pool=pool, folder=tmp_path / at[0])
        with pytest.raises(polder.TierError, match=f"{link} is a link"):
            pending.wait_flushed()
    assert [it.name for it in (tmp_path / "home").iterdir()] == [".ssh"]


def test_a_folder_that_another_user_could_change_is_refused(pool: polder.Pool, tmp_path: Path) -> None:
    wide = tmp_path / "wide open"
    wide.mkdir()
    wide.chmod(0o777)
    pending = polder.torch.snapshot("job", filled(1), step=1, pool=pool, folder=wide)
    remedy = f"open may be written by every user; take their right: chmod o-w '{wide}'"
    with pytest.raises(polder.TierError, match=remedy):
        pending.wait_flushed()
    wide.chmod(0o1777)
    polder.torch.snapshot("job", filled(1), step=1, pool=pool, folder=wide).wait_flushed()
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "theirs/job").mkdir(parents=True)
    os.chown(tmp_path / "theirs", 4242, -1)
    pending = polder.torch.snapshot("job", filled(1), step=1, pool=pool, folder=tmp_path / "theirs")
    with pytest.raises(polder.TierError, match="theirs belongs to user 4242, who could change a snapshot below it"):
        pending.wait_flushed()


# What comes back is what went in.


class Held(torch.nn.Module):
    """A module whose extra state is any state."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def memory() -> torch.Tensor:
    return torch.arange(240.0).reshape(2, 3, 8, 5)


KEPT: dict[str, Any] = {
    "channels_last": lambda: memory().to(memory_format=torch.channels_last),
    "transposed": lambda: memory().transpose(1, 3),
    "with gaps": lambda: memory()[:, ::2, 1::3],
    "expanded": lambda: torch.ones(3, 1).expand(3, 4),
    "overlaps itself": lambda: torch.arange(9.0).as_strided((3, 4), (2, 1)),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.float64),
    "bool": lambda: torch.tensor([[True, False], [False, False]]).t(),
    "bfloat16": lambda: torch.arange(6.0).bfloat16().reshape(2, 3).t(),
    "float8": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, 2, dtype=torch.complex64).t(),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "offset": lambda: memory().reshape(-1)[7:31],
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("where", ["pool", "folder"])
def test_a_tensor_comes_back_with_its_values_and_strides(
    scratch: Path, pool: polder.Pool, where: str, kind: str
) -> None:
    tensor = KEPT[kind]()
    to = None if where == "pool" else scratch / "disk"
    polder.torch.snapshot("job", Held({"tensor": tensor}), step=1, pool=pool, folder=to).wait_flushed()
    if to is not None:
        _core.Store(pool, "job/0").remove()
    got = Held()
    polder.torch.restore("job", got, pool=pool, folder=to)
    back = got.state["tensor"]
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(back.float() if kind == "float8" else back, tensor.float() if kind == "float8" else tensor)


@pytest.mark.parametrize("where", ["pool", "folder"])
def test_tensors_that_share_memory_share_it_again(scratch: Path, pool: polder.Pool, where: str) -> None:
    whole = torch.arange(60.0)
    state = {
        "whole": whole,
        "row": whole.reshape(6, 10)[2],
        "column": whole.reshape(6, 10)[:, 3],
        "bytes": whole.view(torch.int32)[4:],
        "tied": [torch.ones(3)] * 2,
        "apart": [whole[:0], torch.ones(3)],
    }
    to = None if where == "pool" else scratch / "disk"
    polder.torch.snapshot("job", Held(state), step=1, pool=pool, folder=to).wait_flushed()
    if to is not None:
        _core.Store(pool, "job/0").remove()
    held = Held()
    polder.torch.restore("job", held, pool=pool, folder=to)
    got = held.state
    assert torch.equal(got["whole"], whole) and torch.equal(got["column"], whole.reshape(6, 10)[:, 3])
    got["whole"].zero_()
    assert not got["row"].any() and not got["column"].any() and not got["bytes"].any()
    assert got["tied"][0].data_ptr() == got["tied"][1].data_ptr() != got["apart"][1].data_ptr()


def test_dictionaries_come_back_as_they_are(pool: polder.Pool) -> None:
    class Gate(torch.nn.Module):
        """Since version 2 of it the weight is a logarithm."""

        _version = 2

        def __init__(self) -> None:
            super().__init__()
            self.log = torch.nn.Parameter(torch.full((3,), 2.0))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            if (local_metadata.get("version") or 1) < 2:
                state_dict[prefix + "log"] = state_dict[prefix + "log"].log()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    state = {
        "ordered": collections.OrderedDict([("b", 1), ("a", torch.ones(2))]),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
        "rows": ([1, 2], (3, "x"), [torch.ones(1), (torch.zeros(1),)]),
        3: {"3": None},
    }
    model = torch.nn.Sequential(Gate(), Held(state))
    polder.torch.snapshot("job", model, step=1, pool=pool).wait()
    back = torch.nn.Sequential(Gate(), Held())
    polder.torch.restore("job", back, pool=pool)
    assert (back[0].log == 2).all()  # pyright: ignore[reportUnknownMemberType]
    got: Any = back[1].state
    assert str(got) == str(state)
    assert [type(got[key]) for key in ("ordered", "counter", "size")] == [
        collections.OrderedDict,
        collections.Counter,
        torch.Size,
    ]


class Point(collections.namedtuple("Point", "x y")):
    """A kind of tuple."""


class Kind(torch.Tensor):
    """A kind of tensor."""


def freed(left: int = 0) -> torch.Tensor:
    """A tensor without memory, as FSDP leaves one between its uses, or with so many bytes of it."""
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, tuple[Any, str]] = {
    "subclass": (lambda: torch.ones(2).as_subclass(Kind), "is a Kind, a kind of tensor of its own"),
    "lazy": (torch.nn.UninitializedParameter, "is a UninitializedParameter"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"is a Tensor of layout torch\.sparse_coo; only dense tensors"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized"),
    "meta": (lambda: torch.ones(2, device="meta"), "is on meta, and has no values"),
    "freed": (freed, "has no memory for its elements, as after its storage was freed"),
    "shortened": (lambda: freed(255), "has no memory for its elements"),
    "named tuple": (lambda: Point(1, 2), "is a Point"),
    "defaultdict": (lambda: collections.defaultdict(int), "is a defaultdict"),
    "object": (lambda: Path("/"), r"holds what a snapshot does not take \(a PosixPath\)"),
    "number of NumPy": (lambda: np.float64(3), r"holds what a snapshot does not take \(a float64\); keep tensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_come_back_is_refused_when_it_is_taken(pool: polder.Pool, kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(polder.ArgumentError, match=rf"/'model'/'_extra_state'/'odd' {why}"):
        polder.torch.snapshot("job", Held({"odd": make()}), step=1, pool=pool)


def test_schedulers_scalers_and_generators_come_back_as_extra(pool: polder.Pool) -> None:
    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = filled(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        return model, optimizer, {"scheduler": scheduler, "scaler": scaler, "draw": torch.Generator().manual_seed(3)}

    model, optimizer, extra = job()
    optimizer.step()
    extra["scheduler"].step()
    extra["scaler"].update(2.0)
    polder.torch.snapshot("job", model, optimizer, step=1, pool=pool, extra=extra).wait()
    drawn = torch.rand(3, generator=extra["draw"])
    other, fresh, back = job()
    polder.torch.restore("job", other, fresh, pool=pool, extra=back)
    assert back["scheduler"].state_dict() == extra["scheduler"].state_dict()
    assert back["scaler"].get_scale() == 2.0
    assert torch.equal(torch.rand(3, generator=back["draw"]), drawn)
    with pytest.raises(polder.ArgumentError, match="the snapshot job has no extra 'sampler'"):
        polder.torch.restore("job", other, fresh, pool=pool, extra={"sampler": back["scheduler"]})
    with pytest.raises(polder.ArgumentError, match=r"extra\['step'\] is a int, which has no state_dict"):
        polder.torch.snapshot("job", model, step=1, pool=pool, extra={"step": 3})


# Damage.


def test_damage_of_the_newest_names_the_older_one_and_damage_of_that_is_no_error(scratch: Path) -> None:
    folder = scratch / "disk"
    with polder.Pool(scratch / "pool", size="16MiB", run=scratch) as pool:
        for step in (1, 2, 3):
            polder.torch.snapshot("job", filled(step), step=step, pool=pool, folder=folder).wait_flushed()
        bytes_of = [filled(step).weight.detach().numpy().tobytes() for step in (2, 3)]
        older, newest = ((scratch / "pool").read_bytes().index(it) for it in bytes_of)

        def flip(at: int) -> None:
            with (scratch / "pool").open("r+b") as file:
                file.seek(at)
                was = file.read(1)
                file.seek(at)
                file.write(bytes([was[0] ^ 1]))

        flip(older)
        assert polder.torch.restore("job", filled(0), pool=pool).step == 3
        flip(older)
        flip(newest)
        model = filled(0)
        with pytest.raises(
            polder.CorruptError, match=r"version 2 of step 2, which is older, is whole: restore\(.*=2\)"
        ):
            polder.torch.restore("job", model, pool=pool)
        assert not model.weight.any()
        assert polder.torch.restore("job", model, pool=pool, version=2).step == 2
        assert (model.weight == 2).all()
        # What goes on from there comes after the damaged one.
        assert polder.torch.snapshot("job", filled(4), step=3, pool=pool).wait().version == 4
        assert polder.torch.restore("job", model, pool=pool).version == 4
        with pytest.raises(polder.UnusableError, match="version 1 is not kept"):
            polder.torch.restore("job", model, pool=pool, version=1)


def test_hostile_sums_of_a_folder_give_a_corrupt_error_alone(scratch: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    folder = scratch / "disk"
    with polder.Pool(scratch / "first", size="16MiB", run=scratch) as pool:
        for step in (1, 2):
            polder.torch.snapshot("job", filled(step), step=step, pool=pool, folder=folder).wait_flushed()
    at = folder / "job/0/00000002-step2/polder.json"
    whole = at.read_text()
    sums = json.loads(whole)
    hostile = [
        "",
        "[" * 100_000,
        "1" * 5000,
        "null",
        json.dumps({**sums, "files": {"../../x": [1, "a"]}}),
        json.dumps({**sums, "files": {".metadata": [1 << 70, "a"]}}),
        json.dumps({**sums, "identity": {**sums["identity"], "world": 1 << 60}}),
        *(json.dumps({key: value for key, value in sums.items() if key != lost}) for lost in sums),
        *(json.dumps({f"{key}0" if key == other else key: value for key, value in sums.items()}) for other in sums),
    ]
    for _ in range(60):
        begin = dice.randrange(len(whole))
        end = begin + dice.randrange(1, 9)
        hostile.append(whole[:begin] + dice.choice(["", "0", "{", "é"]) + whole[end:])
    with polder.Pool(scratch / "second", size="16MiB", run=scratch) as pool:
        for text in hostile:
            at.write_text(text)
            with contextlib.suppress(ValueError, RecursionError):
                if json.loads(text) == sums:
                    continue
            with pytest.raises(polder.CorruptError, match=r"polder\.json cannot be read.*version 1 of step 1"):
                polder.torch.restore("job", filled(0), pool=pool, folder=folder)
        at.write_text(whole)
        (folder / "job/0/00000001-step1/polder.json").write_text("{")
        assert polder.torch.restore("job", filled(0), pool=pool, folder=folder).step == 2


def test_a_snapshot_of_before_is_read_with_a_warning(pool: polder.Pool) -> None:
    weight, bias = filled(7).state_dict().values()
    leaf = {"dtype": torch.float32}
    walked = [("weight", {**leaf, "tensor": "/w", "shape": [4, 4]}), ("bias", {**leaf, "tensor": "/b", "shape": [4]})]
    plain = {"dict": [("model", {"dict": walked}), ("random", {"dict": [("torch", {"value": torch.get_rng_state()})]})]}
    plain["dict"][1][1]["dict"] += [
        ("python", {"value": random.getstate()}),
        ("numpy", {"value": ["MT19937", [1] * 624, 1, 0, 0.0]}),
    ]
    saved = bytearray(serialize({"step": 30, "state": plain}))
    _core.Store(pool, "job/0").publish([("/w", weight.numpy()), ("/b", bias.numpy()), ("state", saved)])
    model = filled(0)
    with pytest.warns(UserWarning, match="the snapshot job of step 30 was made before versions had identities"):
        assert polder.torch.restore("job", model, pool=pool).step == 30
    assert (model.weight == 7).all()
    polder.torch.snapshot("job", model, step=31, pool=pool).wait()
    assert polder.torch.restore("job", model, pool=pool) == polder.torch.Restored(2, 31)


# Kills.


def test_jobs_that_are_killed_at_random_find_one_attempt_and_what_was_confirmed() -> None:
    """A few rounds of what ``rounds.py`` does 2,000 times."""
    command = [sys.executable, str(Path(__file__).parent / "rounds.py"), "--rounds", "20", "--way", "polder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# A power cut.


def test_what_is_confirmed_is_there_after_a_power_cut(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not synced is dropped: what a file was given since, and each name that came to a folder since."""
    folder, cut = scratch / "disk", scratch / "cut"
    synced: dict[int, tuple[int, bytes | frozenset[tuple[str, int]]]] = {}
    real = os.fsync

    def fsync(opened: int) -> None:
        real(opened)
        at = Path(f"/proc/self/fd/{opened}").readlink()
        inode = os.fstat(opened).st_ino
        synced[inode] = (
            (1, frozenset((it.name, it.lstat().st_ino) for it in at.iterdir())) if at.is_dir() else (0, at.read_bytes())
        )

    monkeypatch.setattr(os, "fsync", fsync)

    def drop(inode: int, to: Path) -> None:
        is_folder, kept = synced.get(inode, (1, frozenset()))
        if isinstance(kept, bytes):
            assert not is_folder
            to.write_bytes(kept)
            return
        to.mkdir()
        for name, child in kept:
            if child in synced:
                drop(child, to / name)

    with polder.Pool(scratch / "pool", size="16MiB", run=scratch) as pool:
        for step in (1, 2, 3):
            polder.torch.snapshot("job", filled(step), step=step, pool=pool, folder=folder).wait_flushed()
            shutil.rmtree(cut, ignore_errors=True)
            drop(scratch.stat().st_ino, cut)
            with polder.Pool(scratch / f"new{step}", size="16MiB", run=scratch) as new:
                model = filled(0)
                assert polder.torch.restore("job", model, pool=new, folder=cut / "disk").step == step
                assert (model.weight == step).all()
