"""A PoolTransport among torchft's own: its class, its calls, and a recovery of two replicas of three."""

import inspect
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport import CheckpointTransport

import polder
from polder.torch.recovery import PoolTransport

assert issubclass(PoolTransport, CheckpointTransport)
assert not inspect.isabstract(PoolTransport)
for name, method in inspect.getmembers(CheckpointTransport, inspect.isfunction):
    ours = list(inspect.signature(getattr(PoolTransport, name)).parameters)
    assert ours == list(inspect.signature(method).parameters), (name, ours)

sent = {"user": {"w": torch.randn(300, 200), "h": torch.ones(3).bfloat16()}, "torchft": {"step": 4}}
seconds = timedelta(seconds=20)
with (
    tempfile.TemporaryDirectory(dir="/dev/shm", prefix="polder-test-") as folder,
    polder.Pool(f"{folder}/pool", size="64MiB", run=folder) as pool,
):
    for transports in (
        [PoolTransport("job", replica=replica, pool=pool) for replica in range(3)],
        [HTTPTransport(seconds, 0) for _ in range(3)],
    ):
        transports[0].send_checkpoint(dst_ranks=[1, 2], step=4, state_dict=sent, timeout=seconds)
        call = {"src_rank": 0, "metadata": transports[0].metadata(), "step": 4, "timeout": seconds}
        with ThreadPoolExecutor() as threads:
            calls = [threads.submit(other.recv_checkpoint, **call) for other in transports[1:]]
            for got in (each.result() for each in calls):
                assert torch.equal(got["user"]["w"], sent["user"]["w"])
                assert torch.equal(got["user"]["h"], sent["user"]["h"])
                assert got["torchft"] == sent["torchft"]
        transports[0].disallow_checkpoint()
        for transport in transports:
            transport.shutdown()
print("equal")
