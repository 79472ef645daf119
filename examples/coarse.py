"""Trains the demo's GPT with a parameter service: two workers push gradients, two proxies sum them in one pool.

Run it with ``make sync``, or by hand::

    python examples/coarse.py --steps 30
    torchrun --nproc-per-node 2 examples/coarse.py

The same steps run over an all-reduce that blocks after the backward pass and over DDP, which overlaps the two, both
on gloo and on polder. All take turns, from the same weights over the same bytes, so that they see the same machine.
The table at the end compares them.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import train
from train import BATCH, CONTEXT, RANKS, Gpt, Unusable, digest, read_text

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"coarse: torch is missing ({error}); `make torch` installs it into .venv")

import polder.torch

ROUND = 5  # steps of one way before the next has its turn
PROFILE = 4  # steps of the service's profile, and of every other way, before anything counts
WARM_UP = 2  # more steps that do not count, with the plan


def arguments() -> argparse.Namespace:
    """What the user chose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file or a folder to learn from")
    parser.add_argument("--steps", type=int, default=20, help="steps of each way that count (20)")
    parser.add_argument("--proxies", type=int, default=2, help="how many proxies sum (2)")
    parser.add_argument("--width", type=int, default=train.WIDTH, help=f"the GPT's width ({train.WIDTH})")
    parser.add_argument("--layers", type=int, default=train.LAYERS, help=f"its layers ({train.LAYERS})")
    return parser.parse_args()


