"""A job of torchft in which the only healthy replica is killed once it has sent its state. The other goes on from it.

Arguments: a folder; for a replica also the lighthouse's address and the replica's number.

Replica 0 trains alone. Replica 1 comes, and torchft has replica 0 send. When that has returned, and replica 1 is about
to receive, replica 0 gets SIGKILL; only then replica 1 receives.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from polder.torch.recovery import PoolTransport

folder = Path(sys.argv[1])
SECONDS = timedelta(seconds=20)


def bits_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(it.detach().numpy().tobytes() for it in model.parameters())).hexdigest()


class Marked(PoolTransport):
    """Says what it has sent, and receives once the sender is dead."""

    def send_checkpoint(self, dst_ranks, step, state_dict, timeout=None):
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)
        print("sent", step, bits_of(model), flush=True)
        # Killed here, before torchft does anything else.
        signal.pause()

    def recv_checkpoint(self, src_rank, metadata, step, timeout=None):
        print("receives", step, flush=True)
        while not (folder / "killed").exists():
            time.sleep(0.005)
        return super().recv_checkpoint(src_rank, metadata, step, timeout)


def replica(address: str, number: int) -> None:
    """Trains for ever, and says after each step which it was."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        print("received", 0, bits_of(model), flush=True)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=SECONDS,
        quorum_timeout=SECONDS,
        connect_timeout=SECONDS,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica_{number}",
        hostname="localhost",
        checkpoint_transport=Marked("job", replica=number),
    )
    while True:
        optimizer.zero_grad()
        manager.start_quorum()
        model(torch.randn(8, 30)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
            print("step", manager.current_step(), bits_of(model), flush=True)


def main() -> None:
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    replicas: list[subprocess.Popen[str]] = []

    def start(number: int) -> subprocess.Popen[str]:
        with (folder / f"log-{number}").open("w") as log:
            command = [sys.executable, __file__, folder, lighthouse.address(), str(number)]
            replicas.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        return replicas[-1]

    def wait_for(process: subprocess.Popen[str], what: str, least: int = 0) -> list[str]:
        for line in process.stdout:
            print(process.args[-1], line, end="")
            words = line.split()
            if words[0] == what and int(words[1]) >= least:
                return words
        sys.exit(f"replica {process.args[-1]} has ended:\n" + (folder / f"log-{process.args[-1]}").read_text())

    try:
        first = start(0)
        wait_for(first, "step", 3)
        second = start(1)
        _, step, bits = wait_for(first, "sent")
        assert int(step) >= 3
        # Before, torchft asks the sender for what `recv_checkpoint` is given.
        wait_for(second, "receives")
        first.kill()
        first.wait()
        (folder / "killed").touch()
        assert wait_for(second, "received")[2] == bits
        wait_for(second, "step", int(step) + 3)
        print("went on")
    finally:
        for process in replicas:
            process.kill()
            process.wait()
        lighthouse.shutdown()


torch.manual_seed(os.getpid())
model = torch.nn.Linear(30, 20)
if len(sys.argv) > 2:
    replica(sys.argv[2], int(sys.argv[3]))
else:
    main()
