"""An optimizer whose state the proxies of a parameter service keep: its settings, and its state both ways."""

from collections.abc import Sequence
from typing import Any

import torch

from polder.errors import ArgumentError

# torch's stubs leave the states of optimizers without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["HeldOptimizer", "Settings", "TakenGradient"]

Settings = tuple[str, float, float, float, float, float, bool]
"""The rule, the learning rate, momentum or first beta, dampening or second beta, epsilon, weight decay, Nesterov."""

_RULES: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
_NOT_CARRIED = ("amsgrad", "maximize", "differentiable", "capturable")

_HARMLESS = {"__get__", "detach_", "requires_grad_", "zero_", "_foreach_zero_"}
"""What `Optimizer.zero_grad` calls of a gradient: reads of its shape and the like, and what leaves zeros."""


class TakenGradient(torch.Tensor):
    """What stands in ``.grad`` once the proxies have taken a gradient.

    It has no numbers: an operation that reads some, such as clipping, raises.
    """

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "TakenGradient":
        """One of the shape of a parameter, and of no bytes worth mentioning."""
        return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape).as_subclass(cls)

    @staticmethod
    def forget(parameter: torch.Tensor) -> None:
        """Leaves a parameter without a gradient if its gradient was taken."""
        if isinstance(parameter.grad, TakenGradient):
            parameter.grad = None

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises an ArgumentError, but where the numbers do not matter."""
        name = getattr(func, "__name__", str(func))
        if name not in _HARMLESS:
            raise ArgumentError(
                f"{name} got a gradient that the proxies have taken: with the optimizer on the proxies no gradient can "
                'be read or clipped after the backward pass; use ParameterService(optimizer="worker")'
            )
        if name != "__get__":
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return "<a gradient that the proxies have taken>"


class HeldOptimizer:
    """Settings and state of an optimizer. The proxies keep the state; the optimizer's own is empty meanwhile.

    Parameters
    ----------
    optimizer : Optimizer
        ``torch.optim.SGD``, ``Adam`` or ``AdamW``. Its groups may change their settings between steps.
    parameters : list of Parameter
        What it trains, float32.

    Attributes
    ----------
    number : int
        Steps that it has done.

    Raises
    ------
    ArgumentError
        When the proxies do not carry it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        rule = _RULES.get(type(optimizer))
        if rule is None:
            names = ", ".join(f"torch.optim.{kind.__name__}" for kind in _RULES)
            raise ArgumentError(f"the optimizer is {type(optimizer).__name__}; proxies carry {names}")
        self._optimizer, self._parameters, self._rule = optimizer, parameters, rule
        ours = {id(parameter) for parameter in parameters}
        theirs = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if ours != set(theirs):
            raise ArgumentError(
                f"the optimizer has {len(theirs)} parameters, the model trains {len(ours)}, and they are not the same; "
                "give it model.parameters()"
            )
        wrong = next((parameter for parameter in parameters if parameter.dtype != torch.float32), None)
        if wrong is not None:
            raise ArgumentError(f"a parameter of {wrong.dtype}; an optimizer on the proxies carries torch.float32")
        self.number = 0
        self.settings()

    def settings(self) -> list[Settings]:
        """Those of each group in the next step."""
        return [self._settings_of(index, group) for index, group in enumerate(self._optimizer.param_groups)]

    def _settings_of(self, index: int, group: dict[str, Any]) -> Settings:
        refused = next((name for name in _NOT_CARRIED if group.get(name)), None)
        if refused is not None:
            raise ArgumentError(f"group {index} of the optimizer has {refused}, which proxies do not carry")
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if self._rule == "sgd":
            momentum, dampening = float(group["momentum"]), float(group["dampening"])
            return self._rule, lr, momentum, dampening, 0.0, decay, bool(group["nesterov"])
        first, second = (float(beta) for beta in group["betas"])
        return self._rule, lr, first, second, float(group["eps"]), decay, False

    def group_of(self, number: int) -> int:
        """The group of a parameter."""
        parameter = self._parameters[number]
        groups = self._optimizer.param_groups
        return next(index for index, group in enumerate(groups) if any(parameter is it for it in group["params"]))

    @property
    def moments(self) -> tuple[str, ...]:
        """What torch calls the arrays of the state, besides the parameters."""
        if self._rule != "sgd":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if any(group["momentum"] for group in self._optimizer.param_groups) else ()

    def taken(self) -> tuple[int, list[list[torch.Tensor]]]:
        """Empties the optimizer's own state: steps that it has done, and each moment of each parameter, maybe zeros.

        Raises
        ------
        ArgumentError
            When parameters are of different steps.
        """
        state = self._optimizer.state
        kept = [of for of in state.values() if any(isinstance(value, torch.Tensor) for value in of.values())]
        steps = {int(of["step"]) if "step" in of else 1 for of in kept}
        if len(steps) > 1:
            raise ArgumentError(f"the optimizer's parameters have done {sorted(steps)} steps; proxies carry one number")
        of_each = [state.get(parameter) or {} for parameter in self._parameters]
        moments = [
            [self._array(of.get(name), parameter) for of, parameter in zip(of_each, self._parameters, strict=True)]
            for name in self.moments
        ]
        # SGD counts no steps: the first one has no moment yet.
        number = steps.pop() if steps else 0
        state.clear()
        return number, moments

    def _array(self, value: object, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            if value.shape != parameter.shape:
                raise ArgumentError(
                    f"the optimizer's state of a parameter of shape {tuple(parameter.shape)} has shape "
                    f"{tuple(value.shape)}; give a new optimizer parameters whose shapes have changed"
                )
            return value.detach().to("cpu", torch.float32).resolve_neg().contiguous()
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)

    def packed(self, moments: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
        """The state of each parameter as torch has it, of these moments."""
        if self.number == 0 or not moments:
            return [{} for _ in self._parameters]
        step = {} if self._rule == "sgd" else {"step": torch.tensor(float(self.number))}
        named = [dict(zip(self.moments, arrays, strict=True)) for arrays in zip(*moments, strict=True)]
        return [{**{name: value.clone() for name, value in step.items()}, **of} for of in named]

    def give_back(self, moments: list[list[torch.Tensor]]) -> None:
        """Makes these the optimizer's own state."""
        for parameter, of in zip(self._parameters, self.packed(moments), strict=True):
            if of:
                self._optimizer.state[parameter] = of

    def write(self, state_dict: dict[str, Any], moments: list[list[torch.Tensor]]) -> None:
        """Writes these moments into what `Optimizer.state_dict` returns."""
        order = [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]
        packed = zip(self._parameters, self.packed(moments), strict=True)
        state_dict["state"] = {order.index(id(parameter)): of for parameter, of in packed if of}
