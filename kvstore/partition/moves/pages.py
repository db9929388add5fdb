"""Builds the data that a target receives: pages of a range's rows, and the changes to the range in part of a log.
Decides only.

Rows and results are transferred unchanged (docs/protocol.md M3, M4).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, starmap
from typing import NamedTuple

import msgspec

from kvstore import versions
from kvstore.errors import Unavailable
from kvstore.partition.state import rows
from kvstore.partition.state.effects import moving_bounds, transaction_change
from kvstore.partition.state.entry import (
    DELETE,
    NOTE,
    OF_TRANSACTIONS,
    Entry,
    Requests,
    requests_message,
    requests_of,
)
from kvstore.partition.state.results import encode_result
from kvstore.partition.state.retry_table import PART_OF_A_RANGE, decode_row
from kvstore.partition.state.rows import data_key, encode_record
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import entry_pb2
from kvstore.proto.arrays import ArrayDecoder
from kvstore.ring.hashing import KeyHash
from kvstore.types import Position

PAGE_BYTES = 256 << 10
"""Bytes of rows in a page. A single row may be larger."""
PAGE_ROWS_MAX = 1000
RETRY_ROWS_MAX, RETRY_IDS_MAX = 200, 4000
"""Rows and request ids read for one page. A row may contain a thousand request ids, each of which costs some
microseconds."""
RETRY_BYTES_MAX = 1 << 20
"""Bytes of request-id rows read for one page. The last row may exceed it."""
BEGINNING = b"d"
RETRIES = rows.ALL_RETRY[0]
"""The cursor at which request ids begin."""


class RangePage(NamedTuple):
    """Some rows of a range, as they are at one position."""

    keys: list[bytes]
    rows: list[bytes]
    requests: bytes
    """A Requests message, or empty."""
    cursor: bytes
    """Where the next page begins; empty after the last page."""
    position: Position
    version: int = versions.FIRST
    """The cluster version that writes the source's log, and therefore its rows."""


def encode(page: RangePage) -> bytes:
    """Encode a page. The version is omitted if it is 1, because servers of version 1 do not know the field."""
    return msgspec.msgpack.encode(page if page.version > versions.FIRST else page[:-1])


_decoder = ArrayDecoder(RangePage)


def decode(data: bytes) -> RangePage:
    return _decoder.decode(data)


# docs/protocol.md V4
def admit(state: ReplicaState, version: int) -> None:
    """Raise Unavailable if the source's rows have been written under a higher cluster version than the target's log
    has. The target's log follows the cluster's version soon, and the target can then import the rows."""
    if version > state.log_version:
        raise Unavailable(
            f"partition {state.partition}: its log is written by cluster version {state.log_version}, rows of version "
            f"{version} wait until the log has that version"
        )


def requests_in(page: RangePage) -> Requests | None:
    return requests_of(entry_pb2.Requests.FromString(page.requests)) if page.requests else None


def page_of(state: ReplicaState, span: TokenSpan, cursor: bytes) -> RangePage:
    """Return the page of the range that begins at `cursor`. Records come first, then intents and decisions, then
    request ids."""
    assert state.position is not None
    if cursor < RETRIES:
        keys, found, following = _rows(state, span, cursor)
        return RangePage(keys, found, b"", following, state.position, state.log_version)
    picked = PickedRequests(span)
    following = b""
    ids_read = read = 0
    for number, (row_key, row) in enumerate(state.engine.iterate(cursor, rows.ALL_RETRY[1])):
        is_full = picked.bytes > PAGE_BYTES or read >= RETRY_BYTES_MAX
        if number == RETRY_ROWS_MAX or is_full or ids_read >= RETRY_IDS_MAX:
            following = row_key
            break
        read += len(row)
        _, requests = decode_row(row)
        ids_read += len(requests.sequences) + len(requests.clients)
        picked.add(requests, int.from_bytes(row_key[1:], "big"), with_all_clients=True)
    requests_here = picked.requests
    message = requests_message(requests_here).SerializeToString() if requests_here is not None else b""
    return RangePage([], [], message, following, state.position, state.log_version)


def _rows(state: ReplicaState, span: TokenSpan, cursor: bytes) -> tuple[list[bytes], list[bytes], bytes]:
    keys: list[bytes] = []
    found: list[bytes] = []
    size = 0
    begins = [(max(cursor, first), end) for first, end in moving_bounds(span) if cursor < end]
    for row_key, row in chain.from_iterable(starmap(state.engine.iterate, begins)):
        if size >= PAGE_BYTES or len(keys) >= PAGE_ROWS_MAX:
            return keys, found, row_key
        keys.append(row_key)
        found.append(row)
        size += len(row_key) + len(row)
    return keys, found, RETRIES


