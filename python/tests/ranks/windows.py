"""One rank of a job that does what MPI says of windows, on memory of the pool, and reports MODEL."""

import os
import sys
import traceback

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, ranks = world.rank, world.size
right, left = (rank + 1) % ranks, (rank - 1) % ranks
WORD = MPI.INT64_T
ITEM = WORD.Get_size()


def allocate(count: int) -> tuple[MPI.Win, np.ndarray]:
    window = MPI.Win.Allocate(count * ITEM, ITEM, comm=world)
    return window, np.frombuffer(window, dtype=np.int64)


kept: list[np.ndarray] = []


def words(*values: int) -> np.ndarray:
    """Numbers that stay where they are, as MPI asks for until an operation is over."""
    kept.append(np.array(values, dtype=np.int64))
    return kept[-1]


def expect(seen: object, wanted: object) -> None:
    np.testing.assert_array_equal(np.asarray(seen), np.asarray(wanted))


def attributes() -> None:
    window, memory = allocate(4 + rank)
    expect(window.flavor, MPI.WIN_FLAVOR_ALLOCATE)
    expect(window.model, MPI.WIN_SEPARATE if os.environ["MODEL"] == "separate" else MPI.WIN_UNIFIED)
    expect((len(memory), window.Get_attr(MPI.WIN_DISP_UNIT)), (4 + rank, ITEM))
    window.Set_name("a name")
    assert window.Get_name() == "a name"
    group = window.Get_group()
    expect(group.size, ranks)
    group.Free()
    window.Free()


def fence() -> None:
    window, memory = allocate(8 * ranks)
    for turn in range(20):
        memory[:] = -1
        window.Fence()
        for target in range(ranks):
            mine = words(*(np.arange(8) + 1000 * rank + turn))
            window.Put(mine, target, 8 * rank)
        window.Fence()
        for origin in range(ranks):
            expect(memory[8 * origin : 8 * origin + 8], np.arange(8) + 1000 * origin + turn)
        got = np.zeros(8, dtype=np.int64)
        window.Get(got, right, 8 * left)
        window.Fence(MPI.MODE_NOSUCCEED)
        expect(got, np.arange(8) + 1000 * left + turn)
    window.Free()


def bytes_side_by_side() -> None:
    """Every rank puts single bytes between those of the others."""
    window = MPI.Win.Allocate(64 * ranks, 1, comm=world)
    memory = np.frombuffer(window, dtype=np.uint8)
    memory[:] = 0
    window.Fence()
    mine = np.array([rank + 1], dtype=np.uint8)
    for target in range(ranks):
        for index in range(64):
            window.Put([mine, 1, MPI.BYTE], target, index * ranks + rank)
    window.Fence()
    expect(memory, [origin + 1 for _ in range(64) for origin in range(ranks)])
    window.Free()


def post_start_complete_wait() -> None:
    window, memory = allocate(2)
    everybody = world.Get_group()
    towards, behind = everybody.Incl([right]), everybody.Incl([left])
    for turn in range(50):
        memory[:] = (rank, -turn)
        window.Post(behind)
        window.Start(towards)
        seen = np.zeros(1, dtype=np.int64)
        window.Get(seen, right, 0)
        window.Put(words(1000 * turn + rank), right, 1)
        window.Complete()
        expect(seen, [right])
        if turn % 2:
            window.Wait()
        else:
            while not window.Test():
                pass
        expect(memory, (rank, 1000 * turn + left))
    for group in (everybody, towards, behind):
        group.Free()
    window.Free()


