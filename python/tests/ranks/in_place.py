"""One rank of a job that sends from one piece of MPI_Alloc_mem's memory again and again."""

import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size

BYTES = (16 << 20) + 100
memory = MPI.Alloc_mem(BYTES)
ours = np.frombuffer(memory, dtype=np.uint8)
came = np.zeros(BYTES, dtype=np.uint8)
pattern = (np.arange(BYTES) % 251).astype(np.uint8)
# Three of the five ranges are long enough.
for number, (begin, end) in enumerate([(0, BYTES), (64, 1 << 20), (1, BYTES - 1), (99, 200), (0, 16 << 20)]):
    ours[:] = pattern + np.uint8(rank + number)
    request = world.Isend(ours[begin:end], right, tag=number)
    world.Recv(came[begin:end], left, tag=number)
    request.Wait()
    if (came[begin:end] != (pattern + np.uint8(left + number))[begin:end]).any():
        # In one write, unlike a traceback: the other rank's goes to the same place.
        sys.exit(f"[{begin}, {end}) is not what rank {left} sent")
MPI.Free_mem(memory)
# Little and nothing is the library's.
for count in [0, 100, 100_000]:
    MPI.Free_mem(MPI.Alloc_mem(count))
print(f"{rank} is done", flush=True)
