"""Fine-tunes a small decoder with its optimizer states and activations placed over memory and a disk.

Run it with ``make offload``, or by hand::

    python examples/offload.py
    python examples/offload.py --dram "400 MiB" --policy interleave
    python examples/offload.py --limit

The same steps run twice, each time in a process of its own: with everything in memory and torch's fused AdamW, then
placed by `polder.offload`. The table says where each byte lies, what each phase took and was predicted to take, and
that the weights are the same bits. With ``--limit`` both run again with less memory than the first one needs.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

try:
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    sys.exit(f"offload: torch is missing ({error}); `make torch` installs it into .venv")

import polder
from polder import offload

HERE = Path(__file__).resolve()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--policy", default="optimal", help="dram, interleave, paper, optimal, or a JSON file of fractions"
    )
    parser.add_argument(
        "--dram", help="memory that tensors may take, such as '400 MiB'; a third of what they need by default"
    )
    parser.add_argument("--folder", type=Path, help="a folder on a disk; a new one beside this repository by default")
    parser.add_argument(
        "--platform", type=Path, help="what `polder probe --disk FOLDER` wrote; measured now by default"
    )
    parser.add_argument("--text", type=Path, help="a file to learn; this repository's pages and sources by default")
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not counted")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--limit", action="store_true", help="run both again under a limit that the unplaced run exceeds"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------ the model


class Block(torch.nn.Module):
    """One layer: causal attention and an MLP, both behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mixed, self.attended = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both residual branches over `x` of shape (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.mixed(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Decoder(torch.nn.Module):
    """A decoder over bytes, each block of which is checkpointed. Calling it gives the loss."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.last = torch.nn.LayerNorm(width)
        torch.nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """The loss of the next byte, for bytes of shape (batch, context + 1)."""
        x = self.bytes(window[:, :-1]) + self.places
        for block in self.blocks:
            x = cast("torch.Tensor", checkpoint(block, x, use_reentrant=False))
        scores = functional.linear(self.last(x), self.bytes.weight)
        return functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())


class Ended(Exception):
    """A run that did not come to its end: the last line that it said."""


def read_text(named: Path | None, context: int) -> torch.Tensor:
    """Bytes to learn: more than a context."""
    root = HERE.parent.parent
    of_repository = (
        path for pattern in ("*.md", "docs/*.md", "crates/*/src/*.rs") for path in sorted(root.glob(pattern))
    )
    text = b"\n".join(path.read_bytes() for path in ([named] if named else of_repository))
    if len(text) <= context + 1:
        where = named or f"the pages and sources of the repository, which lies elsewhere than {root}"
        raise Ended(f"{where}: {len(text)} bytes, expected more than --context and one; name a file with --text")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------- one run, in a child


class Peak:
    """The most private memory that this process has had: what RLIMIT_DATA limits."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Looks now."""
        with Path("/proc/self/status").open() as lines:
            known = dict(line.split(":", 1) for line in lines)
        self.bytes = max(self.bytes, int(known["VmData"].split()[0]) << 10)

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.look()

    def end(self) -> int:
        """Bytes."""
        self._ended.set()
        self._thread.join()
        return self.bytes


def run_here(given: dict[str, Any]) -> dict[str, Any]:
    """Trains, placed where there are tiers, and says what was seen."""
    if given["limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (given["limit"], given["limit"]))
    peak = Peak()
    torch.manual_seed(0)
    text = read_text(Path(given["text"]) if given["text"] else None, given["context"])
    shape = {key: given[key] for key in ("width", "layers", "heads", "context")}
    model = Decoder(**shape)
    settings: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    placed = None
    if given["tiers"]:
        optimizer = offload.AdamW(model.parameters(), **settings)
        window = torch.zeros(given["batch"], given["context"] + 1, dtype=torch.long)
        placed = offload.place(
            model,
            optimizer,
            given["policy"],
            tiers=[offload.Tier(**tier) for tier in given["tiers"]],
            activations=offload.saved_bytes(model, window),
            computation=given["computation"],
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)
    draw = torch.Generator().manual_seed(1)
    phases: list[tuple[float, float, float]] = []
    losses: list[float] = []
    for _ in range(given["steps"]):
        begins = torch.randint(len(text) - given["context"] - 1, (given["batch"],), generator=draw)
        window = torch.stack([text[at : at + given["context"] + 1] for at in begins.tolist()]).long()
        optimizer.zero_grad()
        began = time.perf_counter()
        with placed.activations() if placed else nullcontext():
            loss = model(window)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        end = time.perf_counter()
        phases.append((forward - began, backward - forward, end - backward))
        losses.append(loss.item())
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
    seen = {"weights": whole.hexdigest(), "losses": losses, "phases": phases, "peak": peak.end()}
    if placed:
        rows = [asdict(row) for row in placed.rows()]
        seen |= {"rows": rows, "seconds": placed.seconds, "links": placed.links, "fractions": placed.fractions}
    return seen


# -------------------------------------------------------------------------------------------------- the whole story


def run_there(given: dict[str, Any]) -> dict[str, Any]:
    """A run in a process of its own, so that nothing of another's memory counts."""
    # Freed memory goes back to the system at once, so that the limit meets what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(HERE), "--run", json.dumps(given)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"]
        raise Ended(said[-1])
    return json.loads(ended.stdout)


def mib(nbytes: float) -> str:
    """Bytes in a table."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


def needed(options: argparse.Namespace) -> tuple[int, int]:
    """Bytes of weights with their gradients, and of what can be placed."""
    with torch.device("meta"):
        model = Decoder(options.width, options.layers, options.heads, options.context)
        window = torch.zeros(options.batch, options.context + 1, dtype=torch.long)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 2 * weights, 2 * weights + offload.saved_bytes(model, window)


def main() -> int:
    """Runs both, and prints the tables."""
    options = arguments()
    if options.run:
        print(json.dumps(run_here(json.loads(options.run))))
        return 0
    try:
        if options.folder:
            return compare(options, options.folder)
        with tempfile.TemporaryDirectory(prefix="polder-offload-", dir=HERE.parent.parent) as folder:
            return compare(options, Path(folder))
    except (Ended, OSError, polder.PolderError) as error:
        print(f"offload: {error}", file=sys.stderr)
        return 1


def compare(options: argparse.Namespace, folder: Path) -> int:
    """What `main` does, with a folder."""
    say = lambda text: print(f"offload: {text}", file=sys.stderr)  # noqa: E731
    # Before anything takes its time.
    read_text(options.text, options.context)
    fixed, movable = needed(options)
    room = offload.Tier("dram", options.dram or fixed + movable // 3, 1, 1).nbytes
    say("measuring memory and the disk" if not options.platform else f"reading {options.platform}")
    measured_tiers = (
        offload.tiers_of(options.platform)
        if options.platform
        else offload.measured(folder, threads=torch.get_num_threads())
    )
    dram, *disks = [asdict(tier) | {"folder": str(tier.folder) if tier.folder else None} for tier in measured_tiers]
    if not disks:
        raise Ended(f"{options.platform}: no disk; `polder probe --disk FOLDER` measures one")
    tiers = [dram | {"capacity": room}, disks[0]]
    shape = {key: getattr(options, key) for key in ("steps", "width", "layers", "heads", "context", "batch")}
    given = {**shape, "text": str(options.text.resolve()) if options.text else None, "limit": 0, "tiers": None}
    say("training with everything in memory and torch's fused AdamW")
    unplaced = run_there(given)
    computation = medians(unplaced)
    with_tiers = {**given, "tiers": tiers, "policy": options.policy, "computation": computation[:2]}
    say(f"training placed by policy {options.policy}")
    placed = run_there(with_tiers)
    print(report(tiers, unplaced, placed, options))
    same = unplaced["weights"] == placed["weights"]
    figures = {"tiers": tiers, "unplaced": unplaced, "placed": placed, "same": same}
    if options.limit:
        limit = (unplaced["peak"] + placed["peak"]) // 2
        say(f"again with a limit of {mib(limit)}")
        try:
            run_there({**given, "limit": limit})
            killed = ""
        except Ended as error:
            killed = str(error)
        limited = run_there({**with_tiers, "limit": limit})
        same = same and bool(killed) and limited["weights"] == unplaced["weights"]
        figures |= {"limit": limit, "killed": killed, "limited": limited, "same": same}
        print(f"\nunder a limit of {mib(limit)} of private memory (RLIMIT_DATA)")
        print(f"  unplaced: {'ended by ' + killed if killed else 'NOT STOPPED'}")
        equal = limited["weights"] == unplaced["weights"]
        print(f"  placed:   ended with {'the weights of the unlimited run' if equal else 'OTHER WEIGHTS'}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if same else 1


def medians(seen: dict[str, Any]) -> list[float]:
    """Seconds of each phase over all steps but the first."""
    counted = seen["phases"][1:] or seen["phases"]
    return [statistics.median(phase) for phase in zip(*counted, strict=True)]


def report(
    tiers: list[dict[str, Any]], unplaced: dict[str, Any], placed: dict[str, Any], options: argparse.Namespace
) -> str:
    """The tables."""
    lines = ["tiers" + (" (measured now)" if not options.platform else f" ({options.platform})")]
    for tier in tiers:
        rates = f"read {tier['read'] / 1e9:6.2f} GB/s, write {tier['write'] / 1e9:6.2f} GB/s"
        lines.append(f"  {tier['name']:<6} room for tensors {mib(tier['capacity']):>16}, {rates}")
    lines.append(f"\n{'where each byte lies':<20} {'tier':<18} {'bytes':>15}  by whose word")
    for row in placed["rows"]:
        lines.append(f"{row['object']:<20} {row['tier']:<18} {mib(row['bytes']):>15}  {row['word']}")
    peaks = f"{mib(unplaced['peak'])} unplaced, {mib(placed['peak'])} placed"
    lines.append(f"most private memory of the process at once, libraries included: {peaks}")
    lines.append(
        f"\n{'ms a step (median)':<20} {'unplaced, measured':>20} {'placed, measured':>18} {'placed, predicted':>18}"
    )
    for name, alone, seen in zip(("FWD", "BWD", "STEP"), medians(unplaced), medians(placed), strict=True):
        predicted = placed["seconds"][name]
        lines.append(f"{name:<20} {alone * 1e3:20.1f} {seen * 1e3:18.1f} {predicted * 1e3:18.1f}")
    lines.append(
        "FWD and BWD predicted: the computation of the unplaced run, or the transfers if they take longer.\n"
        "STEP predicted: bytes over the tiers' rates, the slowest link; bytes on the disk pass through memory, too."
    )
    same = "the same bits in both runs" if unplaced["weights"] == placed["weights"] else "DIFFERENT"
    lines.append(f"\nweights after {options.steps} steps: {same} ({placed['weights'][:16]})")
    lines.append("losses: " + ", ".join(f"{loss:.3f}" for loss in placed["losses"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
