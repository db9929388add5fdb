"""Reads the records back from a segment's bytes, and distinguishes a torn tail from damage. Decides only.

A group's header says up to where syncs had completed when it was written. A bad record below the highest such offset
was on disk once: it is damage, which is reported and never taken for the end. A bad record at or above it, and
everything after it, was never reported to anybody: it is the torn tail, and is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvstore.bookie.journal.record import (
    FILE_HEADER_SIZE,
    GROUP_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    GroupHeader,
    RecordHead,
    RecordKind,
    decode_group_header,
    decode_record_head,
    group_marker,
    is_body_good,
    seed_of,
)
from kvstore.bookie.steps import Steps

STEP_RECORDS = 2_000
"""Maximum number of records in one step."""


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record whose head is valid. Its body may be damaged."""

    offset: int
    head: RecordHead
    body: bytes
    is_good: bool
    """False if the record is an entry whose packet is damaged although it had been synced."""


@dataclass(slots=True)
class SegmentScan:
    """The records and the damage found in the bytes of one segment."""

    records: list[ScannedRecord] = field(default_factory=list)
    damage: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of synced bytes in which records can no longer be recognized."""
    end: int = FILE_HEADER_SIZE
    """Offset at which the log ends in this segment."""
    synced_to: int = FILE_HEADER_SIZE
    """Offset below which everything was certainly synced. The bytes from here to `end` were written, but may not be
    synced."""
    last_group: int = 0


def group_headers(data: bytes, salt: int) -> Steps[dict[int, GroupHeader]]:
    """Return every valid group header in a segment's bytes, by its offset."""
    marker, found, at = group_marker(salt), dict[int, GroupHeader](), data.find(group_marker(salt), FILE_HEADER_SIZE)
    for number in count(1):
        if at < 0:
            break
        if number % STEP_RECORDS == 0:
            yield
        header = decode_group_header(data, at, salt, at)
        if header is not None:
            found[at] = header
        at = data.find(marker, at + 1)
    return found


def certified(headers: Mapping[int, GroupHeader], file: int) -> int:
    """Return the offset up to which segment `file` was synced, according to the group headers in it."""
    return max((header.synced_to for header in headers.values() if header.synced_file == file), default=0)


# docs/protocol.md B6
def scan(
    data: bytes,
    file: int,
    salt: int,
    *,
    known_end: int | None = None,
    synced_to: int = 0,
    missing: Sequence[range] = (),
) -> Steps[SegmentScan]:
    """Read the records of segment `file` from its bytes. `known_end` is the offset at which the next segment says that
    this one ends; bytes after it were abandoned. `synced_to` is an offset that other segments know to be synced.
    `missing` are ranges that the disk could not read. If the log would continue in such a range, that is damage and not
    a torn tail, because a crash leaves readable bytes."""
    headers = yield from group_headers(data, salt)
    if known_end is not None:
        headers = {at: header for at, header in headers.items() if at < known_end}
    result = SegmentScan(synced_to=known_end or max(FILE_HEADER_SIZE, certified(headers, file), synced_to))
    result.last_group = max((header.number for header in headers.values()), default=0)
    at, continues_to = FILE_HEADER_SIZE, 0
    while at < result.synced_to or at in headers:
        header = headers.get(at)
        if header is None:
            at = _skip(result, at, min((other for other in headers if other > at), default=result.synced_to))
            continue
        end = at + GROUP_HEADER_SIZE + header.size
        stopped = yield from _records(result, data, at + GROUP_HEADER_SIZE, end, seed_of(salt))
        if stopped < end and stopped >= result.synced_to:
            at, continues_to = stopped, end
            break
        at = end if stopped == end else _skip(result, stopped, end)
    result.end = at
    following = max(continues_to, at + GROUP_HEADER_SIZE)
    if known_end is None and any(each.start < following and each.stop > at for each in missing):
        result.damage.append((at, following))
    return result


def _skip(result: SegmentScan, start: int, stop: int) -> int:
    """Record the range as damage. Return the offset at which to continue, at most the known end."""
    result.damage.append((start, stop))
    return stop


def _records(result: SegmentScan, data: bytes, at: int, end: int, seed: int) -> Steps[int]:
    """Collect the records of one group. Return the offset at which they become unreadable."""
    while at < end:
        head = decode_record_head(data, at, seed=seed, offset=at)
        after = at + RECORD_HEADER_SIZE + (head.size if head is not None else 0)
        if head is None or after > end:
            return at
        body = data[at + RECORD_HEADER_SIZE : after]
        is_good = is_body_good(head, body)
        if not is_good and at >= result.synced_to:
            return at
        if is_good or head.kind == RecordKind.ADD:
            result.records.append(ScannedRecord(at, head, body, is_good))
            if len(result.records) % STEP_RECORDS == 0:
                yield
        else:
            result.damage.append((at, after))
        at = after
    return at
