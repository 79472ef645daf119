"""A Python that has imported torch, and forks a process for each program that it is asked to run.

The import of torch takes seconds of a core, and the tests start over a hundred ranks. A rank is a process of its own.
Its interpreter ends as that of any other process does. A request is a JSON object with two files: the standard output
of the rank, and a pipe. The pipe gets a line with the rank's pid, and one with its exit code when it has ended.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys

# The third-party code that ranks import. Ours is imported by each rank.
with contextlib.suppress(ImportError):
    # No rank compiles kernels, and Triton counts what it has not freed at the end, which `gc.freeze` keeps.
    sys.modules["triton"] = None
    # The first step of an optimizer and the first call of DDP import dynamo.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401


def wait_for_request(requests: socket.socket) -> tuple[dict, int]:
    """What to run, and its standard output. It returns in a process that is forked for that, once for each request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, given, _, _ = socket.recv_fds(requests, 1 << 17, 2)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in given:
            os.close(file)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, told = given
    if (rank := os.fork()) == 0:
        os.close(told)
        return json.loads(message), output
    os.close(output)
    os.write(told, b"%d\n" % rank)
    os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
    os._exit(0)


# A rank need not walk through all that torch has made, and so copy its pages, to find what it can free.
gc.freeze()
asked, output = wait_for_request(socket.socket(fileno=0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(output, 1)
os.dup2(output, 2)
os.close(output)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = asked["arguments"]
__file__ = sys.argv[0]
code = compile(asked["code"], __file__, "exec")
del asked, output, wait_for_request
exec(code, globals())
