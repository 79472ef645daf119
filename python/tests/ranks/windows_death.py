"""Two ranks with a window, the second of which is killed: the first gets its lock, and waits for it in vain."""

import os
import signal
import time

# Whoever starts the second rank goes on, for the launcher would end the job.
if os.environ["POLDER_HOST"] == "1" and (child := os.fork()):
    os.waitpid(child, 0)
    time.sleep(20)
    os._exit(0)

from mpi4py import MPI
from mpich_files import remove_mapped_files

# A launcher that ends a job drops what it has not passed on of the ranks' stderr.
os.dup2(os.open(os.environ["STDERR"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
world = MPI.COMM_WORLD
window = MPI.Win.Allocate(64, 1, comm=world)
window.Set_errhandler(MPI.ERRORS_RETURN)
group = world.Get_group().Incl([1 - world.rank])
if world.rank == 1:
    window.Lock(0, MPI.LOCK_EXCLUSIVE)
world.barrier()
remove_mapped_files()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
window.Lock(0, MPI.LOCK_EXCLUSIVE)
window.Unlock(0)
os.write(2, b"the lock passes on\n")
try:
    window.Start(group)
except MPI.Exception:
    os.write(2, b"an error, not an end\n")
# To leave would be to wait for the dead once more.
os._exit(1)
