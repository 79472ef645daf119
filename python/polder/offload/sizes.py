"""Bytes that one tensor takes: in a range of Polder, of torch, and pinned by torch: ``python -m polder.offload.sizes``.

Prints one JSON object a line. The kernel counts the pages of the range; the process grows by those of torch's tensor.
Pinned memory is measured where there is a GPU. Elsewhere it is computed: torch's caching host allocator rounds up to a
power of two, up to ``pinned_max_round_threshold_mb``.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from polder.offload import ranges
from polder.offload.tiers import Tier, size

_THRESHOLD = "pinned_max_round_threshold_mb"
#: MiB up to which the second pinned column is rounded.
_ROUNDED = 128


def resident() -> int:
    """Bytes of anonymous memory that this process has."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


def grown(make: Callable[[], torch.Tensor]) -> int:
    """Bytes by which this process grows with a tensor whose every byte is written."""
    # What torch needs at its first call is no part of it.
    torch.empty(1).fill_(1)
    before = resident()
    made = make().fill_(1)
    after = resident()
    del made
    return after - before


def rounded(nbytes: int, threshold_mb: int | None) -> int:
    """Bytes that torch's host allocator asks the driver for.

    >>> rounded(5 << 20, None), rounded(5 << 20, 4), rounded(5 << 20, 8)
    (8388608, 5242880, 8388608)
    """
    if threshold_mb is not None and nbytes > threshold_mb << 20:
        return nbytes
    return 1 << (nbytes - 1).bit_length()


def line(nbytes: int) -> dict[str, int | str]:
    """The figures of one size."""
    kept = ranges.memory(nbytes, Tier("node", nbytes, 1, 1, node=0))
    ranges.tensor(kept, (nbytes,), torch.uint8).fill_(1)
    places = kept.where()
    del kept
    sizes: dict[str, int | str] = {
        "asked_for": nbytes,
        "range": sum(of for place, of in places if place != "not touched"),
        "torch": grown(lambda: torch.empty(nbytes, dtype=torch.uint8)),
    }
    for name, threshold in (("torch_pinned", None), (f"torch_pinned_above_{_ROUNDED}_mb", _ROUNDED)):
        sizes[name] = _pinned(nbytes, threshold) if torch.cuda.is_available() else rounded(nbytes, threshold)
    return {**sizes, "pinned": "measured" if torch.cuda.is_available() else "computed: no GPU here"}


def _pinned(nbytes: int, threshold: int | None) -> int:
    """Bytes that torch's host allocator has for one tensor, in a process with that setting."""
    setting = {} if threshold is None else {"PYTORCH_ALLOC_CONF": f"{_THRESHOLD}:{threshold}"}
    program = (
        f"import torch; torch.cuda.init(); it = torch.empty({nbytes}, dtype=torch.uint8, pin_memory=True);"
        "print(torch.cuda.host_memory_stats()['allocated_bytes.current'])"
    )
    environment = {**os.environ, **setting}
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"torch pins no {nbytes} bytes: {ended.stderr.strip().splitlines()[-1]}")
    return int(ended.stdout)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m polder.offload.sizes")
    parser.add_argument("size", nargs="*", default=["65 MiB", "129 MiB", "540 MiB", "1100 MiB"])
    for it in parser.parse_args().size:
        print(json.dumps(line(size(it))), flush=True)


if __name__ == "__main__":
    main()
