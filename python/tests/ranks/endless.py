"""All-reduces for ever, and says what ended it. With "stop", rank 1 stops taking part after the first."""

import signal
import sys
import time

import numpy as np

import polder

# Whoever starts the tests in the background leaves SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
rank, folder, size, coherence, *stop = sys.argv[1:]
pool = polder.Pool(f"{folder}/pool", size="128MiB", host=int(rank), coherence=coherence, run=folder)
group = polder.Group(pool, "/group", int(rank), int(size), timeout=30)
array = np.zeros(1_000_000, "float32")
done = 0
try:
    while True:
        group.all_reduce(array, "max")
        done += 1
        if done == 1:
            print("going", flush=True)
        while stop and rank == "1":
            time.sleep(1)
except polder.PeerDeadError as error:
    print(type(error).__name__, error.host, error.pid, error.sequence > 0)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
