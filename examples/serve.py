"""Two vLLM engines on the CPU, two emulated hosts, one cache of keys and values in a software-coherent pool.

Run it with ``make serve``, or by hand in an environment with vLLM::

    python examples/serve.py

A tiny Llama with random weights is made here. The engine of host 0 serves prompts and stores their blocks. Other
engines serve them too: with the same weights, with weights that were changed in place or in their files, with the first
weights again after host 0 was killed, of another model, and with versions of the weights that lie in the pool. Each
line says what has to hold. The script fails if one does not.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    sys.exit(f"serve: {error}; `make serve` makes an environment in .cache/serve that has it")

import polder
import polder.weights
from polder.kv import Cache

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
NAME = "tiny"
"""Of the weights in the pool."""
TIMEOUT_SECONDS = 1200
"""An engine starts in a minute, or in five on a busy machine."""


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

    def __init__(self, model: Path, pool: Path, version: int | None) -> None:
        # Here, because vLLM says much when it is loaded.
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

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
            load_format="auto" if version is None else "polder",
            model_loader_extra_config={} if version is None else {"name": NAME, "number": version, "pool": str(pool)},
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config=offloading,
                engine_id=f"{pool.parent.name}-{os.getpid()}",
            ),
        )
        self._settings = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
        self.ask(1000 + os.getpid())  # The first prompt that is computed takes longer.

    def ask(self, seed: int) -> Answer:
        """Serves a prompt."""
        (found,) = self._llm.generate({"prompt_token_ids": prompt(seed)}, self._settings, use_tqdm=False)
        (answer,) = found.outputs
        return Answer(list(answer.token_ids), found.num_cached_tokens, found.metrics.first_token_latency * 1e3)

    def reset(self) -> None:
        """Forgets all that is cached in this engine, when what it has stored is in the pool."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise Wrong("vLLM has not reset its caches")

    def change_weights(self) -> None:
        """Changes the weights in place, as a trainer does that updates an engine."""

        def change(model: torch.nn.Module) -> None:
            for weight in model.parameters():
                weight.data.mul_(-1)

        self._llm.apply_model(change)

    def die(self, seed: int) -> None:
        """Serves a prompt, and is killed while it stores the blocks."""
        submit = Cache.submit_put

        def killed(self: Cache, keys: Any, blocks: Any) -> int:
            number = submit(self, keys, blocks)
            os.kill(os.getpid(), signal.SIGKILL)
            return number

        Cache.submit_put = killed
        # vLLM stores a prompt's last blocks when it serves the next.
        self.ask(seed)
        self.ask(seed)

    def close(self) -> None:
        """Ends it."""
        self._llm.llm_engine.engine_core.shutdown()


def serve(calls: Connection, host: int, model: Path, pool: Path, version: int | None, log: Path) -> None:
    """A process with an engine: what is called on it comes through a pipe."""
    os.environ["POLDER_HOST"] = str(host)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    engine = Engine(model, pool, version)
    calls.send(None)
    # No call ends it.
    while call := calls.recv():
        calls.send(getattr(engine, call[0])(*call[1:]))
    engine.close()


