"""A replica recovers through the pool from one that is dead by then."""

import collections
import io
import os
import pickle
import random
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS, Rank, killed_after, python_of

import polder

torch = pytest.importorskip("torch")
from polder.torch.recovery import PoolTransport  # noqa: E402
from polder.torch.state import deserialize, serialize  # noqa: E402

pytestmark = pytest.mark.torch
SOON = timedelta(milliseconds=50)

SENDER = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
import polder
from polder.torch.recovery import PoolTransport

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
weight = distribute_tensor(torch.arange(12.0).reshape(3, 4), DeviceMesh("cpu", [0]), [Replicate()])
pool = polder.Pool(sys.argv[1], run=sys.argv[2])
transport = PoolTransport("job", replica=0, pool=pool)
model = torch.nn.Linear(700, 500)
torch.nn.init.constant_(model.weight, float(sys.argv[3]))
state = {"user": {"model": model.state_dict(), "part": weight}, "torchft": {"step": 5, "batches_committed": 9}}
transport.send_checkpoint([1], 5, state)
print(transport.metadata(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

ENDLESS = """
import sys
from pathlib import Path
import torch
import polder
from polder.torch.recovery import PoolTransport

pool = polder.Pool(sys.argv[1], run=sys.argv[2])
transport = PoolTransport("job", replica=0, pool=pool)
Path(sys.argv[3]).write_text(transport.metadata())
step = 0
while True:
    step += 1
    transport.send_checkpoint([1], step, {str(at): torch.full((200_000,), step) for at in range(3)})
    print(step, flush=True)
"""


def send_and_die(scratch: Path, weight: float) -> str:
    """A replica that is dead once it has sent step 5: its metadata."""
    with Rank(SENDER, scratch / "pool", scratch, weight) as process:
        said = process.communicate(timeout=120)[0]
        assert process.wait() == -signal.SIGKILL, said
    return said.strip()


def pair(pool: polder.Pool, **given: Any) -> tuple[PoolTransport, PoolTransport]:
    return PoolTransport("job", replica=0, pool=pool), PoolTransport("job", replica=1, pool=pool, **given)


def test_a_replica_recovers_what_a_dead_one_has_sent(pool: polder.Pool, scratch: Path) -> None:
    import torch.distributed as dist

    metadata = send_and_die(scratch, 3)
    receiver = PoolTransport("job", replica=1, pool=pool)
    # The part of a DTensor finds the process groups of the same names here.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        got = receiver.recv_checkpoint(0, metadata, 5, timedelta(seconds=20))
        part = got["user"]["part"]
        assert torch.equal((part * 2).full_tensor(), torch.arange(12.0).reshape(3, 4) * 2)
    finally:
        dist.destroy_process_group()
    assert got["torchft"] == {"step": 5, "batches_committed": 9}
    model = torch.nn.Linear(700, 500)
    model.load_state_dict(got["user"]["model"])
    assert (model.weight == 3).all()
    # The same replica again, at the same step with another state: its own counts, to those that have its metadata.
    again = send_and_die(scratch, 4)
    assert (receiver.recv_checkpoint(0, again, 5)["user"]["model"]["weight"] == 4).all()
    assert (receiver.recv_checkpoint(0, metadata, 5)["user"]["model"]["weight"] == 3).all()
    send_and_die(scratch, 5)
    with pytest.raises(polder.PeerTimeoutError, match=r"has sent steps: none"):
        receiver.recv_checkpoint(0, metadata, 5, SOON)


def test_a_sender_that_is_killed_meanwhile_leaves_what_it_has_sent(pool: polder.Pool, scratch: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(2):
        step = killed_after(ENDLESS, dice, 0.03, scratch / "pool", scratch, scratch / "metadata")
        got = PoolTransport("job", replica=1, pool=pool).recv_checkpoint(0, (scratch / "metadata").read_text(), step)
        for at in range(3):
            assert (got[str(at)] == step).all()


def test_odd_tensors_and_values_come_back_as_they_are(pool: polder.Pool) -> None:
    sender, receiver = pair(pool)
    tied = torch.nn.Linear(6, 6)
    whole = torch.arange(600_000, dtype=torch.int64).reshape(600, 1000)
    state = {
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "transposed": whole.t(),
        "strided": whole[::7, 3::2],
        "expanded": torch.ones(1).expand(4),
        "tied": [tied.weight, {"again": tied.weight.data}],
        "view": whole,
        3: (1, 2.5, "text", None, b"bytes", 1 + 2j),
        "counted": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
    }
    sender.send_checkpoint([1], 1, state)
    got = receiver.recv_checkpoint(0, sender.metadata(), 1)
    assert list(got) == list(state)
    for name in ("bfloat16", "bool", "complex", "scalar", "none", "transposed", "strided", "expanded", "view"):
        assert got[name].dtype == state[name].dtype and torch.equal(got[name], state[name]), name
    assert torch.equal(got["float8"].view(torch.uint8), state["float8"].view(torch.uint8))
    first, second = got["tied"][0], got["tied"][1]["again"]
    assert torch.equal(first, tied.weight) and first is second
    assert got[3] == state[3] and got["counted"] == {"a": 2, "b": 1} and tuple(got["size"]) == (2, 3)
    with pytest.raises(polder.ArgumentError, match=r"/'user'/'odd' holds what a snapshot does not take"):
        sender.send_checkpoint([1], 2, {"user": {"odd": Path("/")}})
    with pytest.raises(polder.ArgumentError, match=r"/'s' is a Tensor of layout torch\.sparse_coo; only dense tensors"):
        sender.send_checkpoint([1], 2, {"s": torch.eye(2).to_sparse()})


def test_a_state_that_would_call_something_is_refused() -> None:
    kept = collections.Counter("ab")
    state = {"dtype": torch.bfloat16, "kept": [kept, torch.Size([2])], "again": kept, "set": {1}}
    got = deserialize(serialize(state))
    assert got == state and got["again"] is got["kept"][0]

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    for hostile in (Hostile(), os.system, pickle.loads):
        plain = pickle.dumps([hostile])
        with pytest.raises(pickle.UnpicklingError, match=r"it names .*, which no state holds"):
            deserialize(len(plain).to_bytes(8, "little") + plain)
        saved = io.BytesIO()
        torch.save([hostile], saved)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            deserialize(serialize({}) + saved.getvalue())


def test_a_state_of_the_receiver_is_received_in_place(pool: polder.Pool) -> None:
    own = {"w": torch.zeros(30, 20), "t": torch.zeros(20, 30).t(), "a": torch.zeros(2), "b": torch.zeros(2)}
    sender, receiver = pair(pool, state_dict=lambda: own)
    one = torch.randn(2)
    sent = {"w": torch.randn(30, 20), "t": torch.randn(30, 20), "a": one, "b": one, "new": torch.ones(3)}
    sender.send_checkpoint([1], 1, sent)
    got = receiver.recv_checkpoint(0, sender.metadata(), 1)
    for name, tensor in sent.items():
        assert torch.equal(got[name], tensor), name
        assert name == "new" or got[name] is own[name], name
    sender.send_checkpoint([1], 2, {**sent, "w": torch.randn(20, 30)})
    with pytest.raises(
        polder.ArgumentError, match=r"/'w' has \[20, 30\] elements of .* and \[30, 20\] of torch.float32"
    ):
        receiver.recv_checkpoint(0, sender.metadata(), 2)


def test_what_does_not_come_whole_is_named(pool: polder.Pool, scratch: Path) -> None:
    sender, receiver = pair(pool)
    late = rf"timed out after 0\.05 s: replica 7 has not sent step 3 to job/torchft/0/0 in the pool {scratch}/pool"
    with pytest.raises(polder.PeerTimeoutError, match=late + "; it has sent steps: none") as error:
        receiver.recv_checkpoint(7, sender.metadata(), 3, SOON)
    assert error.value.rank == 7 and isinstance(error.value, TimeoutError)
    weight = torch.randn(1000)
    for step in (1, 2):
        sender.send_checkpoint([1], step, {"user": {"bias": torch.zeros(3), "weight": weight + step}})
    with pytest.raises(polder.PeerTimeoutError, match=late + "; it has sent steps: 1, 2"):
        receiver.recv_checkpoint(7, sender.metadata(), 3, SOON)
    with pytest.raises(polder.ArgumentError, match=r"replica 0 sends by another transport, .*'http://host:1/"):
        receiver.recv_checkpoint(0, "http://host:1/checkpoint/", 1)
    with polder.Pool(scratch / "other", size="16MiB", run=scratch) as other:
        stranger = PoolTransport("job", replica=2, pool=other)
        with pytest.raises(polder.ArgumentError, match=rf"this one has {scratch}/other .*set POLDER_POOL"):
            stranger.recv_checkpoint(0, sender.metadata(), 2)
    with pytest.raises(polder.ArgumentError, match="does not know which replica this is"):
        PoolTransport("job", pool=pool)
    for given, said in (
        (("replica", True), "replica is True"),
        (("rank", 1.0), "rank is 1.0"),
        (("name", 5), "job is 5"),
    ):
        with pytest.raises(polder.ArgumentError, match=f"{said}; give"):
            PoolTransport(**{"name": "job", "replica": 1, "pool": pool, given[0]: given[1]})
    bytes_of = (weight + 2).numpy().tobytes()
    at = (scratch / "pool").read_bytes().index(bytes_of) + 8
    with (scratch / "pool").open("r+b") as file:
        file.seek(at)
        file.write(bytes([bytes_of[8] ^ 1]))
    with pytest.raises(
        polder.CorruptError, match=r"the tensor /'user'/'weight' of step 2 from job/torchft/0/0"
    ) as damage:
        receiver.recv_checkpoint(0, sender.metadata(), 2)
    assert 0 < damage.value.offset <= at
    assert torch.equal(receiver.recv_checkpoint(0, sender.metadata(), 1)["user"]["weight"], weight + 1)


def test_a_thousand_sends_leave_two_versions_and_no_more_bytes_than_ten(pool: polder.Pool) -> None:
    sender, receiver = pair(pool)
    frozen = torch.ones(5000)

    def used() -> int:
        return sum(entry.nbytes for entry in pool.list("/version"))

    most = 0
    for step in range(1000):
        sender.send_checkpoint([1], step, {"weight": torch.full((3000,), step), "frozen": frozen})
        if step < 10:
            most = max(most, used())
        assert used() <= most and len(pool.list("/version")) <= 4
    # What is on the books is what is there.
    assert receiver.recv_checkpoint(0, sender.metadata(), 999)["weight"][7] == 999
    assert receiver.recv_checkpoint(0, sender.metadata(), 998)["weight"][7] == 998
    sender.shutdown()
    assert used() > 0
    sender.remove()
    assert pool.list("/version") == []


def test_torchft_takes_it_for_one_of_its_transports() -> None:
    script = RANKS / "torchft_transport.py"
    done = subprocess.run([python_of("torchft"), script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


def test_a_job_of_torchft_goes_on_from_a_replica_that_was_killed_once_it_had_sent(scratch: Path) -> None:
    with polder.Pool(scratch / "pool", size="64MiB", run=scratch):
        pass
    environment = os.environ | {
        "POLDER_POOL": str(scratch / "pool"),
        "POLDER_RUN": str(scratch),
        "OMP_NUM_THREADS": "1",
    }
    command = [python_of("torchft"), RANKS / "torchft_job.py", scratch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "went on", done.stdout
