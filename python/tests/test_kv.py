"""The cache of keys and values."""

import contextlib
import hashlib
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import RANKS, Rank

import polder
from polder import kv

BLOCK = 4096


def key(name: int) -> bytes:
    return hashlib.md5(name.to_bytes(4)).digest()


def block(name: int) -> bytes:
    return hashlib.blake2b(key(name)).digest() * (BLOCK // 64)


def found_by(cache: kv.Cache, names: range | list[int]) -> list[int]:
    """The names whose blocks are there, each of which is right."""
    buffers = [bytearray(BLOCK) for _ in names]
    found = cache.get([key(name) for name in names], buffers)
    for name, buffer in [(name, buffer) for name, buffer, there in zip(names, buffers, found, strict=True) if there]:
        assert buffer == block(name)
    return [name for name, there in zip(names, found, strict=True) if there]


@pytest.mark.parametrize("coherence", ["software", "coherent"])
def test_what_one_host_puts_another_finds_and_reads(scratch: Path, coherence: str) -> None:
    with (
        polder.Pool(scratch / "pool", size="64MiB", host=0, coherence=coherence, run=scratch) as one,
        polder.Pool(scratch / "pool", host=1, coherence=coherence, run=scratch) as two,
        kv.Cache(one, "llm", identity={"model": "a"}, block=BLOCK, budget="8MiB") as ours,
        kv.Cache(two, "llm", identity={"model": "a"}, block=BLOCK, verify=True) as theirs,
        kv.Cache(two, "llm", identity={"model": "b"}, block=BLOCK) as others,
    ):
        assert ours.hash == theirs.hash != others.hash
        names = range(62)
        put = ours.put([key(name) for name in names], [block(name) for name in names])
        assert put == kv.Put(stored=62, present=0, refused=0)
        assert theirs.lookup([key(0), key(100)]) == [True, False]
        assert found_by(theirs, range(64)) == list(names)
        assert theirs.put([key(0)], [block(0)]) == kv.Put(0, 1, 0)
        assert found_by(others, names) == []
        stat = theirs.stat()
        assert (stat.blocks, stat.hits, stat.misses, stat.void, stat.budget) == (62, 62, 2, 0, 8 << 20)
        assert [(part.host, part.blocks, part.puts) for part in stat.hosts] == [(0, 62, 62), (1, 0, 0)]
        with pytest.raises(polder.NotFoundError, match="other"):
            kv.remove(one, "other")


def test_the_budget_holds_and_the_oldest_block_makes_room(pool: polder.Pool) -> None:
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="2MiB") as cache:
        names = range(1000)
        for name in names:
            assert cache.put([key(name)], [block(name)]).refused == 0
        stat = cache.stat()
        assert stat.claimed <= stat.budget
        kept = found_by(cache, names)
        assert kept == list(names[-len(kept) :])
        assert len(kept) == stat.blocks == 1000 - stat.hosts[0].evictions > 200
    kv.remove(pool, "llm")
    assert pool.list() == []


def test_what_is_no_block_key_or_identity_is_refused(pool: polder.Pool) -> None:
    with pytest.raises(polder.ArgumentError, match="no JSON"):
        kv.Cache(pool, "llm", identity={"seed": float("nan")}, block=BLOCK)
    with pytest.raises(polder.ArgumentError, match="at least 1 byte"):
        kv.Cache(pool, "llm", identity={}, block=0)
    with pytest.raises(polder.PolderError, match="a / in it"):
        kv.Cache(pool, "a/b", identity={}, block=1)
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget=0) as cache:
        assert cache.put([key(1)], [block(1)]) == kv.Put(0, 0, 1)
        with pytest.raises(polder.ArgumentError, match="a key has 15 bytes"):
            cache.lookup([bytes(15)])
        with pytest.raises(polder.ArgumentError, match="100 bytes where this identity's have 4096"):
            cache.put([key(1)], [bytes(100)])
        with pytest.raises(polder.ArgumentError, match="read-only"):
            cache.get([key(1)], [bytes(BLOCK)])
        twice = bytearray(BLOCK)
        with pytest.raises(polder.ArgumentError, match="share memory"):
            cache.get([key(1), key(2)], [twice, twice])
        with pytest.raises(polder.ArgumentError, match="the budget is"):
            kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="1MiB")
    with pytest.raises(polder.ClosedError):
        cache.lookup([])