class RangeChanges:
    """The changes to a range in entries of the source's log: the last change of each row."""

    def __init__(self, span: TokenSpan, hash: KeyHash) -> None:
        self._span, self._hash = span, hash
        self._picked = PickedRequests(span)
        self._rows: dict[bytes, bytes] = {}
        self._bytes = 0

    @property
    def size(self) -> int:
        """Approximate size of the changes in bytes."""
        return self._bytes + self._picked.bytes

    @property
    def is_empty(self) -> bool:
        return not self._rows and self._picked.requests is None

    @property
    def keys(self) -> list[bytes]:
        return list(self._rows)

    @property
    def rows(self) -> list[bytes]:
        """The row of each row key; an empty row means that the row was removed."""
        return list(self._rows.values())

    @property
    def requests(self) -> Requests | None:
        return self._picked.requests

    def add(self, entry: Entry) -> None:
        """Add the changes of one entry of mutations."""
        first, last = self._span
        for kind, seq, key, value, created, expires_ms, _ in entry.mutations():
            if kind == NOTE:
                continue
            row_key = data_key(self._hash, key)
            if not first <= int.from_bytes(row_key[1:5], "big") <= last:
                continue
            if kind in OF_TRANSACTIONS:
                row_key, row = transaction_change(kind, seq, row_key, value)
            else:
                row = b"" if kind == DELETE else encode_record(value, seq, created, entry.time_ms, expires_ms)
            self._rows[row_key] = row
            self._bytes += len(row_key) + len(row)
        if entry.requests is not None:
            self._picked.add(entry.requests, entry.first_seq, with_all_clients=False)


class PickedRequests:
    """The request ids that concern a range, collected from several entries or rows."""

    def __init__(self, span: TokenSpan) -> None:
        self._span = span
        self._number: dict[bytes, int] = {}
        self._found = Requests([], [], [], [], [], [], [], [], [])
        self.bytes = 0

    @property
    def requests(self) -> Requests | None:
        """The request ids with explicit results, all completed by mutation 0. None if there are none."""
        found = self._found
        if not found.clients:
            return None
        if not any(found.touched):
            found.touched = []
        return found

    def add(self, requests: Requests, first_seq: int, *, with_all_clients: bool) -> None:
        """Add the request ids of one entry, whose sequences begin with `first_seq`. If `with_all_clients`, also add
        clients that have no result in the range."""
        chosen = [place for place in range(len(requests.sequences)) if self._concerns(requests, place)]
        wanted = range(len(requests.clients)) if with_all_clients else {requests.client[place] for place in chosen}
        for number in sorted(wanted):
            self._meet(requests, number)
        found = self._found
        found.touched += [b""] * (len(found.sequences) - len(found.touched))
        for place in chosen:
            result = requests.results[place] if requests.results else b""
            result = result or encode_result(first_seq + requests.mutations[place])
            found.client.append(self._number[requests.clients[requests.client[place]]])
            found.sequences.append(requests.sequences[place])
            found.hashes.append(requests.hashes[place])
            found.mutations.append(0)
            found.results.append(result)
            found.touched.append(requests.touched[place] if requests.touched else b"")
            self.bytes += 40 + len(result) + len(found.touched[-1])

    def _concerns(self, requests: Requests, place: int) -> bool:
        touched = requests.touched[place] if requests.touched else b""
        if touched == PART_OF_A_RANGE:
            return False
        if self._span.holds(requests.hashes[place] >> 32):
            return True
        return any(self._span.holds(token) for token in _tokens(touched))

    def _meet(self, requests: Requests, number: int) -> None:
        found, client = self._found, requests.clients[number]
        known = self._number.get(client)
        if known is None:
            self._number[client] = len(found.clients)
            found.clients.append(client)
            found.first_unacked.append(requests.first_unacked[number])
            found.seen_ms.append(requests.seen_ms[number])
            self.bytes += 40
        else:
            found.first_unacked[known] = max(found.first_unacked[known], requests.first_unacked[number])
            found.seen_ms[known] = max(found.seen_ms[known], requests.seen_ms[number])


def _tokens(touched: bytes) -> Iterable[int]:
    return (int.from_bytes(touched[at : at + 4], "big") for at in range(0, len(touched), 4))
