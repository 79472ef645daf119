"""Tensors over ranges that are bound and mapped by tier: where their bytes lie, and that they go back with it."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from polder import _core  # noqa: E402
from polder.errors import TierError  # noqa: E402

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
    memory.map(2 * PAGE, 4 * PAGE, card, 8 * PAGE)
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(2, -1)
    assert tensor.is_contiguous() and tensor.nbytes == 6 * PAGE - 8
    tensor.copy_(torch.arange(tensor.numel()).view(2, -1))
    assert sorted(memory.where()) == [(str(card), 4 * PAGE), ("node 0", 2 * PAGE)]
    there = torch.frombuffer(bytearray(card.read_bytes()), dtype=torch.float32)[8 * 1024 : 12 * 1024 - 2]
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
    with pytest.raises(TierError, match=r"in its 262144 bytes; place less there"):
        memory.map(0, 2 * PAGE, card, 63 * PAGE)
    with pytest.raises(TierError, match="a directory"):
        memory.map(0, PAGE, tmp_path)
    memory.map(0, 2 * PAGE, card)
    memory.check()
    with card.open("r+b") as file:
        file.truncate(PAGE)
    with pytest.raises(TierError, match="it has 4096 bytes left of 8192 that are mapped; something has unbound or"):
        memory.check()
