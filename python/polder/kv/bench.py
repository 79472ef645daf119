"""What blocks cost in a cache and in its peers: what ``polder-dev bench kv`` starts.

Processes put blocks, and each gets the blocks that the next one has put. All contenders take turns in each round. What
counts is the processor time of all processes, servers included; the time from the first begin to the last end stands
beside it. Each block that was got is checked. A row is one JSON object a line on standard output.
"""

import argparse
import ctypes
import hashlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import polder
from polder import _core, kv
from polder.bench import HOSTS, ROUNDS, print_row
from polder.kv.bench_peers import PEERS, POPULATE, Contender, Failed, Floor, Server

SIZES = [64 << 10, 2 << 20, 16 << 20]
MIB = 32
"""Of blocks that a process puts in a round; at least `LEAST_BLOCKS` of them."""
LEAST_BLOCKS = 2
BATCH_BYTES = 8 << 20
"""A call has blocks of so many bytes, and at least one."""
KINDS = ("coherent", "software")
WARM_TURNS = 1
LOOK_UPS, CALLS = 1000, 50
SMALL_BYTES = 4 << 10
"""Of the blocks whose keys are looked up."""
JOINED = (2, 16)
"""Hosts that have joined while keys are looked up."""

Bytes = NDArray[np.uint8]


