"""Trains a small GPT on two emulated hosts that talk through one pool, then the same steps through gloo.

Run it with ``make demo``, or by hand::

    python examples/train.py --text some/folder
    torchrun --nproc-per-node 2 examples/train.py

Two processes with separate host ids share one pool file in software-coherent mode. They train in turn, some steps
on Polder and the same steps on gloo, from the same weights over the same bytes, so that both see the same machine.
"""

import argparse
import hashlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"demo: torch is missing ({error}); `make torch` installs it into .venv")

RANKS = 2
WIDTH = 384
LAYERS = 6
HEADS = 6
CONTEXT = 64
BATCH = 4
ROUND = 10  # steps on one backend before the other has its turn
RAMP = 20  # steps until the learning rate is what it stays
WARM_UP = 3  # steps that are run and not counted
CLIP = 1.0  # the most that the norm of all gradients may be: without it, one step at the full rate may overshoot
TEXT_LIMIT = 64 << 20


class Unusable(Exception):
    """Something that the user can mend, in one line."""


# ---------------------------------------------------------------------------------------------------------- text


def default_text() -> list[bytes]:
    """The Python language reference that every Python carries (PSF licence), and this repository's own words."""
    from pydoc_data.topics import topics

    here = Path(__file__).resolve().parent.parent
    own = [*sorted(here.glob("*.md")), *sorted(here.glob("docs/*.md"))]
    return [*(topic.encode() for topic in topics.values()), *(path.read_bytes() for path in own)]


def read_text(named: Path | None) -> bytes:
    """The bytes of a file, or of every text file in a folder, up to 64 MiB."""
    if named is None:
        pieces = default_text()
    elif named.is_dir():
        pieces = list(text_files(sorted(path for path in named.rglob("*") if path.is_file())))
    elif named.is_file():
        pieces = list(text_files([named]))
    else:
        raise Unusable(f"{named} does not exist; name a file or a folder of text: make demo TEXT=path")
    text = b"\n".join(pieces)
    if len(text) < 100 * CONTEXT:
        where = named or "the default places"
        raise Unusable(
            f"{len(text)} bytes of text in {where}, too few to train on; make demo TEXT=path to a file or folder"
        )
    return text


def text_files(paths: list[Path]) -> Iterator[bytes]:
    """What those files hold that are text and can be read, until the limit."""
    held = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                piece = file.read(TEXT_LIMIT - held)
        except OSError:
            continue
        if is_text(piece):
            held += len(piece)
            yield piece


def is_text(piece: bytes) -> bool:
    """Whether a file is text: no zero bytes, and UTF-8 at its beginning."""
    head = piece[:65536]
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and len(head) == 65536
    return bool(head)


# ------------------------------------------------------------------------------------------------------ launching


def arguments() -> argparse.Namespace:
    """What the user chose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file or a folder to learn from")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the picture goes (out)")
    parser.add_argument("--seconds", type=float, default=100, help="how long to train, both backends together (100)")
    parser.add_argument("--steps", type=int, help="train exactly so many steps on each backend instead")
    parser.add_argument("--backend", default="polder", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace) -> int:
    """Starts the ranks under torchrun, in this process, so that its errors and Ctrl-C end in one line each."""
    text = read_text(options.text)  # fails here, once, rather than in every rank
    print(f"two emulated hosts, one pool, software-coherent; {len(text) / 1e6:.1f} MB of text", flush=True)
    # One thread a rank is what two ranks on two cores can use; torchrun would say so in four lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("POLDER_EMULATE", str(RANKS))
    os.environ.setdefault("POLDER_COHERENCE", "software")
    # What a step frees is kept for the next, as allocators made for training do; glibc has it zeroed anew.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    command = ["--standalone", "--nproc-per-node", str(RANKS), __file__, *sys.argv[1:]]
    try:
        torchrun(command)
    except ChildFailedError as error:
        return max(failure.exitcode for failure in error.failures.values()) or 1
    except (SignalException, KeyboardInterrupt):
        print("interrupted; no pool is left", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


# ---------------------------------------------------------------------------------------------------------- model


class Block(torch.nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = torch.nn.LayerNorm(width)
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.attended = torch.nn.Linear(width, width)
        self.before_mlp = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both residual branches over `x` of shape (batch, length, width)."""
        batch, length, width = x.shape
        mixed = self.queries_keys_values(self.before_attention(x))
        q, k, v = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    """A GPT over bytes, 10.8 M parameters as it stands."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = torch.nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.last = torch.nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(weight)
            elif weight.dim() == 2:
                # What adds to the residual stream starts smaller, by the number of additions, as in GPT-2.
                adds = name.endswith(("attended.weight", "down.weight"))
                torch.nn.init.normal_(weight, std=0.02 / (2 * layers) ** (0.5 * adds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte, shape (batch, length, 256), for bytes of shape (batch, length)."""
        hidden = self.blocks(self.bytes(x) + self.places[: x.shape[1]])
        return functional.linear(self.last(hidden), self.bytes.weight)


