"""One rank of an MPI job in which everybody sends to everybody, a few bytes and many."""

import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
for items in (1, 20_000):
    mine = np.repeat(np.arange(world.size) + world.size * world.rank, items).astype(np.float64)
    theirs = np.empty_like(mine)
    world.Alltoall(mine, theirs)
    expected = np.repeat(world.rank + world.size * np.arange(world.size), items)
    assert (theirs == expected).all(), f"{items} items are not what was sent"
world.Barrier()
sys.stdout.write(f"rank {world.rank} is done\n")
