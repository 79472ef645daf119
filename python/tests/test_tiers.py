"""Tensors over ranges that are bound and mapped by tier: where their bytes lie, and that they go back with it."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_offload import train, vectors  # noqa: E402

from polder import _core, offload  # noqa: E402
from polder.errors import ArgumentError, PlacementError, PlacementWarning, TierError, TierFullError  # noqa: E402
from polder.offload import ranges, sizes  # noqa: E402

pytestmark = pytest.mark.torch
PAGE = 4096


@pytest.fixture
def card(scratch: Path) -> Iterator[Path]:
    """A file in memory, in place of a dax device."""
    path = scratch / "card"
    path.write_bytes(bytes(64 * PAGE))
    yield path


def resident() -> int:
    """Bytes of anonymous memory that this process has."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


def test_a_tensor_over_a_range_takes_its_pages_and_gives_them_back() -> None:
    nbytes = 24 << 20
    # What an earlier test left is not given back in between.
    gc.collect()
    before = resident()
    memory = _core.Range(nbytes)
    assert (memory.nbytes, memory.size) == (nbytes, nbytes)
    memory.bind(0, memory.size, 0)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    assert tensor.data_ptr() == memory.address and not tensor.any()
    tensor.fill_(1.5)
    assert memory.where() == [("node 0", nbytes)]
    gone = weakref.ref(memory)
    half = tensor[: nbytes // 8]
    del memory, tensor
    gc.collect()
    # A view keeps all of it.
    assert gone() is not None and resident() - before >= nbytes
    assert float(half.sum()) == 1.5 * half.numel()
    del half
    gc.collect()
    assert gone() is None and resident() - before < nbytes // 2


def test_a_striped_tensor_is_contiguous_and_its_stripes_lie_where_they_were_put(card: Path) -> None:
    memory = _core.Range(6 * PAGE - 8)
    memory.bind(0, 2 * PAGE, 0)
    assert memory.map(2 * PAGE, 4 * PAGE, card) == 0
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(2, -1)
    assert tensor.is_contiguous() and tensor.nbytes == 6 * PAGE - 8
    tensor.copy_(torch.arange(tensor.numel()).view(2, -1))
    assert sorted(memory.where()) == [(str(card), 4 * PAGE), ("node 0", 2 * PAGE)]
    there = torch.frombuffer(bytearray(card.read_bytes()), dtype=torch.float32)[: 4 * 1024 - 2]
    assert torch.equal(there, tensor.view(-1)[2 * 1024 :])
    # The kernel's list of what is mapped has the card inside the range.
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(card))]
    assert mapped == [f"{memory.address + 2 * PAGE:x}-{memory.address + 6 * PAGE:x}"]


def test_a_tier_that_cannot_hold_a_piece_is_one_clear_error(card: Path, tmp_path: Path) -> None:
    memory = _core.Range(8 * PAGE)
    with pytest.raises(TierError, match=r"^NUMA node 1000: this machine has none of this number; name one of "):
        memory.bind(0, PAGE, 1000)
    with pytest.raises(TierError, match=r"no piece of a range of 32768 bytes; name multiples of 4096 inside it"):
        memory.bind(PAGE, 8 * PAGE, 0)
    with pytest.raises(
        TierError, match=r"/dev/dax9\.0: no such file or device; list the dax devices with `daxctl list`"
    ):
        memory.map(0, PAGE, "/dev/dax9.0")
    others = _core.Range(60 * PAGE)
    others.map(0, 60 * PAGE, card)
    with pytest.raises(
        TierFullError, match=r"no 20480 bytes in a row are free of its 262144; place less there, or end"
    ):
        memory.map(0, 5 * PAGE, card)
    del others
    with pytest.raises(TierError, match="a directory"):
        memory.map(0, PAGE, tmp_path)
    memory.map(0, 2 * PAGE, card)
    memory.check()
    with card.open("r+b") as file:
        file.truncate(PAGE)
    with pytest.raises(TierError, match="it has 4096 bytes left of 8192 that are mapped; something has unbound or"):
        memory.check()