# ------------------------------------------------------------------------------------------------------- training


@dataclass
class Step:
    """What one step took, in seconds."""

    whole: float
    forward: float
    backward: float
    """With the communication that runs during it."""
    optimizer: float
    """With the clipping before it."""
    in_flight: float
    """While at least one gradient bucket was being reduced."""
    exposed: float
    """From the last bucket's submission, when nothing is left to compute, to its arrival."""


@dataclass
class Run:
    """One backend's model, and what was measured of it."""

    name: str
    group: dist.ProcessGroup
    model: torch.nn.parallel.DistributedDataParallel
    optimizer: torch.optim.Optimizer
    rate: torch.optim.lr_scheduler.LambdaLR
    losses: list[float] = field(default_factory=list[float])
    steps: list[Step] = field(default_factory=list[Step])
    flights: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    alone: list[float] = field(default_factory=list[float])
    """Seconds of one step's all-reduces with nothing else to do."""


def start_run(name: str, group: dist.ProcessGroup) -> Run:
    """A model of the same weights on `group`, with a hook that does what DDP does and notes when."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Gpt(), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / RAMP))
    run = Run(name, group, model, optimizer, rate)

    def reduce_bucket(
        run: Run,
        bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    ) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer().div_(RANKS)
        began = time.perf_counter()
        work = submitted(gradients, run.group)

        def arrived(_: object) -> torch.Tensor:
            run.flights.append((began, time.perf_counter()))
            return gradients

        return work.get_future().then(arrived)

    model.register_comm_hook(run, reduce_bucket)
    return run


def submitted(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """An all-reduce on its way."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    return work


