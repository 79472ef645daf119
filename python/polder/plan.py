"""Predicted training steps: one with its parts, or many at once.

All figures are simulated, in seconds and bytes; ``polder plan validate`` prints how far they are from published steps.
"""

import dataclasses
import json
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polder import _core

_NUMBERS, _FIGURES = _core.plan_names()
_CHOICES = {
    "recompute": ("none", "selective", "full"),
    "zero": ("none", "optimizer", "gradients", "weights"),
    "precision": ("bf16", "fp8", "fp32"),
    "offload_tier": ("host", "pool"),
}
_ONE = ("cp", "ep", "pp", "interleave", "micro_batch", "gather_again", "flash", "wide_gradients")
_OVERLAPS = ("overlap_tensor", "overlap_pipeline", "overlap_data", "overlap_offload")
_LEFT_OUT: dict[str, int] = dict.fromkeys((*_ONE, *_OVERLAPS), 1)


@dataclasses.dataclass(frozen=True)
class Shown:
    """Seconds that hold computation up, and that run beside it."""

    exposed_s: float
    hidden_s: float


@dataclasses.dataclass(frozen=True)
class Scoped:
    """Seconds inside a rack, and between racks."""

    inside: Shown
    between: Shown


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds of computing, all micro-batches together."""

    forward_s: float
    backward_s: float
    recompute_s: float
    optimizer_s: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """Seconds of sending, by what it is for."""

    tensor: Scoped
    context: Scoped
    expert: Scoped
    pipeline: Scoped
    data: Scoped


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on an accelerator, and on its share of another tier."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    used_bytes: float
    capacity_bytes: float
    far_bytes: float
    far_capacity_bytes: float


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step takes; ``total_s`` is the sum of all that is not hidden."""

    total_s: float
    compute: Compute
    communication: Communication
    bubble_s: float
    offload: Shown
    straggle_s: float
    memory: Memory


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What runs beside computation."""

    tensor: bool = False
    pipeline: bool = False
    data: bool = False
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Offload:
    """What lies outside the accelerators' memory, and where: ``"host"`` or ``"pool"``."""

    tier: str = "host"
    weights: bool = False
    optimizer: bool = False
    activations: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step is laid out."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    interleave: int
    batch: int
    micro_batch: int
    sequence_parallel: bool
    gather_again: bool
    recompute: str
    flash: bool
    zero: str
    precision: str
    wide_gradients: bool
    overlap: Overlap
    offload: Offload