def whole(places: list[tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in places)


def test_tensors_of_a_scope_lie_in_its_tier_and_those_around_it_do_not() -> None:
    draw = torch.Generator().manual_seed(1)
    before = torch.randn(300, 400, generator=draw)
    draw.manual_seed(1)
    with offload.tier("node:0") as scope:
        made = {
            "randn": torch.randn(300, 400, generator=draw),
            "zeros": torch.zeros(128, 256),
            "tensor": torch.tensor([[1.0] * 200] * 100),
            "sum": before + 1,
            "transposed": before.t().clone(),
            "brain": before.to(torch.bfloat16),
        }
        layer = torch.nn.Linear(256, 128)
        view = made["zeros"][3:]
        small = torch.zeros(16)
    outside = torch.zeros(128, 256)
    assert torch.equal(made["randn"], before) and torch.equal(made["sum"], before + 1)
    assert torch.equal(made["transposed"], before.t()) and made["transposed"].stride() == before.t().clone().stride()
    assert torch.equal(made["brain"], before.to(torch.bfloat16))
    assert not made["zeros"].any() and view.data_ptr() == made["zeros"][3].data_ptr()
    sizes = [it.untyped_storage().nbytes() for it in (*made.values(), layer.weight)]
    assert scope.where() == [("node 0", sum((it + PAGE - 1) // PAGE * PAGE for it in sizes))]
    assert small.nbytes + outside.nbytes > 0
    # It computes as any other: gradients, and steps in place.
    loss = (layer(made["zeros"][:, :256] + 1) ** 2).mean()
    loss.backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    del made, view, loss
    gc.collect()
    assert whole(scope.where()) == layer.weight.nbytes


def test_a_tensor_that_does_not_fit_a_tier_lies_in_memory_and_one_warning_names_it(card: Path) -> None:
    with offload.tier(str(card)) as scope:
        fits = torch.ones(32, 1024)
        with pytest.warns(PlacementWarning) as warned:
            large = torch.ones(80, 1024)
            also = torch.full((90, 1024), 2.0)
        again = torch.ones(16, 1024)
    assert len(warned) == 1
    said = str(warned[0].message)
    assert said.startswith("tensor of shape (80, 1024), torch.float32: not in tier ") and "are free of its" in said
    assert scope.where() == [(str(card), fits.nbytes + again.nbytes)]
    assert float(large.sum() + also.sum()) == 80 * 1024 + 2 * 90 * 1024


BEFORE = torch.nn.Linear(256, 256)


class Loaded(torch.nn.Sequential):
    """A model that loads as those of transformers do: on the meta device, then weight by weight, in another thread."""

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        with torch.device("meta"):
            it = cls(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128))
        kept = torch.load(folder / "model.pt", mmap=True)
        with ThreadPoolExecutor(1) as other:
            for name, part in it.named_modules():
                own = {key: kept[f"{name}.{key}"] for key, _ in part.named_parameters(recurse=False)}
                other.submit(part.load_state_dict, own, strict=False, assign=True).result()
        return it


def test_what_a_model_loads_in_a_scope_lies_in_its_tier(tmp_path: Path, card: Path) -> None:
    torch.manual_seed(0)
    known = Loaded(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)).bfloat16()
    torch.save(known.state_dict(), tmp_path / "model.pt")
    bytes_of_weights = 2 * 2 * 128 * 256
    for name, place in (("node:0", "node 0"), (str(card), str(card))):
        with offload.tier(name) as scope:
            model = Loaded.from_pretrained(tmp_path)
        assert scope.where() == [(place, bytes_of_weights)]
        assert all(map(torch.equal, model.parameters(), known.parameters()))
        # What is loaded over weights that lie there stays there.
        model.load_state_dict(known.state_dict())
        assert scope.where() == [(place, bytes_of_weights)]
    with offload.tier("node:0") as scope:
        model = torch.nn.Linear(256, 256, device="meta")
        model.load_state_dict(
            {"weight": torch.from_numpy(np.ones((256, 256), np.float32)), "bias": torch.ones(256)}, assign=True
        )
        model.register_buffer("table", torch.from_numpy(np.ones((256, 256), np.float32)))
    assert scope.where() == [("node 0", 2 * 4 * 256 * 256)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: torch.nn.Linear(256, 256, device="meta"),
        # Into weights that there were.
        lambda: BEFORE.load_state_dict(BEFORE.state_dict()),
    ],
)
def test_a_scope_that_ends_with_nothing_placed_is_one_warning(make: Any) -> None:
    with pytest.warns(PlacementWarning) as warned, offload.tier("node:0"):
        make()
    assert [str(it.message).partition(":")[0] for it in warned] == ["tier node"]
    assert "nothing was placed in this scope" in str(warned[0].message)


def test_measured_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "/proc/meminfo": "MemAvailable: 24000000 kB\n",
        "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n",
        "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(4 << 30),
        "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(3 << 30),
        "/sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 7\ntotal_inactive_file {1 << 30}\n",
    }

    def read(path: Path) -> str:
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(_core, "offload_disk", lambda *_: (1 << 30, 1e9, 1e9))
    assert [tier.nbytes for tier in offload.measured(tmp_path)] == [2 << 30, (1 << 30) * 9 // 10]
    del files["/proc/self/cgroup"]
    assert offload.measured(tmp_path)[0].nbytes == 24_000_000 << 10
    del files["/proc/meminfo"]
    with pytest.raises(TierError, match="/proc/meminfo: expected MemAvailable"):
        offload.measured(tmp_path)


@pytest.mark.filterwarnings("ignore:.*(nested|quantiz)")
def test_tensors_of_other_layouts_stay_where_torch_makes_them() -> None:
    with offload.tier("node:0") as scope:
        made = [
            torch.sparse_coo_tensor(torch.arange(20000).view(2, -1) % 200, torch.ones(10000), check_invariants=True),
            torch.nested.nested_tensor([torch.ones(100, 300), torch.ones(50, 300)]),
            torch.quantize_per_tensor(torch.ones(300, 300), 0.1, 0, torch.quint8),
        ]
    gc.collect()
    # Of the first its numbers and its indices alone are tensors that may lie there.
    assert whole(scope.where()) <= 10000 * 4 + 20000 * 8 + 2 * PAGE
    assert float(made[0].sum()) == 10000.0
    assert [it.shape[0] for it in made[1].unbind()] == [100, 50]
    assert float(made[2].dequantize()[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"read": "fast"}, "tier t: read: expected bytes a second above 0, found 'fast'"),
        ({"write": float("inf")}, "tier t: write: expected bytes a second above 0, found inf"),
        ({"node": "1"}, "tier t: node: expected the number of a NUMA node, found '1'"),
        ({"node": -1}, "tier t: node: expected the number of a NUMA node, found -1"),
        ({"capacity": [1]}, "expected a size such as '2 GiB', found [1]"),
        ({"capacity": 1.5}, "expected a size such as '2 GiB', found 1.5"),
    ],
)
def test_a_tier_of_odd_values_is_one_clear_error(given: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        offload.Tier(**{"name": "t", "capacity": 4096, "read": 1.0, "write": 1.0, **given})
    assert str(raised.value) == said


def test_tensors_that_share_their_bytes_are_not_moved_apart(card: Path) -> None:
    model = Net()
    tiers = [offload.Tier("dram", "1 GiB", 1e10, 1e10), offload.Tier("card", "1 GiB", 1e10, 1e10, device=card)]
    weight = next(model.parameters())
    optimizer = offload.AdamW(model.parameters())
    with pytest.raises(ArgumentError, match=r"'one' shares its bytes with 'two', which would not follow it"):
        offload.place(model, optimizer, tiers=tiers, tensors={"one": weight, "two": weight})
    with pytest.raises(ArgumentError, match=r"'view' shares its bytes with '.+', which would not follow it"):
        offload.place(model, optimizer, tiers=tiers, tensors={"view": weight.detach()})


def test_a_name_that_stands_for_no_tier_of_memory_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    platform = Path(__file__).parents[2] / "docs" / "platform.toml"
    with pytest.raises(ArgumentError, match="a folder's bytes pass through memory"):
        offload.tier(str(tmp_path))
    with pytest.raises(ArgumentError, match=r"tier 'cxl': expected node:NUMBER, .* platform.toml, which is not"):
        offload.tier("cxl")
    with pytest.raises(ArgumentError, match=r"tier 'cxl': .* has dram, far, scratch"):
        offload.tier("cxl", platform)
    with pytest.raises(ArgumentError, match="tier 'scratch': a folder's bytes"):
        offload.tier("scratch", platform)
    with (
        pytest.raises(TierError, match="tier node:999: NUMA node 999: this machine has none"),
        offload.tier("node:999"),
    ):
        pass
    with pytest.raises(ArgumentError, match="expected a folder, a node or a device, found node and device"):
        offload.Tier("both", 1, 1, 1, node=0, device="/dev/dax0.0")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(torch.tanh(self.inside(x)) ** 2).square().mean()


@vectors
def test_states_and_activations_striped_over_memory_a_node_a_card_and_two_folders_train_the_same_bits(
    scratch: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    card = scratch / "card"
    card.write_bytes(bytes(32 << 20))
    folders = [Path(__file__).parents[2] / "out" / f"tiers-{number}" for number in range(2)]
    tiers = [
        offload.Tier("dram", "1 GiB", 2e10, 2e10),
        offload.Tier("far", "1 GiB", 1e10, 1e10, node=0),
        offload.Tier("card", "16 MiB", 1e10, 1e10, device=card),
        *(offload.Tier(folder.name, "1 GiB", 1e9, 1e9, folder) for folder in folders),
    ]
    fractions = [0.1, 0.3, 0.3, 0.2, 0.1]
    inputs = torch.linspace(-1, 1, 400 * 256).view(400, 256)
    models = []
    for is_placed in (False, True):
        torch.manual_seed(3)
        model = Net()
        models.append(model)
        if is_placed:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            optimizer = offload.AdamW(model.parameters(), lr=1e-2)
            saved = offload.saved_bytes(model, inputs)
            policy = {"optimizer states": fractions, "activations": fractions}
            placed = offload.place(model, optimizer, policy, tiers=tiers, activations=saved)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train(10, placed if is_placed else None, model, optimizer, inputs)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    rows = {(row.object, row.tier): row for row in placed.rows()}
    states = 8 * optimizer.elements()
    for tier, part in zip(tiers, fractions, strict=True):
        # Memory's own stripe is on node 0 too, which the kernel calls by the name of the tier that is bound there.
        expected = {"dram": 0.0, "far": 0.4}.get(tier.name, part) * states
        found = rows[("optimizer states", tier.name)].bytes if expected else 0
        assert abs(found - expected) <= 4 * PAGE, (tier.name, found, expected)
        assert tier.name == "dram" or ("activations", tier.name) in rows
    assert rows[("optimizer states", "card")].word == f"kernel: {card}"
    assert rows[("activations", "card")].bytes >= 0.3 * saved
    with card.open("r+b") as file:
        file.truncate(PAGE)
    with pytest.raises(TierError, match="something has unbound or truncated it"):
        optimizer.step()
    with pytest.raises(TierError, match="something has unbound or truncated it"), placed.activations():
        model(inputs)
    with card.open("r+b") as file:
        file.truncate(32 << 20)
    placed.close()
    for folder in folders:
        folder.rmdir()


class Looked(Net):
    """A net with a table that is trained and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 256 * 256).view(256, 256))
        self.fixed = torch.linspace(1, 2, 256 * 256).view(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ (self.table * self.fixed))


@vectors
def test_tensors_that_a_program_names_are_placed_as_other_objects(scratch: Path) -> None:
    card = scratch / "card"
    card.write_bytes(bytes(4 << 20))
    models = []
    inputs = torch.linspace(-1, 1, 32 * 256).view(32, 256)
    for is_placed in (False, True):
        torch.manual_seed(5)
        model = Looked()
        models.append(model)
        optimizer = (offload.AdamW if is_placed else torch.optim.AdamW)(model.parameters(), lr=1e-2, fused=True)
        if is_placed:
            tiers = [
                offload.Tier("dram", "1 GiB", 2e10, 2e10),
                offload.Tier("card", "2 MiB", 1e10, 1e10, device=card),
                offload.Tier("disk", "1 GiB", 1e9, 1e9, scratch),
            ]
            given = {"tensors": {"trained": model.table, "fixed": model.fixed}, "activations": 1 << 20}
            with pytest.raises(PlacementError, match="fixed: expected none of it in disk; it can lie in dram, card"):
                offload.place(model, optimizer, {"fixed": [0, 0, 1]}, tiers=tiers, **given)
            policy = {"trained": [0.25, 0.75], "fixed": [0, 1]}
            placed = offload.place(model, optimizer, policy, tiers=tiers[:2], **given)
        train(10, placed if is_placed else None, model, optimizer, inputs)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    rows = {(row.object, row.tier): row for row in placed.rows()}
    nbytes = 4 * 256 * 256
    assert (rows["trained", "card"].bytes, rows["fixed", "card"].bytes) == (nbytes * 3 // 4, nbytes)
    assert rows["trained", "card"].word == f"kernel: {card}"
    assert rows["weights", "dram"].bytes == sum(it.nbytes for it in models[0].parameters()) - nbytes
    assert placed.holds(model.table) and placed.holds(model.fixed)
    # A policy counts them: both links work while the table is read.
    best = offload.place(model, optimizer, "optimal", tiers=tiers[:2], tensors={"trained": model.table})
    assert 0 < best.fractions["trained"][1] < 1 and best.links["FWD"][1] > 0
    with pytest.raises(ArgumentError, match="'weights' is an object of every step"):
        offload.place(model, optimizer, tiers=tiers[:1], tensors={"weights": model.table})
    with pytest.raises(ArgumentError, match=r"'turned': expected a contiguous tensor on a CPU, found Tensor of shape"):
        offload.place(model, optimizer, tiers=tiers[:1], tensors={"turned": model.fixed[1:].t()})
    best.close()
    assert not best.holds(model.table)
    # What the placement before has named stays where it is until that is closed too.
    assert placed.holds(model.fixed)
    placed.close()
    assert not placed.holds(model.fixed) and torch.equal(model.fixed, models[0].fixed)


def test_states_that_do_not_fit_a_tier_lie_in_memory_and_one_warning_names_them(card: Path) -> None:
    model = Net()
    optimizer = offload.AdamW(model.parameters())
    tiers = [offload.Tier("dram", "1 GiB", 1e10, 1e10), offload.Tier("card", "1 GiB", 1e10, 1e10, device=card)]
    with pytest.warns(PlacementWarning, match="optimizer states: in memory of the kernel's choice: .* no ") as warned:
        placed = offload.place(model, optimizer, {"optimizer states": [0.0, 1.0]}, tiers=tiers)
    assert len(warned) == 1
    optimizer.zero_grad()
    model(torch.ones(4, 256)).backward()
    optimizer.step()
    assert ("optimizer states", "card") not in {(row.object, row.tier) for row in placed.rows()}
    placed.close()


def test_a_range_is_registered_with_cuda_before_it_is_used_and_given_back_before_its_pages_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int, int]] = []

    class Cuda:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", address, nbytes))
            return flags

        def cudaHostUnregister(self, address: int) -> int:
            # The pages are still mapped.
            calls.append(("release", address, f"{address:x}-" in Path("/proc/self/maps").read_text()))
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    # Of two GPUs this process uses the second, whose copies may still be under way when a tensor is dropped.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device, 0)))
    kept = ranges.memory(3 * PAGE + 1, offload.Tier("near", 1 << 20, 1, 1, node=0))
    tensor = ranges.tensor(kept, (3, 1024), torch.float32)
    address = kept.address
    assert calls == [("register", address, 4 * PAGE)]
    del kept
    assert len(calls) == 1 and tensor.shape == (3, 1024)
    del tensor
    assert calls[1:] == [("wait", 1, 0), ("release", address, 1)]


FULL = """
import sys, torch, warnings
from polder import offload
with open(sys.argv[1], "wb") as file:
    file.truncate(64 << 20)
with warnings.catch_warnings(record=True) as seen, offload.tier(sys.argv[1]):
    warnings.simplefilter("always")
    kept = [torch.ones(1 << 18) for _ in range(8)]
assert all(float(it.sum()) == 1 << 18 for it in kept)
print(*(it.message for it in seen), sep="\\n")
"""


def test_a_file_in_memory_whose_file_system_is_full_is_one_warning(tmp_path: Path) -> None:
    # Eight tensors of 1 MiB, a file of 64 MiB, and a file system of 4.
    small = ["unshare", "--mount", "--propagation", "private", "sh", "-euc"]
    mount = 'mount -t tmpfs -o size=4m tmpfs "$1"'
    if subprocess.run([*small, mount, "sh", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    command = [*small, f'{mount}; shift; exec "$@"', "sh", tmp_path, sys.executable, "-c", FULL, tmp_path / "card"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (said,) = ended.stdout.splitlines()
    assert f"{tmp_path}/card" in said and "free" in said, said


def test_what_is_called_before_a_range_goes_keeps_an_error_that_is_on_its_way() -> None:
    seen: list[list[int]] = []

    def made() -> _core.Range:
        kept = _core.Range(1)
        kept.before_release(lambda: seen.append(sorted([2, 1])))
        return kept

    with pytest.raises(ZeroDivisionError):
        # The range goes while the error is raised.
        _ = (made(), 1 // 0)
    assert seen == [[1, 2]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: registration with CUDA needs one")
def test_a_gpu_copies_from_a_range_as_from_pinned_memory() -> None:
    kept = ranges.memory(1 << 20, offload.Tier("near", 1 << 20, 1, 1, node=0))
    tensor = ranges.tensor(kept, (1 << 18,), torch.float32).fill_(2.0)
    assert tensor.is_pinned()
    assert float(tensor.to("cuda", non_blocking=True).sum()) == 2.0 * (1 << 18)


def test_sizes_are_printed_as_asked_for_and_as_they_are() -> None:
    command = [sys.executable, "-m", "polder.offload.sizes", "9 MiB", str((5 << 20) + 1)]
    rows = [
        json.loads(it) for it in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    assert [row["asked_for"] for row in rows] == [9 << 20, (5 << 20) + 1]
    assert [row["range"] for row in rows] == [9 << 20, (5 << 20) + PAGE]
    if not torch.cuda.is_available():
        assert [row["torch_pinned"] for row in rows] == [16 << 20, 8 << 20]
        assert {row["pinned"] for row in rows} == {"computed: no GPU here"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: torch pins memory through the driver of one")
def test_pinned_sizes_are_measured_where_there_is_a_gpu_and_are_those_that_were_computed() -> None:
    for nbytes in (5 << 20, 129 << 20):
        found = sizes.line(nbytes)
        assert found["pinned"] == "measured"
        pinned = [found["torch_pinned"], found["torch_pinned_above_128_mb"]]
        assert pinned == [sizes.rounded(nbytes, None), sizes.rounded(nbytes, 128)]
