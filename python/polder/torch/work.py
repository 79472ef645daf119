"""What a collective gives back: work that is over, or on its way."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TypeVar, cast

import torch
from torch._C._distributed_c10d import Work
from torch._C._dynamo import eval_frame

from polder import _core
from polder.errors import PeerTimeoutError, PolderError

# What c10d calls has the names and arguments of its bindings, which its stubs do not follow.
# pyright: reportIncompatibleMethodOverride=false, reportUnknownMemberType=false, reportPrivateUsage=false


_Class = TypeVar("_Class", bound=type)


def uncompiled(kind: _Class) -> _Class:
    """Keeps torch.compile out of a class that c10d calls: a compiled program calls its methods as it calls C++."""
    skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skipped)
            # A program that holds the object does not compile the method into itself either.
            vars(member)["_torchdynamo_disable"] = True
    return kind


@uncompiled
class Done(Work):
    """An operation that was over when its call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@uncompiled
class Pending(Work):
    """An operation on its way, on the group's own thread.

    Parameters
    ----------
    tickets : list
        What it waits for.
    tensors : list
        What it gives.
    finish : callable, optional
        Runs once, after the last ticket and before a caller sees the tensors: copies out of staging tensors.
    settle : callable, optional
        Runs before a caller learns that it is over: finishes what was called before, which nobody may wait for.
    explain : callable, optional
        Adds to the error of a rank that did not come what it called instead, and names ranks as the job does.
    tells : (float, callable), optional
        Seconds of a wait after which it tells the other ranks that this one waits: with True, and with False once it
        does not any more.
    """

    def __init__(
        self,
        tickets: "list[_core.Ticket | _core.Message]",
        tensors: list[torch.Tensor],
        finish: Callable[[], None] | None,
        settle: Callable[[], None] | None = None,
        explain: Callable[[PolderError, bool], None] | None = None,
        tells: tuple[float, Callable[[bool], None]] | None = None,
    ) -> None:
        super().__init__()
        self._settle = settle
        self._explain = explain
        self._tells = tells
        self.tickets = tickets
        self.tensors = tensors
        self._finish = finish
        self._finishing = threading.Lock()
        self._failure: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Waits for the operation; raises what went wrong with it."""
        seconds = timeout.total_seconds()
        end = time.monotonic() + seconds
        for ticket in self.tickets:
            try:
                is_done = self._wait_for(ticket, max(end - time.monotonic(), 0.0) if seconds > 0 else None)
            except PolderError as error:
                if self._explain is not None:
                    self._explain(error, True)
                self._set_future()
                raise
            if not is_done:
                raise PeerTimeoutError(f"the operation is not done after {seconds} s; it goes on in the background")
        self._set_future()
        self.finish_once()
        return True

    def _wait_for(self, ticket: "_core.Ticket | _core.Message", seconds: float | None) -> bool:
        if self._tells is None or (seconds is not None and seconds <= self._tells[0]):
            return ticket.wait(seconds)
        after, tell = self._tells
        if ticket.wait(after):
            return True
        tell(True)
        is_done = ticket.wait(None if seconds is None else seconds - after)
        tell(False)
        return is_done

    def finish_once(self) -> None:
        if self._settle is not None:
            self._settle()
        self.finish_own()

    def finish_own(self) -> None:
        """Makes the copies of this operation, which is over, once."""
        # A second caller, on another thread, waits until the copies are made, and hears of their failure too.
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except BaseException as error:
                    self._failure = error
            if self._failure is not None:
                raise self._failure

    def is_collective(self) -> bool:
        """Whether it is done in the turn of its call, and no message."""
        return not isinstance(self.tickets[0], _core.Message)

    def _set_future(self) -> None:
        """Returns once the future is set, if there is one: a thread of the group's does that after the last ticket."""
        if self._future is not None:
            with contextlib.suppress(Exception):
                self._future.wait()

    def is_completed(self) -> bool:
        """Whether the tensors hold the result, or the operation failed, and the future says so."""
        if not self._is_over():
            return False
        if self._error() is None:
            self.finish_once()
        return self._future is None or self._future.done()

    def is_settled(self) -> bool:
        """Whether it is over; then its copies are made, unless it failed."""
        if not self._is_over():
            return False
        if self._error() is None:
            # The holder of the work hears of a failure.
            with contextlib.suppress(Exception):
                self.finish_own()
        return True

    def _is_over(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        error = self._error() or self._failure
        if error is not None:
            if self._explain is not None and isinstance(error, PolderError):
                self._explain(error, False)
            self._set_future()
        return error

    def _error(self) -> BaseException | None:
        return next((error for ticket in self.tickets if (error := ticket.error()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the tensors, which DDP's reducer waits for. A failure is a RuntimeError with the text of ours."""
        if self._future is None:
            over: torch.futures.Future[BaseException | None] = torch.futures.Future()
            # What set_exception leaves is an error for Python alone, which the reducer takes for tensors: it crashed.
            self._future = over.then(self._outcome)
            self._when_done(0, over.set_result)
        return self._future

    def _when_done(self, at: int, then: Callable[[BaseException | None], object]) -> None:
        """Calls `then` with the first failure, or with None when the tickets from `at` on are done."""
        ticket = self.tickets[at]
        if at + 1 == len(self.tickets):
            ticket.when_done(then)
            return
        ticket.when_done(lambda error: then(error) if error is not None else self._when_done(at + 1, then))

    def _outcome(self, over: "torch.futures.Future[BaseException | None]") -> list[torch.Tensor]:
        error = over.value() or self._error()
        if error is not None:
            raise error
        self.finish_once()
        return self.tensors


@uncompiled
class Received(Pending):
    """A message from any rank, which says whose it was."""

    def source_rank(self) -> int:
        """The rank in the group whose message it is, once it has come."""
        source = cast("_core.Message", self.tickets[0]).source
        if source is None:
            raise PolderError("no message has come yet, so it has no source; call wait() first")
        return source

    _source_rank = source_rank