def train_step(run: Run, text: torch.Tensor, draw: torch.Generator, rank: int) -> None:
    """One step on this rank's share of a batch that every rank draws alike."""
    places = torch.randint(len(text) - CONTEXT - 1, (RANKS, BATCH), generator=draw)[rank]
    window = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).long()
    run.flights.clear()
    began = time.perf_counter()
    guesses = run.model(window[:, :-1])
    loss = functional.cross_entropy(guesses.flatten(0, 1), window[:, 1:].flatten())
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.rate.step()
    end = time.perf_counter()
    last = max(run.flights)
    run.losses.append(loss.item())
    run.steps.append(
        Step(
            whole=end - began,
            forward=forward - began,
            backward=backward - forward,
            optimizer=end - backward,
            in_flight=covered(run.flights),
            exposed=max(arrived for _, arrived in run.flights) - last[0],
        )
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of `spans`."""
    total, reached = 0.0, 0.0
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def time_alone(run: Run, repeats: int) -> None:
    """All-reduces as many bytes as one step does, bucket by bucket as DDP would, with the ranks in step."""
    sizes = [4 << 20, *[25 << 20] * 8]
    left = sum(parameter.nbytes for parameter in run.model.parameters())
    buckets: list[torch.Tensor] = []
    while left > 0:
        buckets.append(torch.zeros(min(left, sizes[len(buckets)]) // 4))
        left -= buckets[-1].nbytes
    for _ in range(repeats):
        dist.barrier(group=run.group)
        began = time.perf_counter()
        works = [submitted(bucket, run.group) for bucket in buckets]
        for work in works:
            work.wait()
        run.alone.append(time.perf_counter() - began)


def digest(model: torch.nn.Module) -> str:
    """A hash over every bit of the weights."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
    return whole.hexdigest()[:16]


def train(options: argparse.Namespace) -> None:
    """What each rank does."""
    text = torch.frombuffer(bytearray(read_text(options.text)), dtype=torch.uint8)
    torch.set_num_threads(1)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    world, gloo = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    assert world is not None
    assert isinstance(gloo, dist.ProcessGroup)
    runs = [start_run(options.backend, world), start_run("gloo", gloo)]
    draws = [torch.Generator().manual_seed(1) for _ in runs]
    for run, draw in zip(runs, draws, strict=True):
        for _ in range(WARM_UP):
            train_step(run, text, draw, rank)
        run.steps.clear()
    if rank == 0:
        millions = sum(parameter.numel() for parameter in runs[0].model.parameters()) / 1e6
        print(f"{millions:.1f} M parameters, {RANKS * BATCH * CONTEXT} bytes a step; each round on both backends\n")
        print(f"{'steps':>11}  {'loss':>6}  " + "  ".join(f"{run.name + ' ms/step, tokens/s':>26}" for run in runs))
    end = time.monotonic() + options.seconds
    done = 0
    while goes_on(done, options.steps, end, gloo):
        count = min(ROUND, (options.steps or 1 << 30) - done)
        for run, draw in zip(runs, draws, strict=True):
            for _ in range(count):
                train_step(run, text, draw, rank)
            time_alone(run, 3)
        done += count
        if rank == 0:
            print(progress(runs, done, count), flush=True)
    digests: list[str | None] = [None] * RANKS
    dist.all_gather_object(digests, " ".join(digest(run.model) for run in runs), group=runs[1].group)
    if rank == 0:
        print(f"\n{report(runs, digests)}")
        print(f"\nThe picture: {draw_picture(runs, options.out)}")
        print(f"The figures: {write_figures(runs, options.out)}")
    dist.barrier()


def goes_on(done: int, steps: int | None, end: float, group: dist.ProcessGroup) -> bool:
    """Whether there is another round: every rank takes the first one's word for the time."""
    more = torch.tensor([done < steps if steps else done < 2 * ROUND or time.monotonic() < end])
    dist.broadcast(more, 0, group=group)
    return bool(more)


# --------------------------------------------------------------------------------------------------------- report


def progress(runs: list[Run], done: int, count: int) -> str:
    """One line on the last `count` steps."""
    cells: list[str] = []
    for run in runs:
        step = statistics.median(step.whole for step in run.steps[-count:])
        cells.append(f"{f'{step * 1e3:.0f}, {RANKS * BATCH * CONTEXT / step:,.0f}':>26}")
    loss = statistics.mean(runs[0].losses[-count:])
    return f"{f'{done - count + 1}-{done}':>11}  {loss:6.3f}  " + "  ".join(cells)


def report(runs: list[Run], digests: list[str | None]) -> str:
    """The table: medians with the middle half's range, and how they compare."""
    rows = [
        ("step", [[step.whole for step in run.steps] for run in runs]),
        ("  forward", [[step.forward for step in run.steps] for run in runs]),
        ("  backward, with communication", [[step.backward for step in run.steps] for run in runs]),
        ("  optimizer", [[step.optimizer for step in run.steps] for run in runs]),
        ("communication, alone", [run.alone for run in runs]),
        ("communication in flight", [[step.in_flight for step in run.steps] for run in runs]),
        ("  of it exposed", [[step.exposed for step in run.steps] for run in runs]),
    ]
    table = [("measured, ms a step", *[run.name for run in runs], "ratio")]
    for name, columns in rows:
        ratio = statistics.median(columns[0]) / statistics.median(columns[1])
        table.append((name, *map(spread, columns), f"{ratio:.2f}"))
    lines = aligned(table)
    weights = {word for both in digests for word in (both or "").split()}
    equal = "equal bit for bit on both ranks and both backends" if len(weights) == 1 else f"DIFFERENT: {digests}"
    lines.append(f"weights after {len(runs[0].losses)} steps: {equal} ({(digests[0] or '').split()[0]})")
    lines.append(
        "Median (25% to 75%). Alone: the bytes of one step reduced with nothing else to do. In flight: from a\n"
        "bucket's submission to its arrival, while backward goes on and the other rank may be late. Exposed: after\n"
        "the last bucket's submission. The same hook times both."
    )
    return "\n".join(lines)


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Lines whose columns are as wide as their widest cell, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]


