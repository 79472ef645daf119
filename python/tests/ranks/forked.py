"""One rank of a job whose processes fork: a child stores into what its parent has of MPI_Alloc_mem."""

import os
import resource
import signal

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# Memory of the pool, and such as is the library's: a child has a copy of that.
pieces = [np.frombuffer(MPI.Alloc_mem(nbytes), dtype=np.uint8) for nbytes in ((16 << 20) + 100, 1000)]
for ours in pieces:
    ours[:] = rank
ends = []
for ours in pieces:
    for at in (0, ours.size // 2, ours.size - 1):
        child = os.fork()
        if not child:
            ours[at] = 77
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert ends == [-signal.SIGSEGV] * 3 + [0] * 3, ends
for number, ours in enumerate(pieces):
    came = np.zeros_like(ours)
    world.Sendrecv(ours, 1 - rank, number, came, 1 - rank, number)
    assert (ours == rank).all() and (came == 1 - rank).all(), number
print(f"{rank} is done", flush=True)
