"""Packs operations into frames, and matches answers with operations. Decides only.

Frames are columnar: operations share the cost of a frame instead of being one message each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, TypeVar

from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import failures_of
from kvstore.client.core.values import Item
from kvstore.proto import compact, kv_pb2

FRAME_OPERATIONS_MAX = 2_000
COMPACT_OPERATIONS_MAX = 64
"""Maximum operations of a compact frame. Few, because compact frames are cheap: the server starts on one while the next
is made."""
FRAME_BYTES_MAX = 512 << 10
"""Bytes at which a frame is closed. A single operation may exceed it."""
RETURN_OLD_BYTES = 256 << 10
"""Bytes that an operation counts if its answer may be large and cannot be requested again."""

Group = list[ClientOperation]
L = TypeVar("L")
_options_of, _size_of = attrgetter("options"), attrgetter("size")
_lane_of = attrgetter("numbering", "partition", "level", "seen_ms")


def cut(pending: deque[ClientOperation], most: int = FRAME_OPERATIONS_MAX) -> list[ClientOperation]:
    """Remove and return the next operations of a queue that fit into one frame."""
    if len(pending) <= most:
        taken = list(pending)
        if sum(map(_size_of, taken)) < FRAME_BYTES_MAX and not any(map(_options_of, taken)):
            pending.clear()
            return taken
    taken = []
    size = 0
    while pending and len(taken) < most and size < FRAME_BYTES_MAX:
        operation = pending.popleft()
        taken.append(operation)
        size += operation.size
        if operation.options is not None and operation.options.flags & kv_pb2.RETURN_OLD:
            size += RETURN_OLD_BYTES
    return taken


def frame_of(
    operations: Sequence[ClientOperation],
    first: int,
    *,
    ring_version: int,
    timeout_ms: int,
    tokens: Mapping[str, int],
    cluster: str = "",
) -> tuple[kv_pb2.Frame, dict[int, ClientOperation]]:
    """Return a frame, and its operations by number from `first` on. `cluster`: the only cluster whose servers may
    accept the frame, if nothing else about the call says so."""
    lanes, numbered = _lanes(_lane, operations, first, tokens)
    frame = kv_pb2.Frame(ring_version=ring_version, timeout_ms=timeout_ms, lanes=lanes, cluster=cluster)
    return frame, numbered


def compact_frame_of(
    operations: list[ClientOperation], first: int, *, ring_version: int, timeout_ms: int, tokens: Mapping[str, int]
) -> tuple[kv_pb2.Frame | compact.CompactFrame, dict[int, ClientOperation]]:
    """Return a frame for streams, and its operations by number. The frame is compact if no operation has options."""
    if any(map(_options_of, operations)):
        return frame_of(operations, first, ring_version=ring_version, timeout_ms=timeout_ms, tokens=tokens)
    lanes, numbered = _lanes(_compact_lane, operations, first, tokens)
    return compact.CompactFrame(ring_version, timeout_ms, lanes), numbered


def single_frame_of(
    operation: ClientOperation, number: int, *, ring_version: int, timeout_ms: int, token: int
) -> compact.CompactFrame:
    """Return a compact frame with one operation without options."""
    lane = compact.CompactLane(operation.partition, number, [operation.code], [operation.key])
    if operation.is_read:
        lane.level, lane.token = operation.level, token
    else:
        numbering = operation.numbering
        lane.values, lane.sequences, lane.client = [operation.value], [operation.sequence], numbering.client
        lane.first_unacknowledged, lane.seen_ms = numbering.first_unacknowledged, operation.seen_ms
    return compact.CompactFrame(ring_version, timeout_ms, [lane])


def _lanes(
    make: Callable[[Group, int, int], L], operations: Sequence[ClientOperation], first: int, tokens: Mapping[str, int]
) -> tuple[list[L], dict[int, ClientOperation]]:
    """Return a lane for each group, and the operations by number. `make` gets a group, its first number and its session
    token."""
    lanes: list[L] = []
    numbered: dict[int, ClientOperation] = {}
    for group in _groups(operations):
        lanes.append(make(group, first, tokens.get(group[0].partition, 0)))
        numbered.update(zip(range(first, first + len(group)), group, strict=True))
        first += len(group)
    return lanes, numbered


def _groups(operations: Sequence[ClientOperation]) -> list[Group]:
    """Group operations that may share a lane, in order of first appearance. Usually there is one group."""
    keys = list(map(_lane_of, operations))
    if keys.count(keys[0]) == len(keys):
        return [list(operations)]
    groups: dict[tuple[Any, ...], Group] = {}
    for key, operation in zip(keys, operations, strict=True):
        groups.setdefault(key, []).append(operation)
    return list(groups.values())


def _compact_lane(group: Group, first: int, token: int) -> compact.CompactLane:
    head = group[0]
    lane = compact.CompactLane(head.partition, first, [each.code for each in group], [each.key for each in group])
    lane.level, lane.token = head.level, token
    values = [each.value for each in group]
    if any(values):
        lane.values = values
    sequences = [each.sequence for each in group]
    if any(sequences):
        numbering = head.numbering
        lane.sequences, lane.client, lane.seen_ms = sequences, numbering.client, head.seen_ms
        lane.first_unacknowledged = numbering.first_unacknowledged
    return lane


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


def answered(answers: kv_pb2.Answers | compact.CompactAnswers[Item]) -> Iterable[tuple[int, Any]]:
    """Yield the numbers of operations, each with its answer."""
    if isinstance(answers, compact.CompactAnswers):
        numbers, found, absent = answers.numbers, answers.found, answers.absent
        if not found and not absent:
            return zip(numbers, answers.versions, strict=True)
        if not numbers and not absent:
            return zip(found, answers.records, strict=True)
        done, read = zip(numbers, answers.versions, strict=True), zip(found, answers.records, strict=True)
        return chain(done, read, zip(absent, repeat(None)))
    return _answered(answers)


def _answered(answers: kv_pb2.Answers) -> Iterator[tuple[int, Any]]:
    yield from zip(answers.numbers, answers.versions, strict=True)
    found = len(answers.found)
    expiries = answers.expiries_ms or [0] * found
    # With fewer expiries than records it is unknown which record each belongs to: servers before 0.2.0 joined messages
    # that way.
    if len(expiries) == found:
        columns = (answers.values, answers.found_versions, answers.created, answers.written_ms, expiries)
        yield from zip(answers.found, map(Item, *columns), strict=True)
    for number in answers.absent:
        yield number, None
    for result in answers.results:
        yield result.number, result
    for error, numbers in failures_of(answers):
        for number in numbers:
            yield number, error
