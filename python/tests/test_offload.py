"""Placement carried out: the same bits as torch with everything in memory, and one clear error for each fault."""

import contextlib
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from conftest import Rank  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from polder import _core, offload  # noqa: E402
from polder.errors import ArgumentError, PlacementError, PlacementWarning, TierError  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch computes without vectors here"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share a core wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk: the usual one for tests may lie in memory."""
    try:
        _core.States([], [(1024, tmp_path)])
        yield tmp_path
    except TierError:
        with tempfile.TemporaryDirectory(prefix=".polder-test-", dir=ROOT) as folder:
            yield Path(folder)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.int32).numpy()


def tensors(shapes: list[tuple[int, ...]], seed: int) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def set_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw) * 1e-2


def assert_equal(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        # NaN has many patterns of bits, and none means anything.
        assert torch.equal(one.isnan(), other.isnan())
        assert np.array_equal(bits(one.nan_to_num(0.0)), bits(other.nan_to_num(0.0)))


class Model(torch.nn.Module):
    """Checkpointed blocks whose inputs are large enough to be placed."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        shapes = [(torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)) for _ in range(blocks)]
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(up, torch.nn.Tanh(), down) for up, down in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


INPUT = torch.linspace(-1, 1, 8 * 600).view(600, 8)


def two_tiers(folder: Path, dram: int | str = "1 GiB", capacity: int | str = "64 MiB") -> list[offload.Tier]:
    return [offload.Tier("dram", dram, 2e10, 2e10), offload.Tier("disk", capacity, 2e9, 1e9, folder)]


def train(
    steps: int,
    placed: offload.Placed | None,
    it: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor = INPUT,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        with placed.activations() if placed else contextlib.nullcontext():
            loss = it(inputs + step)
        loss.backward()
        optimizer.step()


@vectors
@pytest.mark.parametrize("states", [[0.0, 1.0], [0.3, 0.7], [1.0, 0.0]])
@pytest.mark.parametrize("activations", [[0.0, 1.0], [0.4, 0.6]])
def test_placed_training_has_the_bits_of_unplaced_training(
    disk: Path, states: list[float], activations: list[float]
) -> None:
    reference, ours = model(), model()
    train(50, None, reference, torch.optim.AdamW(reference.parameters(), **SETTINGS, fused=True))
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    policy = {"optimizer states": states, "activations": activations}
    saved = offload.saved_bytes(ours, INPUT)
    with_tiers = {"tiers": two_tiers(disk), "activations": saved}
    placed = offload.place(ours, optimizer, policy, **with_tiers)
    train(50, placed, ours, optimizer)
    assert_equal(list(ours.parameters()), list(reference.parameters()))
    seen = {(row.object, row.tier): row.bytes for row in placed.rows()}
    # A step's saved tensors take as many bytes as they were said to, in whole pages on the disk. Where there is a GPU,
    # memory for them is registered at once, with some to spare.
    both = seen.get(("activations", "dram"), 0) + seen[("activations", "disk")]
    spare = (1 << 20) + saved // 20 if torch.cuda.is_available() else 0
    assert saved <= both <= saved + 8 * 4096 + spare
    if states[0] < 1:
        assert abs(seen[("optimizer states", "disk")] - states[1] * 8 * optimizer.elements()) <= 8192
    # What is loaded goes into another placement; the next steps are the same.
    again, beside = model(), model()
    again.load_state_dict(ours.state_dict())
    beside.load_state_dict(ours.state_dict())
    other = offload.AdamW(again.parameters(), lr=1.0)
    elsewhere = offload.place(again, other, {"optimizer states": [0.5, 0.5]}, tiers=two_tiers(disk))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torchs = torch.optim.AdamW(beside.parameters(), lr=1.0, fused=True)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(3, elsewhere, again, other)
    train(3, None, beside, torchs)
    assert_equal(list(again.parameters()), list(beside.parameters()))
    # Unplaced again, and nothing is lost.
    elsewhere.close()
    train(1, None, again, other)
    train(1, None, beside, torchs)
    assert_equal(list(again.parameters()), list(beside.parameters()))


@pytest.mark.parametrize("states", [[0.0, 1.0], [0.3, 0.7], [1.0, 0.0]])
def test_the_one_moment_of_lion_is_placed_as_those_of_adam(disk: Path, states: list[float]) -> None:
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    reference, ours = model(), model()
    other = offload.Lion(reference.parameters(), **settings)
    for steps in (5, 3, 2):
        train(steps, None, reference, other)
    optimizer = offload.Lion(ours.parameters(), **settings)
    placed = offload.place(ours, optimizer, {"optimizer states": states}, tiers=two_tiers(disk))
    train(5, placed, ours, optimizer)
    rows = {row.tier: row.bytes for row in placed.rows() if row.object == "optimizer states"}
    assert rows.get("disk", 0) == pytest.approx(states[1] * 4 * optimizer.elements(), abs=4096)
    kept = copy.deepcopy(optimizer.state_dict())
    assert set(kept["state"][0]) == {"step", "exp_avg"}
    # Into another placement, and out of it.
    optimizer = offload.Lion(ours.parameters(), lr=1.0)
    placed = offload.place(ours, optimizer, {"optimizer states": [0.5, 0.5]}, tiers=two_tiers(disk))
    optimizer.load_state_dict(kept)
    train(3, placed, ours, optimizer)
    placed.close()
    train(2, None, ours, optimizer)
    assert_equal(list(ours.parameters()), list(reference.parameters()))
    assert torch.equal(optimizer.state[ours.first.weight]["exp_avg"], other.state[reference.first.weight]["exp_avg"])


def test_states_in_many_pieces_pass_through_few_buffers(disk: Path) -> None:
    # Four pieces in memory and eleven on the disk, through six buffers.
    elements = 15 * (512 << 10)
    states = _core.States([(4 * (512 << 10), None)], [(11 * (512 << 10), disk)])
    ours, theirs = tensors([(elements,)], 3), tensors([(elements,)], 3)
    optimizer = torch.optim.AdamW(theirs, **SETTINGS, fused=True)
    placed = offload.AdamW(ours, **SETTINGS)
    placed.place(states)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        placed.step()
        optimizer.step()
    assert_equal(ours, theirs)
    mean, square = placed.moments(ours[0])
    assert torch.equal(mean, optimizer.state[theirs[0]]["exp_avg"])
    assert torch.equal(square, optimizer.state[theirs[0]]["exp_avg_sq"])
    assert sum(nbytes for _, nbytes in states.where()) == 8 * 4 * (512 << 10)


def test_a_graph_can_be_walked_twice_and_dropped_unwalked(disk: Path) -> None:
    ours, reference = model(), model()
    optimizer = offload.AdamW(ours.parameters())
    policy = {"activations": [0.25, 0.75]}
    placed = offload.place(ours, optimizer, policy, tiers=two_tiers(disk), activations=offload.saved_bytes(ours, INPUT))
    # Each forward pass would fill the room; a dropped graph gives it back.
    for _ in range(3):
        with placed.activations():
            loss = ours(INPUT)
        del loss
    with placed.activations():
        loss = ours(INPUT)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        reference(INPUT).backward()
    for one, other in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.warns(PlacementWarning, match="stays where it is, as all that do not fit"), placed.activations():
        _ = [ours(INPUT) for _ in range(50)]


@pytest.mark.parametrize("node", [0])
def test_a_numa_nodes_pages_lie_there_by_the_kernels_word(node: int) -> None:
    ours = model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), offload.Tier("far", "1 GiB", 1e10, 1e10, node=node)]
    placed = offload.place(ours, optimizer, {"optimizer states": [0.0, 1.0]}, tiers=tiers)
    train(1, placed, ours, optimizer)
    rows = {row.tier: row for row in placed.rows() if row.object == "optimizer states"}
    assert rows.pop("far").word == f"kernel: node {node}"
    # What no parameter reaches is the rest of the last page of each moment.
    assert sum(row.bytes for row in rows.values()) <= 2 * 4096 and set(rows) <= {"not touched yet"}


def linear_program(problem: dict, answer: dict) -> float:
    """The optimum by HiGHS, another code base than the solver of `optimal`."""
    from scipy.optimize import linprog

    tiers, objects, phases = problem["tiers"], problem["objects"], problem["phases"]
    amount = lambda text: float(text.split()[0])  # noqa: E731
    columns = len(objects) * len(tiers) + len(phases)
    limits: list[tuple[np.ndarray, float]] = []
    for index, tier in enumerate(tiers):
        row = np.zeros(columns)
        for number, item in enumerate(objects):
            row[number * len(tiers) + index] = amount(item["bytes"]) / 1e9
        limits.append((row, amount(tier["capacity"]) / 1e9))
    for index, phase in enumerate(phases):
        links = np.zeros((len(tiers), columns))
        links[:, len(objects) * len(tiers) + index] = -1
        for moved in phase["moved"]:
            for number, tier in enumerate(tiers):
                for link in {number, number if tier["through"] is None else tier["through"]}:
                    rates = (
                        tiers[link]["device"] if phase["by_device"] and tiers[link]["device"] else tiers[link]["cpu"]
                    )
                    passes = moved["read"] / amount(rates["read"]) + moved["write"] / amount(rates["write"])
                    links[link, moved["object"] * len(tiers) + number] += (
                        amount(objects[moved["object"]]["bytes"]) * passes
                    )
        limits += [(row, 0.0) for row in links]
    wholes = np.zeros((len(objects), columns))
    for number in range(len(objects)):
        wholes[number, number * len(tiers) : (number + 1) * len(tiers)] = 1
    cost = np.zeros(columns)
    cost[len(objects) * len(tiers) :] = 1
    open_to = lambda item, tier: not item["only"] or tier in item["only"]  # noqa: E731
    bounds = [(0, 1 if open_to(item, tier) else 0) for item in objects for tier in range(len(tiers))]
    bounds += [(phase["least_s"], None) for phase in phases]
    rows, values = zip(*limits, strict=True)
    solved = linprog(cost, np.array(rows), np.array(values), wholes, np.ones(len(objects)), bounds, method="highs")
    assert solved.status == 0, (solved.message, answer)
    return solved.fun


def instance(draw: random.Random) -> dict:
    rates = lambda: {"read": f"{draw.uniform(1e9, 3e11)} B/s", "write": f"{draw.uniform(1e9, 3e11)} B/s"}  # noqa: E731
    count = draw.randint(2, 4)
    # Some objects cannot lie in every tier.
    stays = lambda: sorted(draw.sample(range(count), draw.randint(1, count))) if draw.random() < 0.3 else []  # noqa: E731
    objects = [
        {"name": f"object{index}", "kind": "other", "bytes": f"{draw.uniform(1e8, 2e11)} B", "only": stays()}
        for index in range(draw.randint(1, 8))
    ]
    whole = sum(float(item["bytes"].split()[0]) for item in objects)
    tiers = [
        {
            "name": f"tier{index}",
            "capacity": f"{whole * draw.uniform(0.1, 1) + (whole if index == 0 and draw.random() < 0.2 else 0)} B",
            "cpu": rates(),
            "device": rates() if draw.random() < 0.5 else None,
            "through": 0 if index and draw.random() < 0.3 else None,
        }
        for index in range(count)
    ]
    moved = lambda: [  # noqa: E731
        {"object": index, "read": draw.choice([0, 1, draw.uniform(0, 3)]), "write": draw.choice([0, 1])}
        for index in range(len(objects))
    ]
    phases = [
        {
            "name": f"phase{index}",
            "by_device": draw.random() < 0.5,
            "least_s": draw.choice([0.0, 1.0]),
            "moved": moved(),
        }
        for index in range(draw.randint(1, 3))
    ]
    return {"tiers": tiers, "objects": objects, "phases": phases}


def test_the_optimum_is_that_of_highs_on_a_thousand_random_instances() -> None:
    pytest.importorskip("scipy")
    draw, solved = random.Random(26), 0
    while solved < 1000:
        problem = instance(draw)
        try:
            answer = json.loads(_core.offload_place(json.dumps(problem), "optimal", None))
        except PlacementError as error:
            assert "do not fit in all tiers together" in str(error) or " cannot hold " in str(error)
            continue
        ours, theirs = sum(answer["seconds"]), linear_program(problem, answer)
        assert abs(ours - theirs) <= 1e-6 * theirs, (ours, theirs, problem)
        solved += 1


def refusal(disk: Path, policy: object = "optimal", **given: object) -> str:
    ours = model()
    with pytest.raises((PlacementError, TierError, ArgumentError)) as raised:
        offload.place(
            ours,
            given.pop("optimizer", None) or offload.AdamW(ours.parameters()),
            policy,
            **{"tiers": two_tiers(disk), **given},
        )
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_placement_that_cannot_be_is_one_clear_error(disk: Path) -> None:
    assert refusal(disk, "best") == "'best' is no policy and no file; there are dram, interleave, paper, optimal"
    said = refusal(disk, {"optimizer states": [0.5, 0.4]})
    assert said == "optimizer states: expected fractions that add up to 1, found 0.9"
    assert refusal(disk, {"moments": [1, 0]}).startswith("'moments' is no object of this step; there are weights, ")
    (disk / "policy.json").write_text("[1]")
    assert "expected an object's fractions by its name" in refusal(disk, disk / "policy.json")
    assert "tier dram of 1.024 kB cannot hold " in refusal(disk, tiers=two_tiers(disk, dram=1024))
    small = two_tiers(disk, dram=150_000, capacity=4096)
    assert "do not fit in all tiers together" in refusal(disk, tiers=small)
    kept = {"weights": [0.5, 0.5]}
    assert refusal(disk, kept) == "weights: expected all of it in dram, where it has to stay"
    assert "tier dram of 200 kB cannot hold" in refusal(disk, "dram", tiers=two_tiers(disk, dram=200_000))


def test_a_tier_that_cannot_be_is_one_clear_error(disk: Path) -> None:
    far = {"optimizer states": [0.0, 1.0]}
    assert "this folder lies in memory" in refusal(disk, far, tiers=two_tiers(Path("/dev/shm")))
    assert "no file can be made in this folder" in refusal(disk, far, tiers=two_tiers(Path("/nowhere/at/all")))
    no_node = [two_tiers(disk)[0], offload.Tier("far", "1 GiB", 1e10, 1e10, node=1000)]
    assert refusal(disk, far, tiers=no_node).startswith("tier far: NUMA node 1000: this machine has none")
    assert "expected memory first" in refusal(disk, tiers=two_tiers(disk)[1:])
    theirs = torch.optim.AdamW(model().parameters())
    assert refusal(disk, optimizer=theirs).startswith("optimizer: expected parameters of the model, or 32-bit masters ")
    assert refusal(disk, optimizer=model()) == "optimizer: expected a torch.optim.Optimizer, found test_offload.Model"
    with pytest.raises(TierError, match="bytes do not fit on this disk"):
        _core.States([], [(1 << 46, disk)])
    with pytest.raises(ArgumentError, match="capacity"):
        offload.Tier("disk", "-1 GiB", 1, 1)
    with pytest.raises(ArgumentError, match="expected a size such as '2 GiB', found 'much'"):
        offload.Tier("disk", "much", 1, 1)
    with pytest.raises(ArgumentError, match="read: expected bytes a second above 0"):
        offload.Tier("disk", 1, 0, 1)
    for given, said in (
        ({"name": ""}, "the name of a tier is empty"),
        ({"name": 5}, "the name of a tier is 5"),
        ({"capacity": True}, "capacity: expected more than 0 bytes, found True"),
        ({"read": True}, "read: expected bytes a second above 0, found True"),
        ({"node": True}, "node: expected the number of a NUMA node, found True"),
        ({"folder": ""}, "folder is ''; give a path"),
        ({"device": 5}, "device is 5; give a path"),
    ):
        with pytest.raises(ArgumentError, match=said):
            offload.Tier(**{"name": "tier", "capacity": 1, "read": 1, "write": 1, **given})
    assert offload.Tier("tier", np.int64(4096), 1, 1, node=np.int32(0)).nbytes == 4096  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="the name of a tier is 0"):
        offload.tier(0)  # type: ignore[arg-type]
    for given, said in (
        ({"lr": True}, "lr: expected a number from 0 on, found True"),
        ({"lr": "1"}, "lr: expected a number from 0 on, found '1'"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"betas": 0.9}, "betas: expected two numbers"),
        ({"max_norm": True}, "max_norm: expected a number above 0, found True"),
        ({"skip_overflow": "no"}, "skip_overflow: expected True or False, found 'no'"),
        ({"maximize": 1}, "maximize: expected True or False, found 1"),
    ):
        with pytest.raises(ArgumentError, match=said):
            offload.AdamW(model().parameters(), **given)
    for call in (lambda: offload.place(None, theirs, tiers=two_tiers(disk)), lambda: offload.saved_bytes(None)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"model: expected a torch\.nn\.Module, found NoneType"):
            call()
    assert "masters: expected True or False, found 'no'" in refusal(disk, masters="no")
    assert "a name of tensors is 5; give text" in refusal(disk, tensors={5: torch.ones(1 << 20)})
    with pytest.raises(ArgumentError, match="folder is None; give a path"):
        offload.measured(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="amsgrad=True"):
        offload.AdamW(model().parameters(), amsgrad=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiers": "dram"}, "tiers: expected a list of polder.offload.Tier, found 'dram'"),
        ({"tiers": 2}, "tiers: expected a list of polder.offload.Tier, found 2"),
        ({"activations": "1 GiB"}, "activations: expected bytes from 0 on, found '1 GiB'"),
        ({"activations": -1}, "activations: expected bytes from 0 on, found -1"),
        ({"activations": float("nan")}, "activations: expected bytes from 0 on, found nan"),
        ({"computation": 1.0}, "computation: expected the seconds of a forward and of a backward pass, found 1.0"),
        ({"computation": "ab"}, "computation: expected the seconds of a forward and of a backward pass, found 'ab'"),
        ({"computation": (1.0, -1.0)}, "computation: expected the seconds .* found (1.0, -1.0)"),
        ({"tensors": [torch.ones(4)]}, "tensors: expected tensors by their names, found list"),
        ({"tensors": {"t": 1}}, "tensors: 't': expected a contiguous tensor on a CPU, found int"),
    ],
)
def test_an_argument_of_another_type_is_one_clear_error(disk: Path, given: dict[str, object], said: str) -> None:
    begin, _, end = said.partition(" .* ")
    found = refusal(disk, **given)
    assert found.startswith(begin) and found.endswith(end)


def test_a_forked_child_lets_go_of_a_graph_whose_tensors_are_on_their_way_to_a_disk(disk: Path) -> None:
    ours = model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    saved = offload.saved_bytes(ours, INPUT)
    placed = offload.place(ours, optimizer, {"activations": [0.0, 1.0]}, tiers=two_tiers(disk), activations=saved)
    with placed.activations():
        loss = ours(INPUT)
    if (child := os.fork()) == 0:
        # No test goes on here, whatever fails.
        code = 1
        with contextlib.suppress(BaseException):
            del loss
            with contextlib.suppress(TierError):
                optimizer.step()
            del placed, optimizer
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    optimizer.step()


def test_a_file_that_is_cut_while_it_is_used_is_one_clear_error(disk: Path) -> None:
    ours = model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    placed = offload.place(ours, optimizer, {"optimizer states": [0.0, 1.0]}, tiers=two_tiers(disk))
    train(1, placed, ours, optimizer)
    files = [it for it in Path("/proc/self/fd").iterdir() if it.is_symlink() and f"{disk}/#" in str(it.readlink())]
    assert len(files) == 1
    with files[0].open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(TierError, match="something has truncated it"):
        train(1, placed, ours, optimizer)


def test_a_platform_names_tiers(tmp_path: Path) -> None:
    example = ROOT / "docs" / "platform.toml"
    tiers = offload.tiers_of(example)
    found = [(tier.name, tier.node, tier.folder) for tier in tiers]
    assert found == [("dram", None, None), ("far", 1, None), ("scratch", None, "/scratch")]
    assert (tiers[2].nbytes, tiers[2].read, tiers[2].write) == (200 * 10**9, 3e9, 2e9)
    assert (tiers[1].nbytes, tiers[1].read, tiers[1].write) == (256 * 10**9, 60e9, 40e9)
    # The rates of as many threads as were measured, or of the next fewer.
    assert [offload.tiers_of(example, threads)[1].read for threads in (1, 15, 16, 64)] == [12e9, 12e9, 60e9, 60e9]
    with pytest.raises(ArgumentError, match=r"no platform of this name|cannot read"):
        offload.tiers_of(tmp_path / "none.toml")


def test_the_example_ends_with_the_unlimited_weights_under_a_limit_that_stops_the_unplaced_run(
    disk: Path, tmp_path: Path
) -> None:
    shape = ["--width", 768, "--layers", 2, "--heads", 4, "--context", 64, "--steps", 2]
    given = [*shape, "--dram", "120 MiB", "--folder", disk, "--json", tmp_path / "seen.json", "--limit"]
    command = [sys.executable, ROOT / "examples" / "offload.py", *map(str, given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["same"] and "memory" in seen["killed"]
    assert seen["placed"]["peak"] < seen["limit"] < seen["unplaced"]["peak"]
    assert "weights after 2 steps: the same bits in both runs" in ended.stdout
    assert "placed:   ended with the weights of the unlimited run" in ended.stdout


def test_the_example_says_what_is_missing_outside_the_repository(tmp_path: Path) -> None:
    example = tmp_path / "examples" / "offload.py"
    example.parent.mkdir()
    example.write_text((ROOT / "examples" / "offload.py").read_text())
    (tmp_path / "short.txt").write_text("short")
    for given, expected in (
        ([], f"repository, which lies elsewhere than {tmp_path}: 0 bytes, expected more than --context"),
        (["--text", tmp_path / "short.txt"], "short.txt: 5 bytes, expected more than --context and one; name a file"),
    ):
        ended = Rank(example, *given, "--folder", tmp_path)
        with ended:
            assert expected in ended.communicate(timeout=60)[0] and ended.wait() == 1
