"""One rank of an MPI job: messages of every size, from anybody, in order, probed, and in collectives."""

import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size

for count in [0, 1, 8, 16, 17, 1000, 65536, 65537, 3_000_000]:
    sent = np.arange(count, dtype=np.uint64).view(np.uint8)[:count] + np.uint8(rank)
    came = np.zeros(count, dtype=np.uint8)
    request = world.Isend(sent, right, tag=count % 100)
    world.Recv(came, left, tag=count % 100)
    request.Wait()
    assert (came == sent - np.uint8(rank) + np.uint8(left)).all(), f"{count} bytes"

# What nobody receives yet is in no other message's way.
requests = [world.isend((number, "x" * (number % 3 * 40_000)), right, tag=1) for number in range(30)]
world.send("first", right, tag=2)
assert world.recv(source=left, tag=2) == "first"
status = MPI.Status()
world.Probe(MPI.ANY_SOURCE, 1, status)
assert status.source == left
assert [world.recv(source=MPI.ANY_SOURCE, tag=1)[0] for _ in range(30)] == list(range(30))
MPI.Request.waitall(requests)

total = np.zeros(100_000)
world.Allreduce(np.full(100_000, rank + 1.0), total)
assert (total == size * (size + 1) / 2).all()
assert world.alltoall([(rank, other) for other in range(size)]) == [(other, rank) for other in range(size)]
# Windows: short and long puts, gets, and accumulates and a counter that all add to.
memory = np.zeros(200_001, dtype=np.int64)
window = MPI.Win.Create(memory, 8, comm=world)
for count in [1, 100, 200_000]:
    sent = np.full(count, rank + count)
    window.Fence()
    window.Put(sent, right)
    window.Fence()
    assert (memory[:count] == left + count).all(), f"{count} words put"
    came = np.zeros(count, dtype=np.int64)
    window.Get(came, right)
    window.Fence()
    assert (came == rank + count).all(), f"{count} words got"
window.Lock_all()
before = np.zeros(1, dtype=np.int64)
for _ in range(20):
    window.Fetch_and_op(np.ones(1, dtype=np.int64), before, 0, 200_000, MPI.SUM)
    window.Flush(0)
ones = np.ones(1000, dtype=np.int64)
window.Accumulate(ones, 0, 0)
window.Unlock_all()
world.barrier()
if rank == 0:
    window.Lock(0)
    assert memory[200_000] == 20 * size
    assert (memory[:1000] == left + 200_000 + size).all()
    window.Unlock(0)
window.Free()
sys.stdout.write(f"rank {rank} of {size} is done\n")