@dataclasses.dataclass(frozen=True)
class Margin:
    """How far such predictions are from published steps.

    Tables of published steps took ``least`` to ``most`` times what was predicted without them; ``rows`` of them, each
    with the scalar of its table's software, were off by ``mean`` on average and ``worst`` at most. ``accelerator`` is
    None when nothing was published of it, and the figures are those of all others.
    """

    accelerator: str | None
    least: float
    most: float
    rows: float
    mean: float
    worst: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A predicted step, with what it was predicted for; the fields of ``polder plan train --json``."""

    kind: str
    model: str
    platform: str
    accelerators: int
    fill: int
    order: str
    layout: Layout
    step: Step
    model_flops: float
    peak_flops: float
    points: int
    fits: bool
    margin: Margin
    against: "Plan | None"
    note: str | None


def train(
    model: str,
    platform: str,
    accelerators: int,
    *,
    against: str | None = None,
    rack: str | None = None,
    fill: int | None = None,
    order: str | None = None,
    sequence: int | None = None,
    **layout: int | bool | str | Overlap | Offload,
) -> Plan:
    """Predict a training step.

    Parameters
    ----------
    model, platform
        Names of ``polder plan list``, or paths of files: TOML, a model as a Hugging Face ``config.json``, either as the
        JSON of Calculon.
    accelerators
        How many.
    against
        Another platform, which the same layout is predicted on too.
    rack
        Kind of rack, where the platform has several.
    fill
        Accelerators of each rack that are used; by default the most that fill all racks evenly.
    order
        In which order ranks are counted, the closest first; by default ``"tp-cp-ep-dp-pp"``.
    sequence
        Tokens of a sequence, in place of the model's.
    **layout
        Fields of `Layout` that are given. The fastest layout that fits is searched for among those that have them; by
        default the batch is the power of two that makes 16 Mi tokens at most.

    Returns
    -------
    Plan
        Seconds and bytes. When nothing fits, ``fits`` is false and the layout the nearest to fitting.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, or no layout can run, with the reason and the nearest that can.

    Examples
    --------
    >>> plan = train("gpt3-175b", "dgx-a100", 1024, batch=1536, tp=8, pp=16)
    >>> plan.layout.dp, plan.fits
    (8, True)
    >>> plan.margin.accelerator, plan.margin.least < 1 < plan.margin.most
    ('A100-SXM4-80GB', True)
    """
    given = {name: dataclasses.asdict(it) if dataclasses.is_dataclass(it) else it for name, it in layout.items()}
    request = {
        "model": model,
        "platform": platform,
        "accelerators": accelerators,
        "against": against,
        "rack": rack,
        "fill": fill,
        "order": order,
        "sequence": sequence,
        "layout": given,
    }
    return _typed(Plan, json.loads(_core.plan_train(json.dumps(request, default=_plain))))


def search(
    model: str,
    platform: str,
    *,
    rack: str | None = None,
    fill: int | None = None,
    order: str | None = None,
    **columns: ArrayLike,
) -> dict[str, NDArray[Any]]:
    """Predict many layouts with one call.

    Parameters
    ----------
    model, platform, rack, fill, order
        As for `train`.
    **columns
        Fields of `Layout`, each a number or an array; arrays are broadcast against each other. ``overlap`` and
        ``offload`` are flat: ``overlap_data``, ``offload_tier``. ``tp``, ``dp`` and ``batch`` must be given; what is
        left out is 1, false or the first choice, but ``flash``, ``wide_gradients`` and all overlaps are true, as in
        `train`.

    Returns
    -------
    dict of str to ndarray
        The columns that were given, then the figures of `Step`, flat, in seconds and bytes as float64, and ``fits`` as
        bool. All arrays have the shape of the broadcast. Where a layout cannot run, figures are NaN.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, or a choice is none.
    TypeError
        When a column is no field of a layout, or a field that must be given is missing.

    Examples
    --------
    >>> table = search("gpt3-175b", "dgx-a100", tp=8, dp=[8, 16], pp=[16, 8], batch=1536)
    >>> table["total_s"].shape, bool((table["total_s"] > 0).all())
    ((2,), True)
    """
    unknown = columns.keys() - set(_NUMBERS)
    missing = {"tp", "dp", "batch"} - columns.keys()
    if unknown or missing:
        what = f"no field of a layout: {sorted(unknown)}" if unknown else f"must be given: {sorted(missing)}"
        raise TypeError(f"{what}; fields are {', '.join(_NUMBERS)}")
    given = {name: _numbers(name, column) for name, column in columns.items()}
    arrays = np.broadcast_arrays(*(given.get(name, np.uint32(_LEFT_OUT.get(name, 0))) for name in _NUMBERS))
    rows = np.ascontiguousarray(np.stack(arrays, axis=-1), dtype=np.uint32)
    shape = rows.shape[:-1]
    figures = np.frombuffer(_core.plan_points(model, platform, rows.reshape(-1), rack=rack, fill=fill, order=order))
    figures = figures.reshape(*shape, len(_FIGURES))
    table: dict[str, NDArray[Any]] = {
        name: np.broadcast_to(np.asarray(column), shape) for name, column in columns.items()
    }
    table |= {name: figures[..., index] for index, name in enumerate(_FIGURES)}
    here = table["used_bytes"] <= table["capacity_bytes"]
    return table | {"fits": here & (table["far_bytes"] <= table["far_capacity_bytes"])}


def _numbers(name: str, column: ArrayLike) -> NDArray[np.uint32]:
    """A column as unsigned numbers: a choice as its place."""
    array = np.asarray(column)
    if not array.size:
        return array.astype(np.uint32)
    if name in _CHOICES and array.dtype.kind == "U":
        choices = _CHOICES[name]
        unknown = set(array.ravel().tolist()) - set(choices)
        if unknown:
            raise ValueError(f"{name} is {sorted(unknown)[0]!r}; give one of {', '.join(choices)}")
        return np.vectorize(choices.index, otypes=[np.uint32])(array)
    if array.dtype.kind not in "biu" or int(array.min()) < 0 or int(array.max()) >= 2**32:
        raise ValueError(f"{name} is {column!r}; give whole numbers from 0 to {2**32 - 1}")
    return array.astype(np.uint32)


def _plain(number: Any) -> Any:
    """A number of NumPy as one of Python."""
    return number.item()


def _typed(kind: Any, value: Any) -> Any:
    """A dataclass with the fields of a JSON object."""
    if value is None or not isinstance(value, dict):
        return value
    hints = get_type_hints(kind)

    def inner(hint: Any) -> Any:
        return next(it for it in get_args(hint) if it is not type(None)) if isinstance(hint, UnionType) else hint

    return kind(**{name: _typed(inner(hints[name]), value[name]) for name in hints})
