"""A proxy of a parameter service: a process near a memory device that sums the gradients which workers push.

`polder.torch.ParameterService` starts proxies by itself, as children of the workers, and they end with it::

    python -m polder.proxy --pool /dev/dax0.0 --service /sync/4f1c --proxy 0 --proxies 2 --clients 2

A proxy ends without an error when its workers end the service. It ends with one line on stderr and status 1 when a
worker or another proxy dies, and in silence with status 130 when it is interrupted, as by Ctrl-C. It never outlives the
process that started it by more than a moment.
"""

import argparse
import os
import sys
import threading

from polder import _core
from polder.errors import PolderError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs a proxy.

    Parameters
    ----------
    arguments : list of str, optional
        The command line; that of the process by default.

    Returns
    -------
    int
        The exit status: 0 when the workers ended the service, 1 when something went wrong, 3 when the process that
        started this one is gone, 130 when this one was interrupted.
    """
    try:
        return _run(_parsed(arguments))
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of a job; the workers say so.
        return 130


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m polder.proxy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="the pool's path")
    parser.add_argument("--host", type=int, help="the host id of this process (that of POLDER_HOST, or the keeper's)")
    parser.add_argument("--service", required=True, help="the service's name in the pool")
    parser.add_argument("--proxy", type=int, required=True, help="which proxy this is, from 0")
    parser.add_argument("--proxies", type=int, required=True, help="how many proxies the service has")
    parser.add_argument("--clients", type=int, required=True, help="how many workers it has")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that the others may take to join (60)")
    parser.add_argument("--own", action="store_true", help="the pool is the job's own: the last process removes it")
    parser.add_argument("--tied", action="store_true", help="end when the other end of standard input is closed")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    gone = _parent_gone() if options.tied else threading.Event()
    share: _core.JobPool | None = None
    try:
        share = _core.JobPool.share(options.pool) if options.own else None
        pool = _core.Pool(options.pool, host=options.host)
        try:
            _core.service_proxy(
                pool,
                options.service,
                options.proxy,
                options.clients,
                options.proxies,
                timeout=options.timeout,
                given_up=gone.is_set,
            )
        finally:
            pool.close()
    except (PolderError, OSError) as error:
        if gone.is_set():
            return 3
        print(f"proxy {options.proxy} (pid {os.getpid()}): {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if share is not None:
            share.release()
    return 0


def _parent_gone() -> threading.Event:
    """Set once standard input has ended, which it does when the process that holds its other end is gone."""
    gone = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        gone.set()

    threading.Thread(target=watch, name="polder-parent", daemon=True).start()
    return gone


if __name__ == "__main__":
    sys.exit(main())
