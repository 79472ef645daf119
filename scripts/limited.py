"""Runs programs that may take so long and no longer, and that end with the script that started them."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def end_when_told() -> None:
    """Lets this script end as by Ctrl-C when it is told to, or its terminal is closed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda told, _: sys.exit(128 + told))


def run(seconds: int, grace: int, command: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, for so many seconds: then the program is told to end, and killed after `grace` more.

    It is told so too when this script ends meanwhile. Its process group is its own, so that Ctrl-C does not reach it,
    and nobody would pass on a kill.
    """
    limit = ["timeout", f"--kill-after={grace}", str(seconds)]
    with subprocess.Popen([*limit, *command], **how) as process:
        try:
            said = process.communicate()[0]
        except BaseException:
            process.terminate()
            process.communicate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said)