def test_threads_of_a_process_share_a_cache(pool: polder.Pool) -> None:
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="1MiB") as cache:
        failed: list[BaseException] = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            try:
                for _ in range(300):
                    names = [dice.randrange(400) for _ in range(4)]
                    cache.put([key(name) for name in names], [block(name) for name in names])
                    found_by(cache, [dice.randrange(400) for _ in range(4)])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        stat = cache.stat()
        assert stat.hosts[0].evictions > 0


@pytest.mark.parametrize("coherence", ["software", "coherent"])
def test_no_kill_leaves_a_wrong_byte_or_takes_room_away(scratch: Path, coherence: str) -> None:
    """40 kills at random moments while four processes of two hosts put, get and evict."""
    dice = random.Random(1)
    hosts = [0, 0, 1, 1]
    with (
        polder.Pool(scratch / "pool", size="64MiB", host=0, coherence=coherence, run=scratch) as pool,
        contextlib.ExitStack() as all_ranks,
    ):
        kv.Cache(pool, "llm", identity={"model": "kills"}, block=BLOCK, budget="2MiB").close()

        def start(place: int, seed: int) -> Rank:
            arguments = [scratch / "pool", scratch, hosts[place], coherence, seed]
            rank = all_ranks.enter_context(Rank(RANKS / "kv_engine.py", *arguments))
            assert rank.stdout.readline() == "ready\n"
            return rank

        ranks = [start(place, place) for place in range(4)]
        for kill in range(40):
            place = dice.randrange(4)
            # As many calls of this process as it likes: the victim works meanwhile.
            with kv.Cache(pool, "llm", identity={"model": "kills"}, block=BLOCK) as cache:
                for _ in range(dice.randrange(30)):
                    found_by(cache, [dice.randrange(2000) for _ in range(4)])
            assert ranks[place].poll() is None, "it found a wrong byte, or failed"
            ranks[place].kill()
            ranks[place].wait()
            ranks[place] = start(place, 100 + kill)
        for rank in ranks:
            assert rank.poll() is None, "it found a wrong byte, or failed"
            rank.kill()
            rank.wait()
        # All of the dead one's slots are free again: a turn of puts finds as many places as there are.
        for host in (0, 1):
            with (
                polder.Pool(scratch / "pool", host=host, coherence=coherence, run=scratch) as again,
                kv.Cache(again, "llm", identity={"model": "kills"}, block=BLOCK) as cache,
            ):
                stat = cache.stat()
                assert stat.claimed <= stat.budget
                claimed = next(part.claimed for part in stat.hosts if part.host == host)
                slots = claimed // (BLOCK + 64)
                names = list(range(10_000 * (1 + host), 10_000 * (1 + host) + slots))
                put = cache.put([key(name) for name in names], [block(name) for name in names])
                assert put.stored == slots > 0, put
                assert found_by(cache, names) == names
        kv.remove(pool, "llm")
        assert pool.list() == []


def test_the_command_shows_and_removes_a_cache(scratch: Path) -> None:
    here = {"PATH": os.environ["PATH"], "POLDER_RUN": str(scratch)}

    def polder_says(*words: str) -> str:
        command = ["polder", "kv", *words, "--pool", str(scratch / "pool")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=here)
        return done.stdout + done.stderr

    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        assert polder_says("stat").endswith("no caches\n")
        with kv.Cache(pool, "llm", identity={"model": "a"}, block=BLOCK, budget="8MiB") as cache:
            cache.put([key(1), key(2)], [block(1), block(2)])
            said = polder_says("stat")
            assert said.startswith("cache llm: 2 blocks of 8.0 KiB; slabs take ")
            assert "host 0: 2 blocks, 2 put, 0 evicted" in said
            assert f"identity {cache.hash[:12]}: 2 blocks of 8.0 KiB: " in said
            assert '"claimed"' in polder_says("stat", "llm", "--json")
            assert "no cache" in polder_says("stat", "other")
            assert "is open in" in polder_says("flush", "llm")
        assert polder_says("flush", "llm").endswith("removed the cache llm\n")
        assert pool.list() == []
