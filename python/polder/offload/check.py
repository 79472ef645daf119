"""What a training script keeps in memory: ``polder offload check SCRIPT``.

The script runs as ``python SCRIPT`` does, until each of its optimizers has taken a step or one begins its second.
Watched are ``step`` of every ``torch.optim.Optimizer``, calls of modules, tensors that are saved for backward passes,
and the memory of the process. The file is not changed.
"""

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import os
import runpy
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from polder.errors import ArgumentError, PolderError
from polder.offload.placed import is_master, states_for
from polder.offload.saved import Kept, Live, is_placed, stretch
from polder.offload.shards import local, storage_of
from polder.offload.tiers import Tier, check_tiers, memory_limit, tiers_of

_OBJECTS = ("weights", "frozen weights", "gradients", "optimizer states", "activations")


class _SteppedError(BaseException):
    """Ends the script after its first step. No handler of ``Exception`` stops it."""


@dataclasses.dataclass
class Stepper:
    """An optimizer of the script.

    Attributes
    ----------
    kind, name, model : str
        Its class, and how the script calls it and the model whose parameters it has.
    is_named : bool
        Whether the script's names for both were found.
    refused : str
        Why `place` would not take it; "" if it would.
    weights, states : int
        Bytes of the model's parameters, and of the optimizer's states.
    has_stepped : bool
        Whether it took a step, so that it has states.
    """

    kind: str
    name: str
    model: str
    is_named: bool
    refused: str
    weights: int
    states: int
    has_stepped: bool


@dataclasses.dataclass
class Found:
    """What the first step of a script had in memory.

    Attributes
    ----------
    bytes : dict
        By device, then by object. Activations are the most at once, over all batches of the step.
    squared : dict
        By device, the part of the activations that grows with the square of the context.
    placed : int
        Bytes that `Placed.activations` would copy, at most at once.
    context, batch : int
        Tokens of a sample, and samples, of the first call of a module that says so; 0 if none does.
    moments : list
        Bytes of memory that the process needs at moments of a later step: those that stay, and those that grow with the
        context as activations do. Both are what the kernel counted, so they have whatever libraries take.
    optimizers : list
        That with the most states first.
    trainer : str
        How the script calls the Trainer of transformers that made the step; "" if none did.
    """

    bytes: dict[str, dict[str, int]]
    squared: dict[str, int]
    placed: int
    context: int
    batch: int
    moments: list[tuple[int, int]]
    optimizers: list[Stepper]
    trainer: str


class _Memory:
    """The memory that the kernel counts for this process."""

    def __init__(self) -> None:
        #: What there was before the first pass.
        self.base = 0

    def now(self) -> int:
        """Bytes."""
        return self._of("VmRSS")

    def most(self) -> int:
        """The most bytes since the last call."""
        found = self._of("VmHWM")
        # Where this cannot be written, it is the most since the process began.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return found

    @staticmethod
    def _of(name: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[name].split()[0]) << 10


