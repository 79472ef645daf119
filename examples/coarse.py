"""Trains the demo's GPT with a parameter service: two workers push gradients, two proxies sum them in one pool.

Run it with ``make sync``, or by hand::

    python examples/coarse.py --steps 30
    python examples/coarse.py --rate 200 --sweep
    python examples/coarse.py --memory
    torchrun --nproc-per-node 2 examples/coarse.py

The same steps run over an all-reduce that blocks after the backward pass and over DDP, which overlaps the two, both
on gloo and on polder, and over one central server (the paper's DENSE). All take turns, from the same weights over the
same bytes, so that they see the same machine. The table at the end compares them.

Without ``--rate`` the links are this machine's memory, and proxies and workers share its cores. With it, token buckets
emulate a link of so many MB/s for each worker's all-reduce and for each proxy's device, in both directions.

``--memory`` compares an optimizer on the workers with one on the proxies instead: bytes of all workers, proxies and
the pool together, and the largest batch under one limit for all, with two and with four workers.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
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
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"coarse: torch is missing ({error}); `make torch` installs it into .venv")

from polder.torch import EmulatedLinks, ParameterService, SyncPlan
from polder.torch.meeting import attachments

ROUND = 5  # steps of one way before the next has its turn
PROFILE = 4  # steps of the service's profile, and of every other way, before anything counts
WARM_UP = 2  # more steps that do not count, with the plan
SHARD_SECONDS = 200e-6  # what an emulated link takes for each shard besides its bytes
SWEEP = 10  # steps of m between 0 and 1
ALONE = "alone"
PLACES = {ALONE: "worker, all-reduce (DDP)", "worker": "worker, service", "proxy": "proxy, service"}


def arguments() -> argparse.Namespace:
    """What the user chose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file or a folder to learn from")
    parser.add_argument("--steps", type=int, default=20, help="steps of each way that count (20)")
    parser.add_argument("--proxies", type=int, default=2, help="how many proxies sum (2)")
    parser.add_argument("--width", type=int, default=train.WIDTH, help=f"the GPT's width ({train.WIDTH})")
    parser.add_argument("--layers", type=int, default=train.LAYERS, help=f"its layers ({train.LAYERS})")
    parser.add_argument("--rate", type=float, help="emulate links of so many MB/s for all ways")
    parser.add_argument("--sweep", action="store_true", help="then vary m, the order and the size of shards")
    parser.add_argument("--early", action="store_true", help="also with the optimizer on the proxies, early and not")
    parser.add_argument("--memory", action="store_true", help="instead, what all need by where the optimizer is")
    parser.add_argument("--where", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def memory(options: argparse.Namespace) -> int:
    """Runs workers with and without the service, and prints what all processes and the pool need together."""

    def run(workers: int, where: str, limit: int | None = None) -> dict[str, int]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command += [__file__, "--where", where, *([] if limit is None else ["--limit", str(limit)])]
        command += ["--width", str(options.width), "--layers", str(options.layers), "--proxies", str(options.proxies)]
        # What is freed goes back at once, so that what is there is what is used.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        for line in ended.stdout.splitlines():
            if line.startswith("{"):
                return json.loads(line)
        raise Unusable(f"the run with the optimizer on each {where} failed: {ended.stderr[-2000:]}")

    print("memory of all workers, proxies and the pool together, in MB, AdamW; measured on this machine")
    print(f"the optimizer is on each worker, or on {options.proxies} proxies; the service or an all-reduce averages")
    print("of a worker counts what it has beside its libraries, of a proxy all; the limit is one for all of them")
    for workers in (2, 4):
        limit = run(workers, ALONE)["all"] * 5 // 4
        largest = f"largest batch under {limit / 1e6:.0f} MB"
        print(
            f"\n{f'{workers} workers, batch {BATCH}':<28}{'workers':>9}{'proxies':>9}{'pool':>9}{'all':>9}{largest:>32}"
        )
        for where, name in PLACES.items():
            found = run(workers, where, limit)
            parts = "".join(f"{found[part] / 1e6:>9.1f}" for part in ("workers", "proxies", "pool", "all"))
            print(f"{name:<28}{parts}{found['batch'] or 'none':>32}", flush=True)
    return 0


def kilobytes(name: str, pid: int | str = "self") -> int:
    """A line of a process's status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def remember(options: argparse.Namespace) -> None:
    """Trains with the optimizer where it was asked for; then with larger batches, as long as all fit together."""
    torch.set_num_threads(1)
    dist.init_process_group("polder", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    # So that what torch makes once is there.
    torch.nn.Linear(1, 1)(torch.ones(1)).backward()
    before, peak = kilobytes("RssAnon"), 0
    model = Gpt(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def look(*_: object) -> None:
        nonlocal peak
        peak = max(peak, kilobytes("RssAnon") - before)

    def step(batch: int) -> None:
        window = torch.randint(256, (batch, CONTEXT + 1))
        guesses = net(window[:, :-1])
        look()
        functional.cross_entropy(guesses.flatten(0, 1), window[:, 1:].flatten()).backward()
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()

    def counted(service: ParameterService | None) -> dict[str, int]:
        """What all have, with the most that each worker had since the last call."""
        nonlocal peak
        peaks = torch.tensor([peak])
        dist.all_reduce(peaks)
        peak = 0
        proxies = [] if service is None else [count.pid for count in service.proxies()]
        used = {"workers": int(peaks.item()), "proxies": sum(kilobytes("RssAnon", pid) for pid in proxies)}
        used["pool"] = sum(Path(path).stat().st_blocks * 512 for path in attachments)
        return {**used, "all": sum(used.values())}

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    with contextlib.ExitStack() as inside:
        service = None
        net: torch.nn.Module = model
        if options.where == ALONE:
            net = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            service = ParameterService(options.proxies, profile_steps=2, replan_steps=0, optimizer=options.where)
            inside.enter_context(service).attach(model, optimizer)
        for turn in range(5):
            if turn == 3:
                # Without what the profile took.
                counted(service)
            step(BATCH)
        now = counted(service)
        result, batch = {**now, "batch": 0}, BATCH
        while options.limit is not None and now["all"] <= options.limit:
            result["batch"] = batch
            batch += max(1, batch // 8)
            step(batch)
            now = counted(service)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)


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
    service: ParameterService | None = None
    last_gradient: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    steps_s: list[float] = field(default_factory=list[float])
    blocked_s: list[float] = field(default_factory=list[float])
    optimizer_s: list[float] = field(default_factory=list[float])

    def step(self, text: torch.Tensor, rank: int) -> None:
        """One step on this worker's share of a batch that every worker draws alike."""
        places = torch.randint(len(text) - CONTEXT - 1, (RANKS, BATCH), generator=self.draw)[rank]
        window = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).long()
        began = time.perf_counter()
        guesses = self.model(window[:, :-1])
        if self.service:
            # Of the step before: what this forward pass has waited for counts there.
            self.blocked_s.append(self.service.blocked_s)
        loss = functional.cross_entropy(guesses.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self.average()
        averaged = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        self.steps_s.append(ended - began)
        self.optimizer_s.append(ended - averaged)
        if not self.service:
            self.blocked_s.append(averaged - self.last_gradient)
        self.losses.append(loss.item())

    def note_gradient(self, _: torch.Tensor) -> None:
        """A gradient is complete; the last call of a backward pass counts."""
        self.last_gradient = time.perf_counter()

    def timed(self, text: torch.Tensor, rank: int, steps: int) -> tuple[float, float]:
        """The median seconds of so many steps, and of what blocks in them."""
        for _ in range(steps):
            self.step(text, rank)
        if self.service:
            self.service.wait()
        return statistics.median(self.steps_s[-steps:]), statistics.median(self.blocked_s[-steps:])


class Link:
    """This worker's link in all-reduces, as a token bucket emulates it."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.free = 0.0

    def reserve(self, nbytes: int) -> None:
        """An all-reduce of so many bytes begins now, or when the link is free."""
        if self.rate is not None:
            ring = 2 * (RANKS - 1) / RANKS
            self.free = max(self.free, time.perf_counter()) + ring * nbytes / self.rate

    def wait(self) -> None:
        """Until everything has come through."""
        time.sleep(max(self.free - time.perf_counter(), 0))


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
    parameters, link = list(way.model.parameters()), Link(rate_of(options))

    def average() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        link.reserve(flat.nbytes)
        dist.all_reduce(flat, group=group)
        link.wait()
        flat.div_(RANKS)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    way.average = average
    return way


def overlapped(backend: str, group: dist.ProcessGroup, options: argparse.Namespace) -> Way:
    """DDP: buckets are reduced while the backward pass goes on, which waits for the last ones."""
    way = start_way("DDP, overlapped", backend, options)
    ddp = torch.nn.parallel.DistributedDataParallel(way.model, process_group=group)
    way.model = ddp
    if options.rate is not None:
        link = Link(rate_of(options))

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            """An all-reduce over the emulated link, for which the end of the backward pass waits."""
            del state
            link.reserve(bucket.buffer().nbytes)
            torch.autograd.Variable._execution_engine.queue_callback(link.wait)  # pyright: ignore
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda done: done.value()[0].div_(RANKS))

        ddp.register_comm_hook(None, hook)
    return way


def rate_of(options: argparse.Namespace) -> float | None:
    """Bytes a second of an emulated link."""
    return None if options.rate is None else options.rate * 1e6


def served(name: str, service: ParameterService, options: argparse.Namespace) -> Way:
    """By a parameter service."""
    way = start_way(name, "polder", options)
    way.service = service
    service.attach(way.model, way.optimizer)
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
    rate = rate_of(options)
    one, all_of_them = (
        None if rate is None else EmulatedLinks([(SHARD_SECONDS, rate)] * count, rate) for count in (1, options.proxies)
    )
    central = ParameterService.central(profile_steps=PROFILE, emulated=one)
    # What is measured keeps its plan.
    service = ParameterService(options.proxies, profile_steps=PROFILE, replan_steps=0, emulated=all_of_them)
    with contextlib.ExitStack() as inside:
        for each in (central, service):
            inside.enter_context(each)
        for early in (False, True) if options.early else ():
            held = ParameterService(options.proxies, optimizer="proxy", early=early, emulated=all_of_them)
            name = "optimizer on proxies" + (", early" if early else "")
            ways.append(served(name, inside.enter_context(held), options))
        ours = served("service", service, options)
        ways += [served("central server (DENSE)", central, options), ours]
        for way in ways:
            way.timed(text, rank, PROFILE + WARM_UP)
            way.steps_s.clear()
            way.blocked_s.clear()
        if rank == 0 and service.plan is not None:
            print(said_of(service.plan, rate), flush=True)
        done, busy = 0, 0.0
        while done < options.steps:
            count = min(ROUND, options.steps - done)
            for way in ways:
                before = cpu_seconds(service)
                way.timed(text, rank, count)
                busy += cpu_seconds(service) - before if way is ours else 0
            done += count
            if rank == 0:
                print(f"{done:>6} steps, loss {ours.losses[-1]:.3f}", flush=True)
        digests: list[str | None] = [None] * RANKS
        # DDP's module has its parameters in the same order.
        mine = " ".join(digest(way.model) for way in ways)
        dist.all_gather_object(digests, mine, group=gloo)
        if rank == 0:
            print(f"\n{table(ways, service, digests, busy / sum(ours.steps_s))}", flush=True)
        if options.sweep:
            sweep(ours, service, text, rank, options)
    dist.barrier()
    dist.destroy_process_group()


def cpu_seconds(service: ParameterService) -> float:
    """Processor time of all proxies so far; all run on this machine."""
    ticks = 0
    for count in service.proxies():
        fields = Path(f"/proc/{count.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def sweep(way: Way, service: ParameterService, text: torch.Tensor, rank: int, options: argparse.Namespace) -> None:
    """Steps at 11 values of m, in three orders of shards, and with shards of several sizes."""

    def timed(split: float | None, shard_bytes: int | None = None, first: bool = True) -> tuple[float, float]:
        service.split, service.shard_bytes, service.first_layers_first = split, shard_bytes, first
        service.replan()
        way.timed(text, rank, 1 + WARM_UP)
        return way.timed(text, rank, options.steps)

    def say(*words: object) -> None:
        if rank == 0:
            print(*words, flush=True)

    kind = "measured" if options.rate is None else "emulated"
    plan = service.plan
    assert plan is not None
    simulated = simulate(plan, options)
    beside = ", and simulated by polder plan sync" if simulated else ""
    say(
        f"\nstep by the part of bytes on the proxies: {kind}, predicted by the plan{beside}; the latter with the "
        "optimizer's step as measured"
    )
    before, _ = timed(None)
    points = [(at / SWEEP, timed(at / SWEEP)) for at in range(SWEEP + 1)]
    after, _ = timed(None)
    optimizer_s = statistics.median(way.optimizer_s)

    def predicted(nbytes: float) -> float:
        """Seconds of a step with whole tensors of about so many bytes on the proxies."""
        _, seconds = min(plan.predicted, key=lambda point: abs(point[0] - nbytes))
        return plan.forward_s + seconds + optimizer_s

    for at, (step, blocked) in points:
        predicted_s = predicted(at * plan.total_bytes)
        beside = ""
        if simulated:
            other = simulated[round(at * SWEEP)] + optimizer_s
            beside = f"  simulated {other * 1e3:>7.1f} ms ({other / step - 1:+.0%})"
        say(
            f"  m = {at:.1f} n   step {step * 1e3:>7.1f} ms  blocked {blocked * 1e3:>7.1f} ms  "
            f"predicted {predicted_s * 1e3:>7.1f} ms ({predicted_s / step - 1:+.0%}){beside}"
        )
    best = min(step for _, (step, _) in points)
    ours = (before + after) / 2
    part = plan.proxied_bytes / plan.total_bytes
    say(
        f"  planned m = {part:.2f} n: {ours * 1e3:.1f} ms, the mean of {before * 1e3:.1f} before and {after * 1e3:.1f} "
        f"after the sweep, {predicted(plan.proxied_bytes) * 1e3:.1f} predicted; {ours / best - 1:+.1%} of the best of "
        f"{SWEEP + 1}"
    )
    say(f"\nstep by the order of shards with all bytes on the proxies, {kind}")
    whole = 1 << 40
    for name, of in {
        "whole tensors, first in first out": (1.0, whole, False),
        "shards, first in first out": (1.0, None, False),
        "shards, first layers first": (1.0, None, True),
    }.items():
        step, blocked = timed(*of)
        say(f"  {name:<34} step {step * 1e3:>7.1f} ms  blocked {blocked * 1e3:>7.1f} ms")
    say("  the optimizer steps all layers at once, so what comes first does not shorten a step")
    say(f"\nstep by the size of shards at the planned m, {kind}; the plan's is {plan.shard_bytes >> 10} KiB")
    for size in (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, whole):
        step, blocked = timed(part, size)
        shards = len(service.plan.shards) if service.plan else 0
        name = "whole tensors" if size == whole else f"{size >> 10} KiB"
        say(f"  {name:<14} {shards:>5} shards  step {step * 1e3:>7.1f} ms  blocked {blocked * 1e3:>7.1f} ms")


def simulate(plan: SyncPlan, options: argparse.Namespace) -> list[float]:
    """Seconds of a step at the same values of m, by `polder plan sync`; nothing where it is not installed."""
    command = shutil.which("polder", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if command is None or options.rate is None:
        return []
    layers = options.layers + 1
    asked = [command, "plan", "sync", "--json", "--layers", f"{layers}x{plan.total_bytes // layers / 1e6:.3f}MB"]
    asked += ["--forward", f"{plan.forward_s * 1e3:.3f} ms", "--backward", f"{plan.backward_s * 1e3:.3f} ms"]
    asked += ["--worker-bandwidth", f"{plan.worker_rate / 1e9:.6f} GB/s"]
    # Of a push, a sum and a pull together, by the ring's formula: what all devices carry of all workers.
    device = RANKS * plan.proxy_rate / (2 * (RANKS - 1) / RANKS * options.proxies)
    asked += ["--proxies", str(options.proxies), "--proxy-bandwidth", f"{device / 1e9:.6f} GB/s"]
    asked += ["--link-bandwidth", f"{plan.proxy_rate / (2 * (RANKS - 1) / RANKS) / 1e9:.6f} GB/s"]
    asked += ["--latency", f"{SHARD_SECONDS * 1e6} us"]
    asked += ["--shard", f"{plan.shard_bytes} B", "--workers", str(RANKS)]
    ended = subprocess.run(asked, capture_output=True, text=True, check=True)
    return [point["step_s"] for point in json.loads(ended.stdout)["sweep"]]


def said_of(plan: SyncPlan, rate: float | None) -> str:
    """What the profile found."""
    kind = "measured here" if rate is None else f"over emulated links of {rate / 1e6:.0f} MB/s"
    links = ", ".join(f"{latency * 1e6:.0f} us and {rate / 1e9:.2f} GB/s" for latency, rate in plan.links)
    return "\n".join(
        [
            f"profile: T_FP {plan.forward_s * 1e3:.1f} ms, T_BP {plan.backward_s * 1e3:.1f} ms, "
            f"BW_proxy {plan.proxy_rate / 1e9:.2f} GB/s, BW_worker {plan.worker_rate / 1e9:.2f} GB/s ({kind})",
            f"         links to the proxies: {links}",
            f"plan:    shards of {plan.shard_bytes >> 10} KiB or more, {len(plan.shards)} a step; threshold of routes "
            f"{plan.threshold_bytes / 1024:.0f} KiB",
            f"         m = {plan.proxied_bytes / 1e6:.1f} of {plan.total_bytes / 1e6:.1f} MB, by when gradients come; "
            f"the paper's formula says {plan.split_bytes / 1e6:.1f}\n",
        ]
    )


def table(ways: list[Way], service: ParameterService, digests: list[Any], busy: float) -> str:
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
        of = way.service.plan if way.service else None
        share = "-" if of is None else f"{of.proxied_bytes / of.total_bytes:.0%} of {of.total_bytes / 1e6:.1f} MB"
        lines.append(
            f"{way.name:<22} {way.backend:<8} {step * 1e3:>8.1f} {spread:>15} {blocked * 1e3:>11.1f} {waits:>13} "
            f"{blocked / gloo:>12.2f}  {share}"
        )
    kinds = {word for words in digests for word in str(words).split()}
    equal = f"equal bit for bit: {RANKS} workers, {len(ways)} ways" if len(kinds) == 1 else f"different: {digests}"
    ddp_s = min(statistics.median(way.blocked_s) for way in ways if way.name.startswith("DDP"))
    ours = statistics.median(ways[-1].blocked_s)
    kept = min(statistics.median(way.blocked_s) for way in ways if way.name.startswith("all-reduce"))
    cut = 1 - ours / kept
    good = "as good or better" if ddp_s <= 1.05 * ours else "behind"
    verdict = (
        f"blocked  the service blocks {abs(cut):.0%} {'less' if cut >= 0 else 'more'} than a blocking all-reduce; "
        f"overlapped DDP is {good} at {ddp_s * 1e3:.1f} ms"
    )
    counts = [
        f"proxy {index}: pid {count.pid} on host {count.host}, {count.steps} steps, {count.nbytes / 1e6:.0f} MB of sums"
        for index, count in enumerate(service.proxies())
    ]
    return "\n".join(
        [
            *lines,
            f"\nmedians of {len(ways[0].steps_s)} steps of worker 0, measured on this machine; blocked is from the "
            "last gradient to the last average",
            verdict,
            f"weights  {equal}",
            f"proxies  used {busy:.1%} of a core, all {len(counts)} together",
            f"sums     ran in other processes than this worker (pid {os.getpid()}):",
            *(f"         {count}" for count in counts),
        ]
    )


def main() -> int:
    """Launches itself, or works as one of the workers that it launched."""
    options = arguments()
    try:
        if "LOCAL_RANK" in os.environ:
            remember(options) if options.where else worker(options)
            return 0
        return memory(options) if options.memory else launch(options)
    except Unusable as error:
        print(f"coarse: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
