"""Tensors that are freed, or changed, while a placement copies them: an error, or the numbers that they had."""

import contextlib
import copy
import gc
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_offload import INPUT, SETTINGS, assert_equal, disk, model, one_thread, train, two_tiers  # noqa: E402, F401

import polder  # noqa: E402
from polder import _core, offload  # noqa: E402
from polder.errors import PlacementWarning, TierError  # noqa: E402
from polder.offload import optimizer as optimizers  # noqa: E402
from polder.offload import placed as placing  # noqa: E402
from polder.offload.ranges import memory  # noqa: E402
from polder.torch import restore, snapshot  # noqa: E402

pytestmark = pytest.mark.torch
FREED = "its storage was resized while it was copied"


def nothing() -> None:
    """What no other thread does."""


class Interfering:
    """Does what another thread may, before or after a copy: the compiled half copies without the GIL."""

    def __init__(self, real: Any, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing) -> None:
        self.real, self.before, self.after = real, before, after

    def free(self, slot: int) -> None:
        """Copies nothing."""
        self.real.free(slot)

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.before()
            answer = getattr(self.real, name)(*given)
            self.after()
            return answer

        return call


def over_a_range(elements: int) -> tuple[torch.Tensor, Callable[[], object]]:
    """A tensor whose memory goes with its storage, and what tells whether it is still there."""
    kept = _core.Range(4 * elements)
    # No view, which would keep what it is a view of.
    tensor = torch.frombuffer(kept, dtype=torch.float32)
    return tensor.copy_(torch.arange(elements)), weakref.ref(kept)


def drop(tensor: torch.Tensor) -> None:
    """Gives a tensor other data, so that nothing of the program's has its bytes."""
    tensor.data = torch.empty(0)
    gc.collect()


def free(tensor: torch.Tensor) -> None:
    """Frees the bytes under a tensor, whatever else has them."""
    tensor.untyped_storage().resize_(0)


def in_node(elements: int) -> _core.Saved:
    """Room for one tensor, on node 0."""
    return _core.Saved(0.0, [(1.0, memory(4 * elements, offload.Tier("node", 1 << 30, 1, 1, node=0)))])


ELEMENTS = 1 << 16


def test_a_saved_tensor_that_is_dropped_while_it_is_copied_has_the_bytes_that_it_had() -> None:
    tensor, kept = over_a_range(ELEMENTS)

    def dropped() -> None:
        drop(tensor)
        assert kept() is not None, "the bytes went before they were copied"

    packed = placing._Packed(Interfering(in_node(ELEMENTS), before=dropped), tensor)
    assert kept() is None, "they stay no longer than the copy"
    packed.saved.before = nothing
    assert torch.equal(placing._unpack(packed), torch.arange(float(ELEMENTS)))
    # The control: an address alone keeps nothing.
    tensor, kept = over_a_range(ELEMENTS)
    assert tensor.data_ptr()
    drop(tensor)
    assert kept() is None


def test_a_saved_tensor_whose_storage_is_freed_while_it_is_copied_is_one_clear_error() -> None:
    saved = in_node(ELEMENTS)
    tensor = torch.arange(float(ELEMENTS))
    with pytest.raises(TierError, match=rf"tensor of shape \({ELEMENTS},\), torch.float32: {FREED}") as raised:
        placing._Packed(Interfering(saved, after=lambda: free(tensor)), tensor)
    assert "leave it alone until the forward pass ends" in str(raised.value) and "\n" not in str(raised.value)
    del raised
    gc.collect()
    # The control. It also shows that the one that failed has given its room back.
    packed = placing._Packed(Interfering(saved), torch.arange(float(ELEMENTS)))
    assert torch.equal(placing._unpack(packed), torch.arange(float(ELEMENTS)))


@pytest.mark.parametrize("is_placed", [True, False])
def test_gradients_that_are_dropped_in_a_step_count_and_freed_ones_are_one_clear_error(
    is_placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(before: Callable[[torch.Tensor], None], after: Callable[[torch.Tensor], None]) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(ELEMENTS))
        parameter.grad, kept = over_a_range(ELEMENTS) if before is drop else (torch.arange(float(ELEMENTS)), nothing)
        gradient, mine = parameter.grad, offload.AdamW([parameter], **SETTINGS)

        def dropped() -> None:
            before(gradient)
            assert before is not drop or kept() is not None, "the bytes went before they were read"

        if is_placed:
            mine.place(_core.States([(ELEMENTS, 0)]))
            mine._states = Interfering(mine._states, dropped, lambda: after(gradient))
        else:
            copies = Interfering(_core, dropped, lambda: after(gradient))
            with monkeypatch.context() as patched:
                patched.setattr(optimizers, "_core", copies)
                mine.step()
            return parameter.detach()
        mine.step()
        return parameter.detach()

    def same(_: torch.Tensor) -> None:
        nothing()

    control = stepped(same, same)
    assert torch.equal(stepped(drop, same), control) and not torch.equal(control, torch.ones(ELEMENTS))
    with pytest.raises(TierError, match=f"{FREED}, .* until the step ends, and load a checkpoint"):
        stepped(same, free)


