"""Optimizers in one pass: torch's bits, GradScaler and clipping as with torch, and state dicts that others read."""

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_offload import vectors as as_torch  # noqa: E402

from polder import _core, offload  # noqa: E402
from polder.errors import ArgumentError, PlacementWarning  # noqa: E402

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
SHAPES = [(7,), (1, 1), (64,), (65,), (33, 31), (3, 5, 7), (40000,), (16,), (70001,)]
ADAMS = [(offload.Adam, torch.optim.Adam), (offload.AdamW, torch.optim.AdamW)]
ODD = (float("nan"), float("inf"), -float("inf"), 1e-40, -1e-45, 3e38, -0.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share a core wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def set_gradients(of: list[Any], seed: int, scale: float = 1e-2, *, odd: bool = False) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in of:
        gradient = torch.randn(parameter.shape, generator=draw) * scale
        if odd:
            flat = gradient.view(-1)
            some = flat[:: max(1, flat.numel() // 20)]
            some.copy_(torch.tensor(ODD).repeat(len(some) // len(ODD) + 1)[: len(some)])
        parameter.grad = gradient.to(parameter.dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits; a NaN has many, and none means anything."""
    one, other = one.detach(), other.detach()
    integer = torch.int32 if one.dtype == torch.float32 else torch.int16
    is_same = (one.view(integer) == other.view(integer)) if one.dim() else one == other
    return one.dtype == other.dtype and bool((is_same | (one.isnan() & other.isnan())).all())


def assert_same(ours: list[Any], theirs: list[Any], *optimizers: Any) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert same(one, other), f"parameter {number}"
        if optimizers:
            mine, its = (optimizer.state[it] for optimizer, it in zip(optimizers, (one, other), strict=True))
            for name in its:
                assert same(mine[name], its[name]), (number, name)


@as_torch
@pytest.mark.parametrize(("our", "their"), ADAMS)
@pytest.mark.parametrize(
    ("beta1", "weight_decay", "maximize", "threads"),
    [(0.9, 0.1, False, 2), (0.3, 0.0, True, 1), (0.5, 0.01, False, 1), (0.0, 0.1, True, 1)],
)
def test_a_step_has_the_bits_of_torchs_fused_step(
    our: Any, their: Any, beta1: float, weight_decay: float, maximize: bool, threads: int
) -> None:
    options = {"lr": 1e-2, "betas": (beta1, 0.95), "weight_decay": weight_decay, "maximize": maximize}
    ours, theirs = parameters(SHAPES, 0), parameters(SHAPES, 0)
    torch.set_num_threads(threads)
    mine, its = our(ours, **options), their(theirs, **options, fused=True)
    for step in range(6):
        for of, optimizer in ((ours, mine), (theirs, its)):
            set_gradients(of, step, odd=step == 3)
            # What GradScaler sets before a step: a power of two, and a number that is none.
            optimizer.grad_scale = (None, torch.tensor(1024.0), torch.tensor(3.0))[step % 3]
            optimizer.step()
        assert_same(ours, theirs, mine, its)


@as_torch
@settings(max_examples=40, deadline=None)
@given(
    elements=st.integers(1, 300),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**31),
    adam=st.sampled_from(ADAMS),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    odd=st.booleans(),
)
def test_views_of_any_size_and_alignment_have_torchs_bits(
    elements: int, shift: int, seed: int, adam: Any, beta1: float, weight_decay: float, odd: bool
) -> None:
    options = {"lr": 1e-2, "betas": (beta1, 0.95), "weight_decay": weight_decay}
    pairs = []
    for make, more in zip(adam, ({}, {"fused": True}), strict=True):
        [whole] = parameters([(elements + shift,)], seed)
        view = torch.nn.Parameter(whole.detach()[shift:])
        optimizer = make([view], **options, **more)
        for step in range(3):
            set_gradients([view], seed + step, odd=odd)
            optimizer.step()
        pairs.append((view, optimizer))
    [(one, mine), (other, its)] = pairs
    assert_same([one], [other], mine, its)


@as_torch
@pytest.mark.parametrize(("our", "their"), ADAMS)
def test_a_gradscaler_scales_and_skips_as_with_torch(our: Any, their: Any) -> None:
    runs = []
    for make, more in ((our, {}), (their, {"fused": True})):
        [weight] = parameters([(300,)], 0)
        optimizer = make([weight], lr=1e-2, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        losses = []
        for step in range(12):
            optimizer.zero_grad()
            loss = (weight * (step + 1)).square().mean() * 50
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if step % 3 == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([weight], 0.5)
            scaler.step(optimizer)
            scaler.update()
        runs.append((weight, optimizer, losses))
    [(one, mine, losses), (other, its, theirs)] = runs
    assert losses == theirs
    assert same(one, other)
    # torch makes the states in a step that it skips.
    assert float(mine.state[one]["step"]) == float(its.state[other]["step"]) == 12 - mine.skipped
    assert mine.skipped > 0
    assert mine.why_skipped == "GradScaler found an infinity or NaN among the gradients"


@as_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_clipping_in_the_step_is_clip_grad_norm_before_it(dtype: torch.dtype, scale: float) -> None:
    ours = parameters(SHAPES, 0, dtype)
    theirs = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    mine, its = offload.AdamW(ours, lr=1e-2, max_norm=0.5), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(4):
        set_gradients(ours, step, scale)
        kept = [parameter.grad.clone() for parameter in ours]
        mine.step()
        assert all(torch.equal(parameter.grad, before) for parameter, before in zip(ours, kept, strict=True))
        exact = torch.cat([gradient.view(-1).double() for gradient in kept]).norm().item()
        assert mine.norm == pytest.approx(exact, rel=1e-13)
        factor = _core.offload_clip(mine.norm, 0.5)
        for parameter, gradient in zip(theirs, kept, strict=True):
            parameter.grad = gradient.float()
        # torch sums squares in 32 bits: its own factor differs in the last places.
        its_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in theirs])
        assert factor == pytest.approx(min(1.0, 0.5 / (its_norm.item() + 1e-6)), rel=1e-5)
        torch._foreach_mul_([parameter.grad for parameter in theirs], factor)
        its.step()
        masters = [mine.state[parameter]["master"] if dtype == torch.bfloat16 else parameter for parameter in ours]
        assert_same(masters, theirs)
        assert_same(ours, [parameter.to(dtype) for parameter in theirs])


def test_gradients_that_are_not_finite_reach_parameters_as_in_torch_or_are_skipped() -> None:
    def stepped(value: float, **options: Any) -> tuple[Any, Any]:
        ours = parameters([(5,), (3, 2)], 0)
        optimizer = offload.AdamW(ours, **options)
        set_gradients(ours, 1)
        ours[1].grad[2, 1] = value
        optimizer.step()
        return ours, optimizer

    before = parameters([(5,), (3, 2)], 0)
    for value in (float("nan"), float("inf")):
        ours, _ = stepped(value)
        assert ours[1].isnan().sum() == 1
        assert not ours[0].isnan().any()
        # clip_grad_norm_ multiplies all gradients by NaN, or by 0.
        ours, optimizer = stepped(value, max_norm=1.0)
        assert not torch.isfinite(torch.tensor(optimizer.norm))
        theirs = parameters([(5,), (3, 2)], 0)
        set_gradients(theirs, 1)
        theirs[1].grad[2, 1] = value
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        torch.optim.AdamW(theirs, fused=True).step()
        assert all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(ours, theirs, strict=True))
        ours, optimizer = stepped(value, max_norm=1.0, skip_overflow=True)
        assert_same(ours, before)
        assert (optimizer.skipped, optimizer.state) == (1, {})
        assert optimizer.why_skipped == "the gradient of parameter 1 of group 0, of shape (3, 2), is not finite"
    ours, optimizer = stepped(1e30, skip_overflow=True)
    assert optimizer.skipped == 0
    assert not same(ours[0], before[0])


def lion(p: Any, g: Any, m: Any, lr: float, betas: tuple[float, float], decay: float) -> None:
    """Algorithm 2 of Chen et al., 2023, in torch's operations."""
    direction = m.clone().mul_(betas[0]).add_(g, alpha=1 - betas[0]).sign_()
    p.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


@as_torch
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_has_the_bits_of_the_papers_algorithm_in_torch(weight_decay: float) -> None:
    ours = parameters(SHAPES, 0)
    theirs, moments = (
        [parameter.detach().clone() for parameter in ours],
        [torch.zeros(parameter.shape) for parameter in ours],
    )
    optimizer = offload.Lion(ours, lr=1e-2, weight_decay=weight_decay)
    for step in range(5):
        set_gradients(ours, step, odd=step == 3)
        optimizer.step()
        for parameter, reference, moment in zip(ours, theirs, moments, strict=True):
            lion(reference, parameter.grad, moment, 1e-2, (0.9, 0.99), weight_decay)
        assert_same(ours, theirs)
        assert_same([optimizer.state[parameter]["exp_avg"] for parameter in ours], moments)


@pytest.mark.parametrize("make", [offload.Adam, offload.AdamW, offload.Lion])
def test_brain_floats_train_through_masters_that_survive_a_checkpoint(make: Any) -> None:
    ours, wide = (parameters(SHAPES, 1, torch.bfloat16) for _ in range(2))
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in wide]
    mine, reference = make(ours, lr=1e-3), make(wide, lr=1e-3)

    def train(optimizer: Any, of: list[Any], steps: range) -> None:
        for step in steps:
            set_gradients(of, step)
            for parameter in of:
                parameter.grad = parameter.grad.to(torch.bfloat16).to(parameter.dtype)
            optimizer.step()

    train(mine, ours, range(5))
    kept, weights = copy.deepcopy(mine.state_dict()), [parameter.detach().clone() for parameter in ours]
    # Another process: the model is loaded after its optimizer was made, and what masters were there go.
    again = parameters(SHAPES, 2, torch.bfloat16)
    other = make(again, lr=1.0)
    train(other, again, range(1))
    for parameter, loaded in zip(again, weights, strict=True):
        parameter.data.copy_(loaded)
    other.load_state_dict(kept)
    train(other, again, range(5, 8))
    train(mine, ours, range(5, 8))
    train(reference, wide, range(8))
    assert_same([mine.state[parameter]["master"] for parameter in ours], wide)
    assert_same(ours, [parameter.to(torch.bfloat16) for parameter in wide])
    assert_same(again, ours)
    for one, mirror in zip(again, ours, strict=True):
        for name in mine.state[mirror]:
            assert same(other.state[one][name], mine.state[mirror][name]), name


def test_a_master_follows_weights_that_are_loaded_into_the_model() -> None:
    model = torch.nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    optimizer = offload.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    loaded = {"weight": torch.full((4, 8), 3.0, dtype=torch.bfloat16)}
    for _ in range(2):
        set_gradients([model.weight], 0)
        optimizer.step()
        model.load_state_dict(loaded)
    set_gradients([model.weight], 0)
    optimizer.step()
    assert torch.equal(model.weight, loaded["weight"])


@as_torch
@pytest.mark.parametrize(("our", "their"), ADAMS)
def test_state_dicts_go_to_torch_and_come_back(our: Any, their: Any) -> None:
    def some() -> list[Any]:
        return parameters([(65,), (9, 3)], 0)

    def train(of: list[Any], optimizer: Any, steps: range) -> None:
        for step in steps:
            set_gradients(of, step)
            optimizer.step()

    ours, theirs = some(), some()
    mine, its = our(ours, lr=1e-2), their(theirs, lr=1e-2, fused=True)
    train(ours, mine, range(3))
    train(theirs, its, range(3))
    both = copy.deepcopy(mine.state_dict()), copy.deepcopy(its.state_dict())
    assert {name for group in both[1]["param_groups"] for name in group} <= set(both[0]["param_groups"][0])
    mine, its = our(ours, lr=1.0), their(theirs, lr=1.0, fused=True)
    mine.load_state_dict(both[1])
    its.load_state_dict(both[0])
    train(ours, mine, range(3, 6))
    train(theirs, its, range(3, 6))
    assert_same(ours, theirs, mine, its)


def test_a_state_dict_of_deepspeed_is_read() -> None:
    # As DeepSpeedCPUAdam 0.19.8 writes it.
    [ours], [theirs] = parameters([(65,)], 0), parameters([(65,)], 0)
    mean, square = torch.rand(65), torch.rand(65)
    group = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "params": [0]}
    state = {0: {"step": 4, "exp_avg": mean, "exp_avg_sq": square}}
    mine = offload.AdamW([ours])
    mine.load_state_dict(copy.deepcopy({"state": state, "param_groups": [{**group, "bias_correction": True}]}))
    its = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    its.load_state_dict({"state": copy.deepcopy(state), "param_groups": its.state_dict()["param_groups"]})
    for of, optimizer in ((ours, mine), (theirs, its)):
        set_gradients([of], 0)
        optimizer.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)
    assert float(mine.state[ours]["step"]) == 5
    uncorrected = {"state": state, "param_groups": [{**group, "bias_correction": False}]}
    with pytest.raises(ArgumentError, match=r"bias_correction=False: polder\.offload\.AdamW always corrects"):
        mine.load_state_dict(uncorrected)


DEEPSPEED = ROOT / ".cache/deepspeed/bin/python"
OPERATOR = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions"))
IN_DEEPSPEED = """
import copy, sys, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from polder import offload
draw = torch.Generator().manual_seed(0)
ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5003)) for _ in range(2))
mine = offload.AdamW([ours], lr=1e-2, weight_decay=0.1)
its = DeepSpeedCPUAdam([theirs], lr=1e-2, weight_decay=0.1)
def train(*optimizers, steps):
    for step in range(steps):
        gradient = torch.randn(5003, generator=draw) * 1e-2
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
train(mine, its, steps=3)
dicts = copy.deepcopy(mine.state_dict()), copy.deepcopy(its.state_dict())
mine.load_state_dict(dicts[1])
its.load_state_dict(dicts[0])
train(mine, its, steps=3)
assert float(mine.state[ours]["step"]) == float(its.state[theirs]["step"]) == 6
far = (ours - theirs).abs().max().item()
assert far < 1e-6, far
print("read both ways")
"""


def test_state_dicts_go_to_deepspeed_and_come_back(tmp_path: Path) -> None:
    if not DEEPSPEED.exists() or not list(OPERATOR.glob("*/cpu_adam/cpu_adam.so")):
        pytest.skip("DeepSpeed's cpu_adam is not compiled, which takes minutes: `polder-dev bench offload` compiles it")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [str(DEEPSPEED), "-c", IN_DEEPSPEED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "read both ways"


def test_a_backward_pass_over_old_parameters_fails_as_after_torchs_step() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = offload.AdamW([weight])
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_the_kernels_do_not_take_is_refused() -> None:
    for make, options, message in (
        (offload.AdamW, {"amsgrad": True}, r"amsgrad=True: polder\.offload\.AdamW has no such step"),
        (offload.Adam, {"lr": -1.0}, "lr: expected a number from 0 on, found -1.0"),
        (offload.Lion, {"betas": (0.9, 1.0)}, "betas: expected two numbers from 0 to below 1"),
        (offload.Lion, {"max_norm": 0.0}, "max_norm: expected a number above 0, found 0.0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make(parameters([(3,)], 0), **options)
    [half] = parameters([(3,)], 0, torch.float16)
    set_gradients([half], 0)
    with pytest.raises(ArgumentError, match=r"expects contiguous float32 or bfloat16 on a CPU, found torch\.float16"):
        offload.AdamW([half]).step()


def test_a_tensor_without_memory_or_with_anothers_is_refused_before_anything_changes() -> None:
    parameter, optimizer = stepped()
    before = parameter.detach().clone()
    parameter.grad = torch.ones(200)[50:150]
    parameter.grad.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="got a Tensor of 100 elements that has no memory"):
        optimizer.step()
    parameter.grad = torch.ones(100)
    kept = optimizer.state[parameter]["exp_avg"]
    optimizer.state[parameter]["exp_avg"] = torch._neg_view(torch.ones(100))
    with pytest.raises(ArgumentError, match=r"state exp_avg .* negated when it is read"):
        optimizer.step()
    optimizer.state[parameter]["exp_avg"] = kept
    assert optimizer.state[parameter]["step"] == 1
    assert torch.equal(parameter, before)


def test_arrays_that_share_memory_are_refused_by_name() -> None:
    parameter, optimizer = stepped()
    optimizer.state[parameter]["exp_avg_sq"] = optimizer.state[parameter]["exp_avg"]
    with pytest.raises(
        ArgumentError, match="exp_avg_sq of tensor 0 of the step shares memory with exp_avg of tensor 0"
    ):
        optimizer.step()
    whole = torch.ones(150)
    one, other = (torch.nn.Parameter(whole[begin : begin + 100]) for begin in (0, 50))
    # Gradients are only read: both may have one.
    one.grad = other.grad = torch.ones(100)
    with pytest.raises(
        ArgumentError, match="the parameter of tensor 1 of the step shares memory with the parameter of"
    ):
        offload.AdamW([one, other]).step()
    other.data = torch.ones(100)
    offload.AdamW([one, other]).step()
    assert torch.equal(one, other)


@as_torch
@pytest.mark.parametrize(("our", "their"), ADAMS)
def test_fifty_steps_have_torchs_losses(our: Any, their: Any) -> None:
    curves = []
    for make, more in ((our, {}), (their, {"fused": True})):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.01, **more)
        inputs = torch.linspace(-1, 1, 64 * 16).view(64, 16)
        losses = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :5].square()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append((losses, list(model.parameters())))
    [(ours, mine), (theirs, its)] = curves
    assert ours == theirs
    assert ours[-1] < ours[0] / 2
    assert_same(mine, its)


def stepped(**group: object) -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = torch.nn.Parameter(torch.ones(100))
    parameter.grad = torch.ones(100)
    optimizer = offload.AdamW([{"params": [parameter], **group}], max_norm=1.0)
    optimizer.step()
    return parameter, optimizer


def test_what_a_program_makes_of_groups_and_states_is_refused_before_anything_changes() -> None:
    with pytest.raises(ArgumentError, match="amsgrad=True"):
        stepped(amsgrad=True)
    parameter, optimizer = stepped()
    before = parameter.detach().clone()
    for name, value in (("amsgrad", True), ("amsgrad", False)):
        optimizer.param_groups[0][name] = value
    theirs = torch.optim.AdamW([parameter], amsgrad=True)
    with pytest.raises(ArgumentError, match="amsgrad=True"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.param_groups[0]["amsgrad"] and optimizer.state[parameter]["step"] == 1
    kept = optimizer.state[parameter]["exp_avg"]
    for wrong in (kept.to(torch.bfloat16), kept[:50], torch.zeros(1).expand(100)):
        optimizer.state[parameter]["exp_avg"] = wrong
        with pytest.raises(ArgumentError, match="state exp_avg of a parameter of shape"):
            optimizer.step()
    optimizer.state[parameter]["exp_avg"] = kept
    parameter.data = torch.ones(50)
    with pytest.raises(ArgumentError, match="expected that shape, found one of shape"):
        optimizer.step()
    parameter.data = before
    assert optimizer.state[parameter]["step"] == 1


def test_copies_and_states_of_other_strides_step_as_the_optimizer_does() -> None:
    parameter, optimizer = stepped()
    other, twin = copy.deepcopy((parameter, optimizer))
    other.grad = torch.ones(100)
    optimizer.step()
    twin.step()
    assert torch.equal(other, parameter) and twin.max_norm == 1.0
    wide = torch.nn.Parameter(torch.ones(10, 7))
    mine = offload.AdamW([wide])
    moments = {name: torch.rand(7, 10).t() for name in ("exp_avg", "exp_avg_sq")}
    mine.load_state_dict({**mine.state_dict(), "state": {0: {"step": torch.tensor(1.0), **moments}}})
    assert all(mine.state[wide][name].is_contiguous() for name in moments)
    assert all(torch.equal(mine.state[wide][name], moments[name]) for name in moments)


class Adapted(torch.nn.Module):
    """A frozen base of brain floats, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(256, 256, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.adapter(self.base(x.bfloat16()).float()).square().mean()


def test_frozen_parameters_need_no_room_for_states_and_may_have_any_type() -> None:
    models = []
    for is_placed in (False, True):
        torch.manual_seed(0)
        model = Adapted()
        models.append(model)
        optimizer = offload.AdamW(model.parameters(), lr=1e-2)
        if is_placed:
            # The states of the base would not fit.
            tiers = [offload.Tier("dram", model.base.weight.nbytes + 6 * model.adapter.weight.nbytes, 2e10, 2e10)]
            placed = offload.place(model, optimizer, "dram", tiers=tiers)
            assert optimizer.nbytes() == 2 * model.adapter.weight.nbytes == 131072
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((8, 256), float(step))).backward()
            optimizer.step()
    assert_same(*(list(it.parameters()) for it in models))
    # What is trained from now on had no room, and what was trained before loads into memory.
    model.base.float().requires_grad_(True)
    model.adapter(model.base(torch.ones(8, 256))).sum().backward()
    with pytest.raises(ArgumentError, match=r"parameter of shape \(256, 256\): it was frozen, or in no group, when"):
        optimizer.step()
    model.base.requires_grad_(False)
    known = optimizer.state_dict()
    moments = {name: torch.full((256, 256), 2.0) for name in ("exp_avg", "exp_avg_sq")}
    known["state"][0] = {"step": torch.tensor(1.0), **moments}
    with pytest.warns(PlacementWarning, match="states of parameter 0: in memory, because it was frozen when"):
        optimizer.load_state_dict(known)
    again = optimizer.state_dict()
    assert torch.equal(again["state"][0]["exp_avg"], moments["exp_avg"])
    # Those that have states are placed with them.
    placed = offload.place(model, optimizer, "dram", tiers=[offload.Tier("dram", "1 GiB", 2e10, 2e10)])
    assert optimizer.nbytes() == 2 * (model.adapter.weight.nbytes + 4 * 256 * 256)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg_sq"], moments["exp_avg_sq"])
    placed.close()
    assert torch.equal(optimizer.state[model.base.weight]["exp_avg"], moments["exp_avg"])


def test_a_state_that_is_placed_says_so_where_a_program_looks_for_it() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = offload.AdamW(model.parameters())
    placed = offload.place(model, optimizer, "dram", tiers=[offload.Tier("dram", "1 GiB", 2e10, 2e10)])
    message = (
        r"state exp_avg: the states are placed, .* read a copy in optimizer.state_dict\(\), or close\(\) the placement"
    )
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            _ = optimizer.state[model.weight]["exp_avg"]
        assert "exp_avg" not in optimizer.state[model.weight]
        with pytest.raises(KeyError):
            _ = optimizer.state[model.weight]["other"]
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        # As a checkpoint has them: no classes of Polder.
        known = optimizer.state_dict()
        assert {type(it) for it in known["state"].values()} == {dict}
        optimizer.load_state_dict(known)
    assert copy.deepcopy(optimizer).state_dict()["state"][0]["exp_avg"].shape == (8, 8)
    placed.close()
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], known["state"][0]["exp_avg"])
