"""Training stacks whose tensors are placed: 50 steps have the bits of the same stack unplaced, for each stack."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from conftest import RANKS  # noqa: E402
from test_offload import (  # noqa: E402
    HAS_VECTORS,
    INPUT,
    ROOT,
    SETTINGS,
    assert_equal,
    disk,  # noqa: F401
    model,
    one_thread,  # noqa: F401
    train,
    two_tiers,
)

from polder import offload  # noqa: E402
from polder.errors import ArgumentError, TierError  # noqa: E402
from polder.offload.shards import mapped  # noqa: E402

pytestmark = pytest.mark.torch
vectors = pytest.mark.skipif(not HAS_VECTORS, reason="torch computes without vectors here")


def run(script: str, *arguments: object, python: str | Path = sys.executable, **environment: str) -> str:
    """The last line that a script of tests/ranks prints; it has to end well."""
    # What other frameworks warn of is not ours.
    strict = ["-W", "error"] if python == sys.executable else []
    command = [python, *strict, RANKS / script, *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(
        [str(it) for it in command], env=given, capture_output=True, text=True, timeout=300, check=False
    )
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
    with pytest.raises(
        ArgumentError, match=r"parameter blocks\.1\.0\.weight: expected float32 .* torch\.bfloat16 on cpu"
    ):
        offload.place(mixed, offload.AdamW(mixed.parameters()), tiers=two_tiers(disk))
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
    placed.trace(disk / "trace.json")
    events = json.loads((disk / "trace.json").read_text())["traceEvents"]
    measured = [it for it in events if it.get("cat") == "measured"]
    assert [(it["name"], it["args"]["step"]) for it in measured] == [
        (phase, step) for step in range(3) for phase in ("FWD", "BWD", "STEP")
    ]
    assert all(it["dur"] > 0 and it["ts"] >= 0 for it in events if it["ph"] == "X")
    assert {it["tid"] for it in events if it["ph"] == "X"} == {it["tid"] for it in events if it["ph"] == "M"}


# ------------------------------------------------------------------------------------------------------------ FSDP2


@vectors
def test_fsdp2_resumes_in_another_process_under_another_policy_and_leaves_no_bytes_outside(disk: Path) -> None:  # noqa: F811
    # Two ranks, 50 steps of accumulated batches, clipped gradients and a rate that falls.
    assert run("offload_fsdp.py", disk, 0.7, 0, 20, disk / "checkpoint") == "written"
    assert run("offload_fsdp.py", disk, 0.2, 20, 50, disk / "checkpoint") == "equal"


# ------------------------------------------------------------------------------- frameworks in their own environments


def python_of(framework: str) -> Path:
    """The Python of an environment that `make` makes."""
    folder = ROOT / ".cache" / framework
    if not (folder / ".ready").exists():
        pytest.skip(f"{framework} is not installed; `make .cache/{framework}/.ready` installs it")
    return folder / "bin" / "python"


@vectors
def test_the_trainer_of_transformers_resumes_in_another_process_under_another_policy(disk: Path) -> None:  # noqa: F811
    python = python_of("transformers")
    assert run("offload_trainer.py", disk, 0.7, "first", python=python) == "written"
    assert run("offload_trainer.py", disk, 0.2, "last", python=python) == "equal"
