"""What a forward pass saves: counted without memory, as the kernels of the device save it, and copied once."""

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from polder import offload  # noqa: E402
from polder.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.torch
MODEL = torch.nn.Linear(4, 4)
TIERS = [offload.Tier("dram", "1 GiB", 2e10, 2e10)]


class Attention(torch.nn.Module):
    """Attention by the kernel that torch chooses, of queries in groups of heads if there are fewer of keys."""

    def __init__(self, keys: int = 4, **given: Any) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(64, 64), torch.nn.Linear(64, 16 * keys)
        self.given = {"enable_gqa": keys < 4, **given}

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k = (of(x).unflatten(-1, (-1, 16)).transpose(1, 2) for of in (self.q, self.k))
        if mask is not None and bool(mask.all()):
            # As transformers looks at masks.
            mask = None
        return functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, **self.given).square()


class Last(torch.nn.Module):
    """What a recurrent module returns first."""

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x)[0].sin()


class Again(torch.nn.Module):
    """A checkpointed block whose result is used thrice, in two shapes, beside a flag, a dict and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.calls = 0

    def forward(self, x: torch.Tensor, flag: bool, kept: dict[str, Any], nothing: None = None) -> torch.Tensor:
        assert flag is True and nothing is None and kept["name"] == "cache"
        self.calls += 1
        self.cache = y = checkpoint(self.up, x, use_reentrant=False) * kept["factor"]
        return self.down(y) + self.down(y).sin() + self.down(y.view(-1, 256)).view(x.shape)


X = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(2, 1, 1, 512, dtype=torch.bool).index_fill_(3, torch.arange(9), False)
FORWARDS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[Any, ...]]] = {
    "causal": (lambda: Attention(is_causal=True), (X,)),
    "masked": (Attention, (X, PADDED)),
    "a mask that hides nothing": (Attention, (X, torch.ones_like(PADDED))),
    "grouped": (lambda: Attention(keys=2, is_causal=True), (X,)),
    "dropped": (lambda: Attention(dropout_p=0.1), (X,)),
    "LSTM": (lambda: Last(torch.nn.LSTM(64, 64, 2, batch_first=True)), (X,)),
    "LSTM both ways": (lambda: Last(torch.nn.LSTM(64, 64, bidirectional=True)), (X,)),
    "GRU": (lambda: Last(torch.nn.GRU(64, 256)), (X.view(16, 64, 64),)),
    "RNN": (lambda: Last(torch.nn.RNN(64, 256)), (X.view(16, 64, 64),)),
    "convolution": (
        lambda: torch.nn.Sequential(torch.nn.Conv1d(2, 64, 3), torch.nn.BatchNorm1d(64), torch.nn.ReLU()),
        (X.transpose(0, 1).reshape(64, 2, -1),),
    ),
    "a flag, None and a dict": (Again, (X, True, {"factor": torch.ones(256), "name": "cache"}, None)),
}


def held(model: torch.nn.Module, *inputs: Any) -> int:
    """Bytes of what is saved and held, each place in memory once, as another count than the package's."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = model(*inputs)
    large = [tensor for tensor in saved if tensor.is_contiguous() and tensor.nbytes >= 64 << 10]
    places = {(tensor.data_ptr(), tensor.nbytes) for tensor in large if tensor.untyped_storage().data_ptr() not in own}
    del made
    return sum(nbytes for _, nbytes in places)


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("is_brain", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_said_to_be_saved_is_what_the_cpu_saves_and_a_placement_holds(name: str, is_brain: bool) -> None:
    make, inputs = FORWARDS[name]
    torch.manual_seed(0)
    model = make()
    with torch.autocast("cpu", torch.bfloat16) if is_brain else contextlib.nullcontext():
        nbytes = offload.saved_bytes(model, *inputs)
        assert not hasattr(model, "cache") and getattr(model, "calls", 0) == 0
        assert nbytes == held(model, *inputs) > 0
        placed = offload.place(model, offload.AdamW(model.parameters()), "dram", tiers=TIERS, activations=nbytes)
        with placed.activations():
            made = model(*inputs)
    assert nbytes == sum(row.bytes for row in placed.rows() if row.object == "activations")
    made.float().sum().backward()


def test_a_model_larger_than_memory_is_counted_for_a_cpu_without_any() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    width, length = 1 << 16, 1 << 13
    with torch.device("meta"):
        # A tebibyte of weights, and 2 GiB for each tensor that is saved.
        layers = [it for _ in range(64) for it in (torch.nn.Linear(width, width, bias=False), torch.nn.GELU())]
        model, inputs = torch.nn.Sequential(*layers), torch.zeros(length, width)
    offload.saved_bytes(MODEL, torch.zeros(4, 4))
    before = resident()
    assert offload.saved_bytes(model, inputs) == 128 * 4 * width * length
    assert resident() - before < 64 << 20


def test_counting_starts_no_thread_in_place_of_gpus() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    # A first pass back starts what autograd needs.
    MODEL(torch.zeros(4, 4)).sum().backward()
    before = threads()
    offload.saved_bytes(MODEL, torch.zeros(4, 4))
    MODEL(torch.zeros(4, 4)).sum().backward()
    assert threads() == before


def test_a_lazy_module_is_one_clear_error_before_its_first_call() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.Tanh())
    said = r"0\.weight of a lazy module has no shape before the first call: call the model once"
    with pytest.raises(ArgumentError, match=said):
        offload.saved_bytes(lazy, X)
    with pytest.raises(ArgumentError, match=said):
        offload.place(lazy, offload.AdamW(lazy.parameters()), tiers=TIERS)
    lazy(X)
    assert offload.saved_bytes(lazy, X) == 2 * X.nbytes


def test_a_model_that_looks_at_numbers_runs_for_real_and_is_refused_on_the_meta_device() -> None:
    class Looking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.seen(self.layer(x))
            return y.sin() if y.detach().sum().item() > 1e9 else y.exp().exp()

    looking = Looking()
    before = {name: buffer.clone() for name, buffer in looking.named_buffers()}
    nbytes = offload.saved_bytes(looking, X)
    assert nbytes == held(looking, X)
    looking.load_state_dict(before, strict=False)
    assert offload.saved_bytes(looking, X) == nbytes
    assert all(torch.equal(buffer, before[name]) for name, buffer in looking.named_buffers())
    with pytest.raises(ArgumentError, match="it lies on the meta device and looks at numbers"):
        offload.saved_bytes(Looking().to("meta"), X)


def test_what_is_saved_again_is_copied_once_unless_it_was_changed_in_between() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 15))

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

    optimizer = offload.AdamW([weight])
    for changes, copies in ((False, 1), (True, 2)):
        placed = offload.place(Twice(), optimizer, "dram", tiers=TIERS, activations=4 * weight.nbytes)
        values = torch.linspace(1, 2, 1 << 15)
        with placed.activations():
            first = (weight * values).sum()
            if changes:
                with torch.no_grad():
                    values.mul_(2)
            second = (weight.view(2, -1) * values.view(2, -1)).sum()
        rows = [row.bytes for row in placed.rows() if row.object == "activations"]
        assert rows == [copies * weight.nbytes]
        weight.grad = None
        (first + second).backward()
        assert torch.equal(weight.grad, torch.linspace(1, 2, 1 << 15) * (3 if changes else 2))
        # The bytes of another tensor that takes the same place are copied anew.
        del first, second, values
        gc.collect()
        with placed.activations():
            again = (weight * torch.full((1 << 15,), 5.0)).sum()
        weight.grad = None
        again.backward()
        assert bool((weight.grad == 5.0).all())
        placed.close()
