"""Fine-tunes the demo's GPT by LoRA, loaded from files in 16 bits, and placed by one line with its frozen base.

``make frameworks`` installs what it needs. Run it by hand::

    .cache/transformers/bin/python examples/lora.py
    .cache/transformers/bin/python examples/lora.py --width 1024 --layers 12 --steps 3
    .cache/transformers/bin/python examples/lora.py --keep FOLDER
    .cache/transformers/bin/python -m polder.offload.check examples/lora.py --train FOLDER

The adapters have 16 bits too, and torch's AdamW steps masters of them in 32. The same steps run unplaced, then once
for each policy with less memory than they need, each in a process of its own. The table says which weights they end
with, the most memory that each had while it trained, and what the placement said of it before its first step.
"""

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import peft  # pyright: ignore[reportMissingImports]
    import torch
    from torch.nn import functional
    from transformers import PretrainedConfig, PreTrainedModel  # pyright: ignore[reportMissingImports]
except ImportError as error:
    sys.exit(f"lora: {error}; `make frameworks` installs it: run .cache/transformers/bin/python examples/lora.py")

from train import CONTEXT, Gpt, read_text

import polder.offload

HERE = Path(__file__).resolve()
POLICIES = ("dram", "interleave", "paper", "optimal")


class GptConfig(PretrainedConfig):
    """The shape of a GPT."""

    model_type = "demo-gpt"

    def __init__(self, width: int = 384, layers: int = 6, **given: Any) -> None:
        self.width, self.layers = width, layers
        super().__init__(**given)


class PretrainedGpt(PreTrainedModel):
    """The demo's GPT, with what saves and loads models of transformers."""

    config_class = GptConfig

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config)
        self.gpt = Gpt(config.width, config.layers, config.width // 64)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """They have been set, or are loaded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte."""
        return self.gpt(x)


def peak() -> int:
    """The most memory that this process had since the last call, by the kernel's count."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) << 10


def fine_tune(folder: Path, steps: int, batch: int, policy: str) -> dict[str, Any]:
    """Trains adapters, placed if there is a policy, and says what was seen."""
    before = peak()
    torch.manual_seed(0)
    base = PretrainedGpt.from_pretrained(folder / "model", dtype=torch.bfloat16)
    layers = ["queries_keys_values", "attended", "up", "down"]
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules=layers, init_lora_weights="gaussian")
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    masters = {
        parameter: torch.nn.Parameter(parameter.detach().float())
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    placed, predicted_rows = None, []
    if policy:
        # Beside weights and gradients of what is trained, less than half of the base fits.
        fixed = 2 * sum(tensor.nbytes for tensor in (*masters, *masters.values()))
        room = fixed + sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad) // 2
        dram = polder.offload.Tier("dram", "1 TiB" if policy == "dram" else room, 2e10, 2e10)
        tiers = [dram, polder.offload.Tier("disk", "64 GiB", 2e9, 1e9, folder)]
        window = torch.zeros(batch, CONTEXT, dtype=torch.long)
        saved = polder.offload.saved_bytes(model, window)
        placed = polder.offload.place(model, optimizer, policy, tiers=tiers, activations=saved)
        placed.cover(model)
        predicted_rows = [(row.object, row.tier, row.bytes) for row in placed.predicted()]
    text = torch.frombuffer(bytearray(read_text(None)), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    peak()
    for _ in range(steps):
        begins = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=draw)
        window = torch.stack([text[at : at + CONTEXT + 1] for at in begins.tolist()]).long()
        loss = functional.cross_entropy(model(window[:, :-1]).float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for parameter, master in masters.items():
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        losses.append(loss.item())
    seen: dict[str, Any] = {"losses": losses, "peak": peak(), "before": before}
    if placed:
        seen["predicted"] = predicted_rows
        seen["counted"] = sum(row.bytes for row in placed.rows() if row.object == "staging")
    whole = hashlib.sha256()
    for tensor in (*model.parameters(), *masters.values()):
        whole.update(tensor.detach().view(-1).view(torch.uint8).numpy().tobytes())
    return {**seen, "weights": whole.hexdigest()}


def main() -> int:
    """Runs all, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the model's files go and stay")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="train alone, unplaced, with the files there")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(fine_tune(options.train, options.steps, options.batch, "")))
        return 0
    if options.keep:
        return compare(options, options.keep)
    with tempfile.TemporaryDirectory(prefix="polder-lora-", dir=HERE.parent.parent) as folder:
        return compare(options, Path(folder))


def save(folder: Path, width: int, layers: int) -> None:
    """Writes a new model's files."""
    torch.manual_seed(0)
    PretrainedGpt(GptConfig(width, layers)).bfloat16().save_pretrained(folder / "model")


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own, which has the libraries of this one."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *given).result()


def compare(options: argparse.Namespace, folder: Path) -> int:
    """What `main` does, with a folder on a disk."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        # Freed memory goes back to the system at once, so that what is in use is measured.
        given = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_ARENA_MAX": "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **given})
    apart(save, folder, options.width, options.layers)
    base = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))

    def run(policy: str) -> dict[str, Any]:
        return apart(fine_tune, folder, options.steps, options.batch, policy)

    unplaced = run("")
    print(f"base {base / 1e6:.1f} MB; {options.steps} steps; weights {unplaced['weights'][:16]}")
    print(f"of each peak {unplaced['before'] / 1e6:.1f} MB were there before the model, as the libraries' code")
    print(
        f"{'policy':12}{'weights':>12}{'on disk, MB':>13}{'staging':>9}{'counted':>9}{'peak, MB':>10}{'predicted':>11}"
        f"{'off by':>8}"
    )
    print(f"{'unplaced':12}{'':12}{'':13}{'':9}{'':9}{unplaced['peak'] / 1e6:10.1f}")
    is_same = True
    for policy in options.policies:
        placed = run(policy)
        same = placed["weights"] == unplaced["weights"]
        is_same = is_same and same
        far = sum(nbytes for _, tier, nbytes in placed["predicted"] if tier == "disk")
        staging = sum(nbytes for name, _, nbytes in placed["predicted"] if name == "staging")
        predicted = unplaced["peak"] - far + staging
        off = placed["peak"] / predicted - 1
        print(
            f"{policy:12}{'the same' if same else 'OTHERS':>12}{far / 1e6:13.1f}{staging / 1e6:9.1f}"
            f"{placed['counted'] / 1e6:9.1f}{placed['peak'] / 1e6:10.1f}{predicted / 1e6:11.1f}{off:8.1%}"
        )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
