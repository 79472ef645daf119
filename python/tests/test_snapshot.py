"""Snapshots: processes are killed, and others go on with the same bits."""

# torch's checkpoint module does not say what it exports.
# pyright: reportPrivateImportUsage=false

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polder
from polder import _core

JOB = """
import hashlib, os, random, signal, sys
import torch
import polder.torch

killed, last = int(sys.argv[1]), 8
torch.manual_seed(1)
random.seed(2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).bfloat16()
model.register_buffer("seen", torch.tensor(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if sys.argv[2] == "restore":
    restored = polder.torch.restore("job", model, optimizer)
    step = restored.step
    print("restored", step, flush=True)
while step < last:
    if step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.randn(5, 8).bfloat16() * random.random()).float().square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.seen += 1
    step += 1
    if step % 2 == 0:
        polder.torch.snapshot("job", model, optimizer, step=step)
bits = hashlib.sha256()
for tensor in [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]:
    bits.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
print("bits", bits.hexdigest(), int(model.seen), flush=True)
"""

WRITER = """
import sys
import numpy as np
import polder
from polder import _core

with polder.Pool(sys.argv[1], run=sys.argv[2]) as pool:
    store = _core.Store(pool, "s")
    step = int(sys.argv[3])
    while True:
        step += 1
        store.publish([(str(index), np.full(200_000, step)) for index in range(3)] + [("frozen", np.ones(1000))])
        print(step, flush=True)
"""


def job(scratch: Path, killed: int, mode: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"POLDER_POOL": str(scratch / "pool"), "POLDER_RUN": str(scratch)}
    command = [sys.executable, "-c", JOB, str(killed), mode]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.torch
def test_after_sigkill_another_process_goes_on_with_the_same_bits(scratch: Path) -> None:
    pytest.importorskip("torch")
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        pass
    whole = job(scratch, -1, "anew")
    assert whole.returncode == 0, whole.stderr
    with polder.Pool(scratch / "pool", run=scratch) as pool:
        _core.Store(pool, "job/0").remove()
    died = job(scratch, 5, "anew")
    assert died.returncode == -signal.SIGKILL, died.stderr
    after = job(scratch, -1, "restore")
    assert after.stdout.splitlines() == ["restored 4", whole.stdout.strip()], after.stderr


def test_a_writer_that_is_killed_leaves_the_version_before_whole(scratch: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice, last = random.Random(seed), 0
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch) as pool:
        store = _core.Store(pool, "s")
        for _ in range(8):
            command = [sys.executable, "-c", WRITER, str(scratch / "pool"), str(scratch), str(last)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                said = int(process.stdout.readline())
                # Any moment is a good one: most of the time it is in the middle of one.
                until = time.monotonic() + dice.uniform(0, 0.03)
                while time.monotonic() < until:
                    pass
                process.kill()
                said = max([said, *map(int, process.stdout.read().split())])
            version = store.open()
            assert dict(version.tensors()) == {"0": 1_600_000, "1": 1_600_000, "2": 1_600_000, "frozen": 8000}
            steps = set[int]()
            for name in "012":
                array = np.empty(200_000, int)
                version.read_into(name, array)
                steps |= set(np.unique(array).tolist())
            version.close()
            assert len(steps) == 1, f"steps {steps} in one version"
            last = steps.pop()
            assert last >= said, f"step {said} was published, {last} is the newest"
            assert len(store.versions()) >= min(2, last)
        store.remove()
        assert pool.list("/version") == []


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_through_the_pool(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    import polder.torch

    def state(value: int) -> dict[str, object]:
        weights = torch.full((5, 3), value, dtype=torch.bfloat16)
        return {"w": weights, "none": torch.empty(0), "deep": {"step": value, "list": [torch.tensor(value)]}}

    reader, writer = polder.torch.SnapshotReader("dcp", pool=pool), polder.torch.SnapshotWriter("dcp", pool=pool)
    for value in (1, 2):
        dcp.save(state(value), storage_writer=writer, no_dist=True)
    into = state(0)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["w"], torch.full((5, 3), 2, dtype=torch.bfloat16))  # pyright: ignore[reportArgumentType]
    assert str(into["deep"]) == str(state(2)["deep"])
    saving: Any = dcp.async_save(state(3), storage_writer=writer, no_dist=True)
    saving.result()
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert str(into) == str(state(3))
    # A rank has written its part, and nobody has published the metadata: the checkpoint before counts.
    store = _core.Store(pool, "dcp/0")
    store.publish([("w", np.zeros(3))])
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert str(into) == str(state(3))
    # The next one is over the part that counts, not over that.
    dcp.save(state(4), storage_writer=writer, no_dist=True)
    dcp.load(into, storage_reader=polder.torch.SnapshotReader("dcp", pool=pool, version=3), no_dist=True)
    assert str(into) == str(state(3))
    assert len(store.versions()) == 2


@pytest.mark.torch
def test_what_is_missing_or_does_not_fit_is_named(pool: polder.Pool) -> None:
    torch = pytest.importorskip("torch")
    import polder.torch

    model = torch.nn.Linear(3, 2)
    with pytest.raises(polder.NotFoundError, match=r"no step of the snapshot absent is whole.* keeps steps: none"):
        polder.torch.restore("absent", model, pool=pool)
    made = polder.torch.snapshot("job", model, step=7, pool=pool)
    assert (made.version, made.step, made.copied > 32, made.shared) == (1, 7, True, 0)
    again = polder.torch.snapshot("job", model, step=8, pool=pool)
    assert again.version == 2
    with pytest.raises(polder.ArgumentError, match="the snapshot job has no optimizer"):
        polder.torch.restore("job", model, torch.optim.SGD(model.parameters(), 0.1), pool=pool)
    before = torch.get_rng_state()
    torch.rand(3)
    assert polder.torch.restore("job", model, pool=pool) == polder.torch.Restored(2, 8)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(polder.ArgumentError, match="begins with /"):
        polder.torch.snapshot("/job", model, pool=pool)
    store = _core.Store(pool, "job/0")
    with pytest.raises(polder.NotFoundError, match="keeps no version 9 in this pool; it keeps 1 and 2"):
        store.open(9)
