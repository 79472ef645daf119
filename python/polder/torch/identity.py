"""Which version is which: its identity, the parts of it that ranks have, and the newest that is whole."""

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polder.errors import ArgumentError

__all__ = ["Identity", "Part", "Seen", "newest_whole", "parts_of", "step_of"]

_WORD_BITS = 64
_STEPS = range(-(1 << 63), 1 << _WORD_BITS)
"""What the step of a version may be."""


def step_of(said: Any) -> int:
    """The step that a caller gave, as `Identity.parse` reads it back: no version is published that nobody can restore.

    Raises
    ------
    ArgumentError
        It is no whole number, or does not fit.
    """
    try:
        step = None if isinstance(said, bool) else int(operator.index(said))
    except TypeError:
        step = None
    if step is None or step not in _STEPS:
        raise ArgumentError(f"step is {said!r}; give a whole number from {_STEPS[0]} to {_STEPS[-1]}")
    return step


@dataclass(frozen=True)
class Identity:
    """Which version of a name a rank's part is of; docs/state.md says what each field means.

    Raises
    ------
    ValueError
        From `parse`: the fields are not those of an identity.
    """

    attempt: int
    generation: int
    number: int
    step: int
    world: int
    rank: int
    base: int = 0
    base_attempt: int = 0
    floor: int = 0
    whole: int = 0

    @property
    def word(self) -> str:
        """The word of the attempt, as it is written."""
        return f"{self.attempt:016x}"

    def said(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return {**asdict(self), "attempt": self.word, "base_attempt": f"{self.base_attempt:016x}"}

    @staticmethod
    def parse(fields: Any) -> "Identity":
        """What `said` gave."""
        names = Identity.__dataclass_fields__
        said: dict[str, Any] = dict(fields) if isinstance(fields, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
        if set(said) != set(names):
            raise ValueError(f"its identity is not {', '.join(names)}")
        words = {key: int(str(said[key]), 16) for key in ("attempt", "base_attempt")}
        found = {**said, **words}
        for key, value in found.items():
            if type(value) is not int or value not in _STEPS or (value < 0 and key != "step"):
                raise ValueError(f"its {key} is {said[key]!r}")
        identity = Identity(**found)
        if not 0 <= identity.rank < identity.world or identity.attempt == 0 or identity.number == 0:
            raise ValueError(f"it is of rank {identity.rank} of {identity.world}, version {identity.number}")
        return identity

    @staticmethod
    def of_before(step: int, rank: int) -> "Identity":
        """Of a snapshot from before there were identities: all such are one attempt of as many ranks as restore it."""
        return Identity(0, 0, 0, step, 0, rank)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What the parts of one version have in common; the newest version has the highest."""
        return self.generation, self.number, self.step, self.attempt


@dataclass(frozen=True)
class Part:
    """A rank's part of a version, and where it lies.

    Attributes
    ----------
    identity : Identity
        Which version.
    number : int
        Its number where it lies.
    folder : Path or None
        The folder, if it is on disk; else it is in the pool.
    """

    identity: Identity
    number: int
    folder: Path | None = None


@dataclass(frozen=True)
class Seen:
    """What a rank has found of a name.

    Attributes
    ----------
    parts : list of Part
        The parts that could be read.
    damaged : list of (int, str)
        The numbers of those that could not, and the errors.
    highest : int
        The highest number that is in use, of anything.
    own : int
        The highest number in its own store.
    others : list of int
        Other ranks of which it has looked at the parts: none that restores.
    """

    parts: list[Part]
    damaged: list[tuple[int, str]]
    highest: int
    own: int = 0
    others: list[int] = field(default_factory=list[int])


def parts_of(all_seen: Iterable[Seen], key: tuple[int, ...]) -> dict[int, Part]:
    """Each rank's part of a version; those in the pool before those on disk."""
    found: dict[int, Part] = {}
    for seen in all_seen:
        for part in seen.parts:
            if part.identity.key == key:
                known = found.get(part.identity.rank)
                if known is None or (known.folder is not None and part.folder is None):
                    found[part.identity.rank] = part
    return found


def newest_whole(
    all_seen: list[Seen], size: int, ranks: list[int], world: int, number: int | None = None
) -> list[dict[int, Part]]:
    """The whole versions of all that was seen, the newest first: the parts of each.

    Parameters
    ----------
    all_seen : list of Seen
        What each rank that restores has found.
    size : int
        How many ranks restore.
    ranks : list of int
        Their ranks in the job, where `world` are.
    world : int
        The ranks of the job. A version of so many counts once those that restore have their parts: others may be dead.
    number : int, optional
        Only the version of this number.
    """
    keys = {part.identity.key for seen in all_seen for part in seen.parts}
    whole: list[dict[int, Part]] = []
    for key in sorted(keys, reverse=True):
        parts = parts_of(all_seen, key)
        of = next(iter(parts.values()))
        if number is not None and number not in (of.identity.number, of.number if of.identity.number == 0 else -1):
            continue
        made_by = of.identity.world or size
        due = set(ranks) if made_by == world else set(range(made_by))
        if due <= set(parts):
            whole.append(parts)
    return whole
