"""Adam, AdamW and Lion in one pass over memory, with their states wherever they were placed."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import torch

from polder import _core, address, arguments
from polder.errors import ArgumentError, PlacementWarning, TierError
from polder.offload.shards import Held, local, mapped, whole

#: Elements in a page of 32-bit numbers: what is placed is cut there.
PAGE = 1024
#: What a tensor begins at among all states, so that no piece of it has a tail: see polder_kernels::PIECE.
_ALIGNED = 64
_MOMENTS = ("exp_avg", "exp_avg_sq")
_Settings = tuple[str, float, float, float, float, float]
#: A parameter, its shard, the gradient's, and its group.
_Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]
_Tensor = tuple[_Settings, float, tuple[int, int, int, int, int], int, bool]
#: What an optimizer has besides what torch's has.
_OWN = ("max_norm", "skip_overflow", "norm", "skipped", "why_skipped")
#: A step's memory traffic with next to no arithmetic; it changes no finite number.
TRAFFIC: _Settings = ("traffic", 0.0, 0.0, 0.0, 0.0, 0.0)


class PlacedState(dict[str, Any]):
    """The state of a parameter whose moments are placed."""

    def __missing__(self, name: str) -> Any:
        if name in _MOMENTS:
            raise ArgumentError(
                f"state {name}: the states are placed, so they are no tensors here; read a copy in "
                "optimizer.state_dict(), or close() the placement"
            )
        raise KeyError(name)


class Fused(torch.optim.Optimizer):
    """What `Adam`, `AdamW` and `Lion` have in common."""

    #: The kernel's name of the formula, and the states that it has.
    _rule: ClassVar[str]
    _names: ClassVar[tuple[str, ...]] = _MOMENTS
    #: GradScaler hands its scale and what it found to the step, as to torch's fused optimizers.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Iterable[Any], settings: dict[str, Any], *, max_norm: float | None, skip_overflow: bool
    ) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not (_is_number(given := settings.get(name, 0)) and given >= 0):
                raise ArgumentError(f"{name}: expected a number from 0 on, found {given!r}")
        if not _are_betas(settings["betas"]):
            raise ArgumentError(f"betas: expected two numbers from 0 to below 1, found {settings['betas']!r}")
        if max_norm is not None and not (_is_number(max_norm) and max_norm > 0):
            raise ArgumentError(f"max_norm: expected a number above 0, found {max_norm!r}")
        for name, flag in {"maximize": settings["maximize"], "skip_overflow": skip_overflow}.items():
            if not isinstance(flag, bool):
                raise ArgumentError(f"{name}: expected True or False, found {flag!r}")
        #: The most that the norm of all gradients may be; None leaves them as they are.
        self.max_norm = max_norm
        #: Whether a step with an infinity or NaN among its gradients changes nothing.
        self.skip_overflow = skip_overflow
        #: The norm of the last step's gradients, unscaled and before clipping, if it was computed.
        self.norm: float | None = None
        #: Steps that were skipped, and why the last one was.
        self.skipped, self.why_skipped = 0, ""
        # What ended a step in its middle, until a state dict is loaded.
        self._broken = ""
        self._unplaced()
        super().__init__(params, settings)

    def _unplaced(self) -> None:
        self._states: _core.States | None = None
        # Of placed parameters where their elements begin, and how many there are.
        self._begin: dict[torch.Tensor, int] = {}
        self._sizes: dict[torch.Tensor, int] = {}
        # Parameters of which the placed states hold something.
        self._written: set[torch.Tensor] = set()
        # Of 16-bit parameters the version that their 32-bit masters belong to.
        self._versions: dict[torch.Tensor, int] = {}
        self._folder: Path | None = None
        #: The `Placed` that the states belong to, if any.
        self.placed_by: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, or a pickled optimizer. Its states lie in memory, wherever those of this one were placed."""
        self._check_whole()
        state = {
            parameter: {**kept, **dict(zip(self._names, self._copies(parameter, None), strict=True))} if kept else {}
            for parameter, kept in self.state.items()
        }
        own = {name: getattr(self, name) for name in _OWN}
        return {**super().__getstate__(), "state": defaultdict(dict, state), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accepts groups and step counts as older torch and DeepSpeed write them."""
        if "_states" not in self.__dict__:
            # A copy, or one that was pickled.
            self._unplaced()
            self._broken = ""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._check_group(group)
        for kept in self.state.values():
            if "step" in kept and not torch.is_tensor(kept["step"]):
                kept["step"] = torch.tensor(float(kept["step"]))
        self._guard()

    def _guard(self) -> None:
        """Lets states that are placed say so where a program looks for them."""
        kind = dict if self._states is None else PlacedState
        self.state = defaultdict(kind, {parameter: kind(kept) for parameter, kept in self.state.items()})

    def _check_whole(self) -> None:
        """Refuses to go on after a step that ended in its middle."""
        if self._broken:
            raise TierError(
                f"a step ended in its middle, so that some weights and states are those before it: {self._broken}; "
                "load a checkpoint of the model and, by load_state_dict, of the optimizer"
            )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses what this step would leave out, wherever the program has set it."""
        for name in ("amsgrad", "foreach", "capturable", "differentiable"):
            if group.get(name):
                raise ArgumentError(f"{name}=True: {self._name()} has no such step; use torch's optimizer")
        if not group.get("bias_correction", True):
            raise ArgumentError(f"bias_correction=False: {self._name()} always corrects; use DeepSpeedCPUAdam")

    def _rule_of(self, group: Mapping[str, Any]) -> str:
        """The kernel's name of a group's formula."""
        return self._rule

    def _name(self) -> str:
        return f"polder.offload.{type(self).__name__}"

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def with_states(self) -> list[torch.Tensor]:
        """Parameters that have states, or will: those that are not frozen."""
        return [it for it in self.parameters() if it.requires_grad or self.state.get(it)]

    def elements(self) -> int:
        """Elements that all states take, each parameter's begun and the whole ended as placement needs it."""
        return _up(sum(_up(local(parameter).numel(), _ALIGNED) for parameter in self.with_states()), PAGE)

    def room(self, kept: Sequence[tuple[int, Any]], files: Sequence[tuple[int, str | Path]]) -> _core.States:
        """Room for states: elements in memory with their places, and elements in folders."""
        return _core.States(kept, files, len(self._names))

    def nbytes(self) -> int:
        """Bytes of what is placed: 4 for each element of each moment."""
        return 4 * len(self._names) * self.elements()

    def place(self, states: _core.States | None, folder: str | Path | None = None) -> None:
        """Keeps the states in ``states`` from now on, or in memory of torch again; those that there are move.

        Copies for a state dict lie in files of ``folder``, so that memory does not have to hold all of them.
        """
        between = None if states is None else self._folder
        # ZeRO-3 lists a parameter only while it steps.
        parameters = self.with_states() if self.parameters() else list(self._begin)
        # What a broken step has left is of no use, and may not be there.
        kept = {it: self._copies(it, between) for it in parameters if self.state.get(it) and not self._broken}
        self._states, self._begin, self._sizes, self._written = states, {}, {}, set()
        self._folder = None if folder is None else Path(folder)
        begin = 0
        for parameter in parameters:
            if states is not None:
                self._begin[parameter], self._sizes[parameter] = begin, local(parameter).numel()
            begin += _up(local(parameter).numel(), _ALIGNED)
        self._guard()
        for parameter, moments in kept.items():
            self._put(parameter, moments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before states are placed."""
        if self._states is not None:
            raise ArgumentError(
                "add_param_group: the states are placed; close() the placement, and place again after it"
            )
        self._check_group(param_group)
        super().add_param_group(param_group)

    def moments(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Copies of a parameter's states, or the states themselves where they are tensors."""
        self._check_whole()
        return self._copies(parameter, self._folder)

    def _copies(self, parameter: torch.Tensor, folder: Path | None) -> list[torch.Tensor]:
        state = self.state[parameter]
        if self._names[0] in state:
            return [state[name] for name in self._names]
        assert self._states is not None
        shard = local(parameter)
        count = self._placed_count(parameter, shard)
        moments = [mapped(shard, folder) for _ in self._names]
        into = _pair(address.of(it, dtype=torch.float32, count=count, what="a copy of states") for it in moments)
        self._states.save(self._begin[parameter], *into, count)
        return [whole(parameter, it) for it in moments]

    def _placed_count(self, parameter: torch.Tensor, shard: torch.Tensor) -> int:
        """How many elements the placed states have of a parameter, which still has as many."""
        if parameter not in self._sizes:
            raise ArgumentError(
                f"parameter of shape {tuple(shard.shape)}: it was frozen, or in no group, when the states were placed, "
                "so they have no room for its own; close() the placement, and place again"
            )
        count = self._sizes[parameter]
        if count != shard.numel():
            raise ArgumentError(
                f"parameter of shape {tuple(shard.shape)}: expected {count} elements, as when the states were placed; "
                "close() the placement, and place again"
            )
        return count

    def _put(self, parameter: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        state = self.state[parameter]
        if self._states is None:
            state.update(zip(self._names, moments, strict=True))
            return
        count = self._placed_count(parameter, local(parameter))
        moments = [local(it).detach().to(torch.float32).resolve_neg().contiguous() for it in moments]
        with Held("it is loaded") as held:
            addresses = _pair(held.address(it, torch.float32, count) for it in moments)
            self._states.load(self._begin[parameter], *addresses, count)
        self._written.add(parameter)
        for name in self._names:
            state.pop(name, None)

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Updates every parameter that has a gradient.

        If GradScaler has found an infinity or NaN, nothing changes. The same holds without GradScaler if
        ``skip_overflow`` is set. ``skipped`` counts such steps, and ``why_skipped`` names the gradient.

        Raises
        ------
        TierError
            A tier has failed. If that was in the middle of a step, every later call raises it too, until
            `load_state_dict`: some weights and states are new, others are not.
        """
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        threads = torch.get_num_threads()
        for group in self.param_groups:
            self._check_group(group)
        updates = [
            # A gradient that is a negated view has the numbers that torch reads, not those in its memory.
            (parameter, local(parameter), local(parameter.grad).resolve_neg(), group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, shard, gradient, _ in updates:
            check(shard, gradient, self._name())
            self._check_state(parameter, shard, gradient)
        scale, factor = 1.0, 1.0
        if (given := getattr(self, "grad_scale", None)) is not None:
            scale = float(given)
        overflow = getattr(self, "found_inf", None)
        self.norm = None
        if overflow is not None and float(overflow):
            return self._skip("GradScaler found an infinity or NaN among the gradients", loss)
        if self.max_norm is not None or self.skip_overflow:
            with Held("the step ends") as held:
                arrays = [
                    (held.address(gradient), gradient.numel(), gradient.dtype == torch.bfloat16)
                    for _, _, gradient, _ in updates
                ]
                squares = _core.offload_squares(arrays, threads)
            whole_norm = math.sqrt(sum(squares)) / scale
            if self.skip_overflow and not math.isfinite(whole_norm):
                index = next(index for index, square in enumerate(squares) if not math.isfinite(square))
                return self._skip(self._overflow(updates[index][0]), loss)
            if self.max_norm is not None:
                if any(hasattr(parameter, "to_local") for parameter, *_ in updates):
                    raise ArgumentError(
                        "max_norm: the gradients are shards of DTensors, so this process does not have their norm; "
                        "leave max_norm out and call torch.nn.utils.clip_grad_norm_ before the step"
                    )
                self.norm = whole_norm
                factor = _core.offload_clip(whole_norm, self.max_norm)
        try:
            with Held("the step ends") as held:
                self._update(updates, scale, factor, threads, held)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        return loss

    def _check_state(self, parameter: torch.Tensor, shard: torch.Tensor, gradient: torch.Tensor) -> None:
        """Refuses what the program has made of a state, before anything changes."""
        state = self.state.get(parameter, {})
        names = [*self._names, *(["master"] if shard.dtype == torch.bfloat16 else [])]
        if self._states is None:
            for name in names if state else ():
                tensor = local(state[name]) if name in state else None
                if name == "master" and tensor is None:
                    continue
                is_known = tensor is not None and (tensor.dtype, tensor.shape) == (torch.float32, shard.shape)
                if tensor is None or not is_known or not address.is_plain(tensor) or tensor.device.type != "cpu":
                    given = "none" if tensor is None else _described(tensor)
                    raise ArgumentError(
                        f"state {name} of a parameter of shape {tuple(shard.shape)}: expected contiguous float32 of "
                        f"that shape, found {given}; give a new optimizer parameters whose shapes have changed"
                    )
            return
        if gradient.dtype != torch.float32:
            raise ArgumentError(f"gradient: expected float32 with placed states, found {gradient.dtype}")
        self._placed_count(parameter, shard)
        if set_since := [name for name in self._names if name in state]:
            raise ArgumentError(
                f"state {set_since[0]} of a parameter of shape {tuple(shard.shape)} was set, but states are placed; "
                "use load_state_dict, or close() the placement first"
            )

    def _skip(self, why: str, loss: Any) -> Any:
        self.skipped, self.why_skipped = self.skipped + 1, why
        return loss

    def _overflow(self, parameter: torch.Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for position, it in enumerate(group["params"]):
                if it is parameter:
                    shape = tuple(parameter.shape)
                    return f"the gradient of parameter {position} of group {number}, of shape {shape}, is not finite"
        raise AssertionError("a gradient belongs to a parameter")

    def _update(self, updates: list[_Found], scale: float, factor: float, threads: int, held: Held) -> None:
        # Groups that ascend have a factor of their own.
        for is_ascent in (False, True):
            tensors: list[_Tensor] = []
            placed: list[tuple[int, int, int, int, _Settings, float]] = []
            for parameter, shard, gradient, group in updates:
                if bool(group["maximize"]) is not is_ascent:
                    continue
                beta1, beta2 = group["betas"]
                settings = (
                    self._rule_of(group), float(group["lr"]), beta1, beta2, group.get("eps", 0.0), group["weight_decay"]
                )  # fmt: skip
                state = self._started(parameter, shard)
                state["step"] += 1
                number, count = float(state["step"]), shard.numel()
                if self._states is not None:
                    self._written.add(parameter)
                    to, of = (held.address(tensor, torch.float32, count) for tensor in (shard, gradient))
                    placed.append((self._begin[parameter], to, of, count, settings, number))
                    continue
                kept = [local(state[name]) if name in state else None for name in _MOMENTS]
                mean, square = (0 if moment is None else held.address(moment, torch.float32, count) for moment in kept)
                is_half = shard.dtype == torch.bfloat16
                master = local(state["master"]) if is_half else shard
                copy = held.address(shard, torch.bfloat16, count) if is_half else 0
                at = (held.address(master, torch.float32, count), held.address(gradient, gradient.dtype, count))
                tensors.append((settings, number, (*at, mean, square, copy), count, gradient.dtype == torch.bfloat16))
            signed = -factor if is_ascent else factor
            if tensors:
                _core.offload_step(tensors, scale, signed, threads)
            if self._states is not None and placed:
                # Groups may stand in another order than when they were placed.
                placed.sort(key=lambda entry: entry[0])
                self._states.step(placed, scale, signed, threads)
        for parameter, shard, *_ in updates:
            # A backward pass that saved the old parameter fails, as after a step of torch's.
            torch.autograd.graph.increment_version(parameter)
            if shard.dtype == torch.bfloat16:
                self._versions[parameter] = parameter._version

    def _started(self, parameter: torch.Tensor, shard: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter, made before its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if self._states is None:
                for name in self._names:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            elif parameter in self._written:
                # A state dict without this parameter was loaded: what was there before is gone.
                self._put(parameter, [torch.zeros_like(shard, dtype=torch.float32) for _ in self._names])
        if shard.dtype == torch.bfloat16:
            version = self._versions.setdefault(parameter, parameter._version)
            if "master" not in state or version != parameter._version:
                # New, or changed by others than this optimizer, as by `load_state_dict` of the model.
                state["master"] = parameter.detach().to(torch.float32)
        return state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the states read from where they lie."""
        self._check_whole()
        known: dict[str, Any] = super().state_dict()
        if self._states is not None:
            known["state"] = {number: dict(state) for number, state in known["state"].items()}
            for number, parameter in enumerate(self.parameters()):
                if self.state.get(parameter):
                    known["state"][number].update(zip(self._names, self.moments(parameter), strict=True))
        return known

    def _check_loaded(self, state_dict: dict[str, Any], pairs: Sequence[tuple[int, torch.Tensor]]) -> None:
        for group in state_dict["param_groups"]:
            self._check_group(group)
        for number, parameter in pairs:
            if state := state_dict["state"].get(number):
                for name in self._names:
                    shape = tuple(state[name].shape) if name in state else "none"
                    if shape != tuple(parameter.shape):
                        raise ArgumentError(
                            f"parameter {number}: expected {name} of shape {tuple(parameter.shape)}, found {shape}; "
                            f"load the state dict of an optimizer like {self._name()} over this model"
                        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; what is loaded goes where states were placed. State dicts of DeepSpeedCPUAdam are read too."""
        known = [number for group in state_dict["param_groups"] for number in group["params"]]
        pairs = list(zip(known, self.parameters(), strict=False))
        # Looked at before anything is loaded: a state dict that does not fit changes nothing.
        self._check_loaded(state_dict, pairs)
        super().load_state_dict(state_dict)
        try:
            for number, parameter in pairs:
                if self.state.get(parameter):
                    self._take_over(number, parameter, state_dict["state"][number])
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self._broken = ""

    def _take_over(self, number: int, parameter: torch.Tensor, loaded: Mapping[str, Any]) -> None:
        """Puts a state that torch has loaded where it belongs."""
        state = self.state[parameter]
        if local(parameter).dtype == torch.bfloat16:
            # torch has rounded the states to the parameter's type.
            for name in (*self._names, "master"):
                if name in state:
                    state[name] = loaded[name].detach().to(torch.float32, copy=True).contiguous()
            self._versions[parameter] = parameter._version
        elif parameter in self._begin:
            self._put(parameter, [state[name] for name in self._names])
        else:
            # torch keeps the strides of what it loads, as those of a channels-last model.
            for name in self._names:
                state[name] = state[name].contiguous()
            if self._states is not None:
                warnings.warn(
                    f"states of parameter {number}: in memory, because it was frozen when states were placed",
                    PlacementWarning,
                    stacklevel=3,
                )


class Adam(Fused):
    """A drop-in for ``torch.optim.Adam`` on CPUs, in one pass over memory.

    On CPUs with AVX2 or AVX-512, new parameters and states have the bits of ``torch.optim.Adam(fused=True)``, if torch
    uses the same instructions (``ATEN_CPU_CAPABILITY`` unset). State dicts are torch's. DeepSpeedCPUAdam reads
    them too, and its own are read here.

    Parameters
    ----------
    params
        float32 tensors on a CPU, DTensors of such, or bfloat16 tensors. Of bfloat16 ones the state has a float32
        master, from which the parameter is rounded after each step.
    lr, betas, eps, weight_decay, maximize
        As in torch.
    max_norm : float, optional
        Clips the norm of all gradients within the step, as ``torch.nn.utils.clip_grad_norm_`` does before it.
        Gradients are left as they are; ``norm`` is their norm before.
    skip_overflow : bool
        A step with an infinity or NaN among its gradients changes nothing, as with GradScaler. Without it they reach
        the parameters, as in torch.
    amsgrad, foreach, capturable, differentiable, fused
        For callers that name them. ``True`` is refused for the first four, also in a group. ``fused`` changes nothing.

    Raises
    ------
    ArgumentError
        A value out of range, an option that there is not, or tensors of other types.
    """

    _rule = "adam"
    _decay: ClassVar[float] = 0.0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        skip_overflow: bool = False,
    ) -> None:
        given = {"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable}
        self._check_group({**given, "foreach": foreach})
        settings = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": self._decay if weight_decay is None else weight_decay,
            **given,
            "maximize": maximize,
            "foreach": None,
            "fused": True,
            "decoupled_weight_decay": self._rule == "adamw",
            # DeepSpeedCPUAdam asks for it.
            "bias_correction": True,
        }
        super().__init__(params, settings, max_norm=max_norm, skip_overflow=skip_overflow)

    def _rule_of(self, group: Mapping[str, Any]) -> str:
        # torch's Adam has either decay, and its state dict says which.
        return "adamw" if group["decoupled_weight_decay"] else self._rule


class AdamW(Adam):
    """A drop-in for ``torch.optim.AdamW``: `Adam` with decoupled weight decay, 0.01 unless given."""

    _rule = "adamw"
    _decay = 1e-2


class Lion(Fused):
    """Lion on CPUs (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, Algorithm 2), in one pass.

    Its states are ``exp_avg`` and ``step``, as of DeepSpeedCPULion.

    Parameters
    ----------
    params, max_norm, skip_overflow
        As of `Adam`.
    lr, betas, weight_decay
        As in the paper; the weight decay is decoupled.
    maximize
        Ascends.

    Raises
    ------
    ArgumentError
        A value out of range, or tensors of other types.
    """

    _rule = "lion"
    _names = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        skip_overflow: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings, max_norm=max_norm, skip_overflow=skip_overflow)


def _is_number(given: Any) -> bool:
    """Whether it is one number, also one in a tensor."""
    return arguments.is_number(given, Real) or (isinstance(given, torch.Tensor) and given.numel() == 1)


def _are_betas(given: Any) -> bool:
    try:
        first, second = given
    except (TypeError, ValueError):
        return False
    return all(_is_number(beta) and 0 <= beta < 1 for beta in (first, second))


def check(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: str = "polder.offload.AdamW") -> None:
    """Refuses what the kernel does not take."""
    if parameter.shape != gradient.shape:
        found = f"one of shape {tuple(gradient.shape)}"
        raise ArgumentError(
            f"gradient of a parameter of shape {tuple(parameter.shape)}: expected that shape, found {found}"
        )
    for what, tensor in (("parameter", parameter), ("gradient", gradient)):
        if (
            tensor.device.type != "cpu"
            or tensor.dtype not in (torch.float32, torch.bfloat16)
            or not address.is_plain(tensor)
        ):
            raise ArgumentError(
                f"{what}: {optimizer} expects contiguous float32 or bfloat16 on a CPU, found {_described(tensor)} on "
                f"{tensor.device}; use torch.optim.AdamW"
            )
        # Before anything changes: a tensor whose storage was freed has no memory.
        address.of(tensor, what=f"{what}: {optimizer}")


def _described(tensor: torch.Tensor) -> str:
    """What a tensor is, for errors."""
    if tensor.layout != torch.strided:
        return f"{tensor.dtype} of layout {tensor.layout}"
    negated = ", negated when it is read," if tensor.is_neg() else ""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}{negated}"


def _pair(addresses: Iterable[int]) -> tuple[int, int]:
    """Addresses of both moments; 0 for the second of one."""
    mean, square, *_ = *addresses, 0
    return mean, square


def _up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit
