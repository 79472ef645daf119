"""Groups: the numbers, the errors, the deaths."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import Ranks, in_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import polder

OPS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
DTYPES = [
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


def values(rank: int, count: int, dtype: str, seed: int) -> np.ndarray:
    """Small whole numbers, of which every sum and product is exact."""
    return np.random.default_rng([seed, rank]).integers(0, 4, count).astype(dtype)


def test_every_reduction_gives_what_numpy_gives_on_every_rank(scratch: Path) -> None:
    hosts = [0, 1]

    @settings(deadline=None, max_examples=60, derandomize=True, database=None)
    @given(
        count=st.integers(0, 3000) | st.integers(100_000, 300_000),
        dtype=st.sampled_from(DTYPES),
        op=st.sampled_from(list(OPS)),
        seed=st.integers(0, 1 << 20),
    )
    def holds(count: int, dtype: str, op: str, seed: int) -> None:
        group = groups.group
        everyone = [values(rank, count, dtype, seed) for rank in range(len(hosts))]
        expected = OPS[op].reduce(everyone, axis=0, dtype=dtype)
        mine = everyone[group.rank].copy()
        group.all_reduce(mine, op)
        assert (mine == expected).all()
        out = np.empty((len(hosts), count), dtype)
        group.all_gather(everyone[group.rank], out)
        assert (out == everyone).all()
        part = np.empty(count, dtype)
        group.reduce_scatter(np.concatenate([everyone[group.rank]] * len(hosts)), part, op)
        assert (part == expected).all()
        group.broadcast(out, root=1)
        mine = everyone[group.rank].copy()
        group.reduce(mine, op, root=1)
        assert (mine == (expected if group.rank == 1 else everyone[group.rank])).all()

    import threading

    groups = threading.local()

    def body(group: polder.Group) -> None:
        groups.group = group
        holds()

    in_ranks(scratch, hosts, "software", body)


@pytest.mark.parametrize(("hosts", "coherence"), [([0, 0, 0], "coherent"), ([0, 1, 0, 1], "software")])
def test_parts_travel_to_the_right_ranks(scratch: Path, hosts: list[int], coherence: str) -> None:
    size = len(hosts)

    def body(group: polder.Group) -> None:
        parts = np.array([10 * group.rank + to for to in range(size)], "int32")
        swapped = np.empty(size, "int32")
        group.all_to_all(parts, swapped)
        assert swapped.tolist() == [10 * source + group.rank for source in range(size)]
        gathered = np.empty((size, size), "int32") if group.rank == 2 else None
        group.gather(parts, gathered, root=2)
        if gathered is not None:
            assert gathered.tolist() == [[10 * source + to for to in range(size)] for source in range(size)]
        mine = np.empty(1, "int32")
        group.scatter(parts if group.rank == 1 else None, mine, root=1)
        assert mine[0] == 10 + group.rank
        whole = np.zeros(size, "int32")
        whole[group.rank] = group.rank + 1
        group.all_gather(whole[group.rank : group.rank + 1], whole)
        assert whole.tolist() == list(range(1, size + 1))
        group.barrier()

    in_ranks(scratch, hosts, coherence, body)


def test_bools_stay_bools_and_bits_combine(scratch: Path) -> None:
    def body(group: polder.Group) -> None:
        flags = np.array([group.rank == 0, True, False])
        group.all_reduce(flags)
        assert flags.tobytes() == b"\1\1\0"
        bits = np.array([1 << group.rank, 7], "uint16")
        group.all_reduce(bits, "xor")
        assert bits.tolist() == [3, 0]
        average = np.array([1 + group.rank], "float32")
        group.all_reduce(average, "average")
        assert average[0] == 1.5
        # Their sum does not fit.
        with pytest.raises(polder.errors.ArgumentError, match="the average of int8 is that of a sum, which wraps"):
            group.all_reduce(np.array([100], "int8"), "average")

    in_ranks(scratch, [0, 1], "software", body)


@pytest.mark.parametrize("coherence", ["coherent", "software"])
def test_objects_are_combined_where_they_lie(scratch: Path, coherence: str) -> None:
    def rank_body(rank: int) -> None:
        with (
            polder.Pool(scratch / "pool", size="128MiB", host=rank, coherence=coherence, run=scratch) as pool,
            polder.Group(pool, "/group", rank, 2, timeout=20) as group,
        ):
            mine = pool.create(f"/part-{rank}", shape=100_001, dtype="float32")
            with mine.write() as array:
                array[:] = rank + 1
            group.all_reduce(mine)
            with mine.read() as array:
                assert (array == 3).all()
            group.broadcast(mine, root=1)
            half = pool.create(f"/half-{rank}", shape=2, dtype="int64")
            with half.write() as array:
                array[rank] = rank + 5
            group.all_gather(half)
            with half.read() as array:
                assert array.tolist() == [5, 6]

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(rank_body, rank) for rank in range(2)]:
            future.result()


def test_an_object_of_another_pool_is_refused_and_nothing_is_overwritten(scratch: Path, pool: polder.Pool) -> None:
    with polder.Pool(scratch / "other", size="64MiB", run=scratch) as other, polder.Group(pool, "/g", 0, 1) as group:
        foreign = other.create("/foreign", shape=4, dtype="float32")
        for call in (group.all_reduce, group.broadcast, group.all_gather, group.reduce_scatter):
            with pytest.raises(polder.ArgumentError, match="/foreign was opened through another Pool than the group's"):
                call(foreign)
        group.all_reduce(pool.create("/own", shape=4, dtype="float32"))


@pytest.mark.parametrize("coherence", ["coherent", "software"])
def test_an_object_that_is_closed_while_a_collective_works_on_it_keeps_its_place_until_that_is_over(
    scratch: Path, coherence: str
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                polder.Pool(scratch / "pool", size="64MiB", host=host, coherence=coherence, run=scratch)
            )
            for host in range(2)
        ]
        joining = [threads.submit(polder.Group, pool, "/g", rank, 2, timeout=20) for rank, pool in enumerate(pools)]
        groups = [stack.enter_context(future.result()) for future in joining]
        parts = [pool.create(f"/part-{rank}", shape=1 << 19, dtype="float32") for rank, pool in enumerate(pools)]
        waiting = threads.submit(groups[0].all_reduce, parts[0])
        time.sleep(0.3)
        parts[0].close()
        pools[0].destroy("/part-0")
        others = [pools[0].create(f"/other-{index}", shape=1 << 18, dtype="float32") for index in range(8)]
        for other in others:
            with other.write() as array:
                array[:] = 7
        with parts[1].write() as array:
            array[:] = 1
        groups[1].all_reduce(parts[1])
        waiting.result()
        for other in others:
            with other.read() as array:
                assert (array == 7).all()
        with pytest.raises(polder.ClosedError, match="object is closed"):
            groups[0].all_reduce(parts[0])


def test_what_cannot_be_sent_is_refused_before_anything_moves(pool: polder.Pool) -> None:
    with polder.Group(pool, "/one", 0, 1) as group:
        for array, message in [
            (np.zeros(3, "complex64"), "cannot be sent"),
            (np.zeros(3, ">f4"), "cannot be sent"),
            (np.zeros((4, 4))[:, 1], "not contiguous"),
            (np.broadcast_to(np.zeros(1), 3), "not contiguous|read-only"),
            (b"bytes", "read-only"),
        ]:
            with pytest.raises(polder.ArgumentError, match=message):
                group.all_reduce(array)
        with pytest.raises(polder.ArgumentError, match='no operation "mean"'):
            group.all_reduce(np.zeros(3), "mean")
        with pytest.raises(polder.ArgumentError, match="root is 1"):
            group.broadcast(np.zeros(3), root=1)
        with pytest.raises(polder.ArgumentError, match="out has 16 bytes"):
            group.all_gather(np.zeros(3), np.zeros(2))
        with pytest.raises(TypeError):
            group.all_reduce([1, 2, 3])
        still = np.ones(3)
        group.all_reduce(still)
        assert still.tolist() == [1, 1, 1]


def test_calls_that_take_no_object_name_those_that_do(pool: polder.Pool) -> None:
    thing, array = pool.create("/x", shape=4, dtype="float32"), np.zeros(4, "float32")
    with polder.Group(pool, "/one", 0, 1) as group:
        for call in (
            lambda: group.reduce(thing),
            lambda: group.gather(thing, array),
            lambda: group.gather(array, thing),
            lambda: group.scatter(thing, array),
            lambda: group.all_to_all(thing, array),
            lambda: group.all_gather(thing, array),
            lambda: group.reduce_scatter(array, thing),
        ):
            with pytest.raises(polder.ArgumentError, match="all_reduce, broadcast, and without out all_gather"):
                call()


def test_a_group_that_cannot_be_is_refused_by_what_is_wrong_with_it(pool: polder.Pool) -> None:
    for rank, size, message in [
        (2, 2, "rank is 2 of 2; ranks count from 0 to one less than the size"),
        (0, 0, "size is 0; a group has 1 to 4096 ranks"),
        (0, 5000, "size is 5000; a group has 1 to 4096 ranks"),
        (-1, 2, "rank is -1; give a whole number from 0 to 4294967295"),
        (0, 1 << 70, f"size is {1 << 70}; give a whole number from 0 to 4294967295"),
        ("first", 1, "rank is 'first'; give a whole number from 0 to 4294967295"),
    ]:
        with pytest.raises(polder.ArgumentError) as caught:
            polder.Group(pool, "/g", rank, size)  # type: ignore[arg-type]
        assert str(caught.value) == message
    with pytest.raises(polder.PeerTimeoutError, match="rank 1 has not come to group /g within 100 ms"):
        polder.Group(pool, "/g", 0, 2, timeout=0.1)
    with polder.Group(pool, "/g", 0, 1) as group:
        with pytest.raises(polder.NameExistsError, match=f"rank 0 of group /g is taken by host 0 pid {os.getpid()}"):
            polder.Group(pool, "/g", 0, 1)
        with pytest.raises(polder.ArgumentError, match="root is -1; give a whole number"):
            group.broadcast(np.zeros(3), root=-1)
        with pytest.raises(polder.ArgumentError, match="and of float32; floats have sum, product, min, max"):
            group.all_reduce(np.zeros(3, "float32"), "and")
        with pytest.raises(polder.ArgumentError, match="elements of float64 and out of float32; both need the same"):
            group.all_to_all(np.zeros(2), np.zeros(4, "float32"))


def test_ranks_that_call_different_operations_are_told(scratch: Path) -> None:
    def body(group: polder.Group) -> None:
        with pytest.raises(polder.MismatchError, match="every rank must call the same"):
            group.all_reduce(np.zeros(3 + group.rank, "float32"))
        with pytest.raises(polder.BrokenError) as caught:
            group.barrier()
        assert isinstance(caught.value.__cause__, polder.MismatchError)

    in_ranks(scratch, [0, 1], "software", body)


def test_a_difference_in_the_last_operation_does_not_pass_in_silence(scratch: Path) -> None:
    """200 rounds, in about one of which neither rank sees the other's operation before it leaves the group."""
    with contextlib.ExitStack() as open_pools, ThreadPoolExecutor(2) as threads:
        options = {"size": "64MiB", "coherence": "software", "run": scratch}
        pools = [open_pools.enter_context(polder.Pool(scratch / "pool", host=host, **options)) for host in (0, 1)]

        def differ(rank: int) -> bool:
            group = polder.Group(pools[rank], "/last", rank, 2, timeout=20)
            try:
                # Both are roots, and need nothing of each other.
                group.broadcast(np.zeros(3), root=rank)
                group.close()
            except polder.MismatchError:
                group.close()
                return True
            return False

        assert all(any(threads.map(differ, (0, 1))) for _ in range(200))


