"""Any optimizer of torch, masters of 16-bit parameters and a frozen base, placed: the bits of the unplaced run."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from test_offload import disk, one_thread, two_tiers  # noqa: E402, F401

from polder import offload  # noqa: E402
from polder.errors import ArgumentError, PlacementWarning, TierError  # noqa: E402

pytestmark = pytest.mark.torch
optim = torch.optim
POLICIES = (0.0, 0.3, 1.0)


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).to(dtype)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    placed: offload.Placed | None = None,
    masters: Iterable[torch.nn.Parameter] = (),
) -> None:
    """Steps, over masters that are kept by hand if there are some."""
    pairs = list(zip(model.parameters(), masters, strict=False))
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        with placed.activations() if placed else contextlib.nullcontext():
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter, master in pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def groups(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    first, second, *others = parameters
    return optim.AdamW([{"params": [first, second]}, {"params": others, "lr": 0.1, "weight_decay": 0.0}], lr=1e-2)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda of: optim.AdamW(of, lr=1e-2),
    "AdamW fused": lambda of: optim.AdamW(of, lr=1e-2, fused=True),
    "Adam amsgrad": lambda of: optim.Adam(of, lr=1e-2, amsgrad=True),
    "SGD": lambda of: optim.SGD(of, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda of: optim.SGD(of, lr=0.1),
    "Adafactor": optim.Adafactor,
    "Muon": lambda of: optim.Muon([it for it in of if it.ndim == 2], lr=1e-2),
    "RMSprop": lambda of: optim.RMSprop(of, momentum=0.9, centered=True),
    "ASGD": optim.ASGD,
    "groups": groups,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKE)
def test_any_optimizer_of_torch_has_its_own_bits_under_any_policy(
    disk: Path,  # noqa: F811
    kind: str,
    dtype: torch.dtype,
) -> None:
    reference = net(dtype)
    theirs = MAKE[kind](reference.parameters())
    train(reference, theirs, range(50))
    known = theirs.state_dict()
    for far in POLICIES:
        model = net(dtype)
        optimizer = MAKE[kind](model.parameters())
        placed = offload.place(model, optimizer, {"optimizer states": [1 - far, far]}, tiers=two_tiers(disk))
        train(model, optimizer, range(20), placed)
        held = {row.tier: row.bytes for row in placed.rows() if row.object == "optimizer states"}
        assert sum(held.values()) == optimizer._polder_states.nbytes()
        assert held.get("disk", 0) == pytest.approx(far * sum(held.values()), abs=4096)
        # Moves to where the others were, and goes on.
        placed = offload.place(model, optimizer, {"optimizer states": [far, 1 - far]}, tiers=two_tiers(disk))
        train(model, optimizer, range(20, 40), placed)
        kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, range(40, 50), placed)
        assert_same(model, reference)
        assert_states(optimizer.state_dict(), known)
        placed.close()
        assert_states(optimizer.state_dict(), known)
        # A checkpoint goes to another optimizer, placed otherwise.
        other = net(dtype)
        loaded = MAKE[kind](other.parameters())
        offload.place(other, loaded, {"optimizer states": [far, 1 - far]}, tiers=two_tiers(disk))
        other.load_state_dict(kept["model"])
        loaded.load_state_dict(kept["optimizer"])
        train(other, loaded, range(40, 50))
        assert_same(other, reference)


def assert_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            assert (
                torch.equal(torch.as_tensor(ours["state"][number][name]), torch.as_tensor(value))
                if value is not None
                else True
            )


@pytest.mark.parametrize("far", POLICIES)
def test_a_copy_of_a_placed_optimizer_has_all_states_itself(disk: Path, far: float) -> None:  # noqa: F811
    model = net(torch.float32)
    optimizer = MAKE["AdamW"](model.parameters())
    placed = offload.place(model, optimizer, {"optimizer states": [1 - far, far]}, tiers=two_tiers(disk))
    train(model, optimizer, range(3), placed)
    saved = io.BytesIO()
    torch.save((model, optimizer), saved)
    saved.seek(0)
    copies = [copy.deepcopy((model, optimizer)), torch.load(saved, weights_only=False)]
    train(model, optimizer, range(3, 6), placed)
    for twin, its in copies:
        train(twin, its, range(3, 6))
        assert_same(twin, model)
        assert_states(its.state_dict(), optimizer.state_dict())
    placed.close()
    assert_states(copy.deepcopy(optimizer).state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("far", POLICIES)
def test_masters_of_16_bit_parameters_are_states_of_any_optimizer(disk: Path, far: float) -> None:  # noqa: F811
    policy = {"optimizer states": [1 - far, far]}
    reference = net(torch.bfloat16)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    train(reference, optim.AdamW(masters, lr=1e-2), range(50), None, masters)
    # The program keeps them itself: one more line, and no other change.
    by_hand = net(torch.bfloat16)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in by_hand.parameters()]
    optimizer = optim.AdamW(masters, lr=1e-2)
    placed = offload.place(by_hand, optimizer, policy, tiers=two_tiers(disk))
    train(by_hand, optimizer, range(50), placed, masters)
    assert_same(by_hand, reference)
    # Polder keeps them with the states.
    model = net(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    placed = offload.place(model, optimizer, policy, tiers=two_tiers(disk), masters=True)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer._polder_states.nbytes() == pytest.approx(12 * elements, abs=4096)
    train(model, optimizer, range(30), placed)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert {state.dtype for state in kept["optimizer"]["state"][0].values()} == {torch.float32}
    train(model, optimizer, range(30, 50), placed)
    assert_same(model, reference)
    other = net(torch.bfloat16)
    loaded = optim.AdamW(other.parameters(), lr=1e-2)
    offload.place(other, loaded, policy, tiers=two_tiers(disk), masters=True)
    other.load_state_dict(kept["model"])
    loaded.load_state_dict(kept["optimizer"])
    train(other, loaded, range(30, 50))
    assert_same(other, reference)
    # Polder's own optimizer has masters of its own.
    ours, fused = net(torch.bfloat16), net(torch.bfloat16)
    optimizer = offload.AdamW(ours.parameters(), lr=1e-2)
    placed = offload.place(ours, optimizer, policy, tiers=two_tiers(disk))
    train(ours, optimizer, range(50), placed)
    train(fused, offload.AdamW(fused.parameters(), lr=1e-2), range(50))
    assert_same(ours, fused)


class Adapted(torch.nn.Module):
    """Low-rank adapters over a frozen base, with a table that is looked up and one weight that is used twice."""

    def __init__(self, table: torch.nn.Embedding, base: torch.nn.ModuleList) -> None:
        super().__init__()
        self.table, self.base = table, base
        torch.manual_seed(1)
        self.down = torch.nn.ModuleList(torch.nn.Linear(128, 8, bias=False) for _ in base).bfloat16()
        self.up = torch.nn.ModuleList(torch.nn.Linear(8, 128, bias=False) for _ in base).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.table((x[:, :8] * 50).long().abs() % 512).mean(1)
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = hidden + torch.tanh(layer(hidden) + up(down(hidden)))
        return torch.nn.functional.linear(hidden, self.table.weight)


def adapted() -> Adapted:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(6))
    return Adapted(torch.nn.Embedding(512, 128), layers).bfloat16().requires_grad_(True)


def fine_tuned(
    steps: range, place: Callable[[Any, Any], offload.Placed] | None = None
) -> tuple[Adapted, offload.Placed | None]:
    model = adapted()
    for part in (model.table, model.base):
        part.requires_grad_(False)
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = optim.AdamW(trained, lr=1e-2)
    placed = place(model, optimizer) if place else None
    train(model, optimizer, steps, placed)
    return model, placed


@pytest.mark.parametrize("policy", ["dram", "interleave", "paper", "optimal"])
def test_a_frozen_base_is_an_object_that_every_policy_places(disk: Path, policy: str) -> None:  # noqa: F811
    reference, _ = fine_tuned(range(50))
    base = sum(parameter.nbytes for parameter in reference.parameters() if not parameter.requires_grad)

    def place(model: Any, optimizer: Any) -> offload.Placed:
        # All but `dram` find room for less than the base.
        tiers = two_tiers(disk, dram="1 GiB" if policy == "dram" else base // 2)
        return offload.place(model, optimizer, policy, tiers=tiers)

    model, placed = fine_tuned(range(50), place)
    assert placed is not None
    assert_same(model, reference)
    held = {row.tier: row.bytes for row in placed.rows() if row.object == "frozen weights"}
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert sum(held.values()) == pytest.approx(base, abs=4096 * len(list(model.parameters())))
    assert held.get("disk", 0) == pytest.approx(placed.fractions["frozen weights"][1] * base, abs=largest)
    assert ("disk" in held) is (policy != "dram")
    # Its phases count it, and what is not in memory is not kept there.
    if policy != "dram":
        assert min(placed.links["FWD"][1], placed.links["BWD"][1]) > 0
        counted = {row.object: row.bytes for row in placed.rows()}["staging"]
        predicted = {(row.object, row.tier): row.bytes for row in placed.predicted()}
        assert 0 < counted == pytest.approx(predicted["staging", "dram"], rel=0.05)
        assert held["disk"] == pytest.approx(
            predicted["frozen weights", "disk"], abs=4096 * len(list(model.parameters()))
        )
    placed.close()
    assert not any(placed.holds(parameter) for parameter in model.parameters())
    train(model, optim.SGD([model.up[0].weight], lr=0.1), range(1))


def test_a_frozen_base_lies_in_tiers_of_memory_and_keeps_what_a_program_writes(disk: Path) -> None:  # noqa: F811
    near = offload.Tier("near", "64 MiB", 2e10, 2e10, node=0)
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10), near, *two_tiers(disk)[1:]]
    policy = {"frozen weights": {"dram": 0.2, "near": 0.4, "disk": 0.4}}
    reference, _ = fine_tuned(range(8))
    model, placed = fine_tuned(range(8), lambda *of: offload.place(*of, policy, tiers=tiers))
    assert placed is not None
    assert_same(model, reference)
    words = {row.tier: row.word for row in placed.rows() if row.object == "frozen weights"}
    assert words == {"dram": "count", "near": "kernel: node 0", "disk": "size of the file"}
    with torch.no_grad():
        for tensor in (*model.base.parameters(), model.table.weight):
            tensor.fill_(2.0)
    model(torch.ones(4, 64).bfloat16())
    model(torch.ones(4, 64).bfloat16())
    assert all(bool((tensor == 2).all()) for tensor in (*model.base.parameters(), model.table.weight))


class Counted(optim.SGD):
    """Counts its steps in its group, as optimizers without schedules do."""

    def step(self, closure: Any = None) -> Any:
        """One more."""
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Clipped(optim.SGD):
    """Clips the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        """Clips, and steps."""
        torch.nn.utils.clip_grad_norm_([it for group in self.param_groups for it in group["params"]], 1.0)
        return super().step(closure)


