"""Predicted training steps: one with its parts, or many at once; offloaded steps; memory, inference; fabrics, programs.

All figures are simulated, in seconds and bytes; ``polder plan validate`` prints how far they are from published steps.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polder import _core
from polder.errors import ArgumentError

_NUMBERS, _NAMES, _OF_STEP = _core.plan_names()
_FIGURES = [*(key for key, *_ in _OF_STEP), "total_low_s", "total_high_s"]
_CHOICES = dict(_NAMES)
_ONE = ("cp", "ep", "pp", "interleave", "micro_batch", "gather_again", "flash", "wide_gradients")
_OVERLAPS = ("overlap_tensor", "overlap_context", "overlap_pipeline", "overlap_data", "overlap_offload")
_LEFT_OUT: dict[str, int] = dict.fromkeys((*_ONE, *_OVERLAPS), 1)


@dataclasses.dataclass(frozen=True)
class Exposure:
    """Seconds that hold computation up, and that run beside it."""

    exposed_s: float
    hidden_s: float


@dataclasses.dataclass(frozen=True)
class Scoped:
    """Seconds inside a rack, and between racks."""

    inside: Exposure
    between: Exposure


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds of computing, all micro-batches together."""

    forward_s: float
    backward_s: float
    recompute_s: float
    contention_s: float
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
class TierUse:
    """Bytes in a tier of memory: ``tier`` is ``"accelerator"`` for an accelerator's own, else the tier's name."""

    tier: str
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    used_bytes: float
    capacity_bytes: float


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step takes; ``total_s`` is the sum of all that is not hidden.

    ``memory`` has two tiers: the accelerator's own, then its share of the one that takes what is offloaded.
    """

    total_s: float
    compute: Compute
    communication: Communication
    bubble_s: float
    offload: Exposure
    straggle_s: float
    memory: list[TierUse]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What runs beside computation: what is named, as ``--overlap`` does, and no more."""

    tensor: bool = False
    context: bool = False
    expert: bool = False
    pipeline: bool = False
    data: bool = False
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Offload:
    """What lies outside the accelerators' memory, and where: ``"host"``, ``"pool"`` or a tier of the host by name."""

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
class Errors:
    """How far published steps were from predictions that knew nothing of their publication.

    Of ``steps`` of them predictions were off by ``mean_without_scalar`` on average. ``in_range`` is the part that lay
    in the printed range. With the scalar of its table's software, each of ``rows`` was off by ``mean`` on average. A
    constant rate with such a scalar was off by ``constant_mean``. Of ``published`` rows, all of which ran, ``fits`` are
    predicted to fit in memory. ``worst`` figures are the largest errors.
    """

    steps: float
    mean_without_scalar: float
    worst_without_scalar: float
    in_range: float
    rows: float
    mean: float
    worst: float
    constant_mean: float
    constant_worst: float
    worst_ratio: float
    published: int
    fits: int


@dataclasses.dataclass(frozen=True)
class Margin:
    """How far predictions of this kind of step are from published steps.

    A step takes ``range`` times its prediction: 80% of steps of another publication should lie there. It is set from
    the errors of ``publications``, each predicted without its own. ``step_class`` is ``"dense bf16"``, ``"dense fp8"``,
    ``"dense fp32"`` or ``"MoE"``. ``blind`` has the errors of steps of this class to which no constant is fitted,
    ``fitted`` those of others. ``accelerator`` is None if no constant of the accelerator is fitted to a published step.
    """

    accelerator: str | None
    step_class: str
    range: list[float]
    publications: int
    blind: Errors
    fitted: Errors


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage: its blocks, and the time of its passes as a part of the slowest stage's."""

    blocks: int
    pace: float


@dataclasses.dataclass(frozen=True)
class FabricRates:
    """What a fabric gives an accelerator: the payload of its links, what collectives reach of it, an empty message."""

    payload_bytes_per_s: float
    reached_bytes_per_s: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Fabrics:
    """What fabrics give an accelerator, inside racks and between them; None where there is none."""

    inside: FabricRates | None
    between: FabricRates | None


