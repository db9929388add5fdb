"""Builds pages of one partition's feed in columnar form, for readers that keep their own positions. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state.changes import FeedEntry, Interest
from kvstore.proto import feed_pb2

ROWS_DEFAULT, BYTES_DEFAULT = 10_000, 1 << 20
ROWS_MAX, BYTES_MAX = 50_000, 5 << 19
ROW_BYTES = 40
"""Maximum bytes of a change in addition to its key and value."""
PARTS_MAX = 5_000
"""Number of parts of transactions at which a page ends. The last entry of a page may exceed it. Each part takes up to
100 bytes, also if the page contains none of its changes, and a message has at most 4 MiB."""


def interest_in(start: bytes, end: bytes) -> Interest:
    """Return the interest in the keys of a range. Raises InvalidRequest. A bound may be the longest key plus a zero
    byte."""
    for bound in (start, end):
        if len(bound) > KEY_BYTES_MAX + 1:
            raise InvalidRequest(f"expected a bound of at most {KEY_BYTES_MAX + 1} bytes, got {len(bound)}")
    if end and end <= start:
        raise InvalidRequest(f"expected start < end, got {start!r} and {end!r}")
    return Interest(start, end)


class PageBounds(NamedTuple):
    """The limits of one page: its last sequence, its number of rows and its bytes."""

    until: int
    """Last sequence; 0: no bound."""
    rows: int
    bytes: int

    @staticmethod
    def of(request: feed_pb2.ChangesRequest) -> PageBounds:
        rows = min(request.rows_max or ROWS_DEFAULT, ROWS_MAX)
        return PageBounds(request.until, rows, min(request.bytes_max or BYTES_DEFAULT, BYTES_MAX))


class FeedPage:
    """One page of a feed, which is filled entry by entry."""

    def __init__(self, interest: Interest, bounds: PageBounds, after: int, *, keys_only: bool) -> None:
        self.message = feed_pb2.ChangesResponse(next=after)
        self.is_full = False
        self._interest, self._bounds, self._keys_only = interest, bounds, keys_only
        self._after, self._handed_at = after, -1
        self._size = self._rows = 0
        self._kinds: list[bytes] = []

    @property
    def is_news(self) -> bool:
        """True if the page contains something that a reader at `after` does not have yet."""
        return self._rows > 0 or self._handed_at > self._after or len(self.message.parts) > 0

    @property
    def is_exact(self) -> bool:
        """True if everything taken lies before `next`. Otherwise a handover lies exactly there, and a reader that
        continues from `next` receives it again, because it may have had another page before."""
        return self._handed_at < self.message.next

    @property
    def is_at_bound(self) -> bool:
        """True if nothing requested can follow, so that no reader needs to wait."""
        return bool(self._bounds.until) and self.message.next >= self._bounds.until

    def add(self, entry: FeedEntry) -> bool:
        """Add the requested changes of the next entry and advance `message.next`. Return True if the whole entry
        fitted."""
        message, until = self.message, self._bounds.until
        if len(message.parts) >= PARTS_MAX:
            self.is_full = True
            return False
        rows = self._interest.rows(entry, message.next, until) if entry.keys else ()
        fitting = self._fitting(entry, rows)
        if entry.parts:
            covered = entry.after if fitting == len(rows) else entry.sequences[rows[fitting]] - 1
            self._append_parts(entry, rows[:fitting], min(covered, until) if until else covered)
        self._append(entry, rows if fitting == len(rows) else rows[:fitting])
        if fitting < len(rows):
            self.is_full = True
            self.skip_to(entry.sequences[rows[fitting]] - 1)
            return False
        self.is_full = bool(until) and entry.after > until
        if not (self.is_full and entry.before >= until):  # otherwise the whole entry lies beyond the bound
            message.time_ms = entry.time_ms
            if entry.handed is not None and entry.is_behind(message.next):
                self._hand(entry)
        self.skip_to(entry.after)
        return not self.is_full

    def skip_to(self, seq: int) -> None:
        """Record that the page covers everything up to the sequence."""
        bound = self._bounds.until
        self.message.next = max(self.message.next, min(seq, bound) if bound else seq)

    def finish(self, latest: int) -> feed_pb2.ChangesResponse:
        self.message.kinds = b"".join(self._kinds)
        if self.message.part_of:
            self.message.part_of.extend([0] * (self._rows - len(self.message.part_of)))
        self.message.latest = max(latest, self.message.next)
        return self.message

    def _fitting(self, entry: FeedEntry, rows: Sequence[int]) -> int:
        """Return how many of the rows still fit."""
        count, size = 0, self._size
        most = self._bounds.rows - self._rows
        keys, values = entry.keys, entry.values
        for row in rows[:most]:
            size += len(keys[row]) + (0 if self._keys_only else len(values[row])) + ROW_BYTES
            if size > self._bounds.bytes and (count or self._rows):
                break
            count, self._size = count + 1, size
        return count

    # docs/protocol.md F9
    def _append_parts(self, entry: FeedEntry, rows: Sequence[int], covered: int) -> None:
        """Add the parts of transactions that the entry commits after the page's position and up to sequence `covered`,
        and those of the rows, which are appended next."""
        message = self.message
        of_rows = {entry.part_of[row] for row in rows}
        numbers = {0: 0}
        for number, part in enumerate(entry.parts, 1):
            if number in of_rows or message.next < part.sequence <= covered:
                message.parts.add(
                    transaction=str(part.attempt),
                    sequence=part.sequence,
                    keys=part.keys,
                    keys_of_all=part.keys_of_all,
                )
                numbers[number] = len(message.parts)
        if not rows:
            return
        message.part_of.extend([0] * (self._rows - len(message.part_of)))
        message.part_of.extend([numbers[entry.part_of[row]] for row in rows])

    def _append(self, entry: FeedEntry, rows: Sequence[int]) -> None:
        if not rows:
            return
        message, count = self.message, len(rows)
        self._rows += count
        message.times_ms.extend([entry.time_ms] * count)
        if count == len(entry.keys):
            message.keys.extend(entry.keys)
            message.values.extend([b""] * count if self._keys_only else entry.values)
            message.sequences.extend(entry.sequences)
            message.created.extend(entry.created)
            message.expires_ms.extend(entry.expires_ms)
            self._kinds.append(entry.kinds)
            return
        message.keys.extend([entry.keys[row] for row in rows])
        message.values.extend([b""] * count if self._keys_only else [entry.values[row] for row in rows])
        message.sequences.extend([entry.sequences[row] for row in rows])
        message.created.extend([entry.created[row] for row in rows])
        message.expires_ms.extend([entry.expires_ms[row] for row in rows])
        self._kinds.append(bytes([entry.kinds[row] for row in rows]))

    def _hand(self, entry: FeedEntry) -> None:
        handed = entry.handed
        assert handed is not None
        self._handed_at = handed.seq
        self.message.handovers.add(
            owned=handed.is_owned,
            sequence=handed.seq,
            peer=handed.peer,
            peer_sequence=handed.peer_seq,
            first_token=handed.span.first,
            last_token=handed.span.last,
            move=handed.move,
        )