def counters() -> None:
    """Each rank adds to the counter of rank 0 under its lock, and without one by fetch_and_op."""
    window, memory = allocate(3)
    window.Lock(rank)
    memory[:] = 0
    window.Unlock(rank)
    world.Barrier()
    for _ in range(50):
        value = np.zeros(1, dtype=np.int64)
        window.Lock(0, MPI.LOCK_EXCLUSIVE)
        window.Get(value, 0, 0)
        window.Flush(0)
        window.Put(words(value[0] + 1), 0, 0)
        window.Unlock(0)
    seen = []
    window.Lock_all()
    one, old = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for _ in range(50):
        window.Fetch_and_op(one, old, 0, 1, MPI.SUM)
        window.Flush(0)
        seen.append(int(old[0]))
    # A lock of the program's own, by compare and swap.
    for _ in range(10):
        while True:
            window.Compare_and_swap(words(rank + 1), words(0), old, 0, 2)
            window.Flush(0)
            if old[0] == 0:
                break
        window.Fetch_and_op(words(0), old, 0, 2, MPI.REPLACE)
        window.Flush(0)
        expect(old, [rank + 1])
    window.Unlock_all()
    tickets = [ticket for tickets in world.allgather(seen) for ticket in tickets]
    expect(sorted(tickets), range(50 * ranks))
    window.Lock(rank, MPI.LOCK_SHARED)
    if rank == 0:
        expect(memory, (50 * ranks, 50 * ranks, 0))
    window.Unlock(rank)
    window.Free()


def polling() -> None:
    """What is put and flushed is seen by a target that synchronises its own copies."""
    window, memory = allocate(1)
    memory[:] = 0
    window.Lock_all()
    window.Sync()
    world.Barrier()
    window.Put(words(7 + rank), right, 0)
    window.Flush(right)
    while memory[0] != 7 + left:
        window.Sync()
    window.Unlock_all()
    window.Free()


def datatypes() -> None:
    """A column is put into a row, and got back by way of a part of an array."""
    window, memory = allocate(36)
    memory[:] = 0
    column = WORD.Create_vector(6, 1, 6)
    pairs = WORD.Create_indexed([2, 1, 3], [30, 10, 20])
    rows = WORD.Create_subarray([6, 6], [2, 3], [1, 2])
    struct = MPI.Datatype.Create_struct([2, 4], [0, 48], [WORD, WORD])
    nested = column.Create_resized(0, ITEM)
    grid = [MPI.DISTRIBUTE_CYCLIC, MPI.DISTRIBUTE_BLOCK], [1, MPI.DISTRIBUTE_DFLT_DARG], [2, 2]
    dealt = WORD.Create_darray(4, 2, [6, 6], *grid)
    kinds = [column, pairs, rows, struct, nested, dealt]
    for kind in kinds:
        kind.Commit()
    matrix = np.arange(36, dtype=np.int64).reshape(6, 6) + 100 * rank
    theirs = np.arange(36, dtype=np.int64).reshape(6, 6) + 100 * left
    window.Fence()
    window.Put([matrix, 1, column], right, (12, 6, WORD))
    window.Fence()
    expect(memory[12:18], theirs[:, 0])
    expect(memory.sum(), theirs[:, 0].sum())
    window.Fence()
    window.Put([matrix, 6, WORD], right, (0, 1, pairs))
    window.Fence()
    expect(memory[[30, 31, 10, 20, 21, 22]], theirs.ravel()[:6])
    back = np.zeros((6, 6), dtype=np.int64)
    window.Get([back, 1, rows], right, (0, 1, struct))
    window.Fence()
    want = np.zeros(36, dtype=np.int64)
    want[[8, 9, 10, 14, 15, 16]] = world.sendrecv(memory[[0, 1, 6, 7, 8, 9]].copy(), left, source=right)
    expect(back.ravel(), want)
    window.Fence()
    window.Put([matrix, 9, WORD], right, (0, 1, dealt))
    window.Fence()
    expect(memory.reshape(6, 6)[1::2, :3].ravel(), theirs.ravel()[:9])
    window.Fence()
    # A matrix, turned over: six columns, one after another.
    window.Put([matrix, 36, WORD], right, (0, 6, nested))
    window.Fence()
    expect(memory.reshape(6, 6), theirs.T)
    for kind in kinds:
        kind.Free()
    window.Free()


def bytes_between_parts() -> None:
    """What lies between the parts of a datatype stays as it is, and a type of no parts moves nothing."""
    pair = np.dtype([("value", np.int16), ("gap", np.uint16), ("index", np.int32)])
    window = MPI.Win.Allocate(3 * pair.itemsize, pair.itemsize, comm=world)
    memory = np.frombuffer(window, dtype=pair)
    several = MPI.SHORT_INT.Create_contiguous(2).Commit()
    nothing = MPI.Datatype.Create_struct([], [], []).Commit()
    for kind, count in ((MPI.SHORT_INT, 2), (several, 1)):
        memory[:] = (1, 0xAAAA, 100)
        mine = np.array([(rank + 2, 0xBBBB, 7), (rank + 3, 0xBBBB, 8)], dtype=pair)
        window.Fence()
        window.Put([mine, count, kind], right, (0, count, kind))
        window.Fence()
        expect(memory.tolist(), [(left + 2, 0xAAAA, 7), (left + 3, 0xAAAA, 8), (1, 0xAAAA, 100)])
        got = np.array([(0, 0xCCCC, 0)] * 2, dtype=pair)
        window.Get([got, count, kind], right, (1, count, kind))
        window.Fence()
        expect(got.tolist(), [(rank + 3, 0xCCCC, 8), (1, 0xCCCC, 100)])
        window.Accumulate([mine, count, kind], right, (1, count, kind), MPI.MAXLOC)
        window.Fence()
        expect(memory["value"], (left + 2, left + 3, left + 3))
        expect(memory["gap"], [0xAAAA] * 3)
        expect(memory["index"], (7, 8, 8))
        window.Fence()
        window.Get_accumulate([mine, count, kind], [got, count, kind], right, (1, count, kind), MPI.REPLACE)
        window.Fence()
        expect(got.tolist(), [(rank + 3, 0xCCCC, 8), (rank + 3, 0xCCCC, 8)])
        expect(memory["gap"], [0xAAAA] * 3)
        expect(memory["value"][1:], (left + 2, left + 3))
    window.Fence()
    # As many bytes as the parts have, without the gap.
    window.Put([np.arange(6, dtype=np.uint8), 6, MPI.BYTE], right, (0, 1, MPI.SHORT_INT))
    window.Fence()
    expect(list(memory[:1].tobytes()), [0, 1, 0xAA, 0xAA, 2, 3, 4, 5])
    for count in (0, 1, 2):
        window.Put([mine, count, nothing], right, (0, count, nothing))
        window.Accumulate([mine, count, nothing], right, (0, count, nothing))
    window.Fence()
    several.Free()
    nothing.Free()
    window.Free()


def attributes_of_the_communicator() -> None:
    """A window copies the attributes of its communicator as often as the library does, at most once."""
    copies = []
    key = MPI.Comm.Create_keyval(copy_fn=lambda _comm, _key, value: copies.append(value) or value)
    own = world.Dup()
    own.Set_attr(key, "an attribute")
    window = MPI.Win.Allocate(8, 1, comm=own)
    assert len(copies) <= 1, copies
    window.Free()
    own.Free()
    MPI.Comm.Free_keyval(key)


def ranks_of_two_groups() -> None:
    """The ranks of one group hear nothing of the hosts of the other."""
    half = world.Split(min(rank, 1), rank)
    both = half.Create_intercomm(0, world, 1 if rank == 0 else 0)
    try:
        both.Split_type(MPI.COMM_TYPE_SHARED).Free()
    except MPI.Exception as error:
        # Some libraries have no such split.
        assert error.Get_error_class() in (MPI.ERR_COMM, MPI.ERR_ARG, MPI.ERR_UNSUPPORTED_OPERATION), error
    both.Free()
    half.Free()


def accumulates() -> None:
    window, memory = allocate(6)
    memory[:] = (0, 1, 100, 0, 5, 5)
    window.Fence()
    for target in range(ranks):
        window.Accumulate(words(rank + 1), target, 0)
        window.Accumulate(words(rank + 2), target, 1, MPI.PROD)
        window.Accumulate(words(rank), target, 2, MPI.MIN)
        window.Accumulate(words(1 << rank), target, 3, MPI.BOR)
    window.Fence()
    expect(memory[:4], (sum(range(1, ranks + 1)), np.prod(range(2, ranks + 2)), 0, (1 << ranks) - 1))
    old = np.zeros(2, dtype=np.int64)
    window.Get_accumulate(words(0, 0), old, right, 4, MPI.NO_OP)
    window.Fence()
    expect(old, (5, 5))
    window.Free()
    pair = np.dtype([("value", np.float64), ("index", np.int32)], align=True)
    window = MPI.Win.Allocate(2 * pair.itemsize, pair.itemsize, comm=world)
    places = np.frombuffer(window, dtype=pair)
    places[:] = (-1, -1)
    window.Fence()
    mine = np.array([((rank + 1) % ranks, rank), (rank % 2, rank)], dtype=pair)
    for target in range(ranks):
        window.Accumulate([mine, 2, MPI.DOUBLE_INT], target, (0, 2, MPI.DOUBLE_INT), MPI.MAXLOC)
    window.Fence()
    best = max((rank % 2, -rank) for rank in range(ranks))
    expect([tuple(place) for place in places], [(ranks - 1, (ranks - 2) % ranks), (best[0], -best[1])])
    window.Free()


