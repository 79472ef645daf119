"""Two ranks with a window: the first puts and flushes while the second waits, and says how much of its core it uses."""

import time

from mpi4py import MPI

world = MPI.COMM_WORLD
window = MPI.Win.Allocate(64, 1, comm=world)
window.Lock_all()
times = []
for _ in range(100):
    if world.rank == 0:
        start = time.process_time_ns()
        window.Put(bytes(8), 1)
        window.Flush(1)
        times.append(time.process_time_ns() - start)
world.barrier()
window.Unlock_all()
window.Free()
if world.rank == 0:
    print(*(nanoseconds // 1000 for nanoseconds in sorted(times)))