def test_a_rank_that_does_not_come_is_a_timeout(scratch: Path) -> None:
    with (
        polder.Pool(scratch / "pool", size="64MiB", host=0, run=scratch) as one,
        polder.Pool(scratch / "pool", host=1, run=scratch) as two,
    ):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as threads:
            joining = [
                threads.submit(polder.Group, pool, "/g", rank, 2, timeout=0.5) for rank, pool in enumerate((one, two))
            ]
            groups = [future.result() for future in joining]
        began = time.monotonic()
        with pytest.raises(polder.PeerTimeoutError, match=r"no answer from rank 1 \(host 1, pid ") as caught:
            groups[0].barrier()
        assert isinstance(caught.value, TimeoutError)
        assert 0.4 < time.monotonic() - began < 5
        for group in groups:
            group.close()


@pytest.mark.parametrize("coherence", ["coherent", "software"])
def test_a_rank_killed_in_an_all_reduce_is_named_by_the_survivors(scratch: Path, coherence: str) -> None:
    with Ranks("endless.py", 3, scratch, 3, coherence) as ranks:
        assert ranks.processes[0].stdout
        assert ranks.processes[0].stdout.readline() == "going\n"
        time.sleep(0.3)
        killed = ranks.processes[2]
        killed.send_signal(signal.SIGKILL)
        began = time.monotonic()
        outputs = [process.communicate(timeout=20)[0] for process in ranks.processes[:2]]
        assert time.monotonic() - began < 5
        for output in outputs:
            assert output.splitlines()[-1] == f"PeerDeadError 2 {killed.pid} True", output


