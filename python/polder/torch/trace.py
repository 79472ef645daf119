"""A trace of every collective and message, for Perfetto (ui.perfetto.dev) and chrome://tracing.

``POLDER_TRACE=/tmp/job.json`` names the file. All ranks of a machine append to it: a process of the trace is a rank,
and a thread is a group. The format is Chrome's array of events, whose closing bracket may be missing.
"""

import contextlib
import functools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polder import _core


class Trace:
    """The events of one process."""

    def __init__(self, path: str) -> None:
        # The bracket is there before another rank appends.
        with tempfile.NamedTemporaryFile("w", dir=Path(path).parent) as made:
            made.write("[\n")
            made.flush()
            with contextlib.suppress(FileExistsError):
                os.link(made.name, path)
        # One write an event: what several processes append does not mix.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def ends(
        self,
        ticket: "_core.Ticket | _core.Message | None",
        what: str,
        began: int,
        place: tuple[int, str],
        **facts: object,
    ) -> None:
        """Writes an operation down when its ticket is done, or now if it has none.

        Parameters
        ----------
        began : int
            `time.time_ns()` at its call.
        place : tuple
            The rank and the group's name.
        """
        if ticket is None:
            self._write(what, began, place, facts)
        else:
            ticket.when_done(lambda error: self._write(what, began, place, facts, error))

    def _write(
        self,
        what: str,
        began: int,
        place: tuple[int, str],
        facts: dict[str, object],
        error: BaseException | None = None,
    ) -> None:
        rank, group = place
        event = {
            "name": what,
            "cat": "polder",
            "ph": "X",
            "ts": began / 1000,
            "dur": (time.time_ns() - began) / 1000,
            "pid": rank,
            "tid": group,
            "args": facts if error is None else facts | {"error": str(error)},
        }
        os.write(self._file, (json.dumps(event) + ",\n").encode())


@functools.cache
def trace() -> Trace | None:
    """The trace of this process, where one is asked for."""
    path = os.environ.get("POLDER_TRACE")
    return Trace(path) if path else None