@dataclasses.dataclass(frozen=True)
class Flits:
    """What of a step was followed flit by flit: of each message at most a window, flits times links, and replays.

    A window shorter than ``steady_window_bytes`` sees rates that are not steady.
    """

    window_bytes: float | None
    flit_hops: int
    replays: int
    steady_window_bytes: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A predicted step, with what it was predicted for; the fields of ``polder plan train --json``.

    The step takes ``range_s[0]`` to ``range_s[1]`` seconds, and ``times_against[0]`` to ``times_against[1]`` times as
    long as the same layout on the platform ``against``; that is None where the layout does not fit on both.
    ``model_flops`` counts attention over all pairs of tokens; a causal kernel computes half of them.
    """

    kind: str
    model: str
    sequence: int
    platform: str
    machine: str
    fabrics: Fabrics
    accelerators: int
    rack: str
    fill: int
    order: str
    fidelity: str
    flits: Flits | None
    failed: list[list[int]]
    layout: Layout
    stages: list[Stage]
    step: Step
    model_flops: float
    peak_flops: float
    points: int
    fits: bool
    range_s: list[float]
    margin: Margin
    would_fit: list[str]
    against: "Plan | None"
    times_against: list[float] | None
    left_out: str | None
    note: str | None


def train(
    model: str,
    platform: str,
    accelerators: int | None = None,
    *,
    layout: str | None = None,
    against: str | None = None,
    rack: str | None = None,
    fill: int | None = None,
    order: str | None = None,
    sequence: int | None = None,
    fidelity: str = "L0",
    window: int | None = None,
    virtual_channels: int | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
    failed: Sequence[tuple[int, int]] = (),
    **given: int | bool | str | Overlap | Offload,
) -> Plan:
    """Predict a training step.

    Parameters
    ----------
    model, platform
        Names of ``polder plan show``, or paths of files: TOML, a model as a Hugging Face ``config.json``, either as the
        JSON of Calculon.
    accelerators
        Their number; by default that of the file ``layout``.
    layout
        The path of an execution of Calculon. It gives the order of ranks, and all of the layout that is not given here.
    against
        Another platform, on which the same layout is predicted too. If it cannot run there, ``left_out`` says why.
    rack
        Kind of rack, where the platform has several.
    fill
        Accelerators of each rack that are used; by default the most that fill all racks evenly.
    order
        Order in which ranks are placed, the closest first; by default ``"tp-cp-ep-dp-pp"``.
    sequence
        Tokens of a sequence, in place of the model's.
    fidelity
        How closely communication is looked at: ``"L0"``, in closed form, ``"L1"``, by flows of all groups at once, or
        ``"L2"``, by their flits.
    window
        Of ``"L2"`` alone: bytes of each message that are followed; the rest takes what the second half of them took.
    virtual_channels, buffer, error_rate
        Of ``"L2"`` alone, as for `fabric`.
    failed
        Pairs of switches of the fabric between racks whose link has failed, with ``fidelity="L1"`` or ``"L2"``: what is
        sent takes the shortest ways that are left. The platform ``against`` has all of its links.
    **given
        Fields of `Layout`. The fastest layout that has them and fits is searched for. By default the batch is the
        largest power of two with at most 16 Mi tokens, and 32 Ki an accelerator. Without ``offload``, offloading is
        tried in every tier if nothing fits in the accelerators' memory. ``Offload()`` offloads nothing.

    Returns
    -------
    Plan
        Seconds and bytes. If nothing fits in the accelerators' memory, ``note`` says so and what is offloaded. If
        nothing fits at all, ``fits`` is false, the layout is the nearest to fitting, and ``would_fit`` names one change
        with which a layout fits.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, no layout can run, with the reason and the nearest that can, or a step has more
        flit-hops than are followed, with their number and a window that would do.
    TypeError
        When what is given is no field of a layout, or there are neither ``accelerators`` nor a file.

    Examples
    --------
    >>> plan = train("gpt3-175b", "dgx-a100", 1024, batch=1536, tp=8, pp=16)
    >>> plan.layout.dp, plan.fits
    (8, True)
    >>> plan.margin.accelerator, plan.margin.step_class, plan.margin.range[0] < 1 < plan.margin.range[1]
    ('A100-SXM4-80GB', 'dense bf16', True)
    """
    if accelerators is None and layout is None:
        raise TypeError("accelerators: expected a number, or a file as layout")
    _expect(given, [field.name for field in dataclasses.fields(Layout)], set())
    fields = {name: dataclasses.asdict(it) if dataclasses.is_dataclass(it) else it for name, it in given.items()}
    request = {
        "model": model,
        "platform": platform,
        "accelerators": accelerators or 0,
        "against": against,
        "rack": rack,
        "fill": fill,
        "order": order,
        "sequence": sequence,
        "fidelity": fidelity,
        "flits": _flits(window, virtual_channels, buffer, error_rate),
        "failed": [list(link) for link in failed],
        "layout": fields,
    }
    return _typed(Plan, json.loads(_core.plan_train(_json(request), layout)))


def pays(
    model: str,
    platform: str = "nvl72-ndr",
    against: str = "nvl72-cxl",
    *,
    gpus: int,
    between: ArrayLike | None = None,
    pool: ArrayLike | None = None,
    prices: str | None = None,
    rack: str | None = None,
    fill: int | None = None,
    order: str | None = None,
    sequence: int | None = None,
    **given: int | bool | str | Overlap | Offload,
) -> dict[str, NDArray[Any]]:
    """Compare the fastest steps over two fabrics between racks at many bandwidths, as ``polder plan pays`` does.

    Parameters
    ----------
    model, rack, fill, order, sequence
        As for `train`.
    platform
        The machine that there is, as for `train`.
    against
        The machine that may pay; on a kind of rack with ``:RACK`` behind it.
    gpus
        Accelerators of both.
    between
        Bytes a second that an accelerator gets between racks in one direction, a number or numbers; both are tried with
        each. By default both are taken as they are.
    pool
        With `between`: bytes a second that an accelerator reads from the memory nodes of `against`, a number or
        numbers. Nodes faster than its link are tried once.
    prices
        What the machines cost as they are: a name of ``polder plan show``, or the path of a file.
    **given
        Fields of `Layout`, as for `train`; the rest is searched for at each point, on both.

    Returns
    -------
    dict of str to ndarray
        Arrays with a row for each bandwidth of `against` and its pool, and a column for each of `platform`, as the
        command prints them; of shape (1, 1) without `between`. As float64 ``between``, ``against_between`` and
        ``pool`` (NaN without memory nodes), payloads in bytes a second; ``total_s`` and ``against_total_s``;
        ``times``, how many times as fast the step is on `against`, with its range ``times_least`` and
        ``times_most``; ``pays``, 1 if that is surely above 1, 0 if it is surely below, else NaN. With `prices`, for
        each of ``money_usd``, ``energy_j`` and ``carbon_g`` that both have: the cost of a step, the same with
        ``against_``, and how many times as cheap it is with ``_times``, ``_times_least``, ``_times_most`` and
        ``_pays``. As objects ``layout`` and ``against_layout``, each a `Layout`.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, a platform lacks what is tried, or no layout runs or fits there.
    TypeError
        When what is given is no field of a layout.

    Examples
    --------
    >>> table = pays("palm-540b", gpus=2048, batch=512, between=[25e9, 100e9], prices="watts")
    >>> table["times"].shape, bool(table["times"][1, 0] > table["times"][0, 1])
    ((2, 2), True)
    >>> bool(np.allclose(table["energy_j_times"], table["energy_j"] / table["against_energy_j"]))
    True
    """
    _expect(given, [field.name for field in dataclasses.fields(Layout)], set())
    tried, pools = _bandwidths("between", between), _bandwidths("pool", pool)
    if pools and not tried:
        raise ArgumentError("pool: its bandwidths are tried with those of the fabric; give between too")
    fields = {name: dataclasses.asdict(it) if dataclasses.is_dataclass(it) else it for name, it in given.items()}
    request = {
        "model": model,
        "platform": platform,
        "accelerators": gpus,
        "against": None,
        "rack": rack,
        "fill": fill,
        "order": order,
        "sequence": sequence,
        "layout": fields,
    }
    answer = json.loads(_core.plan_pays(_json(request), against, tried, pools, prices))
    cells = answer["cells"] or [answer["own"]]
    # A column for each bandwidth of the platform that there is, of which each was tried once.
    shape = (-1, len({cell["between_bytes_per_s"][0] for cell in cells}))

    def column(of: Callable[[Any], Any], dtype: Any = np.float64) -> NDArray[Any]:
        filled = np.empty(len(cells), dtype=dtype)
        filled[:] = [of(cell) for cell in cells]
        return filled.reshape(shape)

    table: dict[str, NDArray[Any]] = {"pool": column(lambda cell: cell["pool_bytes_per_s"])}
    for place, prefix in enumerate(("", "against_")):
        table[f"{prefix}between"] = column(lambda cell, at=place: cell["between_bytes_per_s"][at])
        table[f"{prefix}total_s"] = column(lambda cell, at=place: cell["seconds"][at])
        table[f"{prefix}layout"] = column(lambda cell, at=place: _typed(Layout, cell["layouts"][at]), object)
    table |= _compared("", column, lambda cell: cell)
    for place, cost in enumerate(answer["own"]["costs"]):
        name = cost["name"]
        table[name] = column(lambda cell, at=place: cell["costs"][at]["step"][0])
        table[f"against_{name}"] = column(lambda cell, at=place: cell["costs"][at]["step"][1])
        table |= _compared(f"{name}_", column, lambda cell, at=place: cell["costs"][at])
    return table


def _bandwidths(name: str, rates: ArrayLike | None) -> list[float]:
    """Bytes a second as numbers, none where nothing is given."""
    array = np.asarray([] if rates is None else rates, dtype=np.float64).ravel()
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ArgumentError(f"{name} is {array.tolist()}; give bytes a second above 0")
    return array.tolist()


def _compared(
    prefix: str, column: Callable[[Callable[[Any], Any]], NDArray[Any]], of: Callable[[Any], Any]
) -> dict[str, NDArray[Any]]:
    """How many times as good, from how many to how many times, and whether that pays, by the names of columns."""
    times = column(lambda cell: of(cell)["times"])
    least, most = (column(lambda cell, at=at: of(cell)["range"][at]) for at in (0, 1))
    is_sure = np.where(least > 1, 1.0, np.where(most < 1, 0.0, np.nan))
    return {
        f"{prefix}times": times,
        f"{prefix}times_least": least,
        f"{prefix}times_most": most,
        f"{prefix}pays": is_sure,
    }


def search(
    model: str,
    platform: str | ArrayLike,
    *,
    gpus: ArrayLike | None = None,
    sequence: ArrayLike | None = None,
    rack: str | None = None,
    fill: int | None = None,
    order: str | None = None,
    **columns: ArrayLike,
) -> dict[str, NDArray[Any]]:
    """Predict many layouts with one call.

    Parameters
    ----------
    model, rack, fill, order
        As for `train`.
    platform
        As for `train`, or an array of such names.
    gpus
        Accelerators, a number or an array. Copies of the model fill them where ``dp`` is not given; where it is, both
        must agree.
    sequence
        Tokens of a sequence, a number or an array, in place of the model's.
    **columns
        Fields of `Layout`, each a number or an array. ``overlap`` and ``offload`` are flat: ``overlap_data``,
        ``offload_tier``, a name as in `Offload`, or a number of which 2 is the first tier of the host by name.
        ``tp``, ``batch``, and ``dp`` or ``gpus`` must be given; what is left out is 1, false or the first choice, but
        ``flash``, ``wide_gradients`` and all overlaps but ``overlap_expert`` are true, as in `train`.

    Returns
    -------
    dict of str to ndarray
        The columns that were given, then the figures of `Step`, flat, in seconds and bytes as float64, then
        ``total_low_s`` and ``total_high_s``, the range of ``total_s`` to rely on, ``fits`` as bool, and ``reason`` as
        str: why a layout cannot run, empty where it can. All arrays are broadcast against each other, and have the
        shape that this gives. Where a layout cannot run, figures are NaN.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, or a choice is none: a tier that no platform has.
    TypeError
        When a column is no field of a layout, or a field that must be given is missing.

    Examples
    --------
    >>> table = search("gpt3-175b", ["dgx-a100", "dgx-h100"], gpus=1024, tp=8, pp=[[16], [7]], batch=1536)
    >>> table["total_s"].shape, bool((table["total_s"][0] > 0).all())
    ((2, 2), True)
    >>> print(table["reason"][1, 0])
    tp x cp x pp of 56 and dp of 18 do not make 1,024 accelerators
    """
    _expect(columns, _NUMBERS, {"tp", "batch"} | ({"dp"} if gpus is None else set()))
    place = {"platform": platform, "gpus": gpus, "sequence": sequence}
    given = {name: it for name, it in place.items() if it is not None} | columns
    numbers: dict[str, NDArray[np.uint32]] = {}
    tiers: list[str] = []
    platforms, numbers["platform"] = _places(platform)
    if np.asarray(columns.get("offload_tier")).dtype.kind == "U":
        tiers, numbers["offload_tier"] = _places(columns["offload_tier"])
    numbers |= {name: _numbers(name, column) for name, column in given.items() if name not in numbers}
    left_out = _LEFT_OUT if gpus is None else _LEFT_OUT | {"dp": 0}
    names = (*place, *_NUMBERS)
    arrays = np.broadcast_arrays(*(numbers.get(name, np.uint32(left_out.get(name, 0))) for name in names))
    rows = np.ascontiguousarray(np.stack(arrays, axis=-1), dtype=np.uint32)
    shape = rows.shape[:-1]
    flat = rows.reshape(-1)
    bytes_of = _core.plan_points(model, (platforms, tiers), flat, rack=rack, fill=fill, order=order)
    figures = np.frombuffer(bytes_of[0]).reshape(*shape, len(_FIGURES))
    refused = np.frombuffer(bytes_of[1], dtype=np.uint32).reshape(shape)
    table: dict[str, NDArray[Any]] = {
        name: np.broadcast_to(np.asarray(column), shape) for name, column in given.items()
    }
    table |= {name: figures[..., index] for index, name in enumerate(_FIGURES)}
    here = table["used_bytes"] <= table["capacity_bytes"]
    table["fits"] = here & (table["offload_used_bytes"] <= table["offload_capacity_bytes"])
    return table | {"reason": np.asarray(bytes_of[2], dtype=object)[refused]}


def memory(
    platform: str,
    against: str | None = None,
    *,
    access: ArrayLike = 64,
    working_set: ArrayLike,
    accelerators: int | None = None,
    rack: str | None = None,
    nodes: str = "far",
    inside: str = "copy",
    node_latency: str = "given",
    bulk: bool = False,
    host: bool = False,
    cache: float | None = None,
    snoop_filter: float = 256e6,
    skew: float = 0.8,
) -> dict[str, NDArray[Any]]:
    """Predict mean access times of many working sets with one call, as ``polder plan memory`` does.

    Parameters
    ----------
    platform, against
        As for `train`; of ``against`` the accelerators alone are the baseline.
    access, working_set
        Bytes of an access and of a working set, numbers or arrays above 0.
    accelerators
        How many; those of 16 racks by default.
    rack
        Kind of rack, where the platform has several.
    nodes
        Where memory nodes are: ``"near"`` or ``"far"``.
    inside
        How memory of a rack that is not coherent is reached: ``"copy"`` or ``"load"``.
    node_latency
        What a load of a node takes before switches: ``"given"`` or ``"added"``.
    bulk
        Whether data of coherent loads in a rack come over its own fabric.
    host
        Whether the CPU's memory is taken too, after an accelerator's own.
    cache
        Bytes that each accelerator caches of what it loads over CXL; none by default.
    snoop_filter, skew
        As for `coherence`, of what is cached.

    Returns
    -------
    dict of str to ndarray
        ``access`` and ``working_set``, broadcast against each other, then seconds of each configuration as float64:
        ``baseline_s`` where ``against`` is given, ``clusters_s``, and ``tiered_s`` where the platform has tiers. NaN
        where a configuration holds less.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, a platform has no accelerators or too few ports, or a size is not above 0.

    Examples
    --------
    >>> table = memory("nvl72-cxl", "nvl72-ndr", working_set=[100e9, 10e12, 100e12])
    >>> list(table)
    ['access', 'working_set', 'baseline_s', 'clusters_s', 'tiered_s']
    >>> bool((table["tiered_s"][1:] < table["baseline_s"][1:]).all())
    True
    """
    sizes = np.broadcast_arrays(np.asarray(access, dtype=np.float64), np.asarray(working_set, dtype=np.float64))
    for name, array in zip(("access", "working_set"), sizes, strict=True):
        if not (np.isfinite(array) & (array > 0)).all():
            raise ArgumentError(f"{name} is {array.tolist()}; give bytes above 0")
    question = _machines(
        platform,
        against,
        rack,
        accelerators,
        nodes=nodes,
        inside=inside,
        node_latency=node_latency,
        bulk=bulk,
        host=host,
        cache=cache,
        snoop_filter=snoop_filter,
        skew=skew,
    )
    flat = [np.ascontiguousarray(array).reshape(-1) for array in sizes]
    names, seconds = _core.plan_memory(_json(question), *flat)
    table = np.frombuffer(seconds).reshape(*sizes[0].shape, len(names))
    found: dict[str, NDArray[Any]] = dict(zip(("access", "working_set"), sizes, strict=True))
    return found | {f"{name}_s": table[..., index] for index, name in enumerate(names)}


def _machines(
    platform: str,
    against: str | None,
    rack: str | None,
    accelerators: int | None,
    *,
    cache: float | None,
    snoop_filter: float,
    skew: float,
    **ways: object,
) -> dict[str, object]:
    caching = {"cache_bytes": cache, "snoop_filter_bytes": snoop_filter, "skew": skew}
    ways["caching"] = None if cache is None else caching
    return {"platform": platform, "against": against, "rack": rack, "accelerators": accelerators, "ways": ways}


_OF_PATTERN = ("total_s", "p50_s", "p90_s", "p99_s", "max_s", "bytes_per_s")


def fabric(
    platform: str | ArrayLike,
    accelerators: ArrayLike,
    *,
    pattern: str | ArrayLike = "permutation",
    message: ArrayLike = 64 * 2**20,
    routing: str | ArrayLike = "minimal",
    fidelity: str | ArrayLike = "L1",
    seed: ArrayLike | None = None,
    rack: str | None = None,
    failed: Sequence[tuple[int, int]] = (),
    window: int | None = None,
    virtual_channels: int | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
) -> dict[str, NDArray[Any]]:
    """Predict when the messages of many patterns end with one call, as ``polder plan fabric`` does.

    Parameters
    ----------
    platform
        As for `train`, or an array of such names.
    accelerators
        How many send and receive; those of one rack are on its own fabric. A number or an array.
    pattern
        ``"permutation"``, ``"shift"``, ``"incast"``, ``"all-to-all"``, ``"ring"`` or ``"all-reduce"``, or an array.
    message
        Bytes of each message; of an all-reduce, what each accelerator has.
    routing
        ``"minimal"`` or ``"adaptive"``, or an array.
    fidelity
        ``"L0"``, each message alone, ``"L1"``, by flows, or ``"L2"``, by flits, or an array.
    seed
        What permutations are drawn from, and damage to flits; that of the command by default.
    rack
        Kind of rack, where the platform has several.
    failed
        Pairs of switches whose link has failed.
    window, virtual_channels, buffer, error_rate
        Of ``"L2"`` alone: bytes of each message that are followed, channels of a link, flits that the buffer of a
        channel holds, and the part of the flits that arrive damaged.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then as float64 ``total_s``, when the last message of the last
        step has arrived, ``p50_s``, ``p90_s``, ``p99_s`` and ``max_s`` of the messages of a step, and ``bytes_per_s``
        that reach an accelerator, NaN with ``"L0"``, where no two messages share its links.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, a platform has no such fabric, or a pattern is too large to be followed.

    Examples
    --------
    >>> table = fabric("nvl72-ndr", [144, 288], pattern=[["permutation"], ["ring"]], message=2**20)
    >>> table["total_s"].shape, bool((table["p50_s"] <= table["max_s"]).all())
    ((2, 2), True)
    """
    given = {
        "platform": ("platform", platform),
        "accelerators": ("accelerators", accelerators),
        "pattern": ("pattern", pattern),
        "message": ("message_bytes", message),
        "routing": ("routing", routing),
        "fidelity": ("fidelity", fidelity),
        "seed": ("seed", seed),
    }
    columns, rows = _rows(given)
    flits = _flits(window, virtual_channels, buffer, error_rate)
    fixed = {"rack": rack, "failed": [list(link) for link in failed], "flits": flits}
    return columns | _figures(_core.plan_fabric(_json([row | fixed for row in rows])), columns, _OF_PATTERN)


def inference(
    platform: str,
    against: str | None = None,
    *,
    sequences: ArrayLike,
    context: ArrayLike | None = None,
    load: str = "kv",
    model: str | None = None,
    serving: int | None = None,
    accelerators: int | None = None,
    rack: str | None = None,
    access: ArrayLike | None = None,
    working_set: ArrayLike | None = None,
    outstanding: ArrayLike | None = None,
    visits: ArrayLike | None = None,
    nodes: str = "far",
    inside: str = "copy",
    node_latency: str = "given",
    bulk: bool = False,
    host: bool = False,
    cache: float | None = None,
    snoop_filter: float = 256e6,
    skew: float = 0.8,
    fidelity: str = "L0",
    window: int | None = None,
    virtual_channels: int | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
) -> dict[str, NDArray[Any]]:
    """Predict many steps of inference that outgrow an accelerator with one call, as ``polder plan inference`` does.

    Parameters
    ----------
    platform, against, accelerators, rack, nodes, inside, node_latency, bulk, host, cache, snoop_filter, skew
        As for `memory`. A cache is not of ``"kv"``, because a step reads each key and value once.
    sequences
        Sequences that are served at once, whole numbers or arrays above 0.
    context
        Tokens of each sequence whose keys and values are read; 131,072 by default. Of ``"kv"`` alone.
    load
        What is read in a step: ``"kv"``, all keys and values; ``"embedding"``, rows of tables; ``"retrieval"``, vectors
        of an index, one after another.
    model
        The model whose keys and values are read, as for `train`; llama3-70b by default. Of ``"kv"`` alone.
    serving
        Accelerators of a rack that serve together; the whole rack by default.
    access
        Bytes of a page, a row or a vector, a number or an array; by default 64 KiB, 512 and 4 KiB.
    working_set
        Bytes of the tables or of the index, a number or an array; 40e12 by default. Not of ``"kv"``.
    outstanding, visits
        Accesses that are under way at once, and rows or vectors of a sequence in a step, whole numbers or arrays.
        Visits are not of ``"kv"``.
    fidelity
        ``"L0"``, each accelerator reads at its share of links and memories; ``"L1"``, all that serve read at once, as
        flows; ``"L2"``, by flits.
    window, virtual_channels, buffer, error_rate
        As for `fabric`.

    Returns
    -------
    dict of str to ndarray
        What was given of sequences and accesses, broadcast against each other; ``set_bytes`` of all that serve
        together; then seconds of a step on each configuration as float64, named as those of `memory`. NaN where it does
        not fit.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, a platform has no accelerators, more serve than a rack has, a number makes no sense or
        is of another load, or reads take too long to be followed.

    Examples
    --------
    >>> table = inference("nvl72-cxl", "nvl72-ndr", sequences=[64, 512], context=[[8192], [131072]])
    >>> table["tiered_s"].shape, bool((table["tiered_s"] <= table["baseline_s"]).all())
    ((2, 2), True)
    """
    if context is None and load == "kv":
        context = 131_072
    given = {
        "sequences": ("sequences", sequences),
        "context": ("context", context),
        "working_set": ("set_bytes", working_set),
        "access": ("access_bytes", access),
        "outstanding": ("outstanding", outstanding),
        "visits": ("visits", visits),
    }
    columns, rows = _rows(given)
    question = {
        "machines": _machines(
            platform,
            against,
            rack,
            accelerators,
            nodes=nodes,
            inside=inside,
            node_latency=node_latency,
            bulk=bulk,
            host=host,
            cache=cache,
            snoop_filter=snoop_filter,
            skew=skew,
        ),
        "serving": serving,
        "load": load,
        "model": model,
        "fidelity": fidelity,
        "flits": _flits(window, virtual_channels, buffer, error_rate),
    }
    names, figures = _core.plan_inference(_json(question), _json(rows))
    return columns | _figures(figures, columns, ["set_bytes", *(f"{name}_s" for name in names)])


_OF_REGION = ("hits", "filter_misses", "back_invalidations", "invalidations", "waited", "coherent_s", "copies_s")


def coherence(
    platform: str,
    *,
    region: ArrayLike,
    cache: ArrayLike = 64e6,
    snoop_filter: ArrayLike = 256e6,
    writes: ArrayLike = 0.05,
    skew: ArrayLike = 0.8,
    rack: str | None = None,
) -> dict[str, NDArray[Any]]:
    """Predict accesses to many coherent regions of a rack with one call, as ``polder plan coherence`` does.

    Parameters
    ----------
    platform
        As for `train`; its racks have a coherent fabric.
    region, cache, snoop_filter
        Bytes of a region, of it in each accelerator's cache, and of the lines that the snoop filter has entries for,
        numbers or arrays of 64 or more.
    writes
        The part of the accesses that write, from 0 to 1, a number or an array.
    skew
        The exponent of Zipf's law from 0 to 4, a number or an array; with 0 all lines are alike.
    rack
        Kind of rack, where the platform has several.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then as float64, a number an access, ``hits``, ``filter_misses``,
        ``back_invalidations`` and ``invalidations`` (copies), and ``waited``; ``coherent_s``, mean seconds of an access
        by hardware, and ``copies_s``, those if software copies each line anew.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, the racks keep nothing coherent, or a number makes no sense.

    Examples
    --------
    >>> table = coherence("nvl72-cxl", region=[16e6, 4e9], writes=[[0.0], [0.05]])
    >>> table["hits"].shape, bool((table["hits"][:, 0] > table["hits"][:, 1]).all())
    ((2, 2), True)
    """
    given = {
        "region": ("region_bytes", region),
        "cache": ("cache_bytes", cache),
        "snoop_filter": ("snoop_filter_bytes", snoop_filter),
        "writes": ("writes", writes),
        "skew": ("skew", skew),
    }
    columns, rows = _rows(given)
    return columns | _figures(_core.plan_coherence(platform, rack, _json(rows)), columns, _OF_REGION)


_OF_KIND = ("copies", "sequences", "step_s", "alone_s")


def mixed(
    model: str,
    racks: Mapping[str, ArrayLike],
    platform: str = "mixed-nvlink-ualink-cxl",
    *,
    tp: ArrayLike,
    pp: ArrayLike = 1,
    batch: ArrayLike,
    micro_batch: ArrayLike = 1,
    fidelity: str = "L0",
    window: int | None = None,
    virtual_channels: int | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
) -> dict[str, NDArray[Any]]:
    """Predict many training steps on racks of two kinds with one call, as ``polder plan train`` does.

    Parameters
    ----------
    model, platform, fidelity, window, virtual_channels, buffer, error_rate
        As for `train`.
    racks
        Accelerators in racks of each of two kinds by name, whole numbers or arrays.
    tp, pp, batch, micro_batch
        Fields of `Layout`, whole numbers or arrays.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other, accelerators by the names of racks; ``total_s``, its range
        from ``total_low_s`` to ``total_high_s``, and ``even_s``, that with as many sequences for each copy, in seconds
        as float64; ``copies``, ``sequences`` of a copy,
        ``step_s`` and ``alone_s``, seconds with these racks alone, whose last axis is ``racks``; ``reason`` as str: why
        a step cannot run, empty where it can. Figures are NaN where there is none.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, or both kinds are in one rack.
    TypeError
        When there are not two kinds of rack.

    Examples
    --------
    >>> table = mixed("llama3-70b", {"nvl72": 144, "ualink": 144}, tp=8, batch=[720, 719])
    >>> bool(table["total_s"][0] < table["alone_s"][0].min()), table["racks"].tolist()
    (True, ['nvl72', 'ualink'])
    >>> print(table["reason"][1])
    --batch: 719 sequences cannot be divided over 18 and 18 copies by 1; give a multiple of 36
    """
    if len(racks) != 2:
        raise TypeError(f"racks: expected two kinds, found {', '.join(racks) or 'none'}")
    given = {name: (name, count) for name, count in racks.items()}
    fields = {"tp": tp, "pp": pp, "batch": batch, "micro_batch": micro_batch}
    columns, rows = _rows(given | {name: (name, column) for name, column in fields.items()})
    flits = _flits(window, virtual_channels, buffer, error_rate)
    requests = [
        {
            "parts": [{"platform": platform, "rack": name, "accelerators": row[name]} for name in racks],
            "step": {
                "model": model,
                "platform": platform,
                "accelerators": sum(row[name] for name in racks),
                "fidelity": fidelity,
                "flits": flits,
                "layout": {name: row[name] for name in fields},
            },
        }
        for row in rows
    ]
    figures, reasons = _core.plan_mixed(_json(requests))
    shape = columns["tp"].shape
    table = np.frombuffer(figures).reshape(*shape, 4 + 2 * len(_OF_KIND))
    kinds = table[..., 4:].reshape(*shape, 2, len(_OF_KIND))
    totals = ("total_s", "even_s", "total_low_s", "total_high_s")
    found = columns | {name: table[..., index] for index, name in enumerate(totals)}
    found |= {name: kinds[..., index] for index, name in enumerate(_OF_KIND)}
    return found | {"reason": np.asarray(reasons, dtype=object).reshape(shape), "racks": np.asarray(list(racks))}


_OF_PROGRAM = ("total_s", "in_calls_s", "messages", "bytes")


def mpi(
    trace: str | PathLike[str],
    *,
    latency: ArrayLike,
    bandwidth: ArrayLike,
    hosts: ArrayLike | None = None,
    computing: ArrayLike = 1.0,
    fidelity: str | ArrayLike = "L1",
    platform: str | None = None,
    path: str | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
) -> dict[str, NDArray[Any]]:
    """Predict a traced MPI program over many networks with one call, as ``polder plan mpi`` does.

    Parameters
    ----------
    trace
        The folder that ``POLDER_MPI_TRACE`` named: a file of each rank.
    latency, bandwidth
        Seconds of an empty message and bytes a second between ranks of a host, numbers or arrays.
    hosts
        Hosts that ranks run on, in blocks, a whole number or an array; those of the trace by default.
    computing
        How many times as long computing takes as in the trace, a number or an array.
    fidelity
        ``"L0"``, each message as if it were alone, ``"L1"``, in turn with those that take the same ports, ``"L2"``,
        between hosts flit by flit, or an array.
    platform, path
        The machine that hosts are joined as, and its path between two hosts.
    buffer, error_rate
        Of ``"L2"`` alone, as for `fabric`.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then as float64 ``total_s``, ``in_calls_s``, the mean of the
        ranks, and ``messages`` and ``bytes`` between hosts; and scalars of the trace, ``measured_s`` and
        ``measured_in_calls_s``, in seconds.

    Raises
    ------
    polder.ArgumentError
        When a file is missing or damaged, a rank waits for what is never sent, ranks on several hosts have no path, a
        number makes no sense, or there are more flit-hops than are followed.

    Examples
    --------
    >>> table = mpi("trace", latency=600e-9, bandwidth=[1e9, 5e9])  # doctest: +SKIP
    >>> table["total_s"] / table["measured_s"] - 1  # doctest: +SKIP
    array([0.031, 0.012])
    """
    given = {
        "latency": ("latency_s", latency),
        "bandwidth": ("bytes_per_s", bandwidth),
        "hosts": ("hosts", hosts),
        "computing": ("computing", computing),
        "fidelity": ("fidelity", fidelity),
    }
    columns, rows = _rows(given)
    fixed = {"platform": platform, "path": path, "flits": _flits(None, None, buffer, error_rate)}
    questions = [row | fixed for row in rows]
    measured, figures = _core.plan_mpi(trace, _json(questions))
    found = columns | _figures(figures, columns, _OF_PROGRAM)
    names = ("measured_s", "measured_in_calls_s")
    return found | {name: np.asarray(it) for name, it in zip(names, measured, strict=True)}


def chakra(
    folder: str | PathLike[str],
    *,
    compute: ArrayLike,
    memory: ArrayLike,
    launch: ArrayLike,
    platform: str | None = None,
    rack: str | None = None,
    fidelity: str = "L0",
    window: int | None = None,
    virtual_channels: int | None = None,
    buffer: int | None = None,
    error_rate: float = 0.0,
) -> dict[str, NDArray[Any]]:
    """Predict a traced step of PyTorch on many machines with one call, as ``polder plan chakra`` does.

    Parameters
    ----------
    folder
        What PyTorch's ``ExecutionTraceObserver`` wrote: a JSON file of each rank, for one step.
    compute
        Operations a second that matrix products reach, a number or an array.
    memory
        Bytes a second that other operators read and write, a number or an array.
    launch
        Seconds of an operator with nothing to do, a number or an array.
    platform, rack
        The machine that collective calls run on, and its kind of rack; without it they are left out.
    fidelity, window, virtual_channels, buffer, error_rate
        How closely these calls are looked at, as for `train`.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then in seconds as float64 ``total_s`` of the slowest rank;
        ``rank_s``, whose last axis is ``ranks``, the files; ``operator_s`` of the slowest rank, whose last axis is
        ``operators``. ``communication_s`` of each rank, which is part of ``rank_s``, and scalar ``collectives``, how
        many collective calls are left out.

    Raises
    ------
    polder.ArgumentError
        When a file is missing or damaged, a number makes no sense, the platform has no such fabric, or ``fidelity`` is
        given without one.

    Examples
    --------
    >>> table = chakra("step", compute=[1e11, 2e11], memory=1e10, launch=2e-6)  # doctest: +SKIP
    >>> table["operator_s"].shape == (2, table["operators"].size)  # doctest: +SKIP
    True
    """
    given = {
        "compute": ("flops_per_s", compute),
        "memory": ("bytes_per_s", memory),
        "launch": ("launch_s", launch),
    }
    columns, rows = _rows(given)
    flits = _flits(window, virtual_channels, buffer, error_rate)
    if platform is None and (rack, fidelity, flits) != (None, "L0", _flits(None, None, None, 0.0)):
        raise ArgumentError("platform: expected what collective calls run on, as rack, fidelity or flits are given")
    fabric = {"platform": platform, "rack": rack, "fidelity": fidelity, "flits": flits}
    on = None if platform is None else _json(fabric)
    ranks, operators, figures, calls, collectives = _core.plan_chakra(folder, _json(rows), on)
    table = np.frombuffer(figures).reshape(*columns["compute"].shape, len(ranks) + len(operators))
    rank_s = table[..., : len(ranks)]
    found = columns | {"total_s": rank_s.max(axis=-1), "rank_s": rank_s, "operator_s": table[..., len(ranks) :]}
    names = {"ranks": np.asarray(ranks), "operators": np.asarray(operators)}
    return found | names | {"communication_s": np.asarray(calls), "collectives": np.asarray(collectives)}


_OF_TIER = (
    "slow_bytes",
    "spill",
    "units",
    "slow_bytes_per_s",
    "touches_a_minute",
    "mean_s",
    "slowdown",
    "crowding",
    "servers",
    "memory_cost",
    "watts",
    "carbon",
    "carbon_new",
)


def tier(
    platform: str = "memserver",
    *,
    idle: str | ArrayLike,
    ratio: ArrayLike,
    unit: ArrayLike = 64e9,
    draws: ArrayLike = 15e9,
    waits: ArrayLike = 0.5,
    fast: str = "local",
    slow: str = "cxl",
    slow_cost: float | None = None,
    server_watts: float | None = None,
) -> dict[str, NDArray[Any]]:
    """Predict many servers with slow memory beside their own with one call, as ``polder plan tier --idle`` does.

    Parameters
    ----------
    platform
        As for `train`, with a server of two tiers.
    idle
        How long pages lie idle: ``"ads"``, ``"cache"``, ``"web1"`` or ``"web2"`` (Vistara, Table I), an array of these,
        or pairs of a share of the memory and seconds, both rising.
    ratio
        Bytes of fast memory for each byte of slow memory, a number or an array.
    unit, draws
        Bytes of a container, and bytes a second that one draws of memory, numbers or arrays.
    waits
        The part of its time that one waits for memory, from 0 to 1, a number or an array.
    fast, slow
        The server's own memory and its slow memory, by the names of their tiers.
    slow_cost, server_watts
        Cost of a byte of slow memory, as a part of that of fast memory, and watts of a server without slow memory;
        those of Vistara by default.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then as float64 ``slow_bytes``; ``spill``, the part of a container
        on slow memory; ``units``, containers of a server; ``slow_bytes_per_s`` and ``touches_a_minute``, lower bounds
        because a program may read a page more than once in its idle time; ``mean_s`` of a load; ``slowdown`` by that
        traffic, a lower bound too, and ``crowding`` by neighbours, parts of a container's time; ``servers``,
        ``memory_cost``, ``carbon`` and ``carbon_new``, parts of what fast memory alone takes; ``watts`` of a
        container. NaN where the tiers cannot give what is drawn.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, a platform has no such tiers, a container is larger than fast memory, or a number makes
        no sense.

    Examples
    --------
    >>> table = tier(idle=[["ads"], ["web1"]], ratio=[8, 3, 1])
    >>> table["units"].shape, bool((np.diff(table["units"]) >= 0).all())
    ((2, 3), True)
    """
    points = np.asarray(idle)
    is_points = points.dtype.kind in "iuf"
    given: dict[str, tuple[str, Any]] = {} if is_points else {"idle": ("idle", points)}
    given |= {
        "ratio": ("ratio", ratio),
        "unit": ("unit_bytes", unit),
        "draws": ("unit_bytes_per_s", draws),
        "waits": ("waits", waits),
    }
    columns, rows = _rows(given)
    if is_points:
        rows = [row | {"idle": points.tolist()} for row in rows]
    question = {
        "platform": platform,
        "fast": fast,
        "slow": slow,
        "slow_cost": slow_cost,
        "server_watts": server_watts,
    }
    figures = _core.plan_tier(_json(question), _json(rows))
    return columns | _figures(figures, columns, _OF_TIER)


_OFFLOADED = ("fwd_s", "bwd_s", "step_s", "total_s", "tokens_per_s", "dram_only_s", "gpu_bytes", "bytes")


_OF_SYNC = (
    *(f"{way}_{of}" for way in ("all_reduce", "overlapped", "service", "best") for of in ("step_s", "blocked_s")),
    "service_bytes",
    "best_bytes",
    "split_bytes",
)


def sync(
    layers: str | Sequence[int],
    *,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    worker_bandwidth: ArrayLike,
    workers: ArrayLike = 2,
    proxies: ArrayLike | None = None,
    proxy_bandwidth: ArrayLike | None = None,
    link_bandwidth: ArrayLike | None = None,
    latency_s: ArrayLike = 10e-6,
    shard: ArrayLike = 2 << 20,
    first_layers_first: ArrayLike = True,
) -> dict[str, NDArray[Any]]:
    """Predict many data-parallel steps with all-reduces and a parameter service, as ``polder plan sync`` does.

    Parameters
    ----------
    layers
        Bytes of the gradients of each layer, the first one first; or a model, as for `train`.
    forward_s, backward_s
        Seconds of both passes, numbers or arrays.
    worker_bandwidth
        What an all-reduce among workers reaches, in bytes a second: bytes of the gradients times 2(p-1)/p over seconds.
    workers, proxies
        How many of each, whole numbers or arrays. Each proxy sums shards of its own; as many as workers by default.
    proxy_bandwidth, link_bandwidth
        What a proxy's device and a worker's link carry each way, in bytes a second: that of the workers and that of a
        device by default.
    latency_s
        Seconds of each push and pull of a shard, and of each all-reduce, besides its bytes.
    shard
        Bytes of a shard.
    first_layers_first
        Whether the shards of the first layers go first, of those that wait.

    Returns
    -------
    dict of str to ndarray
        What was given, broadcast against each other; then as float64 ``all_reduce``, ``overlapped`` (DDP), ``service``
        (m by the paper's formula) and ``best`` (the best m), each with ``_step_s``, from the begin of the backward pass
        to the end of the next forward pass, and ``_blocked_s``, what no computation hides; ``service_bytes`` and
        ``best_bytes`` on the proxies; ``split_bytes``, the formula's m.

    Raises
    ------
    polder.ArgumentError
        When there is no such model, or a number makes no sense.

    Examples
    --------
    >>> passes = {"forward_s": 0.04, "backward_s": 0.08}
    >>> table = sync([125_000_000] + 24 * [50_000_000], workers=4, worker_bandwidth=12e9, **passes)
    >>> bool(table["best_step_s"] < table["overlapped_step_s"] < table["all_reduce_step_s"])
    True
    """
    given = {
        "workers": ("workers", workers),
        "forward_s": ("forward_s", forward_s),
        "backward_s": ("backward_s", backward_s),
        "worker_bandwidth": ("worker_bandwidth", worker_bandwidth),
        "proxies": ("proxies", proxies),
        "proxy_bandwidth": ("proxy_bandwidth", proxy_bandwidth),
        "link_bandwidth": ("link_bandwidth", link_bandwidth),
        "latency_s": ("latency_s", latency_s),
        "shard": ("shard", shard),
        "first_layers_first": ("first_layers_first", first_layers_first),
    }
    columns, rows = _rows(given)
    model = layers if isinstance(layers, str) else None
    sizes = [] if isinstance(layers, str) else list(layers)
    return columns | _figures(_core.plan_sync(model, sizes, _json(rows)), columns, _OF_SYNC)


def offload(
    model: Any,
    platform: str,
    *,
    context: ArrayLike,
    batch: ArrayLike = 1,
    policy: str | ArrayLike = "optimal",
    gpus: int = 1,
    **given: int | bool | str | None,
) -> dict[str, NDArray[Any]]:
    """Predict many steps whose tensors lie in host memory with one call, as ``polder plan offload`` does.

    Parameters
    ----------
    model
        As for `train`, or a live module of transformers, by its ``config``.
    platform
        As for `train`.
    context, batch
        Tokens of a sequence and sequences of each GPU, numbers or arrays.
    policy
        ``"dram"``, ``"interleave"``, ``"paper"``, ``"optimal"``, the path of a JSON file of fractions, or an array of
        these.
    gpus
        GPUs of the host.
    **given
        As the options of the command: ``dram``, ``buffers`` and ``overhead``, sizes such as ``"128 GiB"``; ``cards``,
        ``lora``, numbers; ``optimizer``, ``"adam"`` or ``"lion"``; ``pinned``, ``"exact"`` or ``"powers-of-two"``;
        ``checkpointing``, ``flash``, ``liger``, booleans; ``rack``.

    Returns
    -------
    dict of str to ndarray
        ``context``, ``batch`` and ``policy``, broadcast against each other; seconds, tokens a second and bytes as
        float64; ``placed_bytes``, whose last two axes are ``objects`` and ``tiers``; ``fits`` as bool; ``lacks`` and
        ``would_fit`` as str, empty where a step fits. Where it does not, figures are NaN.

    Raises
    ------
    polder.ArgumentError
        When a file is damaged, the platform has too few accelerators, or a number or a policy makes no sense.

    Examples
    --------
    >>> table = offload("qwen2.5-7b", "finetuning-a", context=[4096, 8192], policy=[["paper"], ["optimal"]])
    >>> table["total_s"].shape, bool((table["total_s"][1] <= table["total_s"][0]).all())
    ((2, 2), True)
    >>> table["tiers"].tolist()
    ['dram', 'cxl']
    """
    policies, which = _places(policy)
    numbers = {"context": _numbers("context", context), "batch": _numbers("batch", batch), "policy": which}
    arrays = np.broadcast_arrays(*numbers.values())
    rows = np.stack(arrays, axis=-1)
    shape = rows.shape[:-1]
    settings = _json({"gpus": gpus, **given})
    places = [tuple(row) for row in rows.reshape(-1, 3).tolist()]
    with _described(model) as file:
        objects, tiers, figures, reasons = _core.plan_offload(file, platform, settings, places, policies)
    width = len(_OFFLOADED) + len(objects) * len(tiers)
    table = np.frombuffer(figures).reshape(*shape, width)
    columns: dict[str, NDArray[Any]] = dict(zip(numbers, arrays, strict=True))
    columns["policy"] = np.asarray(policies)[arrays[2]]
    columns |= {name: table[..., index] for index, name in enumerate(_OFFLOADED)}
    columns["placed_bytes"] = table[..., len(_OFFLOADED) :].reshape(*shape, len(objects), len(tiers))
    columns["fits"] = ~np.isnan(columns["total_s"])
    for index, name in enumerate(("lacks", "would_fit")):
        columns[name] = np.asarray([row[index] for row in reasons], dtype=object).reshape(shape)
    return columns | {"objects": np.asarray(objects), "tiers": np.asarray(tiers)}


@contextmanager
def _described(model: Any) -> Generator[str]:
    """The name or the path of a model; of a live module that of a file with its configuration."""
    if isinstance(model, str):
        yield model
        return
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    if text is None:
        found = f"{type(model).__module__}.{type(model).__qualname__}"
        raise ArgumentError(
            f"model: expected a name, a path or a module of transformers, found {found}; "
            "`polder offload check` measures any script"
        )
    with tempfile.TemporaryDirectory(prefix="polder-") as folder:
        path = Path(folder, "config.json")
        # With what has its default, too.
        path.write_text(text(use_diff=False))
        yield str(path)


def _expect(given: dict[str, Any], known: list[str], needed: set[str]) -> None:
    """Raises where something is given that is unknown, or what is needed is not."""
    unknown, missing = given.keys() - set(known), needed - given.keys()
    if unknown or missing:
        what = f"no field of a layout: {sorted(unknown)}" if unknown else f"must be given: {sorted(missing)}"
        raise TypeError(f"{what}; fields are {', '.join(known)}")


def _places(column: ArrayLike) -> tuple[list[str], NDArray[np.uint32]]:
    """The names of a column, and it as their places."""
    names, which = np.unique(np.asarray(column, dtype=np.str_), return_inverse=True)
    return names.tolist(), which.reshape(np.shape(column)).astype(np.uint32)


def _numbers(name: str, column: ArrayLike) -> NDArray[np.uint32]:
    """A column as unsigned numbers: a choice as its place."""
    array = np.asarray(column)
    if not array.size:
        return array.astype(np.uint32)
    if name in _CHOICES and array.dtype.kind == "U":
        choices = _CHOICES[name]
        unknown = set(array.ravel().tolist()) - set(choices)
        if unknown:
            raise ArgumentError(f"{name} is {sorted(unknown)[0]!r}; give one of {', '.join(choices)}")
        return np.vectorize(choices.index, otypes=[np.uint32])(array)
    if array.dtype.kind not in "biu" or int(array.min()) < 0 or int(array.max()) >= 2**32:
        raise ArgumentError(f"{name} is {column!r}; give whole numbers from 0 to {2**32 - 1}")
    return array.astype(np.uint32)


def _flits(
    window: int | None, virtual_channels: int | None, buffer: int | None, error_rate: float
) -> dict[str, int | float | None]:
    """What flits need beside a platform, by the keys of a question."""
    return {"window_bytes": window, "channels": virtual_channels, "buffer": buffer, "error_rate": error_rate}


def _rows(given: Mapping[str, tuple[str, Any]]) -> tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]:
    """Columns, broadcast against each other without those that are None, and their rows by the keys of a question."""
    there = {name: (key, np.asarray(it)) for name, (key, it) in given.items() if it is not None}
    for name, (_, array) in there.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ArgumentError(f"{name} is {array.tolist()}; give finite numbers")
    arrays = np.broadcast_arrays(*(array for _, array in there.values()))
    keys = [key for key, _ in there.values()]
    values = zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
    return dict(zip(there, arrays, strict=True)), [dict(zip(keys, row, strict=True)) for row in values]


def _figures(figures: bytes, columns: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The figures of rows by their names, each of the shape that columns have."""
    table = np.frombuffer(figures).reshape(*next(iter(columns.values())).shape, len(names))
    return {name: table[..., index] for index, name in enumerate(names)}


def _json(question: Any) -> str:
    """A question as JSON, which has no number that is not finite."""
    try:
        return json.dumps(question, default=_plain, allow_nan=False)
    except ValueError:
        name, number = next(_unbounded("", json.loads(json.dumps(question, default=_plain))))
        raise ArgumentError(f"{name.removesuffix('_bytes')} is {number}; give finite numbers") from None


def _unbounded(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Each number of a question that is not finite, with its key."""
    if isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield from _unbounded(key, each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _unbounded(name, each)
    elif isinstance(value, float) and not np.isfinite(value):
        yield name, value


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python, and a path as text."""
    return fspath(cast("PathLike[str]", value)) if isinstance(value, PathLike) else value.item()


def _typed(kind: Any, value: Any) -> Any:
    """A dataclass with the fields of a JSON object, or a list of them."""
    if isinstance(value, list):
        (each,) = get_args(kind)
        return [_typed(each, item) for item in cast("list[Any]", value)]
    if value is None or not isinstance(value, dict):
        return value
    hints = get_type_hints(kind)

    def inner(hint: Any) -> Any:
        return (
            next(option for option in get_args(hint) if option is not type(None))
            if isinstance(hint, UnionType)
            else hint
        )

    return kind(**{name: _typed(inner(hints[name]), value[name]) for name in hints})