def requests() -> None:
    window, memory = allocate(2)
    memory[:] = rank
    window.Lock_all()
    window.Sync()
    world.Barrier()
    got = np.zeros(1, dtype=np.int64)
    window.Rget(got, right, 0).Wait()
    expect(got, [right])
    world.Barrier()
    request = window.Rput(words(40 + rank), right, 1)
    MPI.Request.Waitall([request, window.Raccumulate(words(2), left, 0)])
    window.Flush_all()
    world.Barrier()
    window.Sync()
    expect(memory, (rank + 2, 40 + left))
    window.Unlock_all()
    window.Free()


def shared() -> None:
    window = MPI.Win.Allocate_shared(64 * ITEM, ITEM, comm=world)
    expect(window.flavor, MPI.WIN_FLAVOR_SHARED)
    mine, _ = window.Shared_query(rank)
    memory = np.frombuffer(mine, dtype=np.int64)
    window.Lock_all()
    memory[:] = np.arange(64) + 100 * rank
    window.Sync()
    world.Barrier()
    window.Sync()
    parts = [window.Shared_query(other) for other in range(ranks)]
    for other, (part, unit) in enumerate(parts):
        expect((unit, part.nbytes), (ITEM, 64 * ITEM))
        expect(np.frombuffer(part, dtype=np.int64), np.arange(64) + 100 * other)
    # One part follows the other.
    expect(np.diff([MPI.Get_address(part) for part, _ in parts]), [64 * ITEM] * (ranks - 1))
    world.Barrier()
    np.frombuffer(parts[right][0], dtype=np.int64)[:] = rank
    window.Sync()
    world.Barrier()
    window.Sync()
    expect(memory, [left] * 64)
    window.Unlock_all()
    window.Free()


def mistakes() -> None:
    window, _ = allocate(4)
    window.Set_errhandler(MPI.ERRORS_RETURN)
    word = memoryview(bytearray(8))
    for mistake in (
        lambda: window.Put(np.zeros(2, dtype=np.int64), right, 3),
        lambda: window.Put(np.zeros(1, dtype=np.int64), ranks, 0),
        # Places and lengths that are inside once they have wrapped round.
        lambda: window.Put(np.zeros(1, dtype=np.int64), right, 1 << 61),
        lambda: window.Get(np.zeros(1, dtype=np.int64), right, (1 << 61) + 1),
        lambda: window.Accumulate(np.zeros(1, dtype=np.int64), right, 1 << 61),
        lambda: window.Put([word, (1 << 61) + 1, WORD], right, (0, (1 << 61) + 1, WORD)),
        lambda: window.Put([word, (1 << 61) + 1, WORD], right, (0, 1, WORD)),
        lambda: window.Unlock(right),
    ):
        try:
            mistake()
        except MPI.Exception:
            continue
        raise AssertionError("a mistake was not noticed")
    window.Put(np.zeros(1, dtype=np.int64), MPI.PROC_NULL, 0)
    window.Free()


def others() -> None:
    """Windows over the program's own memory stay with the library."""
    memory = np.zeros(1, dtype=np.int64)
    window = MPI.Win.Create(memory, ITEM, comm=world)
    window.Fence()
    window.Put(words(rank), right, 0)
    window.Fence()
    expect(memory, [left])
    window.Free()


for part in (
    attributes,
    fence,
    bytes_side_by_side,
    post_start_complete_wait,
    counters,
    polling,
    datatypes,
    bytes_between_parts,
    attributes_of_the_communicator,
    ranks_of_two_groups,
    accumulates,
    requests,
    shared,
    mistakes,
    others,
):
    try:
        part()
    except Exception:
        traceback.print_exc()
        world.Abort(1)
    world.Barrier()
sys.stdout.write(f"rank {rank} of {ranks} is done\n")
