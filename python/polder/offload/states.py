"""States of any optimizer of torch in their tiers: tensors in memory, and on disks until their parameters step."""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from polder import _core, address
from polder.errors import ArgumentError, PlacementWarning, TierError, TierFullError
from polder.offload.optimizer import PAGE, Fused
from polder.offload.shards import is_plain, local, mapped, whole
from polder.pinned import register

#: What a state begins at, in bytes: a line of the caches.
_LINE = 64
#: Bytes of states that are brought from a disk together, unless one parameter has more.
_TOGETHER = 16 << 20
#: Name of the state that is a 16-bit parameter in 32 bits.
_MASTER = "master"
#: Types of 16 bits that masters stand for.
HALVES = (torch.bfloat16, torch.float16)
_ATTRIBUTE = "_polder_states"


@dataclass
class _Entry:
    """Where the states of a parameter lie: their first byte, their bytes, and of each its offset and what it is like.

    What a state is like is a tensor of the meta device. It stands in its place while the numbers are on a disk.
    """

    begin: int
    nbytes: int
    tensors: dict[str, tuple[int, Any]]


class Room:
    """Bytes over tiers: the first ones in one range of memory, the others on disks."""

    def __init__(self, kept: Sequence[tuple[int, Any]], files: Sequence[tuple[int, str | Path]]) -> None:
        #: Bytes in memory.
        self.near = 4 * sum(count for count, _ in kept)
        #: The most bytes of states of disks that are in memory at once, in a step.
        self.staged = 0
        self._range = _core.Range(self.near) if self.near else None
        self._missed: list[str] = []
        begin = 0
        for count, place in kept:
            try:
                if isinstance(place, int):
                    cast("_core.Range", self._range).bind(begin, 4 * count, place)
                elif place is not None:
                    cast("_core.Range", self._range).map(begin, 4 * count, place)
            except TierFullError as error:
                self._missed.append(str(error))
            begin += 4 * count
        if self._range is not None:
            register(self._range)
        self._far = _core.States([], files, 1)

    def bytes_at(self, begin: int, nbytes: int) -> torch.Tensor:
        """Bytes that lie in memory, as a tensor over them."""
        assert self._range is not None
        return torch.frombuffer(self._range, dtype=torch.uint8, count=nbytes, offset=begin)

    def read(self, begin: int, into: torch.Tensor) -> None:
        """Copies bytes from their tiers."""
        near = max(0, min(self.near - begin, into.nbytes))
        if near:
            into[:near].copy_(self.bytes_at(begin, near))
        if near < into.nbytes:
            self._far.save((begin + near - self.near) // 4, *self._words(into[near:]))

    def write(self, begin: int, of: torch.Tensor) -> None:
        """Copies bytes to their tiers."""
        near = max(0, min(self.near - begin, of.nbytes))
        if near:
            self.bytes_at(begin, near).copy_(of[:near])
        if near < of.nbytes:
            self._far.load((begin + near - self.near) // 4, *self._words(of[near:]))

    @staticmethod
    def _words(of: torch.Tensor) -> tuple[int, int, int]:
        """The address, none for a second moment, and the number of 32-bit words."""
        return address.of(of, dtype=torch.uint8, count=of.nbytes, what="states"), 0, of.nbytes // 4

    def check(self) -> None:
        """Raises if a device has lost bytes."""
        if self._range is not None:
            self._range.check()

    def where(self) -> list[tuple[str, int]]:
        """Bytes in each place of memory, as the kernel says."""
        return [] if self._range is None else self._range.where()

    def missed(self) -> list[str]:
        """Why stripes lie in memory of the kernel's choice."""
        return self._missed

    def on_disk(self) -> tuple[list[int], int]:
        """Bytes of each file, and of memory between them and the step."""
        files, buffers = self._far.on_disk()
        return files, buffers + self.staged


class OptimizerStates:
    """What `place` needs of an optimizer, for one that keeps its states in tensors as torch's do.

    In a step parameters take turns: the optimizer's own ``step`` runs over those whose states lie in memory, then over
    a few at a time of those whose states are on a disk. Those of the next ones are read, and those of the last ones
    written, meanwhile.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any that can step over a part of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.masters = False
        #: The `Placed` that the states belong to, if any.
        self.placed_by: Any = None
        self._room: Room | None = None
        self._folder: Path | None = None
        self._entries: dict[torch.Tensor, _Entry] = {}
        self._wanted: dict[torch.Tensor, dict[str, Any]] = {}
        # Why all parameters have to step at once.
        self._together = ""
        self._broken = ""
        self._warned = False
        # Of 16-bit parameters the version that their masters belong to.
        self._versions: dict[torch.Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        # How often what stands for a state has been written to, by its identity.
        self._writes: dict[int, int] = {}
        self._loaded: Mapping[str, Any] = {}

    def measure(self, masters: bool) -> None:
        """Finds out what states each parameter has, or will have after its first step.

        With ``masters`` 16-bit parameters are stepped as 32-bit masters, which are one more state of each.

        Raises
        ------
        ArgumentError
            The optimizer has no such step.
        """
        if isinstance(self.optimizer, Fused) and (self.optimizer.max_norm is not None or self.optimizer.skip_overflow):
            raise ArgumentError(
                "max_norm, skip_overflow: they need all gradients at once, and placed states of 16-bit parameters step "
                "in turns; leave them out and call torch.nn.utils.clip_grad_norm_ before the step"
            )
        self.masters = masters
        self._wanted, self._together = {}, ""
        alike: dict[tuple[Any, ...], dict[str, Any]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            parameters: list[torch.Tensor] = group["params"]
            stepped = [
                parameter for parameter in parameters if parameter.requires_grad or self.optimizer.state.get(parameter)
            ]

            def probed(parameter: torch.Tensor, number: int = number, group: dict[str, Any] = group) -> dict[str, Any]:
                shard = local(parameter)
                key = number, shard.shape, shard.stride(), shard.dtype
                if key not in alike:
                    alike[key] = self._probed(group, parameter)
                return alike[key]

            if stepped:
                # Also where all have states: a step may need all parameters at once.
                least = min(stepped, key=lambda parameter: local(parameter).numel())
                probed(least)
                if not self._together and not self._steps_apart(group, least):
                    self._together = "a step of two parameters at once is another than that of each alone"
            for parameter in stepped:
                known: Mapping[str, Any] = self.optimizer.state.get(parameter) or {}
                is_known = known and (_MASTER in known or not self._is_mastered(parameter))
                self._wanted[parameter] = _likes(known) if is_known else probed(parameter)

    def _is_mastered(self, parameter: torch.Tensor) -> bool:
        return self.masters and parameter.dtype in HALVES

    def _probed(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """The states that a step makes of a parameter, found by a step of a copy over zeros."""
        shard = local(parameter)
        is_mastered = self._is_mastered(parameter)
        zeros = torch.zeros_like(shard, dtype=torch.float32 if is_mastered else shard.dtype)
        stand_in = torch.nn.Parameter(zeros)
        stand_in.grad = torch.zeros_like(zeros)
        other = self._trial(group, [stand_in])
        kind: Any = type(self.optimizer)

        def noted() -> dict[str, Any]:
            numbers = {key: it for key, it in _attributes(other).items() if isinstance(it, int | float)}
            return {**numbers, **{key: it for key, it in other.param_groups[0].items() if key != "params"}}

        with self._trying("a parameter alone"):
            before = noted()
            _raw_step(kind)(other)
            first = noted()
            likes = _likes(other.state.get(stand_in, {}))
            if odd := _differing(before, first):
                # What the first step alone sets is no obstacle.
                _raw_step(kind)(other)
                odd = _differing(first, noted())
            # As the step that follows one in turns finds it.
            other.param_groups[0]["params"] = []
            _raw_step(kind)(other)
        if odd and not self._together:
            self._together = f"each step changes {odd[0]!r}"
        return {**({_MASTER: zeros.to("meta")} if is_mastered else {}), **likes}

    def _steps_apart(self, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Whether steps of two parameters at once are those of each alone, by a trial with numbers of a small shape."""
        dtype = torch.float32 if self._is_mastered(parameter) else parameter.dtype
        shape = [min(length, 64) for length in local(parameter).shape]
        draw = torch.Generator().manual_seed(0)
        numbers = [torch.randn(shape, generator=draw).to(dtype) for _ in range(2)]

        def stepped(turns: list[list[int]]) -> list[torch.nn.Parameter]:
            parameters = [torch.nn.Parameter(tensor.clone()) for tensor in numbers]
            other = self._trial(group, parameters)
            with self._trying(f"two parameters of shape {tuple(shape)}"):
                for factor in (1e3, 1.0):
                    for trial, number in zip(parameters, numbers, strict=True):
                        trial.grad = number * factor
                    for turn in turns:
                        other.param_groups[0]["params"] = [parameters[index] for index in turn]
                        _raw_step(type(self.optimizer))(other)
            return parameters

        pairs = zip(stepped([[0, 1]]), stepped([[0], [1]]), strict=True)
        return all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs)

    @contextmanager
    def _trying(self, what: str) -> Generator[None]:
        """Steps over ``what``. A rule that rounds at random takes none of the program's random numbers."""
        kind = type(self.optimizer)
        try:
            with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                yield
        except Exception as error:
            raise ArgumentError(
                f"optimizer {kind.__module__}.{kind.__qualname__}: its states cannot be placed, because it takes no "
                f"step over {what}: {type(error).__name__}: {error}"
            ) from error

    def _trial(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> Any:
        """A copy of the optimizer that steps other parameters, with the settings of a group, and shares no state."""
        settings: dict[str, Any] = copy.deepcopy({key: it for key, it in group.items() if key != "params"})
        other = self._like_it([{**settings, "params": parameters}])
        own = {key: _copied(it) for key, it in _attributes(other).items() if key != "param_groups"}
        other.__dict__.update(own, state=defaultdict(dict))
        return other

    def _like_it(self, groups: list[dict[str, Any]]) -> Any:
        """The optimizer with other groups and no hooks, for a step of a part of it."""
        other: Any = object.__new__(type(self.optimizer))
        other.__dict__.update({key: it for key, it in _attributes(self.optimizer).items() if key != "step"})
        other.param_groups = groups
        other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        return other

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter, in the order of the groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def with_states(self) -> list[torch.Tensor]:
        """Parameters that have states, or will."""
        return list(self._wanted)

    def elements(self) -> int:
        """32-bit words that all states take, in whole pages."""
        nbytes = sum(_nbytes(of) for of in self._wanted.values())
        return (nbytes // 4 + PAGE - 1) // PAGE * PAGE

    def nbytes(self) -> int:
        """Bytes of what is placed."""
        return 4 * self.elements()

    def room(self, kept: Sequence[tuple[int, Any]], files: Sequence[tuple[int, str | Path]]) -> Room:
        """Room for states: words in memory with their places, and words in folders."""
        if self._together and any(count for count, _ in files):
            kind = type(self.optimizer)
            raise ArgumentError(
                f"optimizer {kind.__module__}.{kind.__qualname__}: {self._together}, so that its parameters "
                "cannot step in turns, as they do with states on a disk; place them in memory"
            )
        return Room(kept, files)

    def place(self, room: Room | None, folder: str | Path | None = None) -> None:
        """Keeps the states in ``room`` from now on, or in memory of torch again; those that there are move."""
        before, known = self._room, self._entries
        self._room, self._entries = room, {}
        begin = 0
        for parameter, likes in self._wanted.items() if room is not None else ():
            entry = self._entries[parameter] = _Entry(begin, _nbytes(likes), {})
            offset = 0
            for name, like in likes.items():
                entry.tensors[name] = offset, like
                offset += _up(local(like).nbytes)
            begin += entry.nbytes
        for parameter in list(self.optimizer.state):
            old, new = known.get(parameter), self._entries.get(parameter)
            if old is not None and before is not None and not self._broken:
                # Real tensors, wherever they were.
                buffer = torch.empty(old.nbytes, dtype=torch.uint8)
                before.read(old.begin, buffer)
                self._expose(parameter, old, buffer)
            if new is not None:
                self._settle(parameter, new)
        self._folder = None if folder is None else Path(folder)
        if room is None:
            while self._hooks:
                self._hooks.pop().remove()
            delattr(self.optimizer, _ATTRIBUTE)
            del self.optimizer.register_step_pre_hook
            del self.optimizer.__getstate__
        elif not self._hooks:
            optimizer: Any = self.optimizer
            self._hooks = [
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_state_dict_post_hook(self._saved),
                optimizer.register_load_state_dict_pre_hook(self._check_loaded),
                optimizer.register_load_state_dict_post_hook(self._take_over),
            ]
            # The program's own hooks come before the step, also those that it registers later.
            optimizer.register_step_pre_hook = self.register_step_pre_hook
            optimizer.__getstate__ = self._copied
        if room is not None:
            setattr(self.optimizer, _ATTRIBUTE, self)
            self._order()
            # Those that step, and those that are read or written meanwhile.
            _, far = self._turns([parameter for parameter in self.parameters() if parameter in self._entries])
            spans = [sum(self._entries[parameter].nbytes for parameter in turn) for turn in far]
            room.staged = max((one + other for one, other in zip(spans, [*spans[1:], 0], strict=False)), default=0)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """As torch's: before a step, in which parameters take turns."""
        handle = type(self.optimizer).register_step_pre_hook(self.optimizer, hook)
        self._order()
        return handle

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """As torch's: after a step."""
        return self.optimizer.register_step_post_hook(hook)

    def _order(self) -> None:
        """Steps after all that is called before a step."""
        it: Any = self.optimizer
        it._optimizer_step_pre_hooks.move_to_end(self._hooks[0].id)

    # ------------------------------------------------------------------------------------------------- the step

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Steps all parameters. The step that follows finds none."""
        self._check_whole()
        self._check_unwritten()
        assert self._room is not None
        self._room.check()
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if given is not None:
            with torch.enable_grad():
                loss = given()
        try:
            self._step()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        stepped = self._like_it([{**group, "params": []} for group in optimizer.param_groups])
        return (stepped,), kwargs if given is None else {**kwargs, "closure": lambda: loss}

    def _check_whole(self) -> None:
        """Refuses to go on after a step that ended in its middle."""
        if self._broken:
            raise TierError(
                f"a step ended in its middle, so that some weights and states are those before it: {self._broken}; "
                "load a checkpoint of the model and, by load_state_dict, of the optimizer"
            )

    def _check_unwritten(self) -> None:
        """Refuses a step after a program has changed in place what stands for states on a disk: once each time."""
        likes = [(name, local(of)) for entry in self._entries.values() for name, (_, of) in entry.tensors.items()]
        versions = {id(like): 0 if like.is_inference() else like._version for _, like in likes}
        changed = [name for name, like in likes if versions[id(like)] != self._writes.get(id(like), 0)]
        self._writes = versions
        if changed:
            raise ArgumentError(
                f"state {changed[0]!r} was changed in place while it lies on a disk, which has no effect; change a "
                "copy in optimizer.state_dict() and load it by load_state_dict, or close() the placement first"
            )

    def _step(self) -> None:
        assert self._room is not None
        near, far = self._turns([it for it in self.parameters() if it.grad is not None])
        for turn in near:
            self._step_over(turn)
            for parameter in turn:
                if (entry := self._entries.get(parameter)) is not None:
                    self._settle(parameter, entry)
        if not far:
            return
        with ThreadPoolExecutor(1, "polder-states") as other:
            ahead: Future[torch.Tensor] = other.submit(self._read, far[0])
            writes: list[Future[None]] = []
            for number, turn in enumerate(far):
                buffer = ahead.result()
                if number + 1 < len(far):
                    ahead = other.submit(self._read, far[number + 1])
                self._step_from(turn, buffer)
                writes.append(other.submit(self._write, turn, buffer))
                # The thread that writes it has it now, and drops it before it reads again.
                del buffer
            for write in writes:
                write.result()

    def _turns(self, parameters: list[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Parameters that step together: those with states in memory, and those with states on a disk."""
        assert self._room is not None
        at_once: list[torch.Tensor] = []
        near: list[list[torch.Tensor]] = []
        far: list[list[torch.Tensor]] = []
        taken = {id(near): 0, id(far): 0}
        end = -1
        for parameter in parameters:
            entry = self._entries.get(parameter)
            is_far = entry is not None and entry.begin + entry.nbytes > self._room.near
            if not is_far and (entry is None or self._together or self._is_settled(parameter, entry)):
                at_once.append(parameter)
                continue
            assert entry is not None
            turns = far if is_far else near
            # What is read together lies together.
            if not turns or taken[id(turns)] + entry.nbytes > _TOGETHER or (is_far and end != entry.begin):
                turns.append([])
                taken[id(turns)] = 0
            turns[-1].append(parameter)
            taken[id(turns)] += entry.nbytes
            end = entry.begin + entry.nbytes if is_far else end
        return [*([at_once] if at_once else []), *near], far

    def _is_settled(self, parameter: torch.Tensor, entry: _Entry) -> bool:
        """Whether a step over many such parameters makes nothing that has to be copied after it."""
        is_there = bool(self.optimizer.state.get(parameter)) and not self._is_mastered(parameter)
        return is_there or not entry.tensors

    def _read(self, turn: list[torch.Tensor]) -> torch.Tensor:
        assert self._room is not None
        first, last = self._entries[turn[0]], self._entries[turn[-1]]
        nbytes = last.begin + last.nbytes - first.begin
        if not any(_is_away(it) for parameter in turn for it in self.optimizer.state.get(parameter, {}).values()):
            return torch.zeros(nbytes, dtype=torch.uint8)
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._room.read(first.begin, buffer)
        return buffer

    def _write(self, turn: list[torch.Tensor], buffer: torch.Tensor) -> None:
        assert self._room is not None
        self._room.write(self._entries[turn[0]].begin, buffer)

    def _step_from(self, turn: list[torch.Tensor], buffer: torch.Tensor) -> None:
        """A step over parameters whose states are in a buffer."""
        first = self._entries[turn[0]].begin
        parts = {it: buffer[(e := self._entries[it]).begin - first : e.begin - first + e.nbytes] for it in turn}
        for parameter, part in parts.items():
            self._expose(parameter, self._entries[parameter], part)
        self._step_over(turn)
        for parameter, part in parts.items():
            self._collect(parameter, self._entries[parameter], part, is_far=True)

    def _step_over(self, turn: list[torch.Tensor]) -> None:
        """The optimizer's own step, over some of its parameters."""
        other = self._like_it([])
        own = dict(_attributes(other))
        before = [(group, group["params"]) for group in self.optimizer.param_groups]
        wanted = {id(parameter) for parameter in turn}
        stepped: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for group, parameters in before:
                pairs = [(parameter, self._stand_in(parameter)) for parameter in parameters if id(parameter) in wanted]
                stepped += pairs
                if pairs:
                    group["params"] = [stand_in for _, stand_in in pairs]
                    other.param_groups.append(group)
            _raw_step(type(other))(other)
        finally:
            for group, parameters in before:
                group["params"] = parameters
            for parameter, stand_in in stepped:
                if stand_in is not parameter:
                    self._take_back(parameter, stand_in)
        # What it notes about itself.
        _attributes(self.optimizer).update(
            {key: value for key, value in _attributes(other).items() if value is not own.get(key)}
        )

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """What steps for a parameter: its master, where it has one."""
        if not self._is_mastered(parameter):
            return parameter
        state = self.optimizer.state.pop(parameter, {})
        master = state.pop(_MASTER, None)
        if master is None or self._versions.get(parameter, parameter._version) != parameter._version:
            # New, or changed by others than this optimizer, as by `load_state_dict` of the model.
            master = parameter.detach().to(torch.float32)
        stand_in = torch.nn.Parameter(master)
        assert parameter.grad is not None
        stand_in.grad = parameter.grad.to(torch.float32)
        if state:
            self.optimizer.state[stand_in] = state
        return stand_in

    @torch.no_grad()
    def _take_back(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        state = self.optimizer.state.pop(master, {})
        self.optimizer.state[parameter] = {_MASTER: master.detach(), **state}
        parameter.copy_(master)
        self._versions[parameter] = parameter._version

    # -------------------------------------------------------------------------------------------- states in places

    def _settle(self, parameter: torch.Tensor, entry: _Entry) -> None:
        """Puts the states that a parameter has where they belong."""
        assert self._room is not None
        if not self.optimizer.state.get(parameter):
            return
        if entry.begin + entry.nbytes <= self._room.near:
            self._collect(parameter, entry, None, is_far=False)
            return
        buffer = torch.zeros(entry.nbytes, dtype=torch.uint8)
        self._expose(parameter, entry, buffer)
        self._collect(parameter, entry, buffer, is_far=True)
        self._room.write(entry.begin, buffer)

    def _view(self, entry: _Entry, name: str, part: torch.Tensor | None) -> torch.Tensor:
        """A state of this process over a buffer, or over memory where it lies."""
        offset, of = entry.tensors[name]
        like = local(of)
        assert self._room is not None or part is not None
        if part is None:
            kept = cast("Room", self._room).bytes_at(entry.begin + offset, like.nbytes)
        else:
            kept = part[offset : offset + like.nbytes]
        return kept.view(like.dtype).as_strided(like.shape, like.stride())

    def _expose(self, parameter: torch.Tensor, entry: _Entry, part: torch.Tensor) -> None:
        """Lets the optimizer see states that a buffer has."""
        state = self.optimizer.state.get(parameter, {})
        for name, (_, of) in entry.tensors.items():
            if name not in state or not _is_like(state[name], of):
                continue
            view, value = self._view(entry, name, part), state[name]
            if not local(value).is_meta:
                # Made, loaded or set since it was put there.
                view.copy_(local(value))
            state[name] = whole(value, view)

    def _collect(self, parameter: torch.Tensor, entry: _Entry, part: torch.Tensor | None, *, is_far: bool) -> None:
        """Takes the states of a parameter to its places, and leaves what stands for them."""
        state = self.optimizer.state.get(parameter, {})
        for name, value in state.items():
            known = entry.tensors.get(name)
            if known is None or not _is_like(value, known[1]):
                self._warn_of(name, value)
                continue
            view, given = self._view(entry, name, part), local(value)
            if given.data_ptr() != view.data_ptr():
                view.copy_(given)
                state[name] = whole(value, view)
            if is_far:
                state[name] = whole(value, local(known[1]))

    def _warn_of(self, name: str, it: Any) -> None:
        nbytes = sum(local(part).nbytes for part in tree_leaves(it) if isinstance(part, torch.Tensor) and part.dim())
        if nbytes and not self._warned:
            self._warned = True
            warnings.warn(
                f"state {name!r} of {nbytes} bytes: in memory, as others that a first step does not make as dense "
                "tensors; place again once the optimizer has them, or know that they count as no object",
                PlacementWarning,
                stacklevel=3,
            )

    # ---------------------------------------------------------------------------------------------- state dicts

    def _saved(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Fills a state dict with copies of what is on disks."""
        self._check_whole()
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        for number, parameter in enumerate(self.parameters()):
            if number in states:
                states[number] |= self._brought(parameter, states[number])
        return {**state_dict, "state": states}

    def _brought(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of those states of a parameter that are on a disk."""
        entry, far = self._entries.get(parameter), [name for name, it in state.items() if _is_away(it)]
        if entry is None or not far:
            return {}
        assert self._room is not None
        buffer = mapped(torch.empty(entry.nbytes, dtype=torch.uint8, device="meta"), self._folder)
        self._room.read(entry.begin, buffer)
        return {name: whole(state[name], self._view(entry, name, buffer)) for name in far}

    def _copied(self) -> dict[str, Any]:
        """What a copy of the optimizer gets, also a pickled one: it is not placed, and has all states itself."""
        self._check_whole()
        given = type(self.optimizer).__getstate__(self.optimizer)
        states = ((it, {**state, **self._brought(it, state)}) for it, state in self.optimizer.state.items())
        return {**given, "state": defaultdict(dict, states)}

    def _check_loaded(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Refuses a state dict that does not fit, before anything is loaded."""
        known = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(known, self.parameters(), strict=False):
            entry, state = self._entries.get(parameter), state_dict["state"].get(number, {})
            for name, (_, of) in entry.tensors.items() if entry is not None else ():
                value = state.get(name)
                if isinstance(value, torch.Tensor) and local(value).shape != local(of).shape:
                    raise ArgumentError(
                        f"parameter {number}: expected {name} of shape {tuple(of.shape)}, found {tuple(value.shape)}; "
                        "load the state dict of an optimizer like this one over this model"
                    )
        self._loaded = {**state_dict, "known": known}

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts states that torch has loaded where they belong."""
        loaded, self._loaded = self._loaded, {}
        try:
            for number, parameter in zip(loaded.get("known", ()), self.parameters(), strict=False):
                entry = self._entries.get(parameter)
                if entry is None or not optimizer.state.get(parameter):
                    continue
                if self._is_mastered(parameter):
                    # torch has rounded the states to the parameter's type.
                    given = loaded["state"][number]
                    state = optimizer.state[parameter]
                    state |= {name: given[name].detach() for name in entry.tensors if name in given}
                    self._versions[parameter] = parameter._version
                self._settle(parameter, entry)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self._broken = ""


def states_of(optimizer: torch.optim.Optimizer, masters: bool) -> OptimizerStates:
    """The states of an optimizer, which are those of its last placement if there is one."""
    states: OptimizerStates = getattr(optimizer, _ATTRIBUTE, None) or OptimizerStates(optimizer)
    states.measure(masters)
    return states


def _raw_step(kind: Any) -> Callable[..., Any]:
    """A class's step without the hooks that torch has put around it."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _attributes(of: object) -> dict[str, Any]:
    return vars(of)


def _copied(it: Any) -> Any:
    """A container of its own, of the same things."""
    return copy.copy(it) if isinstance(it, (dict, list, set)) else it  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]


def _likes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of the states that can be placed a tensor of the meta device for each."""
    likes: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        shard = local(value)
        is_meta = shard.device.type == "meta"
        if not is_meta and not (is_plain(shard) and shard.device.type == "cpu" and _is_dense(shard)):
            continue
        if shard.dim() and shard.nbytes:
            like = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta")
            likes[name] = value if is_meta else whole(value, like)
    return likes


def _is_dense(it: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in one row without gaps, in any order."""
    return torch.ops.aten.is_non_overlapping_and_dense(it)


def _is_away(it: Any) -> bool:
    """Whether it stands for a state whose numbers are on a disk."""
    return isinstance(it, torch.Tensor) and local(it).is_meta


def _is_like(it: Any, of: Any) -> bool:
    if not isinstance(it, torch.Tensor):
        return False
    one, other = local(it), local(of)
    return one.shape == other.shape and one.dtype == other.dtype and one.device.type in ("cpu", "meta")


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what differs."""
    return [key for key in {**one, **other} if not _is_equal(one.get(key), other.get(key))]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _nbytes(likes: Mapping[str, Any]) -> int:
    return sum(_up(local(it).nbytes) for it in likes.values())


def _up(nbytes: int) -> int:
    return (nbytes + _LINE - 1) // _LINE * _LINE
