"""What the phases of steps took, beside what was predicted for them."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle

PHASES = ("FWD", "BWD", "STEP")


class Phases:
    """Times the phases of every step.

    FWD is the time in ``placed.activations()``. BWD is what follows, up to STEP or the next FWD, with whatever else the
    program does there. STEP is the optimizer's step. A step of accumulated batches has several FWD and BWD.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its step ends a step.
    tiers : sequence of str
        Their names.
    seconds : mapping
        Of each phase what was predicted.
    links : mapping
        Of each phase what was predicted for each tier's link.
    moved : mapping
        Of each phase the bytes that each tier reads and writes.
    is_timed : bool
        Whether the prediction knows how long FWD and BWD compute.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tiers: Sequence[str],
        seconds: Mapping[str, float],
        links: Mapping[str, Sequence[float]],
        moved: Mapping[str, Sequence[float]],
        is_timed: bool,
    ) -> None:
        self._tiers, self._seconds, self._links, self._moved = list(tiers), seconds, links, moved
        self._is_timed = is_timed
        #: Phase, step, begin and end, in seconds of one clock.
        self.seen: list[tuple[str, int, float, float]] = []
        self._step, self._open = 0, ("", 0.0)
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
        ]

    def turn(self, phase: str) -> None:
        """One phase ends here, and another begins."""
        now = time.perf_counter()
        name, begin = self._open
        if name:
            self.seen.append((name, self._step, begin, now))
        self._open = (phase, now)

    def _begin_step(self, *_: object) -> None:
        self.turn("STEP")

    def _end_step(self, *_: object) -> None:
        self.turn("")
        self._step += 1

    def close(self) -> None:
        """Times nothing any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def measured(self) -> dict[str, float]:
        """Seconds of one pass of each phase: the median, without the first step, in which memory is touched first."""
        last = max((step for _, step, _, _ in self.seen), default=0)
        kept = {
            phase: [end - begin for it, step, begin, end in self.seen if it == phase and (step or not last)]
            for phase in PHASES
        }
        return {phase: statistics.median(of) for phase, of in kept.items() if of}

    def summary(self) -> str:
        """A table of each phase and tier: predicted and measured seconds, bytes, and the bandwidth that both give."""
        measured = self.measured()
        lines = [f"{'phase':6}{'measured s':>12}{'predicted s':>13}  {'tier':10}{'MB':>10}{'GB/s':>8}{'link s':>10}"]
        for phase in PHASES:
            took = measured.get(phase)
            said = f"{took:12.4f}" if took is not None else f"{'-':>12}"
            head = f"{phase:6}{said}{self._seconds[phase]:13.4f}"
            for tier, nbytes, link in zip(self._tiers, self._moved[phase], self._links[phase], strict=True):
                rate = f"{nbytes / took / 1e9:8.2f}" if took else f"{'-':>8}"
                lines.append(f"{head}  {tier:10}{nbytes / 1e6:10.1f}{rate}{link:10.4f}")
                head = " " * len(head)
        steps = len({step for _, step, _, _ in self.seen})
        alone = "" if self._is_timed else "; of FWD and BWD transfers alone, place(computation=) adds what they compute"
        lines.append(
            f"measured: the median of {max(steps - 1, min(steps, 1))} steps; predicted: from the tiers' rates{alone}"
        )
        return "\n".join(lines)

    def trace(self, path: str | Path) -> None:
        """Writes what was measured and what was predicted as a Chrome trace, which Perfetto reads."""
        tracks = ["measured", "predicted", *(f"link of {tier}, predicted" for tier in self._tiers)]
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(tracks)
        ]
        origin = min((begin for _, _, begin, _ in self.seen), default=0.0)
        for phase, step, begin, end in self.seen:
            shown = [(0, end - begin), (1, self._seconds[phase])]
            shown += [(2 + tier, link) for tier, link in enumerate(self._links[phase])]
            for tid, seconds in shown:
                if seconds:
                    at = {"ts": (begin - origin) * 1e6, "dur": seconds * 1e6}
                    args = {"step": step, "bytes": sum(self._moved[phase]) if tid < 2 else self._moved[phase][tid - 2]}
                    events.append(
                        {"name": phase, "cat": tracks[tid], "ph": "X", "pid": 0, "tid": tid, **at, "args": args}
                    )
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
