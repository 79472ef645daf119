"""Outputs that share memory with inputs, in every collective and at several lengths; each value is computed apart."""

import itertools
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import polder.torch  # noqa: F401

dist.init_process_group("polder", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
wrong: list[str] = []


def value(source: int, part: int, count: int) -> torch.Tensor:
    """What rank ``source`` gives for ``part``; sums of it are exact."""
    return torch.arange(count, dtype=torch.float32) % 97 + 1000 * source + 10 * part


def over(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def case(name: str, check: Callable[[], bool]) -> None:
    """Notes a case that is wrong on some rank."""
    try:
        is_right: object = check()
    except Exception as error:
        is_right = f"{type(error).__name__}: {error}"
    told: list[object] = [None] * size
    dist.all_gather_object(told, is_right)
    if any(each is not True for each in told):
        wrong.append(f"{name}: {told}")


def laid(count: int, shift: int, parts: int = size) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of this rank's parts, and one of equal length that begins ``shift`` elements later."""
    room = torch.zeros(count * parts + shift)
    room[: count * parts] = torch.cat([value(rank, part, count) for part in range(parts)])
    return room[: count * parts], room[shift : shift + count * parts]


def rotated(count: int, by: int, is_async: bool) -> bool:
    given = [value(rank, part, count) for part in range(size)]
    got = given[by:] + given[:by]
    over(dist.all_to_all(got, given, async_op=is_async))
    return all(torch.equal(got[part], value(part, rank, count)) for part in range(size))


def listed(count: int, shift: int, is_async: bool) -> bool:
    given, got = (list(it.split(count)) for it in laid(count, shift))
    over(dist.all_to_all(got, given, async_op=is_async))
    return all(torch.equal(got[part], value(part, rank, count)) for part in range(size))


def single(count: int, shift: int, is_async: bool) -> bool:
    given, got = laid(count, shift)
    over(dist.all_to_all_single(got, given, async_op=is_async))
    return torch.equal(got, torch.cat([value(part, rank, count) for part in range(size)]))


def uneven(count: int, shift: int, is_async: bool) -> bool:
    """Rank r gives rank k so many times k + 1, and gets r + 1 of each."""
    given_lengths, got_lengths = [(part + 1) * count for part in range(size)], [(rank + 1) * count] * size
    whole = sum(given_lengths)
    room = torch.zeros(max(whole, sum(got_lengths)) + shift)
    room[:whole] = value(rank, 0, whole)
    got = room[shift : shift + sum(got_lengths)]
    over(dist.all_to_all_single(got, room[:whole], got_lengths, given_lengths, async_op=is_async))
    begin = sum(given_lengths[:rank])
    return torch.equal(got, torch.cat([value(part, 0, whole)[begin:][: got_lengths[0]] for part in range(size)]))


def reduced_list(count: int, into: int, is_async: bool) -> bool:
    given = [value(rank, part, count) for part in range(size)]
    over(dist.reduce_scatter(given[into], given, async_op=is_async))
    return torch.equal(given[into], sum(value(source, rank, count) for source in range(size)))


def reduced(count: int, shift: int, is_async: bool) -> bool:
    room = torch.zeros(count * size + shift + count)
    room[: count * size] = torch.cat([value(rank, part, count) for part in range(size)])
    got = room[shift : shift + count]
    over(dist.reduce_scatter_tensor(got, room[: count * size], async_op=is_async))
    return torch.equal(got, sum(value(source, rank, count) for source in range(size)))


def gathered_list(count: int, own: int, is_async: bool) -> bool:
    given = value(rank, 0, count)
    got = [given if part == own else torch.zeros(count) for part in range(size)]
    over(dist.all_gather(got, given, async_op=is_async))
    return all(torch.equal(got[part], value(part, 0, count)) for part in range(size))


def gathered(count: int, shift: int, is_async: bool) -> bool:
    room = torch.zeros(count * size + count)
    room[shift : shift + count] = value(rank, 0, count)
    over(dist.all_gather_into_tensor(room[: count * size], room[shift : shift + count], async_op=is_async))
    return torch.equal(room[: count * size], torch.cat([value(part, 0, count) for part in range(size)]))


def scattered(count: int, own: int, is_async: bool) -> bool:
    given = [value(0, part, count) for part in range(size)] if rank == 0 else None
    got = given[own] if given else torch.zeros(count)
    over(dist.scatter(got, given, 0, async_op=is_async))
    return torch.equal(got, value(0, rank, count))


def collected(count: int, own: int, is_async: bool) -> bool:
    given = value(rank, 0, count)
    got = [given if part == own else torch.zeros(count) for part in range(size)]
    over(dist.gather(given, got if rank == 0 else None, 0, async_op=is_async))
    return rank != 0 or all(torch.equal(got[part], value(part, 0, count)) for part in range(size))


count_of_cases = 0
for count, is_async in itertools.product((3, 700, 5000, 40_000, 300_000), (False, True)):
    shifts = (0, 1, count // 2, count)
    for check, places in (
        (rotated, range(size)),
        (listed, shifts),
        (single, shifts),
        (uneven, shifts),
        (reduced_list, range(size)),
        (reduced, (*shifts, count * size - 1)),
        (gathered_list, range(size)),
        (gathered, (*shifts, count * size - 1)),
        (scattered, range(size)),
        (collected, range(size)),
    ):
        for place in places:
            case(f"{check.__name__} {count} {place} async={is_async}", lambda: check(count, place, is_async))  # noqa: B023
            count_of_cases += 1
dist.destroy_process_group()
if rank == 0:
    print("\n".join(wrong) or f"{count_of_cases} cases")
sys.exit(bool(wrong))
