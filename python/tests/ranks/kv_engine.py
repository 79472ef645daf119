"""Puts and gets blocks of a cache whose bytes follow from their keys, until it is killed."""

import hashlib
import random
import sys

import polder
from polder import kv

path, run, host, coherence, seed = sys.argv[1:]
BLOCK = 4096
dice = random.Random(int(seed))


def block_of(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest() * (BLOCK // 64)


with (
    polder.Pool(path, host=int(host), coherence=coherence, run=run) as pool,
    kv.Cache(pool, "llm", identity={"model": "kills"}, block=BLOCK) as cache,
):
    print("ready", flush=True)
    while True:
        keys = [hashlib.md5(dice.randrange(2000).to_bytes(4)).digest() for _ in range(dice.randrange(1, 9))]
        if dice.random() < 0.5:
            cache.put(keys, [block_of(key) for key in keys])
        else:
            buffers = [bytearray(BLOCK) for _ in keys]
            for key, buffer, found in zip(keys, buffers, cache.get(keys, buffers), strict=True):
                assert not found or buffer == block_of(key), f"a wrong byte of {key.hex()}"
