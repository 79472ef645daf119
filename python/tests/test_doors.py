"""Training stacks whose tensors are placed: 50 steps have the bits of the same stack unplaced, for each stack."""

import json
import os
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from conftest import RANKS, Rank, Ranks, python_of  # noqa: E402
from test_offload import (  # noqa: E402
    INPUT,
    SETTINGS,
    assert_equal,
    disk,  # noqa: F401
    model,
    one_thread,  # noqa: F401
    train,
    two_tiers,
    vectors,
)

from polder import offload  # noqa: E402
from polder.errors import ArgumentError, PlacementError, TierError  # noqa: E402
from polder.offload.placed import Weight  # noqa: E402
from polder.offload.shards import local, mapped, whole  # noqa: E402
from polder.offload.zero import Pins, TensorStates, Zero  # noqa: E402

pytestmark = pytest.mark.torch


def run(script: str, *arguments: object, python: Path | None = None, timeout: int = 300, **environment: str) -> str:
    """The last line that a script of tests/ranks prints, here or in another environment; it has to end well."""
    if python is None:
        with Rank(RANKS / script, *arguments, **environment) as process:
            said = process.communicate(timeout=timeout)[0]
            assert process.wait() == 0, said
            return said.splitlines()[-1]
    command = [str(it) for it in (python, RANKS / script, *arguments)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------ plain torch


@vectors
def test_a_checkpoint_resumes_in_another_process_under_another_policy(disk: Path) -> None:  # noqa: F811
    # 50 steps with two groups, accumulated batches, clipped gradients and a rate that falls, in two processes.
    assert run("offload_resume.py", disk, 0.7, 0, 20, disk / "checkpoint.pt") == "written"
    assert run("offload_resume.py", disk, 0.2, 20, 50, disk / "checkpoint.pt") == "equal"


def test_states_that_a_state_dict_lacks_begin_anew_where_others_were(disk: Path) -> None:  # noqa: F811
    ours, reference = model(), model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    offload.place(ours, optimizer, {"optimizer states": [0.5, 0.5]}, tiers=two_tiers(disk))
    fresh = optimizer.state_dict()
    train(2, None, ours, optimizer)
    ours.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(fresh)
    train(2, None, ours, optimizer)
    train(2, None, reference, offload.AdamW(reference.parameters(), **SETTINGS))
    assert_equal(list(ours.parameters()), list(reference.parameters()))


def test_what_a_placed_optimizer_cannot_take_is_one_clear_error(disk: Path) -> None:  # noqa: F811
    ours = model()
    mixed = model()
    mixed.blocks[1].to(torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"max_norm, skip_overflow: they need all gradients at once"):
        offload.place(mixed, offload.AdamW(mixed.parameters(), max_norm=1.0), tiers=two_tiers(disk))
    away = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(ArgumentError, match=r"parameter weight: expected floating point on a CPU, found .* on meta"):
        offload.place(away, offload.AdamW(away.parameters()), tiers=two_tiers(disk))
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    placed = offload.place(ours, optimizer, {"optimizer states": [0.5, 0.5]}, tiers=two_tiers(disk))
    train(1, None, ours, optimizer)
    known, before = optimizer.state_dict(), [it.clone() for it in optimizer.moments(next(ours.parameters()))]
    with pytest.raises(ArgumentError, match="add_param_group: the states are placed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    wrong = {**known, "state": {0: {**known["state"][0], "exp_avg": torch.ones(3)}}}
    with pytest.raises(ArgumentError, match=r"parameter 0: expected exp_avg of shape \(32, 8\), found \(3,\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ArgumentError, match=r"parameter 0: expected exp_avg of shape .*, found none"):
        optimizer.load_state_dict({**known, "state": {0: {"step": torch.tensor(1.0)}}})
    assert all(map(torch.equal, optimizer.moments(next(ours.parameters())), before))
    # Once it is unplaced, groups can be added.
    placed.close()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_a_state_dict_that_finds_no_room_on_its_disk_is_one_clear_error(disk: Path) -> None:  # noqa: F811
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(TierError, match="no room for 131072 bytes of a state dict: File too large"):
            mapped(torch.empty(1 << 15), disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_step_of_one_tensor_reads_its_part_of_the_disk_alone(disk: Path) -> None:  # noqa: F811
    def read() -> int:
        known = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(known["read_bytes"])

    ours = torch.nn.ParameterList(torch.zeros(1 << 20) for _ in range(4))
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    offload.place(ours, optimizer, {"optimizer states": [0, 1]}, tiers=two_tiers(disk))
    reads = []
    # Nothing is read of a file that was never written.
    for stepped in (list(ours), list(ours), list(ours)[2:3]):
        optimizer.zero_grad()
        for parameter in stepped:
            parameter.grad = torch.ones(1 << 20)
        before = read()
        optimizer.step()
        reads.append(read() - before)
    # Transfers are whole, so both ends of the part may bring neighbours.
    assert reads[1] >= 32 << 20 and reads[2] <= reads[1] // 2, reads


def test_what_a_model_saves_is_counted_also_if_it_looks_at_values() -> None:
    class Looking(type(model())):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (x[0] != 7).all().item()
            return torch.nn.functional.dropout(super().forward(x), 0.5) + torch.rand(())

    plain, looking = model(), Looking()
    before = torch.get_rng_state()
    assert offload.saved_bytes(looking, INPUT) == offload.saved_bytes(plain, INPUT) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(it.grad is None for it in looking.parameters())


def test_measured_phases_stand_beside_predicted_ones_in_a_table_and_in_a_trace(disk: Path) -> None:  # noqa: F811
    ours = model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    given = {"tiers": two_tiers(disk), "activations": offload.saved_bytes(ours, INPUT)}
    offload.place(ours, optimizer, "dram", **given)
    placed = offload.place(ours, optimizer, {"optimizer states": [0.5, 0.5], "activations": [0, 1]}, **given)
    assert "-" in placed.summary()
    with torch.no_grad(), placed.activations():
        ours(INPUT)
    train(3, placed, ours, optimizer)
    table = placed.summary().splitlines()
    assert [line.split()[0] for line in table] == ["phase", "FWD", "disk", "BWD", "disk", "STEP", "disk", "measured:"]
    states = 8 * optimizer.elements()
    # Both halves of the states are read and written.
    assert float(table[6].split()[1]) == pytest.approx(states / 1e6, abs=0.05)
    assert "the median of 2 steps" in table[-1]
    # Nothing said how long a pass computes.
    assert table[-1].endswith("of FWD and BWD transfers alone, place(computation=) adds what they compute")
    placed.trace(disk / "trace.json")
    events = json.loads((disk / "trace.json").read_text())["traceEvents"]
    measured = [event for event in events if event.get("cat") == "measured"]
    assert [(event["name"], event["args"]["step"]) for event in measured] == [
        (phase, step) for step in range(3) for phase in ("FWD", "BWD", "STEP")
    ]
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert {event["tid"] for event in events if event["ph"] == "X"} == {
        event["tid"] for event in events if event["ph"] == "M"
    }
    timed = offload.place(ours, optimizer, "dram", **given, computation=(1.0, 2.0))
    assert timed.summary().endswith("predicted: from the tiers' rates")


# ------------------------------------------------------------------------------------------------------------ FSDP2


@vectors
def test_fsdp2_resumes_in_another_process_under_another_policy_and_leaves_no_bytes_outside(
    disk: Path,  # noqa: F811
    scratch: Path,
) -> None:
    # Two ranks, 50 steps of accumulated batches, clipped gradients and a rate that falls.
    card = scratch / "card"
    with card.open("wb") as file:
        file.truncate(8 << 20)
    for far, first, last, said in ((0.7, 0, 20, "written"), (0.2, 20, 50, "equal")):
        with Ranks("offload_fsdp.py", 2, disk, card, far, first, last, disk / "checkpoint") as ranks:
            assert [output.splitlines()[-1] for output in ranks.outputs()] == [said] * 2


@vectors
@pytest.mark.parametrize("optimizers", ["ours", "torch"])
def test_every_policy_places_what_fsdp2_shards(disk: Path, scratch: Path, optimizers: str) -> None:  # noqa: F811
    card = scratch / "card"
    with card.open("wb") as file:
        file.truncate(8 << 20)
    with Ranks("offload_policies.py", 2, disk, card, optimizers) as ranks:
        assert [output.splitlines()[-1] for output in ranks.outputs()] == ["equal"] * 2


def test_a_shard_in_memory_stays_there_where_the_mesh_computes_on_gpus() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh, shard = DeviceMesh("cuda", [0], _init_backend=False, _rank=0), torch.arange(12.0).view(4, 3)
    meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
    like = DTensor(torch.ones(4, 3), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    made = whole(like, shard)
    assert local(made).data_ptr() == shard.data_ptr() and (made.shape, made.placements) == (shard.shape, (Shard(0),))


@pytest.mark.parametrize(
    "gpu",
    [
        "stand-in",
        pytest.param("real", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run on one")),
    ],
)
def test_what_a_gpu_saves_moves_to_the_tiers_and_back(disk: Path, gpu: str) -> None:  # noqa: F811
    with Ranks("offload_gpu.py", 1, disk, gpu) as ranks:
        assert [output.splitlines()[-1] for output in ranks.outputs()] == ["equal"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: FSDP2 computes on one")
@pytest.mark.parametrize("pins", ["pinned", "plain"])
@pytest.mark.parametrize("far", [0.0, 0.5])
def test_fsdp2_that_computes_on_a_gpu_has_the_bits_of_unplaced_training(
    disk: Path,  # noqa: F811
    pins: str,
    far: float,
) -> None:
    with Ranks("offload_gpu_fsdp.py", 1, disk, pins, far, CUBLAS_WORKSPACE_CONFIG=":4096:8") as ranks:
        assert [output.splitlines()[-1] for output in ranks.outputs()] == ["equal"]


# ---------------------------------------------------------------------------------------------------------- DeepSpeed


def test_pinned_tensors_are_ranges_that_go_back_with_their_last_view() -> None:
    pins = Pins()
    source = torch.arange(6.0).view(2, 3)
    pinned, room = pins.pin(source), pins.pin_empty(source.bfloat16(), (5000,))
    assert torch.equal(pinned, source) and pinned.data_ptr() != source.data_ptr()
    assert torch.equal(pins.pin(source, match_shape=False), source.view(-1))
    assert room.dtype == torch.bfloat16 and not room.any()
    assert [
        pinned_range.nbytes for pinned_range in sorted(pins.ranges(), key=lambda pinned_range: pinned_range.nbytes)
    ] == [4096, 12288]
    view = pinned[1]
    assert pins.unpin(pinned) and pins.is_pinned(view) and not pins.is_pinned(source)
    del pinned, room
    assert [pinned_range.nbytes for pinned_range in pins.ranges()] == [4096] and torch.equal(view, source[1])
    del view
    assert pins.ranges() == []


def test_what_zero_cannot_place_is_one_clear_error(disk: Path) -> None:  # noqa: F811
    given = {"tiers": two_tiers(disk)}
    for stage, actual in (
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "stage 1 with cpu"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "stage 3 with nvme"),
        ({"stage": 2}, "stage 2 with None"),
    ):
        with pytest.raises(ArgumentError, match=f"offload_optimizer.device cpu, found {actual}"):
            offload.zero(model(), {"zero_optimization": stage}, **given)
    ours = model()
    first = SimpleNamespace(place=None)
    own = TensorStates(torch.optim.AdamW(ours.parameters()), cast("Any", first))
    for memory, files in (([(1024, None)], [(1024, disk)]), ([(1024, 1)], []), ([(512, None), (512, 1)], [])):
        with pytest.raises(PlacementError, match=r"first tier; give optimizer=polder\.offload\.AdamW"):
            own.room(memory, files)
    own.room([(1024, None)], [])


# ------------------------------------------------------------------------------- frameworks in their own environments


def test_a_whole_weight_that_changes_in_place_after_it_was_saved_is_found_but_not_that_it_is_gathered() -> None:
    module = torch.nn.Linear(8, 8)
    kept = object.__new__(Zero)
    kept._module = module
    saved = kept.gathered(module.weight.detach())
    assert isinstance(saved, Weight)
    # ZeRO-3 frees a weight, and gathers it again.
    whole = module.weight.data.clone()
    module.weight.data = torch.empty(0)
    module.weight.data = whole
    assert torch.equal(saved.unpacked(), whole)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpacked()


@vectors
@pytest.mark.parametrize("optimizer", ["ours", "theirs"])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_resumes_in_another_process_under_another_policy_and_leaves_no_32_bit_numbers_outside(
    stage: int,
    optimizer: str,
    disk: Path,  # noqa: F811
) -> None:
    # DeepSpeed compiles what it needs at first use: its own Adam takes minutes.
    python = python_of("deepspeed")
    shares = (0.7, 0.2) if optimizer == "ours" else (0, 0)
    given = {"python": python, "timeout": 1200, "DS_ACCELERATOR": "cpu"}
    given |= {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": f"{python.parents[1]}/extensions",
    }
    assert run("offload_zero.py", disk, shares[0], stage, optimizer, "first", **given) == "written"
    assert run("offload_zero.py", disk, shares[1], stage, optimizer, "last", **given) == "equal"


@vectors
def test_the_trainer_of_transformers_resumes_in_another_process_under_another_policy(disk: Path) -> None:  # noqa: F811
    python = python_of("transformers")
    assert run("offload_trainer.py", disk, 0.7, "first", python=python) == "written"
    assert run("offload_trainer.py", disk, 0.2, "last", python=python) == "equal"


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_what_a_check_says_to_paste_below_a_trainer_trains_the_same_bits(disk: Path, optim: str) -> None:  # noqa: F811
    python = python_of("transformers")
    assert run("offload_trainer_check.py", disk, optim, python=python) == "equal"


def test_a_model_of_transformers_loads_into_the_tier_of_a_scope(tmp_path: Path) -> None:
    assert run("offload_loaded.py", tmp_path, python=python_of("transformers")) == "placed"


def test_an_8_bit_optimizer_is_placed_as_any_other(disk: Path) -> None:  # noqa: F811
    assert run("offload_8bit.py", disk, python=python_of("transformers")) == "equal"


def test_lora_over_a_base_from_files_is_placed_by_one_line_and_a_check_pastes_it(disk: Path) -> None:  # noqa: F811
    python, example = python_of("transformers"), Path(__file__).parents[2] / "examples/lora.py"
    command = [str(python), str(example), "--width=128", "--layers=2", f"--keep={disk}"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(disk)}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    rows = [line.split() for line in ended.stdout.splitlines()[4:]]
    assert [(row[0], row[1:3]) for row in rows] == [(it, ["the", "same"]) for it in offload.POLICIES]
    # All but one had less memory than the base needs.
    assert [float(row[3]) > 0 for row in rows] == [False, True, True, True]
    check = [str(python), "-P", "-m", "polder.offload.check", "--json", str(example), "--train", str(disk)]
    ended = subprocess.run(check, env=given, cwd=disk, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    _, line, cover = json.loads(ended.stdout)["paste"]
    assert line.startswith('placed = polder.offload.place(model, optimizer, "optimal", tiers=')
    assert cover == "placed.cover(model)"