class Single(optim.SGD):
    """Steps one parameter alone."""

    def step(self, closure: Any = None) -> Any:
        """Steps it, or fails."""
        if sum(len(group["params"]) for group in self.param_groups) > 1:
            raise ValueError("one at a time")
        return super().step(closure)


def test_what_cannot_step_in_turns_is_one_clear_error(disk: Path) -> None:  # noqa: F811
    model, tiers = net(), two_tiers(disk)
    far = {"optimizer states": [0, 1]}
    with pytest.raises(ArgumentError, match=r"Single: .*no step over two parameters of shape .*: one at a time"):
        offload.place(model, Single(model.parameters(), momentum=0.9), far, tiers=tiers)
    with pytest.raises(ArgumentError, match=r"LBFGS: its states cannot be placed, because it takes no step over a par"):
        offload.place(model, optim.LBFGS(model.parameters()), tiers=tiers)
    counted = Counted([*model.parameters()], lr=0.1, momentum=0.9)
    counted.param_groups[0]["k"] = 0
    with pytest.raises(ArgumentError, match=r"each step changes 'k', so that its parameters cannot step in"):
        offload.place(model, counted, far, tiers=tiers)
    clipped = Clipped(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ArgumentError, match=r"Clipped: a step of two parameters at once is another than that of each"):
        offload.place(model, clipped, far, tiers=tiers)
    # In memory they all step at once.
    for optimizer in (counted, clipped):
        reference = net()
        model.load_state_dict(reference.state_dict())
        theirs = type(optimizer)(reference.parameters(), lr=0.1, momentum=0.9)
        offload.place(model, optimizer, "dram", tiers=tiers)
        train(model, optimizer, range(3))
        train(reference, theirs, range(3))
        assert_same(model, reference)
    assert counted.param_groups[0]["k"] == 3
    with pytest.raises(ArgumentError, match="masters=True: expected an optimizer of torch over 16-bit parameters"):
        offload.place(model, optim.SGD(model.parameters()), tiers=tiers, masters=True)
    optimizer = optim.AdamW(model.parameters())
    offload.place(model, optimizer, far, tiers=tiers)
    train(model, optimizer, range(1))
    known = optimizer.state_dict()
    wrong = {**known, "state": {0: {**known["state"][0], "exp_avg": torch.ones(3)}}}
    with pytest.raises(ArgumentError, match=r"parameter 0: expected exp_avg of shape \(256, 64\), found \(3,\)"):
        optimizer.load_state_dict(wrong)
    # A state that lies on a disk is no number: torch says so.
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.state[model[0].weight]["exp_avg"].sum().item()


