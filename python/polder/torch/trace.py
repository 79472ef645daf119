"""A trace of every collective and message, for Perfetto (ui.perfetto.dev) and chrome://tracing.

``POLDER_TRACE=/tmp/job.json`` names the file. All ranks of a machine append to it: a process of the trace is a rank,
and a thread is a group. The format is Chrome's array of events, whose closing bracket may be missing. A file that
cannot be written ends the trace, not the job. A link is not followed.
"""

import contextlib
import functools
import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polder import _core


class Trace:
    """The events of one process.

    Raises
    ------
    OSError
        Says why the file cannot be had.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # The bracket is there before another rank appends.
        with tempfile.NamedTemporaryFile("w", dir=Path(path).parent) as made:
            made.write("[\n")
            made.flush()
            with contextlib.suppress(FileExistsError):
                os.link(made.name, path)
        # One write an event: what several processes append does not mix. A pipe without a reader is not waited for.
        if Path(path).is_symlink():
            raise OSError("it is a link, which is not followed")
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise OSError("it is a pipe or a device, no file")
        self._is_open = True

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
        line = (json.dumps(event) + ",\n").encode()
        if not self._is_open:
            return
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no space is left for a whole event")
        except OSError as failure:
            self._is_open = False
            _warn(self._path, failure, "the trace ends here")


@functools.cache
def trace() -> Trace | None:
    """The trace of this process, where one is asked for and can be written."""
    path = os.environ.get("POLDER_TRACE")
    try:
        return Trace(path) if path else None
    except OSError as failure:
        _warn(str(path), failure, "this process is not traced")
        return None


def _warn(path: str, failure: OSError, so: str) -> None:
    # On no account an error: a program may make errors of Python's warnings, or have closed its output.
    with contextlib.suppress(Exception):
        print(f"polder: POLDER_TRACE={path}: {failure.strerror or failure}; {so}", file=sys.stderr, flush=True)
