"""Which ranks of a group are left when some have died: one list on all of them."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polder.errors import PeerDeadError, PolderError
from polder.torch.backend import ProcessGroupPolder
from polder.torch.meeting import watching

# torch's stubs leave stores and groups without types.
# pyright: reportUnknownMemberType=false

__all__ = ["Survivors", "agreed"]


class Survivors:
    """The ranks of a group that are left.

    Two ranks may see two deaths in another order, and more ranks may die while the others form a group. So survivors go
    on in rounds. In a round the first list of the dead that comes to the store counts for all, and those that it leaves
    form a group. If one of these has died too, what they do together fails on each of them, at the latest in the next
    collective. Then each comes to the next round, whose list has that rank.

    Parameters
    ----------
    group : ProcessGroup
        The ranks. It stays open: it knows which of their processes live.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        assert isinstance(group, ProcessGroupPolder)
        self.whole = group
        """All ranks that there were at first."""
        self._ranks = dist.get_process_group_ranks(group)
        self._seen: set[int] = set()
        """The ranks that this process knows to be dead."""
        self._dead: set[int] = set()
        """Those that all survivors count as dead."""
        self._rounds = 0

    def have_lost(self, error: PolderError | None = None) -> bool:
        """Whether ranks have died since the last round; `error` may name one that another rank has missed first."""
        named = (error.host, error.pid) if isinstance(error, PeerDeadError) else None
        for rank, (host, pid, lives) in enumerate(self.whole.members()):
            if not lives or (host, pid) == named:
                self._seen.add(rank)
        return not self._seen <= self._dead

    def regroup(self) -> dist.ProcessGroup:
        """Comes to the next round, and forms a group of those that are left. All survivors call it.

        Raises
        ------
        PeerDeadError
            A rank that the round counts as left is dead.
        PolderError
            The others count this rank as dead, or could not form the group.
        """
        if self._rounds == 0:
            # Others may wait for this rank in it, and not for one that has died.
            self.whole.give_up()
        self._dead = agreed(self.whole.agreements, self._rounds, self._seen | self._dead)
        self._rounds += 1
        if self.whole.getRank() in self._dead:
            raise PolderError(
                f"the other workers have counted rank {self.whole.getRank()} as dead and gone on without it; "
                "start it anew"
            )
        left = [rank for at, rank in enumerate(self._ranks) if at not in self._dead]
        with watching(self._expect_no_loss):
            # Each survivor calls it once a round: torch counts the calls, and the count is a part of the group's name.
            group = dist.new_group(
                left,
                timedelta(seconds=self.whole.seconds),
                backend="polder",
                use_local_synchronization=True,
            )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _expect_no_loss(self) -> None:
        if self.have_lost():
            ranks = ", ".join(str(self._ranks[at]) for at in sorted(self._seen - self._dead))
            raise PeerDeadError(f"rank {ranks} died while the others formed a group without the ranks that died before")


def agreed(store: Any, number: int, dead: set[int]) -> set[int]:
    """The ranks that count as dead in round `number`: what the first of its callers gave.

    Parameters
    ----------
    store : Store
        A store of c10d that all callers share, and nobody has used for earlier rounds.
    number : int
        The round, from 0.
    dead : set of int
        The ranks that this caller knows to be dead.

    Returns
    -------
    set of int

    Raises
    ------
    PolderError
        The store is lost.

    Examples
    --------
    >>> store = dist.HashStore()
    >>> agreed(store, 0, {3, 1}), agreed(store, 0, {2}), agreed(store, 1, {1, 2, 3})
    ({1, 3}, {1, 3}, {1, 2, 3})
    """
    try:
        said = store.compare_set(f"dead/{number}", "", json.dumps(sorted(dead)))
    except (RuntimeError, OSError) as error:
        raise PolderError(
            f"the c10d store is lost ({error}); the process that keeps it has ended, so the ranks that are left cannot "
            "meet: start the job anew"
        ) from error
    return set(json.loads(said))
