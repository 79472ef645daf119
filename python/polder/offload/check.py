"""What a training script keeps in memory: ``polder offload check SCRIPT``.

The script runs as ``python SCRIPT`` does, up to the end of its first optimizer step. Watched are ``step`` of every
``torch.optim.Optimizer``, calls of modules, and tensors that are saved for backward passes. The file is not changed.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import resource
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from polder.errors import PolderError
from polder.offload.placed import is_placed
from polder.offload.shards import local, storage_of, ungraphed
from polder.offload.tiers import tiers_of

_OBJECTS = ("weights", "gradients", "optimizer states", "activations")


class _SteppedError(BaseException):
    """Ends the script after its first step. No handler of ``Exception`` stops it."""


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
        Bytes that `Placed.activations` would copy, at most at once: each saved tensor, also if several share a storage.
    context, batch : int
        Tokens of a sample, and samples, of the first call of a module that says so; 0 if none does.
    peak : int
        The most bytes that the process had in memory.
    optimizer, model_name, optimizer_name : str
        The class, and how the script calls both.
    trainer : bool
        Whether the Trainer of transformers made the step.
    """

    bytes: dict[str, dict[str, int]]
    squared: dict[str, int]
    placed: int
    context: int
    batch: int
    peak: int
    optimizer: str
    model_name: str
    optimizer_name: str
    trainer: bool


class _Kept:
    """A saved tensor, counted until the graph lets go of it."""

    def __init__(self, watch: "Watch", tensor: torch.Tensor) -> None:
        self.watch, self.tensor = watch, ungraphed(tensor)
        watch.count(tensor, 1)

    def __del__(self) -> None:
        self.watch.count(self.tensor, -1)