class Watch:
    """Notes what a script does up to the end of its first step.

    Parameters
    ----------
    ended : callable
        What ends the process with the answer if the script goes on after its first step: it has caught what stops it.
    """

    def __init__(self, ended: Callable[[Found], None]) -> None:
        self.found: Found | None = None
        self._ended = ended
        self._context = self._batch = 0
        self._is_sure = False
        self._modules: set[int] = set()
        self._weights: set[int] = set()
        self._saved: defaultdict[str, Live] = defaultdict(Live)
        self._squares: defaultdict[str, Live] = defaultdict(Live)
        self._squared: dict[str, int] = {}
        self._placed = Live()
        self._memory = _Memory()
        self._gradients: dict[int, tuple[str, int]] = {}
        # Bytes of gradients, and those that came besides what was before the first pass, states, and them.
        self._moments: list[tuple[int, int]] = []
        self._steps = 0
        self._steppers: dict[int, tuple[torch.optim.Optimizer, torch.nn.Module | None, Stepper]] = {}

    def saved(self, tensor: torch.Tensor) -> Kept:
        """A tensor that is saved."""
        kept = Kept(tensor)
        if tensor.layout != torch.strided or tensor.is_nested or (key := storage_of(tensor)) in self._weights:
            return kept
        device, nbytes = tensor.device.type, tensor.untyped_storage().nbytes()
        if device == "cpu" and is_placed(tensor, self._weights):
            kept.count(self._placed, stretch(tensor), tensor.nbytes)
        squares = self._squares[device]
        if tensor.dim() > 3 and tensor.shape[-1] == tensor.shape[-2] == self._context > 1:
            kept.count(squares, key, nbytes)
        if kept.count(self._saved[device], key, nbytes):
            self._squared[device] = squares.bytes
        return kept

    def called(self, module: torch.nn.Module, args: Any) -> None:
        """Before a module computes: its weights are no activations, and its arguments may say the context."""
        if not self._memory.base:
            self._memory.base = self._memory.now()
            self._memory.most()
        if id(module) not in self._modules:
            self._modules |= {id(inner) for inner in module.modules()}
            for tensor in (*module.parameters(), *module.buffers()):
                self._weights.add(storage_of(tensor))
                if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._gradients:
                    self._gradients[id(tensor)] = (tensor.device.type, 0)
                    tensor.register_post_accumulate_grad_hook(self._accumulated)  # pyright: ignore[reportUnknownMemberType]
        for argument in args if not self._is_sure else ():
            if isinstance(argument, torch.Tensor) and argument.dim() > 1:
                self._is_sure = argument.dim() == 2 and not argument.is_floating_point()
                if self._is_sure or (argument.dim() == 3 and not self._context):
                    self._batch, self._context = argument.shape[0], argument.shape[1]
                if self._is_sure:
                    break

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """After a gradient came."""
        here = sum(nbytes for device, nbytes in self._gradients.values() if device == "cpu")
        self._moments.append((here, self._memory.most() - self._memory.base - here - self._states()))
        self._gradients[id(parameter)] = self._of(parameter.grad)

    def _states(self) -> int:
        """Bytes of states in memory."""
        steppers = [optimizer for optimizer, _, it in self._steppers.values() if it.has_stepped]
        return sum(nbytes for it in steppers for device, nbytes in self._states_of(it) if device == "cpu")

    def _states_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
        states: list[dict[str, Any]] = list(optimizer.state.values())
        return [self._of(it) for state in states for it in state.values() if isinstance(it, torch.Tensor)]

    @staticmethod
    def _of(tensor: torch.Tensor | None) -> tuple[str, int]:
        """The device of a tensor, and the bytes that this process has of it."""
        if tensor is None:
            return "cpu", 0
        shard = local(tensor)
        return shard.device.type, shard.nbytes

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """After a step."""
        if self.found is not None:
            self._ended(self.found)
        is_second = id(optimizer) in self._steppers
        if not is_second:
            self._note(optimizer, has_stepped=True)
        self._steps = max(self._steps, self._memory.most())
        seen = {id(parameter) for known, _, _ in self._steppers.values() for parameter in _parameters(known)}
        # Wrappers of an optimizer have its parameters.
        waiting = [other for other in _optimizers() if not {id(parameter) for parameter in _parameters(other)} <= seen]
        if waiting and not is_second:
            return
        for other in waiting:
            self._note(other, has_stepped=False)
        self.found = self._finding()
        raise _SteppedError

    def _note(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
        parameters = _parameters(optimizer)
        model, names = _names(optimizer, parameters)
        weights: list[torch.Tensor] = parameters if model is None else list(model.parameters())
        stepper = Stepper(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            *names,
            _refused(optimizer, model),
            sum(self._of(it)[1] for it in weights),
            sum(nbytes for _, nbytes in self._states_of(optimizer)),
            has_stepped,
        )
        self._steppers[id(optimizer)] = optimizer, model, stepper

    def _finding(self) -> Found:
        rows: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_OBJECTS, 0))
        weights: dict[int, torch.Tensor] = {}
        for optimizer, model, _ in self._steppers.values():
            known = _parameters(optimizer) if model is None else model.parameters()
            weights |= {id(parameter): parameter for parameter in known}
            for device, nbytes in self._states_of(optimizer):
                rows[device]["optimizer states"] += nbytes
        for number, parameter in weights.items():
            device, nbytes = self._of(parameter)
            rows[device]["weights" if parameter.requires_grad else "frozen weights"] += nbytes
            # What came may be gone again.
            device, nbytes = (
                self._of(parameter.grad) if parameter.grad is not None else self._gradients.get(number, ("cpu", 0))
            )
            if nbytes:
                rows[device]["gradients"] += nbytes
        for device, live in self._saved.items():
            if live.most:
                rows[device]["activations"] = live.most
        stays = self._memory.base + self._states()
        moments = {(self._steps, 0), *((stays + gradients, max(0, more)) for gradients, more in self._moments)}
        # To the next MiB. One that has no more of either than another says nothing.
        moments = {(_up(stays), _up(grows)) for stays, grows in moments}
        most = [
            moment
            for moment in moments
            if not any(moment != by and moment[0] <= by[0] and moment[1] <= by[1] for by in moments)
        ]
        steppers = [stepper for _, _, stepper in self._steppers.values()]
        return Found(
            dict(rows),
            self._squared,
            self._placed.most,
            self._context,
            self._batch,
            sorted(most),
            sorted(steppers, key=lambda stepper: -stepper.states),
            _trainer(),
        )

    def run(self, script: Path, arguments: list[str], is_quiet: bool) -> None:
        """Runs a script up to the end of its first step."""
        sys.argv = [str(script), *arguments]
        # Where Python puts no folder first, that place is the standard library's.
        sys.path[: not sys.flags.safe_path] = [str(script.resolve().parent)]
        hooks = [register_optimizer_step_post_hook(self.stepped), register_module_forward_pre_hook(self.called)]
        try:
            # What the script prints is no part of one JSON object.
            out = contextlib.redirect_stdout(sys.stderr) if is_quiet else contextlib.nullcontext()
            with out, torch.autograd.graph.saved_tensors_hooks(self.saved, lambda it: it.tensor):
                runpy.run_path(str(script), run_name="__main__")
        except _SteppedError:
            pass
        finally:
            for hook in hooks:
                hook.remove()


