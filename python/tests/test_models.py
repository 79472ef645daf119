"""Odd models and optimizers, cut by a restore: the bits of the run that is not cut, or refused when taken."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

import polder

torch = pytest.importorskip("torch")
import polder.torch  # noqa: E402

nn = torch.nn
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

Made = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding((x[:, :4] * 3).long().abs() % 8))


class Lora(nn.Module):
    """A frozen base with a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


class Own(nn.Module):
    """Parameters of any strides, kinds and shapes."""

    def __init__(self, *parameters: torch.Tensor, buffers: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(it) for it in parameters])
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [it.abs().double().sum() * x.mean() for it in self.all]
        return torch.stack(parts or [x.sum().double()])


class Rows(nn.Module):
    """What a recurrent layer gives, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.unsqueeze(0))[0]


class Images(nn.Module):
    """A layer of images."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(2, 2, 4, 2).to(memory_format=torch.channels_last))


class Eight(torch.optim.Optimizer):
    """An optimizer that keeps its momentum in 8 bits, with a scale, in nested state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, which makes all of a state of the parameter's type."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["q"]["bits"] = state["q"]["bits"].to(torch.int8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:  # pyright: ignore[reportUnknownVariableType]
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                was = state["q"]["bits"].float() * state["q"]["scale"] if state else torch.zeros_like(parameter)
                now = 0.9 * was + parameter.grad
                scale = now.abs().max() / 127 + 1e-12
                state["q"] = {"bits": (now / scale).round().to(torch.int8), "scale": scale}
                state["history"] = [*state.get("history", []), float(scale)]
                parameter.sub_(group["lr"] * now)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def by(
    optimizer: Callable[..., torch.optim.Optimizer], **settings: Any
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: optimizer([it for it in model.parameters() if it.requires_grad], **settings)


ADAM = by(torch.optim.AdamW, lr=0.01)
FUSED = by(torch.optim.AdamW, lr=0.01, fused=True)
Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]
KEPT: dict[str, Case] = {
    "channels_last, fused": (
        lambda: Images(nn.Conv2d(2, 4, 3, padding=1)).to(memory_format=torch.channels_last),
        FUSED,
    ),
    "channels_last, fused SGD": (
        lambda: Images(nn.Conv2d(2, 4, 3, padding=1)).to(memory_format=torch.channels_last),
        by(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    ),
    "batch norm": (lambda: Images(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)), ADAM),
    "tied": (Tied, ADAM),
    "tied, fused": (Tied, FUSED),
    "LoRA": (Lora, ADAM),
    "LSTM": (lambda: Rows(nn.LSTM(8, 4, 2, bidirectional=True)), ADAM),
    "GRU": (lambda: Rows(nn.GRU(8, 4)), FUSED),
    "RNN": (lambda: Rows(nn.RNN(8, 4)), ADAM),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), ADAM),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), ADAM),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), ADAM),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), ADAM),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), ADAM),
    "transposed": (lambda: Own(torch.arange(12.0).reshape(3, 4).t()), FUSED),
    "permuted": (lambda: Own(torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)), FUSED),
    "with gaps": (lambda: Own(torch.arange(24.0).reshape(4, 6)[:, ::2]), ADAM),
    "part of a larger one": (lambda: Own(*torch.arange(24.0).reshape(2, 12).unbind()), ADAM),
    "scalar and empty": (lambda: Own(torch.tensor(2.0), torch.empty(0, 3)), ADAM),
    "double and half": (lambda: Own(torch.ones(3, dtype=torch.float64), torch.ones(3).bfloat16()), ADAM),
    "complex": (lambda: Own(torch.ones(3, dtype=torch.complex64)), by(torch.optim.Adam, lr=0.01)),
    "buffers": (
        lambda: Own(torch.ones(2), buffers={"a": torch.arange(4), "b": torch.ones(2, 3).t(), "c": torch.tensor(True)}),
        ADAM,
    ),
    "expanded buffer": (lambda: Own(torch.ones(2), buffers={"a": torch.ones(3, 1).expand(3, 4).clone()}), ADAM),
    "lazily made": (lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh()), ADAM),
    "one layer twice": (lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2), ADAM),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Sequential(plain()), nn.Linear(8, 8))), ADAM),
    "averaged": (lambda: torch.optim.swa_utils.AveragedModel(plain(), use_buffers=True), ADAM),
    "8 bits": (plain, by(Eight)),
    "Adam amsgrad": (plain, by(torch.optim.Adam, lr=0.01, amsgrad=True)),
    "Adam foreach": (plain, by(torch.optim.Adam, lr=0.01, foreach=True)),
    "NAdam": (plain, by(torch.optim.NAdam)),
    "RAdam": (plain, by(torch.optim.RAdam)),
    "Adamax": (plain, by(torch.optim.Adamax)),
    "Adagrad fused": (plain, by(torch.optim.Adagrad, fused=True)),
    "Adadelta": (plain, by(torch.optim.Adadelta)),
    "RMSprop": (plain, by(torch.optim.RMSprop, centered=True, momentum=0.9)),
    "Rprop": (plain, by(torch.optim.Rprop)),
    "ASGD": (plain, by(torch.optim.ASGD)),
    "Adafactor": (plain, by(torch.optim.Adafactor)),
    "SGD without momentum": (plain, by(torch.optim.SGD, lr=0.1)),
    "LBFGS": (plain, by(torch.optim.LBFGS, lr=0.1, max_iter=3)),
    "groups": (
        plain,
        lambda model: torch.optim.AdamW(
            [{"params": [it], "lr": 0.01 * at, "name": str(at)} for at, it in enumerate(model.parameters(), 1)]
        ),
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).double().square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
        scheduler.step()


def made(case: Case) -> Made:
    torch.manual_seed(0)
    model = case[0]()
    if any(isinstance(it, nn.modules.lazy.LazyModuleMixin) for it in model.modules()):
        model(torch.zeros(4, 8))
    optimizer = case[1](model)
    return model, optimizer, {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def everything(value: Any) -> Any:
    """All bits of a state."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.stride(), value.detach().resolve_conj().clone().contiguous().view(-1).tolist()
    if isinstance(value, dict):
        return [(key, everything(it)) for key, it in value.items()]
    return [everything(it) for it in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", KEPT)
def test_a_model_that_is_restored_trains_on_with_the_same_bits(pool: polder.Pool, kind: str) -> None:
    model, optimizer, extra = made(KEPT[kind])
    train(model, optimizer, extra["scheduler"], range(3))
    polder.torch.snapshot("job", model, optimizer, step=3, pool=pool, extra=extra).wait()
    at_the_cut = copy.deepcopy(everything(optimizer.state_dict()))
    train(model, optimizer, extra["scheduler"], range(3, 6))
    other, fresh, back = made(KEPT[kind])
    assert polder.torch.restore("job", other, fresh, pool=pool, extra=back).step == 3
    assert everything(fresh.state_dict()) == at_the_cut
    train(other, fresh, back["scheduler"], range(3, 6))
    assert everything(dict(other.state_dict())) == everything(dict(model.state_dict()))
    assert everything(fresh.state_dict()) == everything(optimizer.state_dict())


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "lazy, and not made yet": lambda: nn.LazyLinear(8),
    "quantized": lambda: Own(buffers={"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}),
    "quantized by torch.ao": lambda: torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}),
    "sparse": lambda: Own(buffers={"s": torch.eye(3).to_sparse()}),
    "compressed": lambda: Own(buffers={"s": torch.eye(3).to_sparse_csr()}),
    "nested": lambda: Own(buffers={"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}),
    "jagged": lambda: Own(
        buffers={"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}
    ),
    "on meta": lambda: nn.Linear(3, 3, device="meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_not_come_back_is_refused_when_it_is_taken(pool: polder.Pool, kind: str) -> None:
    try:
        model = REFUSED[kind]()
    except (RuntimeError, NotImplementedError, ImportError) as error:
        pytest.skip(f"this build of torch has none: {error}")
    with pytest.raises(polder.ArgumentError, match=r"^/'model'/'"):
        polder.torch.snapshot("job", model, step=1, pool=pool)
    assert pool.list("/version/job/0/1") == []
