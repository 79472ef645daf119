"""rehearsed.py RANK: one of two hosts of a pool, with collectives and an object that both write in turn."""

import os
import sys

import numpy as np

import polder

rank = int(sys.argv[1])
wrong = 0
with polder.Pool(os.environ["POLDER_POOL"], host=rank) as pool, polder.Group(pool, "/group", rank, 2) as group:
    made = pool.create("/object", shape=4096, dtype=np.int64) if rank == 0 else None
    group.barrier()
    shared = made or pool.open("/object", shape=4096, dtype=np.int64)
    for turn, count in enumerate([3, 5000, 70000, 300, 20000]):
        summed = (np.arange(count) * (rank + 1) + turn).astype(np.float64)
        group.all_reduce(summed, "sum")
        wrong += not np.array_equal(summed, np.arange(count) * 3.0 + 2 * turn)
        if rank == turn % 2:
            with shared.write() as values:
                values[:] = turn
        group.barrier()
        with shared.read() as values:
            wrong += not (values == turn).all()
        group.barrier()
sys.exit(wrong > 0)
