"""A job of elastic torchrun goes on from the newest version of all ranks, when a machine dies and when one comes.

`torch_elastic.py` starts agents with ``--nnodes=1:3`` and one rank each: three, of which one is killed with its rank,
then one more. Each start of the ranks restores, checks what it has found, and snapshots step after step.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import polder
import polder.torch

SECONDS = 300
"""The time within which each change of the ranks must come."""


def worker(folder: Path) -> None:
    """A rank: it trains until the file `stop` is there."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pool = polder.Pool(folder / "pool", size="64MiB", run=folder)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    try:
        step = polder.torch.restore("job", model, optimizer, pool=pool, folder=folder / "disk").step
        assert all(bool((it == step).all()) for it in model.parameters())
    except polder.NotFoundError:
        pass

    def say(verb: str, at: int) -> None:
        with (folder / "said").open("a") as said:
            said.write(json.dumps({"verb": verb, "world": world, "rank": rank, "step": at, "pid": os.getpid()}) + "\n")

    say("found", step)
    going = torch.ones(1)
    while True:
        if rank == 0 and (folder / "stop").exists():
            going.zero_()
        dist.broadcast(going, 0)
        if not going.item():
            break
        step += 1
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, step)
        polder.torch.snapshot("job", model, optimizer, step=step, pool=pool, folder=folder / "disk").wait()
        say("confirmed", step)
    dist.destroy_process_group()


class Job:
    """The agents, and what their ranks have said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents = folder, list[subprocess.Popen[bytes]]()
        # The rendezvous is here, so that any agent may be killed.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def add(self) -> None:
        """Starts an agent."""
        command = [
            *("torchrun", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d"),
            f"--rdzv-endpoint=127.0.0.1:{self.store.port}",
            "--rdzv-id=job",
            "--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=10",
            "--monitor-interval=0.5",
        ]
        # torch tells an agent that comes later nothing of a store that the others share.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.agents.append(subprocess.Popen([*command, __file__, str(self.folder)], env=environment))

    def said(self) -> list[dict[str, Any]]:
        """All of it, in order."""
        at = self.folder / "said"
        return [json.loads(line) for line in at.read_text().splitlines()] if at.exists() else []

    def wait_for(self, what: Callable[[list[dict[str, Any]]], bool], why: str) -> None:
        """Until the ranks have said so."""
        until = time.monotonic() + SECONDS
        while not what(self.said()):
            assert time.monotonic() < until, f"no {why} within {SECONDS} s: {self.said()[-5:]}"
            assert all(agent.poll() in (None, -signal.SIGKILL) for agent in self.agents), "an agent has ended"
            time.sleep(0.05)

    def wait_for_steps(self, world: int, why: str) -> None:
        """Until so many ranks have confirmed three steps since what was said."""
        before = len(self.said())

        def has_steps(said: list[dict[str, Any]]) -> bool:
            new = [it for it in said[before:] if it["verb"] == "confirmed" and it["world"] == world]
            return len({it["step"] for it in new}) >= 3 and len({it["rank"] for it in new}) == world

        self.wait_for(has_steps, why)

    def kill_last(self) -> None:
        """Kills the last agent and its rank, as when its machine dies."""
        agent = self.agents[-1]
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (agent.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)


def judge(events: list[dict[str, Any]]) -> None:
    """Each start has found one version on all ranks, not older than what was confirmed on all ranks before."""
    confirmed: dict[int, set[int]] = defaultdict(set)
    newest, restored = 0, list[dict[str, Any]]()
    for event in events:
        if event["verb"] == "found":
            restored.append(event)
            if len(restored) < event["world"]:
                continue
            steps = {one["step"] for one in restored}
            assert {one["rank"] for one in restored} == set(range(event["world"])), restored
            assert len(steps) == 1 and min(steps) >= newest, f"{restored}, and {newest} was confirmed"
            print(f"{event['world']} ranks go on from step {event['step']}; step {newest} was confirmed", flush=True)
            restored, confirmed = [], defaultdict(set)
        else:
            confirmed[event["step"]].add(event["rank"])
            if len(confirmed[event["step"]]) == event["world"]:
                newest = event["step"]


def main() -> None:
    """Three ranks, two, and three again."""
    folder = Path.cwd() / "job"
    folder.mkdir()
    job = Job(folder)
    try:
        for _ in range(3):
            job.add()
        job.wait_for_steps(3, "job of three ranks")
        job.kill_last()
        job.wait_for_steps(2, "job of two ranks")
        job.add()
        job.wait_for_steps(3, "job of three ranks again")
        (folder / "stop").touch()
        for agent in (job.agents[0], job.agents[1], job.agents[3]):
            assert agent.wait(SECONDS) == 0
    finally:
        for agent in job.agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait()
    said = job.said()
    judge(said)
    worlds = [it["world"] for it in said if it["verb"] == "found" and it["rank"] == 0]
    assert {2, 3} <= set(worlds), worlds


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