def quartiles(seconds: list[float]) -> list[float]:
    """The figure that a quarter is below, the median, and the one that a quarter is above."""
    return statistics.quantiles(seconds, n=4)


def middle_half(steps: list[Step]) -> list[Step]:
    """The half of the steps that is neither fast nor slow. Means over it add up, as medians do not."""
    ordered = sorted(steps, key=lambda step: step.whole)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def smoothed(losses: list[float]) -> tuple[list[float], list[float]]:
    """The means of ten steps each, and the steps in whose middle they stand."""
    starts = range(0, len(losses) - ROUND + 1, ROUND)
    return [at + (ROUND - 1) / 2 for at in starts], [statistics.mean(losses[at : at + ROUND]) for at in starts]


def spread(seconds: list[float]) -> str:
    """The median and the middle half, in ms."""
    low, middle, high = quartiles(seconds)
    return f"{middle * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"


def write_figures(runs: list[Run], out: Path) -> Path:
    """What was trained and what a step took, in seconds, for `polder-dev held-out`."""
    model = dict(title="demo", source="examples/train.py", hidden=WIDTH, layers=LAYERS, heads=HEADS, vocabulary=256)
    figures: dict[str, object] = {
        "kind": "measured",
        "model": {**model, "sequence": CONTEXT, "tied": True},
        "ranks": RANKS,
        "batch": RANKS * BATCH,
        "steps": {run.name: quartiles([step.whole for step in run.steps]) for run in runs},
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "train.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return path


def draw_picture(runs: list[Run], out: Path) -> Path:
    """Losses on the left, where a step's time goes on the right, with the middle half of the steps."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run, style, colour in zip(runs, ("-", ":"), ("C0", "C1"), strict=True):
        left.plot(run.losses, color=colour, linewidth=0.5, alpha=0.4)
        left.plot(*smoothed(run.losses), style, color=colour, linewidth=2, label=f"{run.name}, mean of {ROUND} steps")
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="Loss: the two lines lie on each other")
    left.legend()
    parts = {
        "forward": lambda step: step.forward,
        "backward without what is exposed": lambda step: step.backward - step.exposed,
        "exposed communication": lambda step: step.exposed,
        "optimizer": lambda step: step.optimizer,
    }
    bottom = [0.0] * len(runs)
    for name, part in parts.items():
        heights = [statistics.mean(map(part, middle_half(run.steps))) * 1e3 for run in runs]
        right.bar([run.name for run in runs], heights, 0.5, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, run in enumerate(runs):
        half = [step.whole * 1e3 for step in middle_half(run.steps)]
        low, middle, high = half[0], statistics.mean(half), half[-1]
        label = "whole step: 25% to 75%, and its mean" if place == 0 else None
        reach = [[middle - low], [high - middle]]
        right.errorbar(run.name, middle, reach, fmt="o", color="black", capsize=6, label=label)
    right.set(xlabel="backend", ylabel="ms a step (mean of the middle half)", title="Where a step's time goes")
    figure.suptitle("Measured: two emulated hosts on one machine, software-coherent, no CXL", fontsize="medium")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "train.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> int:
    """Launches the ranks, or is one of them."""
    options = arguments()
    try:
        if "RANK" not in os.environ:
            return launch(options)
        train(options)
    except Unusable as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if "RANK" in os.environ and dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
