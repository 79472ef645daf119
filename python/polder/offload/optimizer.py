"""AdamW in one pass over memory, with its states wherever they were placed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from polder import _core
from polder.errors import ArgumentError
from polder.offload.shards import local, mapped, whole

#: Elements in a page of 32-bit numbers: what is placed is cut there.
PAGE = 1024
#: What a tensor begins at among all states, so that no piece of it has a tail: see polder_kernels::PIECE.
_ALIGNED = 64
_Settings = tuple[float, float, float, float, float]


class AdamW(torch.optim.Optimizer):
    """A drop-in for ``torch.optim.AdamW`` on 32-bit parameters of CPUs, and on DTensors of such.

    On CPUs with AVX2 or AVX-512, new parameters and states have the bits of ``torch.optim.AdamW(fused=True)``, if torch
    uses the same instructions (``ATEN_CPU_CAPABILITY`` unset). State dicts are torch's.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay
        As in torch.
    amsgrad, maximize, foreach, capturable, differentiable, fused
        Accepted only with their defaults, and ``fused=True``, for callers that name them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        given = {"amsgrad": amsgrad, "maximize": maximize, "capturable": capturable, "differentiable": differentiable}
        for name, value in {**given, "foreach": foreach}.items():
            if value:
                raise ArgumentError(f"{name}=True: polder.offload.AdamW has no such step; use torch.optim.AdamW")
        for name, value, least in (("lr", float(lr), 0), ("eps", eps, 0), ("weight_decay", weight_decay, 0)):
            if not value >= least:
                raise ArgumentError(f"{name}: expected a number from {least} on, found {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(f"betas: expected numbers from 0 to below 1, found {betas}")
        self._states: _core.States | None = None
        self._begin: dict[torch.Tensor, int] = {}
        # Parameters of which the placed states hold something.
        self._written: set[torch.Tensor] = set()
        self._folder: Path | None = None
        #: The `Placed` that the states belong to, if any.
        self.placed_by: Any = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **given}
        super().__init__(params, {**defaults, "foreach": None, "fused": True})

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def elements(self) -> int:
        """Elements that the states of all parameters take, each begun and the whole ended as placement needs it."""
        return _up(sum(_up(local(parameter).numel(), _ALIGNED) for parameter in self.parameters()), PAGE)

    def place(self, states: _core.States | None, folder: str | Path | None = None) -> None:
        """Keeps the states in ``states`` from now on, or in memory of torch again; those that there are move.

        Copies for a state dict lie in files of ``folder``, so that memory does not have to hold all of them.
        """
        between = None if states is None else self._folder
        kept = {it: self._copies(it, between) for it in self.parameters() if self.state.get(it)}
        self._states, self._begin, self._written = states, {}, set()
        self._folder = None if folder is None else Path(folder)
        begin = 0
        for parameter in self.parameters():
            if states is not None:
                self._begin[parameter] = begin
            begin += _up(local(parameter).numel(), _ALIGNED)
        for parameter, (mean, square) in kept.items():
            self._put(parameter, mean, square)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before states are placed."""
        if self._states is not None:
            raise ArgumentError(
                "add_param_group: the states are placed; close() the placement, and place again after it"
            )
        super().add_param_group(param_group)

    def moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a parameter's states, or the states themselves where they are tensors."""
        return self._copies(parameter, self._folder)

    def _copies(self, parameter: torch.Tensor, folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state[parameter]
        if "exp_avg" in state:
            return state["exp_avg"], state["exp_avg_sq"]
        assert self._states is not None
        shard = local(parameter)
        mean, square = (mapped(shard, folder) for _ in range(2))
        self._states.save(self._begin[parameter], mean.data_ptr(), square.data_ptr(), shard.numel())
        return whole(parameter, mean), whole(parameter, square)

    def _put(self, parameter: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> None:
        state = self.state[parameter]
        if self._states is None:
            state["exp_avg"], state["exp_avg_sq"] = mean, square
            return
        mean, square = (local(it).detach().to(torch.float32).contiguous() for it in (mean, square))
        self._states.load(self._begin[parameter], mean.data_ptr(), square.data_ptr(), mean.numel())
        self._written.add(parameter)
        state.pop("exp_avg", None)
        state.pop("exp_avg_sq", None)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        threads = torch.get_num_threads()
        tensors: list[tuple[int, int, int, int, _Settings, float]] = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            settings = (float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                shard, gradient = local(parameter), local(gradient)
                check(shard, gradient)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    if self._states is None:
                        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                    elif parameter in self._written:
                        # A state dict without this parameter was loaded: what was there before is gone.
                        self._put(parameter, torch.zeros_like(shard), torch.zeros_like(shard))
                state["step"] += 1
                at, elements = (shard.data_ptr(), gradient.data_ptr()), shard.numel()
                number = float(state["step"])
                if self._states is None:
                    moments = (local(state["exp_avg"]).data_ptr(), local(state["exp_avg_sq"]).data_ptr())
                    _core.offload_adamw(settings, number, (*at, *moments), elements, threads)
                else:
                    self._written.add(parameter)
                    tensors.append((self._begin[parameter], *at, elements, settings, number))
        if self._states is not None and tensors:
            self._states.step(tensors, threads)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the states read from where they lie."""
        known: dict[str, Any] = super().state_dict()
        if self._states is not None:
            for number, parameter in enumerate(self.parameters()):
                if self.state.get(parameter):
                    mean, square = self.moments(parameter)
                    known["state"][number] = {**known["state"][number], "exp_avg": mean, "exp_avg_sq": square}
        return known

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; what is loaded goes where states were placed."""
        known = [number for group in state_dict["param_groups"] for number in group["params"]]
        # Looked at before anything is loaded: a state dict that does not fit changes nothing.
        for number, parameter in zip(known, self.parameters(), strict=False):
            if state := state_dict["state"].get(number):
                for name in ("exp_avg", "exp_avg_sq"):
                    found = tuple(state[name].shape) if name in state else "none"
                    if found != tuple(parameter.shape):
                        raise ArgumentError(
                            f"parameter {number}: expected {name} of shape {tuple(parameter.shape)}, found {found}; "
                            "load the state dict of an AdamW over this model"
                        )
        super().load_state_dict(state_dict)
        for parameter in self.parameters() if self._states is not None else []:
            if state := self.state.get(parameter):
                self._put(parameter, state["exp_avg"], state["exp_avg_sq"])


def check(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Refuses what the kernel does not take."""
    for what, it in (("parameter", parameter), ("gradient", gradient)):
        if it.device.type != "cpu" or it.dtype != torch.float32 or it.layout != torch.strided or not it.is_contiguous():
            found = f"{it.dtype} of shape {tuple(it.shape)} and strides {it.stride()} on {it.device}"
            raise ArgumentError(f"{what}: expected contiguous float32 on a CPU, found {found}; use torch.optim.AdamW")


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit
