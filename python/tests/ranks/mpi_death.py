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
from mpich_files import remove_mapped_files

# A launcher that ends a job drops what it has not passed on of the ranks' stderr.
os.dup2(os.open(os.environ["STDERR"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
world = MPI.COMM_WORLD
world.barrier()
remove_mapped_files()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["CALL"] == "receive":
    world.Recv(np.zeros(1), source=1)
else:
    world.Probe(source=1)
