"""What callers give: whole numbers, seconds, text and paths, or an ArgumentError that names the argument and the value.

True and False are whole numbers of Python, and never meant as one. NumPy's whole numbers are taken.
"""

import math
import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any, cast

from polder.errors import ArgumentError

__all__ = ["is_number", "path", "seconds", "text", "whole"]


def is_number(given: Any, kind: type) -> bool:
    """Whether it is a number of a kind, and no bool."""
    return not isinstance(given, bool) and isinstance(given, kind)


def whole(name: str, given: Any, least: int = 0, *, expected: str = "a whole number") -> int:
    """A whole number from `least` on.

    Examples
    --------
    >>> whole("rank", True)
    Traceback (most recent call last):
        ...
    polder.errors.ArgumentError: rank is True; give a whole number from 0 on
    """
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ArgumentError(f"{name} is {given!r}; give {expected} from {least} on")
    return number


def seconds(name: str, given: Any) -> float:
    """Seconds from 0 on; infinitely many are some too."""
    if not is_number(given, Real) or math.isnan(given) or given < 0:
        raise ArgumentError(f"{name} is {given!r}; give seconds, 0 or more")
    return float(given)


def text(name: str, given: Any) -> str:
    """Text that UTF-8 has."""
    try:
        if isinstance(given, str):
            given.encode()
            return given
    except UnicodeEncodeError:
        pass
    raise ArgumentError(f"{name} is {given!r}; give text")


def path(name: str, given: Any) -> Path:
    """A path. An empty one would be the current folder, which the caller then names."""
    if not isinstance(given, str | os.PathLike) or not str(cast("Any", given)):
        raise ArgumentError(f"{name} is {given!r}; give a path")
    return Path(cast("Any", given))
