"""Two vLLM engines on the CPU, two emulated hosts, one cache of keys and values in a software-coherent pool.

Run it with ``make serve``, or by hand in an environment with vLLM::

    python examples/serve.py

A tiny Llama with random weights is made here. The engine of host 0 serves a prompt and stores its blocks. Engines of
host 1 serve it too: with the same weights, with weights that were changed in place or in their files, with the first
weights again, and of another model. Each line says what has to hold, and the script fails if one does not.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
except ImportError as error:
    sys.exit(f"serve: {error}; `make serve` makes an environment in .cache/serve that has it")

import polder

# vLLM and transformers are no part of the environment in which examples are checked.
# pyright: basic, reportMissingImports=false

VOCABULARY = 1024
BLOCK = 32
"""Tokens; what vLLM's attention on CPUs takes."""
PROMPT = 2000
"""Tokens."""
FULL = (PROMPT - 1) // BLOCK * BLOCK
"""The tokens of a prompt that a cache can give: whole blocks, and the last token is always computed."""
ANSWER = 12
"""Tokens."""
GiB = 1 << 30


class Wrong(Exception):
    """A line that does not hold."""


# ------------------------------------------------------------------------------------------------------ the model


def save_model(folder: Path, seed: int, layers: int = 4) -> None:
    """A Llama with random weights. A block of it has 64 KiB with 4 layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        # Large weights: random ones of the usual size give nearly equal scores, which rounding may order.
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompt(seed: int) -> list[int]:
    """Random tokens."""
    return torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


# ----------------------------------------------------------------------------------------------------- an engine


@dataclass
class Answer:
    """What an engine has answered."""

    tokens: list[int]
    cached: int
    first_ms: float


class Engine:
    """A vLLM engine, in this process."""

    def __init__(self, model: Path, pool: Path) -> None:
        tiers = [{"type": "polder", "pool": str(pool)}]
        offloading = {"spec_name": "PolderCpuSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": tiers}
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            block_size=BLOCK,
            max_model_len=PROMPT + 2 * ANSWER,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=offloading
            ),
        )
        self.ask(seed=0)  # The first request of a process warms it up.

    def ask(self, seed: int) -> Answer:
        """Serves a prompt."""
        settings = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        (found,) = self._llm.generate({"prompt_token_ids": prompt(seed)}, settings, use_tqdm=False)
        return Answer(
            list(found.outputs[0].token_ids), found.num_cached_tokens or 0, found.metrics.first_token_latency * 1e3
        )

    def reset(self) -> None:
        """Forgets all that is cached in this engine, when what it has stored is in the pool."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise Wrong("vLLM has not reset its caches")

    def change_weights(self) -> None:
        """Changes the weights in place, as a trainer that updates an engine does."""
        self._llm.apply_model(lambda model: [weight.data.mul_(-1) for weight in model.parameters()] and None)

    def close(self) -> None:
        """Ends it."""
        self._llm.llm_engine.engine_core.shutdown()


def serve(calls: Connection, host: int, model: Path, pool: Path, threads: int) -> None:
    """A process with an engine: what is called on it comes through a pipe."""
    os.environ["POLDER_HOST"] = str(host)
    torch.set_num_threads(threads)
    try:
        engine = Engine(model, pool)
        calls.send(None)
        while call := calls.recv():
            calls.send(getattr(engine, call[0])(*call[1:]))
        engine.close()
    except EOFError:
        pass  # The other side has failed.


@contextlib.contextmanager
def engine(host: int, model: Path, pool: Path) -> Iterator[Any]:
    """Calls the methods of an engine in a process of its own."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(theirs, host, model, pool, 1))
    process.start()
    theirs.close()

    def call(*words: Any) -> Any:
        ours.send(words)
        return answer()

    def answer() -> Any:
        try:
            return ours.recv()
        except EOFError:
            raise Wrong(f"the engine of host {host} has ended; its last lines stand above") from None

    try:
        answer()
        yield call
        ours.send(None)
        process.join()
    finally:
        ours.close()
        if process.is_alive():
            process.kill()
        process.join()
    if process.exitcode:
        raise Wrong(f"the engine of host {host} ended with {process.exitcode}")


# ------------------------------------------------------------------------------------------------- the whole story


def check(line: str, holds: bool, seen: str) -> None:
    """Prints a line that has to hold."""
    print(f"{line}: {seen}{'' if holds else '  DOES NOT HOLD'}", flush=True)
    if not holds:
        raise Wrong(line)


def story(folder: Path, pool: Path) -> None:
    """All engines."""
    model, other = folder / "model", folder / "other"
    save_model(model, seed=1)
    save_model(other, seed=1, layers=2)

    with engine(0, model, pool) as first:
        cold, own = first("ask", 1), first("ask", 1)
        check("host 0, first time", cold.cached == 0, f"{cold.cached} of {PROMPT} tokens cached")
        check("host 0, vLLM's own prefix cache", own.cached == FULL, f"{own.cached} cached")
        first("reset")

        with engine(1, model, pool) as second:
            shared = second("ask", 1)
            check("host 1, through the pool", shared.cached == FULL, f"{shared.cached} cached, all full blocks")
            same = shared.tokens == own.tokens
            check("host 1, answer", same, f"{shared.tokens} {'as' if same else f'for {own.tokens}'} on host 0")
            # Another prompt of the same length, in the same process.
            unknown = second("ask", 2)
            check("host 1, another prompt", unknown.cached == 0, f"{unknown.cached} cached")
            print(
                f"first token of {PROMPT}: {shared.first_ms:.0f} ms with the cache, {unknown.first_ms:.0f} ms without"
                " (measured, this CPU)"
            )
            second("change_weights")
            second("reset")
            changed = second("ask", 1)
            check("host 1, weights changed in place", changed.cached == 0, f"{changed.cached} cached")

    save_model(model, seed=2)
    with engine(1, model, pool) as third:
        updated = third("ask", 1)
        check("host 1, other weights in the same files", updated.cached == 0, f"{updated.cached} cached")
    save_model(model, seed=1)
    with engine(1, model, pool) as fourth:
        back = fourth("ask", 1)
        holds = (back.cached, back.tokens) == (FULL, own.tokens)
        check("host 1, the first weights again", holds, f"{back.cached} cached, the same answer")
    with engine(1, other, pool) as fifth:
        foreign = fifth("ask", 1)
        check("host 1, another model", foreign.cached == 0, f"{foreign.cached} cached")


def main() -> int:
    """Makes a pool and runs the engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", default="ERROR", help="what vLLM logs (ERROR)")
    options = parser.parse_args()
    # For the engines, which inherit it. An engine's scheduler runs in the engine's own process.
    os.environ |= {
        "VLLM_LOGGING_LEVEL": options.log,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "POLDER_COHERENCE": "software",
    }
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="polder-serve-", dir="/dev/shm") as folder:
            pool = Path(folder, "pool")
            polder.Pool(pool, size="256MiB").close()
            story(Path(folder), pool)
    except (Wrong, polder.PolderError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    print(f"all lines hold, after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
