"""An optimizer whose state the proxies of a parameter service keep: its settings, and its state both ways."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from polder.errors import ArgumentError, PeerDeadError
from polder.torch import gpu
from polder.torch.exchange import Route, name_of
from polder.torch.planner import Planner

# torch's stubs leave the states of optimizers without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

__all__ = ["HeldOptimizer", "Holder", "KeptGradient", "Settings", "TakenGradient", "mark_of"]

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
        return parameter.detach().new_zeros(()).expand(parameter.shape).as_subclass(cls)

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
                'be read or clipped after the backward pass; use ParameterService(optimizer="worker"), or '
                'ParameterService(optimizer="proxy", clips=True)'
            )
        if name != "__get__":
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return "<a gradient that the proxies have taken>"


class KeptGradient(TakenGradient):
    """What stands in ``.grad`` while the proxies keep the average for a step to come.

    What reads it gets the average from the pool, each time anew. It takes factors, as those of clipping by norm and of
    GradScaler, which the proxies apply before they step.
    """

    #: Brings the average from the pool.
    pull: Callable[[], torch.Tensor]
    #: What it is multiplied by, one after another; 32-bit floats.
    factors: list[float]
    is_zero: bool

    @classmethod
    def over(cls, parameter: torch.Tensor, pull: Callable[[], torch.Tensor]) -> "KeptGradient":
        """One of a parameter."""
        it: Any = cls.of(parameter)
        it.pull, it.factors, it.is_zero = pull, [], False
        return it

    def value(self) -> torch.Tensor:
        """The average times the factors."""
        value = self.pull()
        for factor in self.factors:
            value.mul_(factor)
        return value.zero_() if self.is_zero else value

    def scale(self, by: Any) -> None:
        """Multiplies it, in the proxies' step."""
        if (factor := float(by)) != 1:
            self.factors.append(factor)

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reads averages, and notes factors."""
        name, given = getattr(func, "__name__", str(func)), kwargs or {}
        several: list[KeptGradient] = args[0] if name.startswith("_") and args and isinstance(args[0], list) else []
        if name in ("zero_", "_foreach_zero_"):
            for it in several or args[:1]:
                it.is_zero = True
            return args[0]
        if name in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in ("mul_", "_foreach_mul_") and (several or isinstance(args[0], cls)):
            scaled = several or list(args[:1])
            factors = args[1] if isinstance(args[1], list | tuple) else [args[1]] * len(scaled)
            for it, factor in zip(scaled, factors, strict=True):
                it.scale(factor)
            return args[0]
        # One after another, so that no more than one is in memory.
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            for it in several:
                func([it.value()], *args[1:])
                it.scale(args[2])
            return None
        if name == "_foreach_norm":
            return [func([it.value()], *args[1:], **given)[0] for it in several]
        if name.endswith("_") and not name.endswith("__"):
            raise ArgumentError(
                f"{name} got a gradient that the proxies keep: it can be read, and multiplied by a number; use "
                'ParameterService(optimizer="worker") for what else changes gradients'
            )

        def read(it: Any) -> Any:
            return it.value() if isinstance(it, cls) else it

        args, given = tree_map(read, (args, given))
        return func(*args, **given)


class KeptState(defaultdict[torch.Tensor, Any]):
    """What stands in ``optimizer.state`` while the proxies keep it: nothing is read there, and nothing written.

    It stays after a service has failed, so that no step goes on from moments of zeros.
    """

    def __missing__(self, key: torch.Tensor) -> Any:
        """Raises an ArgumentError."""
        del key
        raise ArgumentError(
            "the proxies keep the optimizer's state: read it by optimizer.state_dict(), and change it by "
            "optimizer.load_state_dict(), both on all workers; after a failure of the service load that of a checkpoint"
        )

    def _refuse(self, *_: Any, **__: Any) -> Any:
        self.__missing__(torch.empty(0))

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = cast("Any", _refuse)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptState, ()


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
    stepping : int
        The last step that the proxies were to do.
    kept : int
        How many moments of each parameter they keep.
    moving : list of bool
        Of each group of parameters, whether it has a momentum of steps before.

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
        if isinstance(optimizer.state, KeptState):
            optimizer.state.clear()
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
        self.number = self.stepping = 0
        self.kept = 1 if rule == "sgd" else 2
        self._count = len(optimizer.param_groups)
        self._trained = self._trains()
        self._ordered: list[Settings] | None = None
        self._groups: list[dict[str, Any]] = []
        self.moving = [False] * self._count
        self.settings()

    def settings(self) -> list[Settings]:
        """Those of each group in the next step."""
        groups = self._optimizer.param_groups
        if len(groups) != self._count:
            raise ArgumentError(
                f"the optimizer has {len(groups)} groups, and had {self._count} when it was attached; make another "
                "service after add_param_group"
            )
        if self._trains() != self._trained:
            raise ArgumentError(
                "the groups of the optimizer have other parameters than when it was attached; make another service "
                "after such a change"
            )
        return [self._settings_of(index, group) for index, group in enumerate(groups)]

    def _trains(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def expect_kept(self) -> None:
        """That the program has not given the optimizer a state of its own, which no step would use."""
        if not isinstance(self._optimizer.state, KeptState):
            raise ArgumentError(
                "optimizer.state was set, and the proxies keep the optimizer's state; to begin anew, call "
                'optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}) on all workers'
            )

    def next(self) -> list[Settings]:
        """As `settings`, for the next step, which is about to begin."""
        self.expect_kept()
        settings = self.settings()
        for index, (rule, _, momentum, dampening, *_) in enumerate(settings):
            if rule != "sgd" or not momentum:
                continue
            if dampening and self.number and not self.moving[index]:
                raise ArgumentError(
                    f"group {index} of the optimizer has got momentum after {self.number} steps without; its first "
                    "gradient is not dampened then, which proxies do not carry; leave out dampening"
                )
            self.moving[index] = True
        return settings

    def ordered(self) -> list[Settings]:
        """As `next`, for a step that begins before the optimizer's own."""
        self._ordered, self.stepping = self.next(), self.number + 1
        self._groups = [{key: it for key, it in of.items() if key != "params"} for of in self._optimizer.param_groups]
        return self._ordered

    def step(self, key: int, values: Sequence[torch.Tensor]) -> None:
        """Does the last step that was ordered with a part of a parameter, its gradient and its moments, as a proxy."""
        parameter, gradient, *moments = values
        settings: Any = self._groups[self.group_of(key)]
        if self._rule != "sgd":
            settings = {**settings, "fused": True, "foreach": None}
        # It shares the memory of `parameter`.
        part = torch.nn.Parameter(parameter)
        kind: Any = type(self._optimizer)
        optimizer = kind([{**settings, "params": [part]}])
        if self.stepping > 1:
            steps = {} if self._rule == "sgd" else {"step": torch.tensor(float(self.stepping - 1))}
            optimizer.state[part] = {**steps, **dict(zip(self.moments, moments, strict=False))}
        part.grad = gradient
        optimizer.step()
        for name, moment in zip(self.moments, moments, strict=False):
            moment.copy_(optimizer.state[part][name])

    def expect_as_ordered(self, closure: object) -> None:
        """That the optimizer's own step is the one that the proxies have done.

        Raises
        ------
        ArgumentError
            When settings have changed since, or the backward pass is in a closure.
        """
        if closure is not None:
            raise ArgumentError(
                "step() got a closure; with the optimizer on the proxies call the backward pass before step()"
            )
        self.expect_kept()
        ordered, self._ordered = self._ordered, None
        if ordered is not None and ordered != self.settings():
            raise ArgumentError(
                "settings of the optimizer were changed after the backward pass began, and the proxies have stepped "
                "with the old ones: change them before it, or use ParameterService(clips=True)"
            )

    def _settings_of(self, index: int, group: dict[str, Any]) -> Settings:
        refused = next((name for name in _NOT_CARRIED if group.get(name)), None)
        if refused is not None:
            raise ArgumentError(f"group {index} of the optimizer has {refused}, which proxies do not carry")
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if self._rule == "sgd":
            momentum, dampening = float(group["momentum"]), float(group["dampening"])
            return self._rule, lr, momentum, dampening, 0.0, decay, bool(group["nesterov"])
        first, second = (float(beta) for beta in group["betas"])
        # torch's Adam has either decay, and its groups say which.
        rule = "adamw" if group.get("decoupled_weight_decay", self._rule == "adamw") else "adam"
        return rule, lr, first, second, float(group["eps"]), decay, False

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
        done = {
            self._steps_of(state.get(parameter) or {}, group)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        steps = {number for number in done if number is not None}
        if len(steps) > 1:
            raise ArgumentError(
                f"the optimizer's parameters have done {sorted(steps)} steps, and proxies carry one number: those that "
                "were frozen have done none; give the model a new optimizer, or keep the optimizer on the workers"
            )
        of_each = [state.get(parameter) or {} for parameter in self._parameters]
        moments = [
            [self._array(of.get(name), parameter) for of, parameter in zip(of_each, self._parameters, strict=True)]
            for name in self.moments
        ]
        # SGD counts no steps: the first one has no moment yet.
        number = steps.pop() if steps else 0
        self._ordered = None
        self.moving = [
            any((state.get(it) or {}).get("momentum_buffer") is not None for it in group["params"])
            for group in self._optimizer.param_groups
        ]
        self._optimizer.state = KeptState()
        return number, moments

    def _steps_of(self, of: dict[str, Any], group: dict[str, Any]) -> int | None:
        """Steps that a parameter with this state has done; None if its first step is as one over moments of zeros."""
        if any(isinstance(value, torch.Tensor) for value in of.values()):
            # SGD counts none.
            return int(of["step"]) if "step" in of else 1
        return None if self._rule == "sgd" and not (group["momentum"] and group["dampening"]) else 0

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
        steps = [{} if self._rule == "sgd" else {"step": self._step_of(parameter)} for parameter in self._parameters]
        named = [dict(zip(self.moments, arrays, strict=True)) for arrays in zip(*moments, strict=True)]
        return [{**step, **of} for step, of in zip(steps, named, strict=True)]

    def _step_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The number of steps, where torch has it: what is fused counts them beside its parameter."""
        is_fused = any(
            group.get("fused") and any(parameter is it for it in group["params"])
            for group in self._optimizer.param_groups
        )
        return torch.tensor(float(self.number)).to(parameter.device if is_fused else "cpu")

    def give_back(self, moments: list[list[torch.Tensor]]) -> None:
        """Makes these the optimizer's own state."""
        self._optimizer.state = defaultdict(dict)
        for parameter, of in zip(self._parameters, self.packed(moments), strict=True):
            if of:
                self._optimizer.state[parameter] = of

    def write(self, state_dict: dict[str, Any], moments: list[list[torch.Tensor]]) -> None:
        """Writes these moments into what `Optimizer.state_dict` returns."""
        order = [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]
        packed = zip(self._parameters, self.packed(moments), strict=True)
        state_dict["state"] = {order.index(id(parameter)): of for parameter, of in packed if of}


def mark_of(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes with the values of a parameter: its version, or where it lies."""
    return parameter._version, parameter.data_ptr() if parameter.is_cpu else 0


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two float32 tensors of one shape are the same, NaNs too."""
    return torch.equal(*(it.contiguous().view(torch.int32) for it in (one, other)))


class Holder(Planner):
    """What a worker does where the proxies keep the optimizer's state: it brings them states, and gets them back."""

    _held: HeldOptimizer | None
    """The optimizer, where the proxies keep its state."""
    _keeps: bool
    """Whether they keep averages until the optimizer's step."""
    _is_pulling: bool
    """Whether some have not come yet."""
    _awaits_step: bool
    """Whether the proxies have stepped, and the program has not called the optimizer's step."""
    _has_means: bool
    """Whether averages stand in the pool in place of parameters."""
    _noted: dict[int, tuple[int, int]]
    """The version and the address of each parameter when it was last pulled or brought to the proxies."""

    def _hold(self, held: HeldOptimizer) -> None:
        """Gives the proxies the parameters and the optimizer's state."""
        with self._guarded(), torch.no_grad():
            # About the order in which gradients come.
            self._order = order = list(range(len(self._parameters)))[::-1]
            ours = [self._parameters[key] for key in order]
            self._routes = {
                key: Route(at, of.numel(), of.numel(), of.dtype)
                for at, (key, of) in enumerate(zip(order, ours, strict=True))
            }
            dtypes = [of.dtype for of in ours]
            self._plan_all([of.nbytes for of in ours], dtypes, lambda tensor: held.group_of(order[tensor]), held.kept)
            self._held = held
            self._hand_over()

    def _hand_over(self) -> None:
        """Brings the proxies the parameters and the optimizer's state, both as worker 0 has them."""
        held = self._held
        assert held is not None
        with self._guarded(), torch.no_grad():
            number, moments = held.taken()
            said = torch.tensor([number, *held.moving])
            dist.broadcast(said, group_src=0, group=self._group)
            had_none = held.number == 0
            held.number, held.moving = int(said[0]), said[1:].bool().tolist()
            self._awaits_step = False
            self._load_parameters()
            # Proxies begin with zeros.
            if held.number or not had_none:
                for slot, tensors in enumerate(moments, 1):
                    self._move(slot, tensors, is_load=True)

    def _loaded(self, *_: object) -> None:
        self._load_parameters()

    def _load_parameters(self) -> None:
        with self._guarded(), torch.no_grad():
            self._move(0, [parameter.detach() for parameter in self._parameters], is_load=True)
            self._has_means = False
            self._note_parameters()

    def _note_parameters(self, numbers: Sequence[int] | None = None) -> None:
        """Notes that these parameters, or all, are those of the proxies."""
        for number in range(len(self._parameters)) if numbers is None else numbers:
            self._noted[number] = mark_of(self._parameters[number])

    def _expect_own_parameters(self) -> None:
        """That the parameters are those of the proxies, whose next step would undo what the program has changed."""
        for number, parameter in enumerate(self._parameters):
            if self._noted[number] == mark_of(parameter):
                continue
            # What was changed and changed back, as for an evaluation, is no matter.
            if self._has_means or not _have_same_bits(self._pulled(number, parameter), parameter.detach()):
                self._failed = True
                raise ArgumentError(
                    f"parameter {number} was changed by something else than the optimizer, and the proxies keep the "
                    "parameters: call model.load_state_dict(model.state_dict()) on all workers after such a change, "
                    "before the next backward pass"
                )
        self._note_parameters()

    def _expect_step_was_called(self) -> None:
        """That the program wanted the step that the proxies did in the last backward pass."""
        if self._awaits_step:
            self._failed = True
            raise ArgumentError(
                "a second backward pass without optimizer.step() between: the proxies have stepped in the first; "
                "accumulate inside service.no_sync(), or use ParameterService(clips=True) to leave out steps"
            )

    def _write_state(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """What ``optimizer.state_dict()`` returns has the proxies' state. All workers call it."""
        held = self._held
        if held is not None:
            held.write(state_dict, self._moments(held))

    def _moments(self, held: HeldOptimizer) -> list[list[torch.Tensor]]:
        """The moments of each parameter, from the proxies."""
        if held.number == 0:
            return []
        moments = [[torch.empty_like(parameter.detach()) for parameter in self._parameters] for _ in held.moments]
        try:
            for slot, tensors in enumerate(moments, 1):
                self._move(slot, tensors, is_load=False)
        except PeerDeadError as error:
            self._take_over(held, error, is_step=False)
            return self._moments(held)
        return moments

    def _take_over(self, held: HeldOptimizer, error: PeerDeadError, *, is_step: bool) -> None:
        """Starts other proxies in place of one that has died, with the state that is in the pool."""
        raise NotImplementedError

    def _move(self, slot: int, tensors: list[torch.Tensor], *, is_load: bool) -> None:
        """Brings an array of each parameter to the proxies as worker 0 has it, or from them; all workers get it."""
        self.wait()
        service = self._service()
        service.order_move(slot, is_load)
        for key in self._order:
            route, tensor = self._routes[key], tensors[key]
            room = self._room(key, tensor)
            if tensor.is_cuda:
                gpu.copy_out(room, tensor)
            span = self._span(room, route.dtype, route.count, writable=True)
            service.push(route.tensor, span, name_of(route.dtype), span)
        service.wait()
        self._enter()

    def _kept(self, number: int, parameter: torch.Tensor) -> TakenGradient:
        """What stands for a gradient that was pushed."""
        if not self._keeps:
            return TakenGradient.of(parameter)

        return KeptGradient.over(parameter, lambda: self._pulled(number, parameter))

    def _pulled(self, number: int, parameter: torch.Tensor) -> torch.Tensor:
        """What stands in the pool for a parameter between two backward passes: its average, or its new value."""
        kind = torch.contiguous_format
        route, value = self._routes[number], torch.empty_like(parameter, requires_grad=False, memory_format=kind)
        span = self._span(self._room(number, value), route.dtype, route.count, writable=True)
        self._service().read(route.tensor, span, name_of(route.dtype))
        self._enter([number])
        return value

    def _step_with_averages(self, held: HeldOptimizer, factors: list[float]) -> None:
        """The proxies step with the averages that they keep, and the workers pull the parameters."""
        self._expect_own_parameters()
        service = self._service()
        service.order_step(held.number + 1, held.next(), factors)
        for key in self._order:
            route, room = self._routes[key], self._room(key, self._parameters[key].detach())
            span = self._span(room, route.dtype, route.count, writable=True)
            service.push_nothing(route.tensor, span, name_of(route.dtype))
        self._is_pulling = self._is_early
        if not self._is_pulling:
            service.wait()
            self._enter()
        held.number += 1
        self._has_stepped()

    def _has_stepped(self) -> None:
        self._awaits_step, self._has_means = not self._keeps, False
        for parameter in self._parameters:
            torch.autograd.graph.increment_version(parameter)
        self._note_parameters()

    def _factors(self, optimizer: torch.optim.Optimizer) -> list[float] | None:
        """What the program has multiplied all gradients by; None if there is no step to take."""
        gradients = [parameter.grad for parameter in self._parameters]
        if all(it is None for it in gradients):
            return None
        # Optimizers of torch that are fused unscale by themselves.
        found, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found is not None and float(found):
            return None
        kept = [it for it in gradients if isinstance(it, KeptGradient) and not it.is_zero]
        # As text, because no NaN is equal to another.
        factors = {str(it.factors): it.factors for it in kept}
        if len(kept) < len(gradients) or len(factors) > 1:
            raise ArgumentError(
                "some gradients were removed, set or multiplied by other factors than the rest; with the optimizer on "
                "the proxies clip all parameters together"
            )
        by = [] if scale is None else [1 / float(scale)]
        if by and math.frexp(by[0])[0] != 0.5:
            raise ArgumentError("a scale that is no power of two; call scaler.unscale_(optimizer) before the step")
        return [*kept[0].factors, *by]

    def wait(self) -> None:
        """Waits until all parameters of the last step have come."""
        raise NotImplementedError

    def _forget_taken(self) -> None:
        """Parameters whose gradients the proxies took have none."""
        if self._held is not None:
            for parameter in self._parameters:
                TakenGradient.forget(parameter)

    def _forget_of(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What a parameter calls before its next gradient comes, which is not added to one that was taken."""

        def forget(_: torch.Tensor) -> None:
            if isinstance(kept := parameter.grad, KeptGradient) and not kept.is_zero:
                self._failed = True
                raise ArgumentError(
                    "a backward pass before optimizer.step() or zero_grad(): the averages of the last one are with the "
                    "proxies; accumulate inside service.no_sync()"
                )
            TakenGradient.forget(parameter)

        return forget
