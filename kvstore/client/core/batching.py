"""Operations → frames, and their answers → operations. Decides only.

Columns instead of a message per operation: what a frame costs is shared by all that are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from kvstore.client.core.operation import Operation
from kvstore.client.core.operations import failures_of
from kvstore.client.core.values import Item
from kvstore.proto import kv_pb2

FRAME_OPERATIONS_MAX = 2_000
FRAME_BYTES_MAX = 512 << 10
"""A frame is closed when it has this much; one operation may go beyond."""
RETURN_OLD_BYTES = 256 << 10
"""What an operation counts for whose answer may be large and cannot be asked again."""

Group = list[Operation]


def cut(pending: deque[Operation]) -> list[Operation]:
    """The next operations of a queue that go into one frame; they are taken out of it."""
    taken: list[Operation] = []
    size = 0
    while pending and len(taken) < FRAME_OPERATIONS_MAX and size < FRAME_BYTES_MAX:
        operation = pending.popleft()
        taken.append(operation)
        size += operation.size
        if operation.options is not None and operation.options.flags & kv_pb2.RETURN_OLD:
            size += RETURN_OLD_BYTES
    return taken


def frame_of(
    operations: Sequence[Operation], first: int, *, ring_version: int, timeout_ms: int, tokens: Mapping[str, int]
) -> tuple[kv_pb2.Frame, dict[int, Operation]]:
    """A frame, and its operations by their numbers from `first` on."""
    lanes = []
    numbered: dict[int, Operation] = {}
    for group in _groups(operations):
        lanes.append(_lane(group, first, tokens.get(group[0].partition, 0)))
        numbered.update(zip(range(first, first + len(group)), group, strict=True))
        first += len(group)
    return kv_pb2.Frame(ring_version=ring_version, timeout_ms=timeout_ms, lanes=lanes), numbered


def _groups(operations: Sequence[Operation]) -> list[Group]:
    """Operations that may share a lane, in order of first appearance; neighbours mostly do."""
    groups: dict[tuple[Any, ...], Group] = {}
    last = group = None
    for operation in operations:
        if (
            last is None
            or operation.numbering is not last.numbering
            or operation.partition != last.partition
            or operation.level != last.level
            or operation.seen_ms != last.seen_ms
        ):
            key = (operation.partition, operation.numbering.client, operation.level, operation.seen_ms)
            group = groups.setdefault(key, [])
        last = operation
        group.append(operation)  # type: ignore[union-attr]
    return list(groups.values())


def _lane(group: Group, first: int, token: int) -> kv_pb2.Lane:
    head = group[0]
    lane = kv_pb2.Lane(
        partition=head.partition,
        first=first,
        codes=[operation.code for operation in group],  # type: ignore[misc]
        keys=[operation.key for operation in group],
        level=head.level,  # type: ignore[arg-type]
        token=token,
    )
    values = [operation.value for operation in group]
    if any(values):
        lane.values.extend(values)
    sequences = [operation.sequence for operation in group]
    if any(sequences):
        numbering = head.numbering
        lane.sequences.extend(sequences)
        lane.client, lane.seen_ms = numbering.client, head.seen_ms
        lane.first_unacknowledged = numbering.first_unacknowledged
    options = [operation.options for operation in group]
    if options.count(None) < len(options):
        for index, each in enumerate(options):
            if each is not None:
                each.index = index
                lane.options.append(each)
    return lane


def settled(answers: kv_pb2.Answers, open_: dict[int, Operation]) -> Iterator[tuple[Operation | None, Any]]:
    """Each answered operation with its answer, taken out of `open_`; None for one that nobody knows (any more)."""
    pop = open_.pop
    yield from zip(map(pop, answers.numbers, repeat(None)), answers.versions, strict=True)
    if answers.found:
        expiries = answers.expiries_ms or repeat(0)
        columns = (answers.values, answers.found_versions, answers.created, answers.written_ms, expiries)
        yield from zip(map(pop, answers.found, repeat(None)), map(Item, *columns), strict=False)
    for number in answers.absent:
        yield pop(number, None), None
    for result in answers.results:
        yield pop(result.number, None), result
    for error, numbers in failures_of(answers):
        for number in numbers:
            yield pop(number, None), error