def _up(nbytes: int) -> int:
    return (nbytes + (1 << 20) - 1) >> 20 << 20


def _optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer that there is."""
    return [it for it in gc.get_objects() if issubclass(type(it), torch.optim.Optimizer)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [it for group in optimizer.param_groups for it in group["params"]]


def _refused(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> str:
    """Why `place` would not take an optimizer; "" if it would."""
    # Without a name for it, the optimizer's parameters stand for the model.
    over = torch.nn.ParameterList(_parameters(optimizer)) if model is None else model
    try:
        states_for(over, optimizer)
    except ArgumentError as error:
        return str(error)
    return ""


def _frames() -> list[FrameType]:
    frames: list[FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _variables() -> list[dict[str, Any]]:
    """What the script's functions that are running know by name, the outermost first."""
    mine = [frame for frame in reversed(_frames()) if frame.f_globals.get("__name__") == "__main__"]
    return [{**frame.f_globals, **frame.f_locals} for frame in mine]


def _names(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> tuple[torch.nn.Module | None, tuple[str, str, bool]]:
    """The model over the parameters; how the script calls the optimizer and it, and whether it calls both."""
    wanted = {id(parameter) for parameter in parameters}
    known = [pair for variables in _variables() for pair in variables.items()]
    ours = next((name for name, value in known if value is optimizer), None)
    modules = [(name, value) for name, value in known if isinstance(value, torch.nn.Module)]
    over = [pair for pair in modules if wanted <= {id(parameter) for parameter in pair[1].parameters()}]
    over = over or [pair for pair in modules if all(is_master(pair[1], parameter) for parameter in parameters)]
    if not over:
        return None, (ours or "optimizer", "model", False)
    # Of a module and one around it, as adapters make, the script calls the outer one.
    name, model = max(over, key=lambda pair: len(list(pair[1].modules())))
    return model, (ours or "optimizer", name, ours is not None)


def _trainer() -> str:
    """How the script calls the Trainer of transformers that makes this step."""
    inside = [frame for frame in _frames() if frame.f_globals.get("__name__") == "transformers.trainer"]
    if not inside:
        return ""
    it = inside[0].f_locals.get("self")
    return next((name for known in _variables() for name, value in known.items() if value is it), "trainer")


def needed(finding: Found, context: int) -> float:
    """Bytes of memory that steps of a context need.

    Activations grow with the context, those of a square shape with its square, and so does what is made of them for a
    while. All else stays.
    """
    whole, square = finding.bytes["cpu"]["activations"], finding.squared.get("cpu", 0)
    part = context / finding.context
    grown = ((whole - square) * part + square * part * part) / whole
    return max(stays + grows * grown for stays, grows in finding.moments)


def first_too_long(finding: Found, room: int) -> int:
    """The first context that does not fit in ``room`` bytes; 0 if any does, or nothing says."""
    saved = finding.bytes.get("cpu", {}).get("activations", 0)
    if not finding.context or not saved or not any(grows for _, grows in finding.moments):
        return 0
    low, high = 0, finding.context
    while needed(finding, high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(finding, middle) <= room else (low, middle)
    return high


def lines(finding: Found, tiers: str) -> list[str]:
    """What to paste into the script, if its optimizer can be placed: it runs as it is."""
    first, activations = finding.optimizers[0], finding.placed
    if first.refused or not tiers:
        return []
    pasted = ["import polder.offload"]
    model, optimizer = first.model, first.name
    if name := finding.trainer:
        model, optimizer = f"{name}.model", f"{name}.optimizer"
        pasted.append(f"{name}.create_optimizer()")
    given = f'{model}, {optimizer}, "optimal", {tiers}, activations={activations}'
    pasted.append(f"placed = polder.offload.place({given})")
    return [*pasted, *([f"placed.cover({model})"] if activations else [])]


def _answer(finding: Found, tiers: str) -> list[str]:
    """What to do, for people."""
    first, *others = finding.optimizers
    out: list[str] = []
    for other in others:
        states = (
            f"{other.states / 1e6:.1f} MB of states"
            if other.has_stepped
            else "no step yet, so its states are not counted"
        )
        out.append(
            f"another optimizer: {other.name} ({other.kind}) over {other.model}: "
            f"{other.weights / 1e6:.1f} MB of weights, {states}"
        )
        if other.refused:
            out.append(f"    cannot be placed: {other.refused}")
    if others:
        out += ["a placement has one optimizer and its model: give each a part of every tier", ""]
    if first.refused:
        return [*out, f"nothing to paste: {first.name} cannot be placed: {first.refused}"]
    if not tiers:
        return [
            *out,
            "nothing to paste: no folder on a disk was found for a second tier; measure one by "
            "`polder probe --disk FOLDER --out platform.toml`, and check with --platform platform.toml",
        ]
    place = finding.trainer or first.name
    if finding.trainer or first.is_named:
        out.append(f"paste below the line that makes {place}:")
    else:
        out.append("paste where the optimizer is made; the lines call it optimizer, and its model model:")
    out += [f"    {line}" for line in lines(finding, tiers)]
    if tiers.startswith("tiers="):
        out += [
            "",
            '`polder probe --disk FOLDER --out platform.toml` measures tiers once: then platform="platform.toml"',
        ]
    return out


def table(finding: Found, room: int, platform: Path | None, tiers: str) -> str:
    """The answer for people."""
    out = [f"{'object':18}" + "".join(f"{device:>14}" for device in finding.bytes)]
    for name in _OBJECTS:
        cells = "".join(f"{of[name] / 1e6:11.1f} MB" for of in finding.bytes.values())
        out.append(f"{name:18}{cells}")
    out.append(f"{'all else':18}{_rest(finding) / 1e6:11.1f} MB  the most memory of a step, less the rows above")
    out.append("")
    longest = first_too_long(finding, room)
    if longest:
        out.append(f"measured with a context of {finding.context} and a batch of {finding.batch}")
        out.append(f"first context that will not fit in {room / 1e9:.1f} GB of memory: {longest}")
    else:
        out.append("no call says what the context is, or no activation lies in memory: no context is predicted")
    if platform is not None and longest:
        whole = sum(tier.nbytes for tier in tiers_of(platform) if tier.name != "dram")
        states = finding.bytes["cpu"]["optimizer states"]
        placed = first_too_long(finding, room + whole)
        out.append(f"with states ({states / 1e6:.1f} MB) and activations in all tiers of {platform}: {placed} at best")
    return "\n".join([*out, "", *_answer(finding, tiers)])


def _rest(found: Found) -> int:
    most = max(stays + grows for stays, grows in found.moments)
    return max(0, most - sum(found.bytes.get("cpu", {}).values()))


def _tiers(platform: Path | None, script: Path) -> str:
    """The argument that names tiers: those of a file, or memory and a folder that lies on a disk; "" if none does."""
    if platform is not None:
        return f"platform={json.dumps(str(platform))}"
    for folder in (Path(), script.parent, Path.home(), Path("/var/tmp")):
        with contextlib.suppress(PolderError):
            check_tiers([Tier("disk", 1, 1, 1, folder)])
            return f"tiers=polder.offload.measured({json.dumps(str(folder))})"
    return ""


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("polder offload check")
    parser.add_argument("--platform", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    script = given.script

    def failed(why: str) -> int:
        print(f"polder: {script}: {why}", file=sys.stderr)
        return 1

    if not script.is_file():
        return failed("no such script")
    try:
        if given.platform is not None:
            tiers_of(given.platform)
    except PolderError as error:
        return failed(str(error))
    tiers = _tiers(given.platform, script)
    # As much as there is before the script has taken some.
    room = memory_limit() + _Memory().now()

    def say(finding: Found) -> None:
        if given.json:
            answer = dataclasses.asdict(finding) | {"room": room, "rest": _rest(finding), "tiers": tiers}
            answer["paste"] = lines(finding, tiers)
            text = json.dumps(answer | {"first_too_long": first_too_long(finding, room)})
        else:
            text = table(finding, room, given.platform, tiers)
        print(text, file=sys.__stdout__, flush=True)

    def ended(finding: Found) -> None:
        say(finding)
        os._exit(0)

    watch = Watch(ended)
    try:
        watch.run(script, given.arguments, given.json)
    except SystemExit as end:
        if watch.found is None:
            return failed(f"ended with {end.code!r} before its first step; give it the arguments of a training run")
    except BaseException as error:
        if watch.found is None:
            traceback.print_exc()
            hint = "; ranks are started by: torchrun --nproc-per-node 2 -m polder.offload.check " + str(script)
            why = f"failed before its first step ended: {type(error).__name__}: {error}"
            return failed(why + hint * ("environ" in str(error) and "RANK" not in os.environ))
    if watch.found is None:
        return failed("ended without a step of a torch.optim.Optimizer; give it the arguments of a training run")
    say(watch.found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