class Ours(Contender):
    """A cache in a pool; a process belongs to one of the emulated hosts."""

    def __init__(self, folder: Path, kind: str, turns: int, *, verify: bool) -> None:
        super().__init__(f"{kind} checksum" if verify else kind)
        self._path, self._kind, self._turns, self._verify = folder / kind, kind, turns, verify
        self._cache: Any = None

    def join(self, number: int, procs: int) -> None:
        """Attaches the pool, and maps its pages."""
        self._pool = polder.Pool(self._path, host=number % HOSTS, coherence=self._kind, run=self._path.parent)
        populate(self._path)

    def open(self, block: int, count: int, procs: int, buffers: tuple[Bytes, Bytes]) -> None:
        """Opens a cache with room for the blocks of all rounds, so that none makes room."""
        self.leave_cache()
        budget = room_for(self._turns * procs * count * block)
        self._cache = kv.Cache(
            self._pool, self.name.replace(" ", "-"), identity={}, block=block, budget=budget, verify=self._verify
        )

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Stores blocks."""
        put = self._cache.put(keys, blocks)
        if put.stored != len(keys):
            raise Failed(f"{self.name}: stored {put.stored} of {len(keys)} blocks, {put.refused} had no room")

    def get(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Fills buffers."""
        if not all(self._cache.get(keys, blocks)):
            raise Failed(f"{self.name}: a block is not there; {self._cache.stat()}")

    def leave_cache(self) -> None:
        """Lets go of the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def remove(self) -> None:
        """Removes the cache, in one process."""
        kv.remove(self._pool, self.name.replace(" ", "-"))


def room_for(nbytes: int) -> int:
    """Bytes of slabs for so many bytes of blocks: with lines, and with a slab of each host that is not full."""
    return nbytes * 3 // 2 + (64 << 20)


def populate(path: Path) -> None:
    """Maps the pages of a file that this process has mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, name = line.split(maxsplit=5)
        if name == str(path):
            begin, end = (int(word, 16) for word in where.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), POPULATE)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="polder-dev bench kv", description=__doc__)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a block")
    parser.add_argument("--mib", type=int, default=MIB, help="of blocks that a process puts in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each contender")
    parser.add_argument("--alone", action="store_true", help="beside the floor alone")
    arguments = parser.parse_args()
    python = Path(sys.prefix).parent / ".cache/kvpeers/bin/python"
    if not arguments.alone and python.exists() and Path(sys.prefix) != python.parents[1]:
        os.execv(python, [str(python), "-P", "-m", "polder.kv.bench", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(
        prefix="polder-bench-", dir=os.environ.get("POLDER_BENCH_FOLDER", "/dev/shm")
    ) as folder:
        measure(Path(folder), arguments)
    return 0


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Measures blocks of each size by each number of processes, then look-ups."""
    most, sizes = max(arguments.procs), arguments.sizes
    share = max(arguments.mib << 20, LEAST_BLOCKS * max(sizes), LOOK_UPS * SMALL_BYTES)
    turns = WARM_TURNS + arguments.rounds
    for kind in KINDS:
        # A cache with checksums, and one without.
        room = 2 * room_for(turns * most * share) + (128 << 20)
        _core.format(folder / kind, room, hosts=HOSTS, processes=most + 2, coherence=kind)
    ours: list[Contender] = [Ours(folder, kind, turns, verify=verify) for kind in KINDS for verify in (False, True)]
    floor = Floor(folder, share * most)
    with ExitStack() as stack:
        homes = homes_of(stack, [*ours, floor], None, most, share)
        if not arguments.alone:
            homes |= peers(stack, folder, most, share)
        for size, procs in itertools.product(sizes, arguments.procs):
            count = max((arguments.mib << 20) // size, LEAST_BLOCKS)
            compare(homes, [it.name for it in ours], (size, count, procs), arguments.rounds)
        indexed = {name: home for name, home in homes.items() if name not in {floor.name, *(it.name for it in ours)}}
        look_ups(folder, indexed, arguments.rounds)


def peers(stack: ExitStack, folder: Path, most: int, share: int) -> dict[str, "Workers"]:
    """The peers that run here; a word on standard error for each that does not."""
    homes: dict[str, Workers] = {}
    for peer in PEERS:
        try:
            contender, server = peer(folder, share * most)
            made = homes_of(stack, [contender], server, most, share)
            compare(made, [], (SMALL_BYTES, LEAST_BLOCKS, most), 0)
            homes |= made
        except Failed as reason:
            print(f"polder-dev bench kv: without {reason}", file=sys.stderr)
    return homes


def homes_of(
    stack: ExitStack, contenders: list[Contender], server: Server | None, most: int, share: int
) -> dict[str, "Workers"]:
    """The processes in which contenders run: those of a peer, whose threads count, are its own."""
    clock = stack.enter_context(server).clock if server else None
    home = Workers(stack, contenders, clock, most, share)
    home.all("join", most)
    return {contender.name: home for contender in contenders}


class Workers:
    """Processes that do what they are told, at the same time."""

    def __init__(
        self, stack: ExitStack, contenders: list[Contender], clock: int | None, count: int, share: int
    ) -> None:
        self._clock = clock
        forking = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        for number in range(count):
            here, there = forking.Pipe()
            process = forking.Process(target=work, args=(there, number, contenders, share), daemon=True)
            process.start()
            there.close()
            stack.callback(process.join)
            # A pipe does not end by closing it here: the processes that were forked since have this end too.
            stack.callback(here.send, None)
            self._ends.append(here)

    def all(self, what: str, *words: Any, count: int | None = None) -> tuple[float, float]:
        """Has the first `count` of them do something: processor time, the server's too, and time, in us."""
        ends = self._ends[:count]
        served = -self._served()
        for end in ends:
            end.send((what, *words))
        answers = [end.recv() for end in ends]
        served += self._served()
        for answer in answers:
            if isinstance(answer, str):
                raise Failed(f"{words[0]}: {what}: {answer}")
        wall = max(end for _, _, end in answers) - min(begin for _, begin, _ in answers)
        return (sum(cpu for cpu, _, _ in answers) + served) / 1e3, wall / 1e3

    def _served(self) -> int:
        return time.clock_gettime_ns(self._clock) if self._clock is not None else 0


def work(orders: Connection, number: int, contenders: list[Contender], share: int) -> None:
    """A process: answers each order with its processor time, begin and end, or with why it failed."""
    state = State(number, {it.name: it for it in contenders}, share)
    while order := orders.recv():
        what, *words = order
        try:
            answer: Any = getattr(state, what)(*words) or (0, 0, 0)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        orders.send(answer)


class State:
    """What a process has: its contenders, the blocks that it puts, and room for those that it gets."""

    def __init__(self, number: int, contenders: dict[str, Contender], share: int) -> None:
        self._number, self._contenders = number, contenders
        self._own = np.random.default_rng(number).integers(0, 255, share, dtype=np.uint8)
        self._got = np.ones(share, np.uint8)
        self._block, self._count, self._procs = 1, 0, 1

    def join(self, most: int) -> None:
        """Attaches what all measurements share."""
        for contender in self._contenders.values():
            contender.join(self._number, most)

    def open(self, name: str, block: int, count: int, procs: int) -> None:
        """Prepares a contender for blocks of this size."""
        self._block, self._count, self._procs = block, count, procs
        self._contenders[name].open(block, count, procs, (self._own, self._got))

    def put(self, name: str, turn: int) -> tuple[int, int, int]:
        """Puts this process's blocks of a round."""
        keys, blocks = self._keys(turn, self._number), self._blocks(self._own)
        for key, block in zip(keys, blocks, strict=True):
            block[:16] = np.frombuffer(key, np.uint8)
        return self._timed(self._contenders[name].put, keys, blocks)

    def get(self, name: str, turn: int) -> tuple[int, int, int]:
        """Gets the blocks that the next process has put, and checks them."""
        keys, blocks = self._keys(turn, (self._number + 1) % self._procs), self._blocks(self._got)
        for block in blocks:
            block[:16] = 0
        spent = self._timed(self._contenders[name].get, keys, blocks)
        if [bytes(block[:16]) for block in blocks] != keys:
            raise Failed(f"{name}: a block has other bytes than were put")
        return spent

    def look_up(self, name: str, turn: int) -> tuple[int, int, int]:
        """Looks up keys, over and over."""
        keys = self._keys(turn, 0)
        lookup, present = self._contenders[name].lookup, [False]
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(CALLS):
            present = lookup(keys)
        cpu, end = time.process_time_ns() - cpu, time.perf_counter_ns()
        if present != [turn == 0] * len(keys):
            raise Failed(f"{name}: found {sum(present)} of {len(keys)} keys of round {turn}")
        return cpu, begin, end

    def clear(self, name: str) -> None:
        """Removes what a peer holds; a cache has room for all rounds."""
        self._contenders[name].clear()

    def close(self, name: str) -> None:
        """Lets go of what was opened for one size."""
        self._contenders[name].leave_cache()

    def remove(self, name: str) -> None:
        """Removes what was opened for one size, in the pool."""
        self._contenders[name].remove()

    def _timed(self, run: Callable[[list[bytes], list[Any]], None], keys: list[bytes], blocks: list[Any]) -> Any:
        batch = max(BATCH_BYTES // self._block, 1)
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for at in range(0, len(keys), batch):
            run(keys[at : at + batch], blocks[at : at + batch])
        end = time.perf_counter_ns()
        return time.process_time_ns() - cpu, begin, end

    def _keys(self, turn: int, number: int) -> list[bytes]:
        return [hashlib.md5(f"{turn} {number} {index}".encode()).digest() for index in range(self._count)]

    def _blocks(self, array: Bytes) -> list[Bytes]:
        return [array[index * self._block : (index + 1) * self._block] for index in range(self._count)]


def compare(homes: dict[str, Workers], ours: list[str], case: tuple[int, int, int], rounds: int) -> None:
    """Has all contenders put and get in turn, and prints a row for each of ours and each peer."""
    size, count, procs = case
    figures: dict[tuple[str, str, str], list[float]] = {}
    for name, home in homes.items():
        home.all("open", name, size, count, procs, count=procs)
    for turn in range(WARM_TURNS + rounds):
        for (name, home), what in itertools.product(homes.items(), ("put", "get")):
            spent = home.all(what, name, turn, count=procs)
            for metric, us in zip(("CPU", "time"), spent, strict=True):
                # CPU of all processes for one block; time in which each process moves one.
                blocks = count * (procs if metric == "CPU" else 1)
                figures.setdefault((name, what, metric), []).append(us / blocks)
            if what == "get":
                home.all("clear", name, count=procs)
    for name, home in homes.items():
        home.all("close", name, count=procs)
        home.all("remove", name, count=1)
    words = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    for what, own, peer in itertools.product(("put", "get"), ours, (name for name in homes if name not in ours)):
        for metric in ("CPU", "time") if peer == "floor" else ("CPU",):
            mine, theirs = (figures[name, what, metric][WARM_TURNS:] for name in (own, peer))
            print_row("kv", f"{what} {words} {procs} procs {own}", metric, "us/block", mine, peer, theirs)


# --------------------------------------------------------------------------------------------------------- look-ups


class Joined(Contender):
    """A cache that several hosts have joined, all of them in one process."""

    def __init__(self, folder: Path, kind: str, hosts: int) -> None:
        super().__init__(f"{kind} {hosts} hosts")
        self.kind = kind
        self._path, self._hosts = folder / f"{kind}-{hosts}", hosts
        self._stack = ExitStack()

    def format(self) -> None:
        """Makes the pool."""
        _core.format(self._path, 128 << 20, hosts=max(JOINED), processes=4, coherence=self.kind)

    def open(self, block: int, count: int, procs: int, buffers: tuple[Bytes, Bytes]) -> None:
        """Joins as each host; the last of them puts."""
        self._caches = [self._stack.enter_context(self._join(host, block)) for host in range(self._hosts)]

    @contextmanager
    def _join(self, host: int, block: int) -> Generator[kv.Cache]:
        with (
            polder.Pool(self._path, host=host, coherence=self.kind, run=self._path.parent) as pool,
            kv.Cache(pool, "bench", identity={}, block=block, budget=32 << 20) as cache,
        ):
            yield cache

    def put(self, keys: list[bytes], blocks: list[Any]) -> None:
        """Stores blocks as the last host."""
        self._caches[-1].put(keys, blocks)

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Asks as the first host."""
        return self._caches[0].lookup(keys)

    def leave_cache(self) -> None:
        """Leaves as all hosts."""
        self._stack.close()


def look_ups(folder: Path, peers: dict[str, Workers], rounds: int) -> None:
    """Looks up keys that have blocks, and keys that have none, through Python."""
    joined = [Joined(folder, kind, hosts) for kind, hosts in itertools.product(KINDS, JOINED)]
    for contender in joined:
        contender.format()
    with ExitStack() as stack:
        homes = homes_of(stack, [*joined], None, 1, LOOK_UPS * SMALL_BYTES) | peers
        figures: dict[tuple[str, int], list[float]] = {}
        for name, home in homes.items():
            home.all("open", name, SMALL_BYTES, LOOK_UPS, 1, count=1)
            home.all("put", name, 0, count=1)
        for _, (name, home), turn in itertools.product(range(1 + rounds), homes.items(), (0, 1)):
            cpu, _ = home.all("look_up", name, turn, count=1)
            figures.setdefault((name, turn), []).append(cpu / CALLS)
        for name, home in homes.items():
            home.all("close", name, count=1)
    for contender, turn in itertools.product(joined, (0, 1)):
        case = f"look-up of {LOOK_UPS} keys {('hit', 'miss')[turn]} {contender.name} through Python"
        mine = figures[contender.name, turn][1:]
        if not peers:
            print_row("kv", case, "CPU", "us", mine)
        for peer in peers:
            print_row("kv", case, "CPU", "us", mine, peer, figures[peer, turn][1:])


if __name__ == "__main__":
    sys.exit(main())