class Remote:
    """An engine in a process of its own, as a context manager; a call names a method of `Engine`."""

    def __init__(self, host: int, model: Path, pool: Path, version: int | None = None) -> None:
        self._name = f"the engine of host {host}"
        self._pool = pool
        self._log = pool.with_name(f"host{host}.log")
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(theirs, host, model, pool, version, self._log))
        self._process.start()
        theirs.close()

    def __call__(self, *words: Any) -> Any:
        """Calls a method, and waits for what it gives."""
        self._ours.send(words)
        return self._answer()

    def _answer(self) -> Any:
        if not self._ours.poll(TIMEOUT_SECONDS):
            raise Wrong(f"{self._name} has not answered for {TIMEOUT_SECONDS} s")
        try:
            return self._ours.recv()
        except EOFError:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            raise Wrong(f"{self._name} has ended:\n{last}") from None

    def die(self, seed: int) -> None:
        """Lets it be killed while it stores the blocks of a prompt."""
        self._ours.send(("die", seed))
        with contextlib.suppress(EOFError):
            if self._ours.poll(TIMEOUT_SECONDS):
                self._ours.recv()
                raise Wrong(f"{self._name} was to be killed while it stores, and has answered")
        self._process.join(TIMEOUT_SECONDS)
        if self._process.exitcode != -signal.SIGKILL:
            raise Wrong(f"{self._name} was to be killed, and ended with {self._process.exitcode}")
        # vLLM would have removed it.
        for left in Path("/dev/shm").glob(f"vllm_offload_{self._pool.parent.name}-{self._process.pid}*"):
            left.unlink()

    def __enter__(self) -> "Remote":
        try:
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._process.is_alive():
                self._ours.send(None)
                self._process.join(TIMEOUT_SECONDS)
                if self._process.exitcode != 0:
                    raise Wrong(f"{self._name} ended with {self._process.exitcode}")
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()


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
    known, unknown = range(1, 4), range(11, 14)

    with Remote(0, model, pool) as first:
        cold = [first("ask", seed) for seed in known]
        cached = [answer.cached for answer in cold]
        check("host 0, first time", not any(cached), f"{cached} of {PROMPT} tokens of each prompt cached")
        own = [first("ask", seed) for seed in known]
        cached = [answer.cached for answer in own]
        check("host 0, vLLM's own prefix cache", cached == [FULL] * 3, f"{cached} cached")
        first("reset")

        with Remote(1, model, pool) as second:
            shared = [second("ask", seed) for seed in known]
            cached = [answer.cached for answer in shared]
            check("host 1, through the pool", cached == [FULL] * 3, f"{cached} cached, all full blocks")
            same = [answer.tokens for answer in shared] == [answer.tokens for answer in own]
            check(
                "host 1, answers", same, f"{ANSWER} tokens each, {'the same as' if same else 'others than'} on host 0"
            )
            computed = [second("ask", seed) for seed in unknown]
            cached = [answer.cached for answer in computed]
            check("host 1, other prompts", not any(cached), f"{cached} cached")
            took = [statistics.median(answer.first_ms for answer in them) for them in (shared, computed)]
            print(f"first token: {took[0]:.0f} ms with the cache, {took[1]:.0f} ms without (measured, medians of 3)")
            second("change_weights")
            second("reset")
            changed = second("ask", 1)
            check("host 1, weights changed in place", changed.cached == 0, f"{changed.cached} cached")
        first.die(21)
        print("host 0 is killed while it stores another prompt")

    save_model(model, seed=2)
    with Remote(1, model, pool) as third:
        updated = third("ask", 1)
        check("host 1, other weights in the same files", updated.cached == 0, f"{updated.cached} cached")
    save_model(model, seed=1)
    with Remote(0, model, pool) as fourth:
        back = [fourth("ask", seed) for seed in known]
        cached = [answer.cached for answer in back]
        check("host 0, the first weights again", cached == [FULL] * 3, f"{cached} cached")
        same = [answer.tokens for answer in back] == [answer.tokens for answer in own]
        check("host 0, answers", same, f"{'the same as' if same else 'others than'} before it was killed")
    with Remote(1, other, pool) as fifth:
        foreign = fifth("ask", 1)
        check("host 1, another model", foreign.cached == 0, f"{foreign.cached} cached")
    weights_in_pool(model, pool, {0: [answer.tokens for answer in cold], FULL: [answer.tokens for answer in own]})


def weights_in_pool(model: Path, pool: Path, answers: dict[int, list[list[int]]]) -> None:
    """Engines that load versions of the weights from the pool: the model's folder has none any more.

    `answers` are those of the first weights, by how many tokens of a prompt were cached: rounding may order some.
    """
    versions: list[int] = []
    with polder.Pool(pool, host=0) as attached:
        for seed in (1, 2):
            save_model(model, seed)
            versions.append(polder.weights.publish_file(NAME, model, label=f"seed {seed}", pool=attached).number)
    for file in model.glob("*.safetensors"):
        file.unlink()
    for host, version, cached in ((0, 0, 0), (1, 1, 0), (1, 0, FULL)):
        with Remote(host, model, pool, versions[version]) as engine:
            replies = [engine("ask", seed) for seed in range(1, 4)]
            # Waits until all is stored.
            engine("reset")
        line = f"host {host}, weights from the pool, version {versions[version]}"
        seen = [reply.cached for reply in replies]
        check(line, seen == [cached] * 3, f"{seen} cached")
        same = [reply.tokens for reply in replies] == answers[cached]
        check(f"{line}, answers", same == (version == 0), f"{'the same as' if same else 'others than'} at first")


def main() -> int:
    """Makes a pool and runs the engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    # For the engines, which inherit it. An engine's scheduler runs in the engine's own process.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "POLDER_COHERENCE": "software",
        # The engine that is killed leaves a semaphore, which Python removes when this process ends.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    }
    disable_progress_bar()
    began = time.monotonic()
    print(f"two emulated hosts, one pool, software-coherent; prompts of {PROMPT} tokens, blocks of {BLOCK}", flush=True)
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
