"""Two ranks of an MPI job, the second of which is killed while the first waits for it."""

import os
import signal
import time

# Whoever starts the second rank goes on, for the launcher would end the job.
if os.environ["POLDER_HOST"] == "1" and (child := os.fork()):
    os.waitpid(child, 0)
    time.sleep(20)
    os._exit(0)

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
world.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["CALL"] == "receive":
    world.Recv(np.zeros(1), source=1)
else:
    world.Probe(source=1)
