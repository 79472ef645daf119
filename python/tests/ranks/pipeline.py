"""One rank of an MPI job that looks for long messages before it receives them, as MPICH's pipeline may carry them."""

import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
other = 1 - world.rank
sizes = [1, 16_384, 16_385, 100_000, 3_000_000]


def message(size: int) -> np.ndarray:
    return (np.arange(size) * 31 + size).astype(np.uint8)


for turn in range(2):
    if world.rank == turn:
        for size in sizes:
            world.Send(message(size), other, size)
        world.Barrier()
        sends = [world.Issend(message(size), other, size) for size in sizes]
        MPI.Request.Waitall(sends)
        continue
    for number, size in enumerate(sizes):
        status = MPI.Status()
        if number % 2:
            world.Probe(other, MPI.ANY_TAG, status)
            came = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            world.Recv(came, other, status.Get_tag())
        else:
            found = world.Mprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            came = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            found.Recv(came)
        assert (came == message(size)).all(), f"a message of {size} bytes is not what was sent"
    # All are there unexpected, and taken in another order.
    world.Barrier()
    for size in reversed(sizes):
        while not world.Iprobe(other, size):
            pass
        found = world.Mprobe(other, size)
        came = np.empty(size, np.uint8)
        found.Recv(came)
        assert (came == message(size)).all(), f"a message of {size} bytes is not what was sent"
world.Barrier()
sys.stdout.write(f"rank {world.rank} is done\n")