def launch(options: argparse.Namespace) -> int:
    """Starts the workers under torchrun, in this process."""
    text = read_text(options.text)  # fails here, once, rather than in every worker
    print(f"{RANKS} workers on two emulated hosts, {options.proxies} proxies, one software-coherent pool", flush=True)
    print(f"{len(text) / 1e6:.1f} MB of text; {os.cpu_count()} cores for all of these processes", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("POLDER_EMULATE", str(RANKS))
    os.environ.setdefault("POLDER_COHERENCE", "software")
    # What a step frees is kept for the next, as in the demo.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    try:
        torchrun(["--standalone", "--nproc-per-node", str(RANKS), __file__, *sys.argv[1:]])
    except ChildFailedError as error:
        return max(failure.exitcode for failure in error.failures.values()) or 1
    except (SignalException, KeyboardInterrupt):
        print("interrupted; no pool is left", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


@dataclass
class Way:
    """One way to average gradients, with a model of its own."""

    name: str
    backend: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    draw: torch.Generator
    average: Callable[[], None] = lambda: None
    """What runs between the backward pass and the optimizer's step."""
    last_gradient: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    steps_s: list[float] = field(default_factory=list[float])
    blocked_s: list[float] = field(default_factory=list[float])

    def step(self, text: torch.Tensor, rank: int, service: polder.torch.ParameterService | None) -> None:
        """One step on this worker's share of a batch that every worker draws alike."""
        places = torch.randint(len(text) - CONTEXT - 1, (RANKS, BATCH), generator=self.draw)[rank]
        window = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).long()
        began = time.perf_counter()
        guesses = self.model(window[:, :-1])
        loss = functional.cross_entropy(guesses.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self.average()
        averaged = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_s.append(time.perf_counter() - began)
        # The service averages inside of the optimizer's step, before that begins.
        self.blocked_s.append(averaged - self.last_gradient if service is None else service.blocked_s)
        self.losses.append(loss.item())

    def note_gradient(self, _: torch.Tensor) -> None:
        """A gradient is complete; the last call of a backward pass counts."""
        self.last_gradient = time.perf_counter()


def start_way(name: str, backend: str, options: argparse.Namespace) -> Way:
    """The same weights for every way."""
    torch.manual_seed(0)
    model = Gpt(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    way = Way(name, backend, model, optimizer, torch.Generator().manual_seed(1))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(way.note_gradient)
    return way


def blocking(backend: str, group: dist.ProcessGroup, options: argparse.Namespace) -> Way:
    """An all-reduce of all gradients together, after the backward pass."""
    way = start_way("all-reduce, blocking", backend, options)
    parameters = list(way.model.parameters())

    def average() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(RANKS)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    way.average = average
    return way


def overlapped(backend: str, group: dist.ProcessGroup, options: argparse.Namespace) -> Way:
    """DDP: buckets are reduced while the backward pass goes on, which waits for the last ones."""
    way = start_way("DDP, overlapped", backend, options)
    way.model = torch.nn.parallel.DistributedDataParallel(way.model, process_group=group)
    return way


def worker(options: argparse.Namespace) -> None:
    """What each worker does."""
    text = torch.frombuffer(bytearray(read_text(options.text)), dtype=torch.uint8)
    torch.set_num_threads(1)
    dist.init_process_group("polder", timeout=timedelta(seconds=60))
    rank, pool = dist.get_rank(), dist.group.WORLD
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    assert pool is not None
    assert isinstance(gloo, dist.ProcessGroup)
    ways = [make(*of, options) for make in (blocking, overlapped) for of in (("gloo", gloo), ("polder", pool))]
    with polder.torch.ParameterService(options.proxies, profile_steps=PROFILE) as service:
        ours = start_way("service", "polder", options)
        service.attach(ours.model, ours.optimizer)
        for way in [*ways, ours]:
            for _ in range(PROFILE + WARM_UP):
                way.step(text, rank, service if way is ours else None)
            way.steps_s.clear()
            way.blocked_s.clear()
        if rank == 0 and service.plan is not None:
            print(said_of(service.plan), flush=True)
        done = 0
        while done < options.steps:
            count = min(ROUND, options.steps - done)
            for way in [*ways, ours]:
                for _ in range(count):
                    way.step(text, rank, service if way is ours else None)
            done += count
            if rank == 0:
                print(f"{done:>6} steps, loss {ours.losses[-1]:.3f}", flush=True)
        digests: list[str | None] = [None] * RANKS
        # DDP's module has its parameters in the same order.
        mine = " ".join(digest(way.model) for way in [*ways, ours])
        dist.all_gather_object(digests, mine, group=gloo)
        if rank == 0:
            print(f"\n{table([*ways, ours], service, digests)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def said_of(plan: polder.torch.SyncPlan) -> str:
    """What the profile found."""
    links = ", ".join(f"{latency * 1e6:.0f} us and {rate / 1e9:.2f} GB/s" for latency, rate in plan.links)
    return "\n".join(
        [
            f"profile: T_FP {plan.forward_s * 1e3:.1f} ms, T_BP {plan.backward_s * 1e3:.1f} ms, "
            f"BW_proxy {plan.proxy_rate / 1e9:.2f} GB/s, BW_worker {plan.worker_rate / 1e9:.2f} GB/s (measured here)",
            f"         links to the proxies: {links}",
            f"plan:    shards of {plan.shard_bytes >> 10} KiB or more, {len(plan.shards)} a step; m = "
            f"{plan.split_bytes / 1e6:.1f} of {plan.total_bytes / 1e6:.1f} MB, in whole tensors "
            f"{plan.proxied_bytes / 1e6:.1f} MB to the proxies\n",
        ]
    )


def table(ways: list[Way], service: polder.torch.ParameterService, digests: list[Any]) -> str:
    """Step time, blocked communication, the split, and whether weights are equal."""
    plan, gloo = service.plan, statistics.median(ways[0].blocked_s)
    assert plan is not None
    lines = [
        f"{'gradients averaged by':<22} {'backend':<8} {'step ms':>8} {'spread':>15} {'blocked ms':>11} "
        f"{'spread':>13} {'of blocking':>12}  proxies take"
    ]
    for way in ways:
        step, blocked = statistics.median(way.steps_s), statistics.median(way.blocked_s)
        spread = f"{min(way.steps_s) * 1e3:.1f} to {max(way.steps_s) * 1e3:.1f}"
        waits = f"{min(way.blocked_s) * 1e3:.1f} to {max(way.blocked_s) * 1e3:.1f}"
        share = f"{plan.proxied_bytes / plan.total_bytes:.0%} of {plan.total_bytes / 1e6:.1f} MB"
        lines.append(
            f"{way.name:<22} {way.backend:<8} {step * 1e3:>8.1f} {spread:>15} {blocked * 1e3:>11.1f} {waits:>13} "
            f"{blocked / gloo:>12.2f}  {share if way is ways[-1] else '-'}"
        )
    kinds = {word for words in digests for word in str(words).split()}
    equal = f"equal bit for bit: {RANKS} workers, {len(ways)} ways" if len(kinds) == 1 else f"different: {digests}"
    counts = [
        f"proxy {index}: pid {count.pid} on host {count.host}, {count.steps} steps, {count.nbytes / 1e6:.0f} MB of sums"
        for index, count in enumerate(service.proxies())
    ]
    return "\n".join(
        [
            *lines,
            f"\nmedians of {len(ways[0].steps_s)} steps of worker 0, measured on this machine; blocked is from the "
            "last gradient to the last average",
            f"weights  {equal}",
            f"sums     ran in other processes than this worker (pid {os.getpid()}):",
            *(f"         {count}" for count in counts),
        ]
    )


def main() -> int:
    """Launches itself, or works as one of the workers that it launched."""
    options = arguments()
    try:
        if "LOCAL_RANK" in os.environ:
            worker(options)
            return 0
        return launch(options)
    except Unusable as error:
        print(f"coarse: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