def test_ctrl_c_ends_a_wait(scratch: Path) -> None:
    with Ranks("endless.py", 2, scratch, 2, "coherent", "stop") as ranks:
        first, second = ranks.processes
        assert first.stdout
        assert first.stdout.readline() == "going\n"
        time.sleep(0.3)
        first.send_signal(signal.SIGINT)
        assert first.communicate(timeout=10)[0].splitlines()[-1] == "KeyboardInterrupt"
        second.kill()


def test_a_group_that_is_not_closed_leaves_when_it_is_forgotten(pool: polder.Pool) -> None:
    group = polder.Group(pool, "/forgotten", 0, 1)
    group.barrier()
    assert len(pool.list()) == 1
    del group
    assert pool.list() == []


def test_ctrl_c_ends_the_wait_for_a_rank_that_does_not_come(scratch: Path) -> None:
    with Ranks("endless.py", 1, scratch, 2, "coherent") as ranks:
        time.sleep(1.5)
        ranks.processes[0].send_signal(signal.SIGINT)
        assert ranks.processes[0].communicate(timeout=10)[0].splitlines()[-1] == "KeyboardInterrupt"


def test_objects_and_groups_keep_a_closed_pool_attached(scratch: Path) -> None:
    pool = polder.Pool(scratch / "pool", size="64MiB", run=scratch)
    thing = pool.create("/x", shape=3, dtype="float32")
    group = polder.Group(pool, "/g", 0, 1)
    pool.close()
    with thing.write() as array:
        array[:] = 2
    group.all_reduce(thing)
    with thing.read() as array:
        assert array.tolist() == [2, 2, 2]
    group.close()
    with pytest.raises(polder.ClosedError, match="group is closed"):
        group.barrier()