def test_a_step_that_ends_in_its_middle_is_refused_until_a_state_dict_is_loaded(disk: Path) -> None:  # noqa: F811
    class Failing(optim.AdamW):
        """Fails when it is told to."""

        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails and any(it.ndim == 1 for group in self.param_groups for it in group["params"]):
                raise ValueError("no")
            return super().step(closure)

    model = net()
    optimizer = Failing(model.parameters())
    offload.place(model, optimizer, {"optimizer states": [0.2, 0.8]}, tiers=two_tiers(disk))
    train(model, optimizer, range(2))
    known = copy.deepcopy(optimizer.state_dict())
    optimizer.fails = True
    with pytest.raises(ValueError, match="no"):
        train(model, optimizer, range(1))
    assert len(optimizer.param_groups[0]["params"]) == 4
    optimizer.fails = False
    for call in (lambda: train(model, optimizer, range(1)), optimizer.state_dict):
        with pytest.raises(TierError, match=r"a step ended in its middle.*ValueError: no; load a checkpoint"):
            call()
    optimizer.load_state_dict(known)
    train(model, optimizer, range(1))


@pytest.mark.parametrize("far", POLICIES)
def test_schedulers_closures_scalers_hooks_and_new_groups_see_the_optimizer_that_there_was(
    disk: Path,  # noqa: F811
    far: float,
) -> None:
    runs: list[tuple[torch.nn.Module, list[int]]] = []
    for is_placed in (False, True):
        model, late = net(), torch.nn.Parameter(torch.ones(64, 256))
        model.register_parameter("late", late)
        optimizer = optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-2, fused=True)
        before = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen: list[int] = []
        optimizer.register_step_pre_hook(lambda it, *_, seen=seen: seen.append(len(it.param_groups[0]["params"])))
        optimizer.register_step_post_hook(lambda it, *_, seen=seen: seen.append(len(it.param_groups[0]["params"])))
        state = torch.random.get_rng_state()
        if is_placed:
            offload.place(model, optimizer, {"optimizer states": [1 - far, far]}, tiers=two_tiers(disk))
        assert torch.equal(torch.random.get_rng_state(), state)
        after = optim.lr_scheduler.StepLR(optimizer, 2)

        def halve(it: Any, *_: Any) -> None:
            """A hook that comes late changes the gradients of the step that it comes before."""
            for parameter in (each for group in it.param_groups for each in group["params"] if each.grad is not None):
                parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.full((8, 64), float(step) if step != 3 else float("inf"))).square().mean()
            if step == 4:
                optimizer.add_param_group({"params": [late], "lr": 1.0})
            if step >= 4:
                loss = loss + late.square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            before.step()
            after.step()

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 64)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        runs.append((model, seen))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_a_state_on_a_disk_that_is_changed_in_place_is_an_error(disk: Path) -> None:  # noqa: F811
    model, reference = net(), net()
    optimizers = [optim.AdamW(it.parameters(), lr=1e-2) for it in (model, reference)]
    offload.place(model, optimizers[0], {"optimizer states": [0.0, 1.0]}, tiers=two_tiers(disk))
    for it, optimizer in zip((model, reference), optimizers, strict=True):
        train(it, optimizer, range(2))
    for state in optimizers[0].state.values():
        state["exp_avg"].zero_()
    with pytest.raises(ArgumentError, match="'exp_avg' was changed in place while it lies on a disk"):
        optimizers[0].step()
    # What the error says to do.
    for optimizer in optimizers:
        said = optimizer.state_dict()
        for state in said["state"].values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        optimizer.load_state_dict(said)
    for it, optimizer in zip((model, reference), optimizers, strict=True):
        train(it, optimizer, range(2, 4))
    assert_same(model, reference)


class Nested(torch.optim.Optimizer):
    """Keeps its momentum in a dict of its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """With half of what there was."""
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", {"momentum": torch.zeros_like(parameter)})
            kept["momentum"].mul_(0.5).add_(parameter.grad)
            parameter.sub_(0.1 * kept["momentum"])


def test_a_state_that_cannot_be_placed_is_one_warning(disk: Path) -> None:  # noqa: F811
    model, reference = net(), net()
    train(reference, Nested(reference.parameters(), {}), range(3))
    optimizer = Nested(model.parameters(), {})
    offload.place(model, optimizer, "dram", tiers=two_tiers(disk))
    with pytest.warns(PlacementWarning, match="state 'kept' of 65536 bytes: in memory, as others that") as warned:
        train(model, optimizer, range(3))
    assert len(warned) == 1
    assert_same(model, reference)