def test_a_state_that_is_freed_while_it_is_loaded_is_one_clear_error() -> None:
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS))
    mine = offload.AdamW([parameter], **SETTINGS)
    mine.place(_core.States([(ELEMENTS, None)]))
    mean, square = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    mine._put(parameter, [mean, square])
    assert torch.equal(mine.moments(parameter)[0], mean)
    mine._states = Interfering(mine._states, after=lambda: free(square))
    with pytest.raises(TierError, match=f"{FREED}, .* until it is loaded"):
        mine._put(parameter, [mean, square])


def put(saved: _core.Saved, array: np.ndarray) -> int:
    """Saves a copy that is overwritten at once: what a disk still writes is no more the program's."""
    given = array.copy()
    slot = saved.put(given.ctypes.data, given.size)
    given[:] = 0
    return slot


def take(saved: _core.Saved, slot: int, nbytes: int) -> np.ndarray:
    taken = np.empty(nbytes, np.uint8)
    saved.take(slot, taken.ctypes.data, nbytes)
    return taken


def test_saved_tensors_that_are_freed_while_a_disk_writes_and_reads_them_leave_others_as_they_were(
    disk: Path,  # noqa: F811
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    saved = _core.Saved(0.3, [], [(0.7, 64 << 20, disk)])
    for _ in range(12):
        live: dict[int, np.ndarray] = {}
        for _ in range(12):
            array = numbers.integers(0, 256, draw.randrange(1 << 16, 5 << 20), np.uint8)
            live[put(saved, array)] = array
            if draw.random() < 0.2:
                slot = draw.choice([*live])
                del live[slot]
                saved.free(slot)
        # Backwards, as a backward pass, which reads one ahead. Some go before they are read.
        for slot in sorted(live, reverse=True):
            if draw.random() < 0.7:
                assert np.array_equal(take(saved, slot, live[slot].size), live[slot])
            saved.free(slot)


def test_bytes_of_a_saved_tensor_that_change_on_the_disk_are_seen(disk: Path) -> None:  # noqa: F811
    # The control of the test above: more than is under way at once, and a write that comes late.
    saved = _core.Saved(0.0, [], [(1.0, 64 << 20, disk)])
    arrays = [np.full(2 << 20, number, np.uint8) for number in range(20)]
    slots = [put(saved, array) for array in arrays]
    files = [it for it in Path("/proc/self/fd").iterdir() if it.is_symlink() and f"{disk}/#" in str(it.readlink())]
    with files[0].open("r+b") as file:
        os.pwrite(file.fileno(), b"late", 4096)
        os.fsync(file.fileno())
    first = take(saved, slots[0], arrays[0].size)
    assert first[4096:4100].tobytes() == b"late" and not first[4100:].any()
    assert np.array_equal(take(saved, slots[1], arrays[1].size), arrays[1])


def test_what_is_saved_beyond_the_room_stays_where_it_is_with_one_warning(disk: Path) -> None:  # noqa: F811
    ours, reference = model(), model()
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    given = {"tiers": two_tiers(disk), "activations": offload.saved_bytes(ours, INPUT)}
    placed = offload.place(ours, optimizer, {"activations": [0.25, 0.75]}, **given)
    with pytest.warns(PlacementWarning, match="activations: tensor of shape .* stays where it is") as warned:
        for _ in range(3):
            with placed.activations():
                _ = [ours(INPUT) for _ in range(50)]
            gc.collect()
    assert len(warned) == 1
    train(3, placed, ours, optimizer)
    train(3, None, reference, offload.AdamW(reference.parameters(), **SETTINGS))
    assert_equal(list(ours.parameters()), list(reference.parameters()))


class Mean(torch.nn.Module):
    """The end of a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.parametrize("is_placed", [False, True])
def test_weights_that_are_stepped_before_their_backward_pass_are_refused_as_without_placement(
    is_placed: bool,
    disk: Path,  # noqa: F811
) -> None:
    # Of the second layer's weights backward needs the numbers; those of the last are small.
    shapes = ((8, 256), (256, 256), (256, 8))
    ours = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in shapes), Mean())
    optimizer = offload.AdamW(ours.parameters(), **SETTINGS)
    given = {"tiers": two_tiers(disk), "activations": 4 << 20}
    placed = offload.place(ours, optimizer, {"activations": [0, 1]}, **given) if is_placed else None
    train(1, placed, ours, optimizer)
    for stepped in (ours[1].weight, ours[2].weight):
        with placed.activations() if placed else contextlib.nullcontext():
            loss = ours(INPUT)
        with torch.no_grad():
            stepped.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
    # The control: untouched ones pass.
    train(1, placed, ours, optimizer)


def test_a_saved_tensor_that_was_copied_has_the_numbers_that_it_had() -> None:
    weight = torch.nn.Parameter(torch.ones(ELEMENTS))
    module, optimizer = torch.nn.ParameterList([weight]), offload.AdamW([weight], **SETTINGS)
    tiers = [offload.Tier("dram", "1 GiB", 2e10, 2e10)]
    placed = offload.place(module, optimizer, "dram", tiers=tiers, activations=4 * ELEMENTS)
    for is_placed in (True, False):
        values = torch.arange(float(ELEMENTS))
        with placed.activations() if is_placed else contextlib.nullcontext():
            product = (weight * values).sum()
        values.zero_()
        if is_placed:
            product.backward()
            continue
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            product.backward()
    assert torch.equal(weight.grad, torch.arange(float(ELEMENTS)))


def test_a_graph_that_is_dropped_goes_with_the_results_that_it_saved() -> None:
    class Mark:
        """What tells whether the graph is still there."""

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.tanh()
            ctx.save_for_backward(y)
            ctx.mark = Mark()
            marks.append(weakref.ref(ctx.mark))
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (y,) = ctx.saved_tensors
            return gradients[0] * (1 - y * y)

    marks: list[Callable[[], object]] = []
    weight = torch.nn.Parameter(torch.ones(16))
    placed = offload.place(
        torch.nn.ParameterList([weight]),
        offload.AdamW([weight]),
        "dram",
        tiers=[offload.Tier("dram", "1 GiB", 2e10, 2e10)],
        activations=1,
    )
    with placed.activations():
        kept = Tanh.apply(weight)
        Tanh.apply(weight)
    gc.collect()
    assert [mark() is None for mark in marks] == [False, True]
    kept.sum().backward()
    assert torch.equal(weight.grad, 1 - weight.detach().tanh() ** 2)
    # The control: a hook that returns the result itself keeps its graph for ever.
    with torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it):
        Tanh.apply(weight)
    gc.collect()
    assert marks[-1]() is not None


def test_conjugated_views_and_subclasses_have_the_gradients_of_unplaced_training(disk: Path) -> None:  # noqa: F811
    weight = torch.randn(200, 200, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        one, other = torch.complex(weight * 2, weight * 3), torch.complex(weight * weight, weight.sin())
        return (one.conj() * other).real.sum()

    (theirs,) = torch.autograd.grad(loss(), weight)
    layer = torch.nn.Linear(4, 4)
    optimizer = offload.AdamW(layer.parameters())
    given = {"tiers": two_tiers(disk), "activations": 8 << 20}
    placed = offload.place(layer, optimizer, {"activations": [0, 1]}, **given)
    with placed.activations():
        saved = loss()
    (ours,) = torch.autograd.grad(saved, weight)
    assert torch.equal(ours, theirs)
    assert any(row.object == "activations" and row.tier == "disk" for row in placed.rows())


def test_a_step_that_failed_on_a_disk_does_not_keep_the_next_one_waiting_and_breaks_the_optimizer_until_it_loads(
    disk: Path,  # noqa: F811
    scratch: Path,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 21))
    model = torch.nn.ParameterList([parameter])
    optimizer = offload.AdamW(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    offload.place(model, optimizer, {"optimizer states": [0, 1]}, tiers=two_tiers(disk))
    optimizer.step()
    kept = optimizer.state_dict()
    files = [
        link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and f"{disk}/#" in str(link.readlink())
    ]
    file = max(files, key=lambda link: link.stat().st_size)
    size = file.stat().st_size
    with file.open("r+b") as cut:
        cut.truncate(4096)
        with pytest.raises(TierError, match="something has truncated it"):
            optimizer.step()
        # Some weights and states are new, others are not: nothing goes on with them.
        broken = (
            "a step ended in its middle, .*something has truncated it.*; load a checkpoint of the model and, by load_"
        )
        with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
            for call in (
                optimizer.step,
                optimizer.state_dict,
                lambda: optimizer.moments(parameter),
                lambda: copy.deepcopy(optimizer),
                lambda: snapshot("job", model, optimizer, step=2, pool=pool),
            ):
                with pytest.raises(TierError, match=broken):
                    call()
            with pytest.raises(polder.NotFoundError):
                restore("job", model, optimizer, pool=pool)
        os.posix_fallocate(cut.fileno(), 0, size)
    # All buffers were on their way when it failed.
    optimizer.load_state_dict(kept)
    assert torch.equal(optimizer.moments(parameter)[0], kept["state"][0]["exp_avg"])
    optimizer.step()


def test_states_of_a_step_that_failed_are_left_where_they_are_when_the_placement_closes(
    disk: Path,  # noqa: F811
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 16))
    model = torch.nn.ParameterList([parameter])
    optimizer = offload.AdamW(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    placed = offload.place(model, optimizer, {"optimizer states": [0, 1]}, tiers=two_tiers(disk))
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    files = [
        link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and f"{disk}/#" in str(link.readlink())
    ]
    with max(files, key=lambda link: link.stat().st_size).open("r+b") as cut:
        cut.truncate(4096)
    with pytest.raises(TierError, match="something has truncated it"):
        optimizer.step()
    # The disk is not read once more.
    placed.close()
    with pytest.raises(TierError, match="a step ended in its middle"):
        optimizer.step()
    optimizer.load_state_dict(kept)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(2.0))
