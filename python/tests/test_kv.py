"""The cache of keys and values."""

import contextlib
import hashlib
import os
import random
import select
import subprocess
import threading
import urllib.request
from pathlib import Path

import numpy as np
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
    # A reader with either would meet blocks of the other.
    for identity, why in [
        ({1: "a"}, "the name 1"),
        ({"a": {1: 2}}, "'a' by a dict"),
        ({"block_bytes": 1}, "leave it out"),
    ]:
        with pytest.raises(polder.ArgumentError, match=why):
            kv.Cache(pool, "llm", identity=identity, block=BLOCK)  # type: ignore[arg-type]
    for size in (1.5, "64", float("nan"), None, True, 0, -1):
        with pytest.raises(polder.ArgumentError, match=r"block is .*; give a whole number of bytes from 1 on"):
            kv.Cache(pool, "llm", identity={}, block=size)  # type: ignore[arg-type]
    with pytest.raises(polder.ArgumentError, match="identity is a list; give a mapping"):
        kv.Cache(pool, "llm", identity=[("model", "tiny")], block=BLOCK)  # type: ignore[arg-type]
    with pytest.raises(polder.ArgumentError, match="budget is True; give a number of bytes"):
        kv.Cache(pool, "llm", identity={}, block=BLOCK, budget=True)
    assert kv.describe({"layers": np.int64(3)}) == kv.describe({"layers": 3}) != kv.describe({"layers": True})
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


def test_memory_of_python_objects_is_neither_stored_nor_filled(pool: polder.Pool) -> None:
    objects = [np.full(BLOCK // 8, None), np.zeros(BLOCK // 16, dtype=[("a", "i8"), ("b", "O")])]
    numbers = np.zeros(BLOCK // 8, dtype=[("O", "i4"), ("NO", "f4")])
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="1MiB") as cache:
        cache.put([key(1)], [block(1)])
        for call in (cache.put, cache.get, cache.submit_put, cache.submit_get):
            for array in objects:
                with pytest.raises(polder.ArgumentError, match="references to Python objects"):
                    call([key(1)], [array])
        assert cache.get([key(1)], [numbers]) == [True] and numbers.tobytes() == block(1)


def test_the_first_two_of_many_outputs_that_overlap_are_named(pool: polder.Pool) -> None:
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="1MiB") as cache:
        rows = list(np.zeros((1000, BLOCK), dtype=np.uint8))
        assert cache.get([key(1)] * 1000, rows) == [False] * 1000
        rows[7] = rows[900][:]
        with pytest.raises(polder.ArgumentError, match="outputs 7 and 900 that share"):
            cache.get([key(1)] * 1000, rows)


def test_a_cache_that_was_removed_takes_no_block_for_the_next_of_its_name(pool: polder.Pool) -> None:
    identity = {"model": "a"}
    gone = kv.Cache(pool, "llm", identity=identity, block=BLOCK, budget="1MiB")
    gone.put([key(1)], [block(1)])
    kv.remove(pool, "llm")
    with gone, kv.Cache(pool, "llm", identity=identity, block=BLOCK, budget="1MiB") as anew:
        anew.put([key(2)], [block(2)])
        for call in (lambda: gone.put([key(3)], [block(3)]), gone.retire):
            with pytest.raises(polder.NotFoundError):
                call()
        assert found_by(anew, [1, 2, 3]) == [2]


def test_jobs_end_in_the_order_of_their_lane_and_a_descriptor_says_so(pool: polder.Pool) -> None:
    with kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="8MiB") as cache:
        told = select.poll()
        told.register(cache.event_fd(), select.POLLIN)
        assert cache.drain() == [] and told.poll(0) == []
        names = range(200)
        puts = [cache.submit_put([key(name)], [block(name)]) for name in names]
        assert told.poll(60_000)
        ended = cache.drain(wait=True)
        assert [result.job for result in ended] == puts
        assert {(result.put, result.error, result.found) for result in ended} == {(kv.Put(1, 0, 0), None, None)}
        assert told.poll(0) == [] and cache.drain(wait=True) == []
        buffers = [bytearray(BLOCK) for _ in range(3)]
        get = cache.submit_get([key(1), key(2), key(1000)], buffers)
        wrong = cache.submit_put([key(1)], [bytes(100)])
        done = {result.job: result for result in cache.drain(wait=True)}
        assert done[get].found == [True, True, False] and done[get].seconds > 0
        assert buffers[:2] == [block(1), block(2)]
        assert isinstance(done[wrong].error, polder.ArgumentError) and "100 bytes" in str(done[wrong].error)
        # What they were lent is the program's again.
        buffers[0].clear()


def test_what_a_job_has_is_lent_until_it_is_told_of_and_a_close_lets_it_end(pool: polder.Pool) -> None:
    cache = kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="8MiB")
    lent = bytearray(block(1))
    cache.submit_put([key(1)], [lent])
    with pytest.raises(BufferError):
        lent.clear()
    with pytest.raises(polder.ArgumentError, match="read-only"):
        cache.submit_get([key(1)], [bytes(BLOCK)])
    with pytest.raises(polder.ArgumentError, match="share memory"):
        cache.submit_get([key(1), key(2)], [lent, lent])
    cache.close()
    lent.clear()
    with pytest.raises(polder.ClosedError):
        cache.drain()
    with kv.Cache(pool, "llm", identity={}, block=BLOCK) as again:
        assert found_by(again, [1]) == [1]