class Watch:
    """Notes what a script does up to the end of its first step."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self._context = self._batch = 0
        self._is_sure = False
        self._modules: set[int] = set()
        self._weights: set[int] = set()
        self._users: Counter[int] = Counter()
        self._live: Counter[str] = Counter()
        self._most: Counter[str] = Counter()
        self._squared: Counter[str] = Counter()
        self._placed = self._most_placed = 0

    def count(self, tensor: torch.Tensor, sign: int) -> None:
        """One more, or one less, saved tensor over a storage."""
        if tensor.layout != torch.strided or tensor.is_nested:
            return
        storage = tensor.untyped_storage()
        key, device = storage_of(tensor), tensor.device.type
        if key in self._weights:
            return
        if device == "cpu" and is_placed(tensor, self._weights):
            # A placement copies each, also those that share a storage.
            self._placed += sign * tensor.nbytes
            self._most_placed = max(self._most_placed, self._placed)
        self._users[key] += sign
        if self._users[key] == (sign + 1) // 2:
            self._live[device] += sign * storage.nbytes()
            is_square = tensor.dim() > 3 and tensor.shape[-1] == tensor.shape[-2] == self._context > 1
            if is_square and sign > 0 and self._live[device] > self._most[device]:
                self._squared[device] += storage.nbytes()
            self._most[device] = max(self._most[device], self._live[device])

    def called(self, module: torch.nn.Module, args: Any) -> None:
        """Before a module computes: its weights are no activations, and its arguments may say the context."""
        if id(module) not in self._modules:
            self._modules |= {id(it) for it in module.modules()}
            self._weights |= {storage_of(it) for it in (*module.parameters(), *module.buffers())}
        for it in args if not self._is_sure else ():
            if isinstance(it, torch.Tensor) and it.dim() > 1:
                self._is_sure = it.dim() == 2 and not it.is_floating_point()
                if self._is_sure or (it.dim() == 3 and not self._context):
                    self._batch, self._context = it.shape[0], it.shape[1]
                if self._is_sure:
                    break

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> NoReturn:
        """After the first step."""
        rows: dict[str, Counter[str]] = {}

        def add(name: str, tensor: torch.Tensor) -> None:
            shard = local(tensor)
            rows.setdefault(shard.device.type, Counter())[name] += shard.nbytes

        parameters = [it for group in optimizer.param_groups for it in group["params"]]
        model, names = _names(optimizer, parameters)
        for it in parameters if model is None else model.parameters():
            add("weights", it)
            if it.grad is not None:
                add("gradients", it.grad)
        states: list[dict[str, Any]] = list(optimizer.state.values())
        for it in (it for state in states for it in state.values()):
            if isinstance(it, torch.Tensor):
                add("optimizer states", it)
        for device, nbytes in self._most.items():
            rows.setdefault(device, Counter())["activations"] = nbytes
        self.found = Found(
            {device: dict(of) for device, of in rows.items()},
            dict(self._squared),
            self._most_placed,
            self._context,
            self._batch,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            *names,
            any(frame.f_globals.get("__name__") == "transformers.trainer" for frame in _frames()),
        )
        raise _SteppedError

    def run(self, script: Path, arguments: list[str], is_quiet: bool) -> None:
        """Runs a script up to the end of its first step."""
        sys.argv = [str(script), *arguments]
        # Where Python puts no folder first, that place is the standard library's.
        sys.path[: not sys.flags.safe_path] = [str(script.resolve().parent)]
        hooks = [register_optimizer_step_post_hook(self.stepped), register_module_forward_pre_hook(self.called)]
        try:
            # What the script prints is no part of one JSON object.
            out = contextlib.redirect_stdout(sys.stderr) if is_quiet else contextlib.nullcontext()
            with out, torch.autograd.graph.saved_tensors_hooks(lambda it: _Kept(self, it), lambda it: it.tensor):
                runpy.run_path(str(script), run_name="__main__")
        except _SteppedError:
            pass
        finally:
            for hook in hooks:
                hook.remove()


def _frames() -> list[FrameType]:
    frames: list[FrameType] = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _names(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> tuple[torch.nn.Module | None, tuple[str, str]]:
    """The model over the parameters, and how the script calls it and the optimizer."""
    wanted = {id(it) for it in parameters}
    for frame in reversed(_frames()):
        known = {**frame.f_globals, **frame.f_locals} if frame.f_globals.get("__name__") == "__main__" else {}
        ours = next((name for name, it in known.items() if it is optimizer), None)
        for name, it in known.items():
            if isinstance(it, torch.nn.Module) and wanted <= {id(parameter) for parameter in it.parameters()}:
                return it, (name, ours or "optimizer")
    return None, ("model", "optimizer")


def memory_limit() -> int:
    """Bytes that this process may have: what is available, what it has, and no more than its cgroups allow."""
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    limits = [int(known["MemAvailable"].split()[0]) << 10]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        folder = Path("/sys/fs/cgroup", line.rpartition(":")[2].lstrip("/"))
        for it in (folder, *folder.parents):
            try:
                limits.append(int((it / "memory.max").read_text()) - int((it / "memory.current").read_text()))
            except (OSError, ValueError):
                # No such group, or no limit.
                continue
    return min(limits)


def first_too_long(found: Found, room: int, device: str = "cpu", rest: int = 0) -> int:
    """The first context that does not fit in ``room`` bytes; 0 if any does.

    Activations grow with the context, those of a square shape with its square. All else stays.
    """
    of = found.bytes.get(device, {})
    fixed = rest + sum(nbytes for name, nbytes in of.items() if name != "activations")
    square = found.squared.get(device, 0)
    line = of.get("activations", 0) - square
    if not found.context or line + square <= 0:
        return 0
    low, high = 0, found.context

    def needs(context: int) -> float:
        part = context / found.context
        return fixed + line * part + square * part * part

    while needs(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs(middle) <= room else (low, middle)
    return high


def lines(found: Found, platform: Path | None) -> list[str]:
    """What to paste into the script."""
    activations = found.placed
    file = "platform.toml" if platform is None else str(platform)
    if found.trainer:
        given = f'polder.offload.trainer(model, args, "optimal", platform="{file}", activations={activations})'
        return ["import polder.offload", f"trainer = Trainer(…, optimizer_cls_and_kwargs={given})"]
    named, kind = found.optimizer_name, found.optimizer
    pasted = ["import polder.offload"]
    if not kind.startswith("polder.offload."):
        name = kind.rpartition(".")[2]
        # The states of others are not placed.
        ours = name if name in ("Adam", "AdamW") else "AdamW"
        pasted.append(f"{named} = polder.offload.{ours}(…)  # in place of {kind.replace(f'.{name.lower()}.', '.')}")
    given = f'{found.model_name}, {named}, "optimal", platform="{file}", activations={activations}'
    return [*pasted, f"placed = polder.offload.place({given})", "with placed.activations():  # around the forward pass"]


def table(found: Found, room: int, platform: Path | None) -> str:
    """The answer for people."""
    out = [f"{'object':18}" + "".join(f"{device:>14}" for device in found.bytes)]
    for name in _OBJECTS:
        cells = "".join(f"{of.get(name, 0) / 1e6:11.1f} MB" for of in found.bytes.values())
        out.append(f"{name:18}{cells}")
    rest = _rest(found)
    out.append(f"{'all else':18}{rest / 1e6:11.1f} MB  the process at its peak, less the rows above")
    out.append("")
    longest = first_too_long(found, room, rest=rest)
    if longest:
        out.append(f"measured with a context of {found.context} and a batch of {found.batch}")
        out.append(f"first context that will not fit in {room / 1e9:.1f} GB of memory: {longest}")
    else:
        out.append("no call says what the context is, or no activation lies in memory: no context is predicted")
    if platform is not None:
        whole = sum(tier.nbytes for tier in tiers_of(platform) if tier.name != "dram")
        states = found.bytes.get("cpu", {}).get("optimizer states", 0)
        placed = first_too_long(found, room + whole, rest=rest)
        if longest:
            out.append(
                f"with states ({states / 1e6:.1f} MB) and activations in all tiers of {platform}: {placed} at best"
            )
    return "\n".join([*out, "", "paste:", *(f"    {it}" for it in lines(found, platform))])


def _rest(found: Found) -> int:
    return max(0, found.peak - sum(found.bytes.get("cpu", {}).values()))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("polder offload check")
    parser.add_argument("--platform", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    script, watch = given.script, Watch()

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
    # As much as there is before the script has taken some.
    room = memory_limit() + (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    try:
        watch.run(script, given.arguments, given.json)
    except SystemExit as end:
        if watch.found is None:
            return failed(f"ended with {end.code!r} before its first step; give it the arguments of a training run")
    except BaseException as error:
        if watch.found is None:
            traceback.print_exc()
            return failed(f"failed before its first step ended: {type(error).__name__}: {error}")
    found = watch.found
    if found is None:
        return failed("ended without a step of a torch.optim.Optimizer; give it the arguments of a training run")
    if given.json:
        answer = dataclasses.asdict(found) | {"room": room, "rest": _rest(found), "paste": lines(found, given.platform)}
        print(json.dumps(answer | {"first_too_long": first_too_long(found, room, rest=_rest(found))}))
    else:
        print(table(found, room, given.platform))
    return 0


if __name__ == "__main__":
    sys.exit(main())
