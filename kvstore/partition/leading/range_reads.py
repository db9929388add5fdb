"""Reads a range in key order: pages in both directions, keys without records, and counts. The caller decides whether
the answer may be given. Decides only.

Each answer is bounded in what it scans, reads and returns, so that it takes only some milliseconds. An answer that is
shorter than requested says where to continue. Keys without records and counts are read from the key-order index,
without reading records.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.partition.state import rows
from kvstore.partition.state.commands import Flag, Range, Record, Result
from kvstore.partition.state.rows import ORDER, data_keys_of, record_of
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens
from kvstore.ring.hashing import KeyHash

PAGE_KEYS_MAX = 1000
"""Maximum number of keys in one page of a scan: some milliseconds of work."""
PAGE_BYTES_MAX = 1 << 20
"""Maximum bytes of keys and values in one answer. The last record may exceed it."""
READ_BYTES_MAX = 4 << 20
"""Maximum bytes of records read for one answer, whether or not the answer contains them."""
COUNT_KEYS_MAX = 8192
"""Number of keys that one answer counts, rounded up to a whole step: a replica that does not lead counts in one
turn."""
ROWS_PER_STEP = 512
"""Rows that a count reads between two turns of the event loop."""
OVERDUE_MAX = 4096
"""Number of keys past their expiry that are collected up front. If there are more, the records themselves show which
keys have expired."""
_KEYS_PER_READ_MIN, _KEYS_PER_READ_MAX = 1, 16
"""Records that one read of the engine gets. The first read gets one, because record sizes are unknown. Later reads get
at most as many as can be read in vain without a stall, if the next records have the maximum size."""

KEYS_ONLY, REVERSE, BARE, COUNT_ONLY = map(int, (Flag.KEYS_ONLY, Flag.REVERSE, Flag.BARE, Flag.COUNT_ONLY))


class Expired(NamedTuple):
    """Returned instead of an answer if the deletes of these keys must be logged first."""

    keys: list[bytes]


# docs/protocol.md P37
class ScanPage(NamedTuple):
    """The result of a scan: keys with records, keys alone, or a count. `next` says where to continue: a start key, a
    token or, for a reverse scan, an end key; None at the end."""

    items: list[tuple[bytes, Record]] | list[bytes] | int
    next: bytes | int | None


Steps = Generator[None, None, Result | Expired]
"""Work in steps of some milliseconds. The generator returns the answer."""


def steps(state: ReplicaState, op: Range, now_ms: int, readable: Tokens) -> Steps:
    """Return an iterator that answers a RANGE in steps."""
    start, end, limit, flags = op.key, op.end, op.limit, int(op.flags)
    if flags & COUNT_ONLY:
        return (yield from _count(state, start, end, limit, now_ms, readable))
    if flags & BARE:
        return _bare(state, start, end, limit, flags, now_ms, readable)
    return scan(state, start, end, limit, flags, now_ms, readable)


def keys_in(
    state: ReplicaState, start: bytes, end: bytes, limit: int, readable: Tokens, *, backwards: bool = False
) -> tuple[list[bytes], bytes | None]:
    """Return up to `limit` keys in [start, end) in order, including expired keys, and where to continue."""
    keys = [key[1:] for key, _ in islice(_order(state, start, end, backwards=backwards), limit + 1)]
    following = keys[limit - backwards] if len(keys) > limit else None
    return _of(readable, state, keys[:limit]), following


def scan(
    state: ReplicaState, start: bytes, end: bytes, limit: int, flags: int, now_ms: int, readable: Tokens
) -> ScanPage | Expired:
    """Return one page in key order. Keys that are not `readable` are left out, so the page may be short or empty. A
    `limit` of 0 means PAGE_KEYS_MAX."""
    backwards = bool(flags & REVERSE)
    keys, following = keys_in(state, start, end, page_keys(limit), readable, backwards=backwards)
    items: list[tuple[bytes, Record]] = []
    expired: list[bytes] = []
    at = size = read = 0
    some_max = _KEYS_PER_READ_MIN
    while at < len(keys):
        some = keys[at : at + some_max]
        for key, row in zip(some, state.engine.multi_get(data_keys_of(state.hash, some)), strict=True):
            assert row is not None, f"{key!r} is in the index and has no record"
            if size >= PAGE_BYTES_MAX or read >= READ_BYTES_MAX:
                return Expired(expired) if expired else ScanPage(items, keys[at - 1] if backwards else key)
            size += take(items, expired, key, row, flags, now_ms, state.record_time_ms)
            read += len(row)
            at += 1
        # Choose the next chunk so that, if its records are as large as these, few are read in vain.
        left = (READ_BYTES_MAX if flags & KEYS_ONLY else PAGE_BYTES_MAX) - read
        some_max = max(1, min(2 * some_max, _KEYS_PER_READ_MAX, left * at // max(1, read)))
    return Expired(expired) if expired else ScanPage(items, following)


def take(
    items: list[tuple[bytes, Record]],
    expired: list[bytes],
    key: bytes,
    row: bytes,
    flags: int,
    now_ms: int,
    record_time_ms: int,
) -> int:
    """Add the record to the page unless it has expired. Returns the number of bytes by which the page grew."""
    record = record_of(row)
    if 0 < record.expires_ms <= now_ms:
        if record.expires_ms > record_time_ms:
            expired.append(key)
        return 0
    if flags & KEYS_ONLY:
        record = record._replace(value=b"")
    items.append((key, record))
    return len(key) + len(record.value)


def _bare(
    state: ReplicaState, start: bytes, end: bytes, limit: int, flags: int, now_ms: int, readable: Tokens
) -> ScanPage | Expired:
    overdue = _overdue_or_none(state, now_ms)
    if overdue is None:
        found = scan(state, start, end, limit, flags | KEYS_ONLY, now_ms, readable)
        return found if isinstance(found, Expired) else ScanPage(_keys_of(found), found.next)
    backwards = bool(flags & REVERSE)
    keys, following = keys_in(state, start, end, page_keys(limit), readable, backwards=backwards)
    if sum(map(len, keys)) > PAGE_BYTES_MAX:
        size = 0
        for place, key in enumerate(keys):
            size += len(key)
            if size > PAGE_BYTES_MAX:
                keys, following = keys[:place], keys[place - backwards]
                break
    return _without(overdue, keys, following, state.record_time_ms)


def _count(state: ReplicaState, start: bytes, end: bytes, limit: int, now_ms: int, readable: Tokens) -> Steps:
    overdue = _overdue_or_none(state, now_ms)
    if overdue is None:
        found = scan(state, start, end, limit, KEYS_ONLY, now_ms, readable)
        return found if isinstance(found, Expired) else ScanPage(len(_keys_of(found)), found.next)
    limit = min(limit, COUNT_KEYS_MAX) if limit > 0 else COUNT_KEYS_MAX
    order = _order(state, start, end)
    # as of the iterator's view: such keys may be dropped before the scan ends
    has_foreign_rows = _may_have_foreign_rows(readable, state)
    total = looked = 0
    while True:
        keys = [key[1:] for key, _ in islice(order, ROWS_PER_STEP)]
        looked += len(keys)
        mine = _held(readable, state.hash, keys) if has_foreign_rows else keys
        page = _without(overdue, mine, None, state.record_time_ms)
        if isinstance(page, Expired):
            return page
        total += len(page.items)  # type: ignore[arg-type]  # keys alone
        if len(keys) < ROWS_PER_STEP:
            return ScanPage(total, None)
        if looked >= limit:
            return ScanPage(total, keys[-1] + b"\0")
        yield


def _without(
    overdue: dict[bytes, int], keys: list[bytes], following: bytes | None, record_time_ms: int
) -> ScanPage | Expired:
    """Return the page without the keys that are past their expiry."""
    if not overdue:
        return ScanPage(keys, following)
    expired = [key for key in keys if overdue.get(key, 0) > record_time_ms]
    return Expired(expired) if expired else ScanPage([key for key in keys if key not in overdue], following)


def _overdue_or_none(state: ReplicaState, now_ms: int) -> dict[bytes, int] | None:
    """Return all keys past their expiry with their expiry times; None if there are more than OVERDUE_MAX."""
    found = islice(state.engine.iterate(rows.ALL_EXPIRY[0], rows.expiry_key(now_ms + 1, b"")), OVERDUE_MAX + 1)
    overdue = {row_key[9:]: int.from_bytes(row_key[1:9], "big") for row_key, _ in found}
    return None if len(overdue) > OVERDUE_MAX else overdue


def _order(state: ReplicaState, start: bytes, end: bytes, *, backwards: bool = False) -> Iterator[tuple[bytes, bytes]]:
    last = ORDER + end if end else rows.ALL_ORDER[1]
    return (state.engine.iterate_back if backwards else state.engine.iterate)(ORDER + start, last)


def _of(readable: Tokens, state: ReplicaState, keys: list[bytes]) -> list[bytes]:
    return _held(readable, state.hash, keys) if _may_have_foreign_rows(readable, state) else keys


def _may_have_foreign_rows(readable: Tokens, state: ReplicaState) -> bool:
    """Return True if the state may contain keys that are not readable."""
    return readable.spans != state.ownership.owned.spans or state.ownership.has_foreign_rows


def _held(readable: Tokens, hash: KeyHash, keys: list[bytes]) -> list[bytes]:
    return [key for key, token in zip(keys, hash.tokens_of(keys), strict=True) if readable.holds(token)]


def page_keys(limit: int) -> int:
    """Return the maximum number of keys in a page with this limit."""
    return min(limit, PAGE_KEYS_MAX) if limit > 0 else PAGE_KEYS_MAX


def _keys_of(page: ScanPage) -> list[bytes]:
    return [key for key, _ in page.items]  # type: ignore[union-attr,misc]  # of a scan