def test_an_identity_that_is_retired_is_described_no_more(pool: polder.Pool) -> None:
    def described() -> list[str]:
        return [it.name for it in pool.list("/kv/llm/id/")]

    with (
        kv.Cache(pool, "llm", identity={"weights": "known"}, block=BLOCK, budget="8MiB"),
        kv.Cache(pool, "llm", identity={"weights": "unknown"}, block=BLOCK) as cache,
    ):
        assert len(described()) == 2
        cache.put([key(1)], [block(1)])
        cache.retire()
        cache.retire()
        assert len(described()) == 1
        assert found_by(cache, [1]) == [1]


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
        # A process that died while it asked for a slab has claimed it: its host's next put takes that back.
        with contextlib.ExitStack() as all_caches:
            caches: list[kv.Cache] = []
            for host in (0, 1):
                again = polder.Pool(scratch / "pool", host=host, coherence=coherence, run=scratch)
                all_caches.enter_context(again)
                cache = kv.Cache(again, "llm", identity={"model": "kills"}, block=BLOCK)
                caches.append(all_caches.enter_context(cache))
                assert cache.put([key(5000 + host)], [block(5000 + host)]).stored == 1
            # All of the dead ones' slots are free again: a turn of puts finds as many places as there are.
            for host, cache in enumerate(caches):
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
        assert all(polder_says(word).endswith("no caches\n") for word in ("stat", "check"))
        with kv.Cache(pool, "llm", identity={"model": "a"}, block=BLOCK, budget="8MiB") as cache:
            cache.put([key(1), key(2)], [block(1), block(2)])
            text = polder_says("stat")
            assert text.startswith("cache llm: 2 blocks of 8.0 KiB; slabs take ")
            assert "host 0: 2 blocks, 2 put, 0 evicted" in text
            assert f"identity {cache.hash[:12]}: 2 blocks of 8.0 KiB: " in text
            assert '"claimed"' in polder_says("stat", "llm", "--json")
            assert "no cache" in polder_says("stat", "other") and "no cache" in polder_says("check", "other")
            assert polder_says("check") == "cache llm: 2 blocks, 0 of them read; 0 damaged\n"
            assert "is open in" in polder_says("flush", "llm")
        assert polder_says("flush", "llm").endswith("removed the cache llm\n")
        assert pool.list() == []


def test_a_damaged_block_is_named_by_slab_and_slot_and_is_a_miss(scratch: Path) -> None:
    here = {"PATH": os.environ["PATH"], "POLDER_RUN": str(scratch)}
    command = ["polder", "kv", "check", "--pool", str(scratch / "pool")]

    def check() -> tuple[int, str]:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=here)
        return done.returncode, done.stdout

    with (
        polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool,
        kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="8MiB", verify=True) as cache,
    ):
        cache.put([key(1), key(2)], [block(1), block(2)])
        assert check() == (0, "cache llm: 2 blocks, 2 of them read; 0 damaged\n")
        with (scratch / "pool").open("r+b") as file:
            bytes_there = file.read()
            file.seek(bytes_there.index(block(2)) + 100)
            file.write(b"damage")
        code, text = check()
        assert code == 1
        assert "2 blocks, 2 of them read; 1 damaged" in text
        assert "slab 0/0 slot 1 at offset 0x" in text and "does not match its checksum" in text
        assert found_by(cache, [1, 2]) == [1]


def test_prometheus_and_top_see_what_a_cache_holds(scratch: Path) -> None:
    here = {"PATH": os.environ["PATH"], "POLDER_RUN": str(scratch)}

    def started(*words: str) -> subprocess.Popen[str]:
        command = ["polder", "kv", *words, "--pool", str(scratch / "pool")]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=here)

    with (
        polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool,
        kv.Cache(pool, "llm", identity={}, block=BLOCK, budget="8MiB") as cache,
    ):
        cache.put([key(1), key(2)], [block(1), block(2)])
        with started("metrics", "--listen", "127.0.0.1:0") as serving:
            assert serving.stderr
            address = serving.stderr.readline().split()[-1]
            text = urllib.request.urlopen(address, timeout=60).read().decode()
            (scratch / "pool").rename(scratch / "away")
            assert "looking again every 5 s" in serving.stderr.readline()
            while_away = urllib.request.urlopen(address, timeout=60).read().decode()
            (scratch / "away").rename(scratch / "pool")
            serving.terminate()
        assert serving.returncode == 0
        assert while_away.endswith("polder_kv_up 0\n# EOF\n")
        assert "polder_kv_puts" not in while_away
        assert 'polder_kv_puts_total{cache="llm",host="0"} 2\n' in text
        assert f'polder_kv_bytes{{cache="llm",identity="{cache.hash}"}} {2 * BLOCK}\n' in text
        with started("top") as shown:
            assert shown.stdout
            lines = [shown.stdout.readline() for _ in range(7)]
            shown.terminate()
        assert lines[0].startswith("cache llm: 2 blocks of 8.0 KiB")
        assert "  0 put/s, 0 evicted/s, 0 hits/s\n" in lines
    with started("metrics", "--listen", "0.0.0.0:0") as refused:
        assert "127.0.0.1" in refused.communicate(timeout=60)[1]
