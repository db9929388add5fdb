"""Reads of a range in key order: pages forwards and backwards, keys alone, counts. Whether they may be answered is not
decided here. Decides only.

Each answer is bounded in what it looks at, reads and holds, so that it takes some milliseconds: it is shorter than what
was asked for, and says where to go on. Keys alone and counts come from the order of keys, and no record is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import NamedTuple

from kvstore.partition.state import rows
from kvstore.partition.state.commands import Flag, Op, Record, Result
from kvstore.partition.state.rows import ORDER, data_keys_of, record_of
from kvstore.partition.state.state import State
from kvstore.partition.state.tokens import Tokens
from kvstore.ring.hashing import token_of

PAGE_KEYS_MAX = 1000
"""Keys in one page of a scan: some milliseconds of work."""
PAGE_BYTES_MAX = 1 << 20
"""Bytes of keys and values in one answer; the last record may go beyond."""
READ_BYTES_MAX = 4 << 20
"""Bytes of records that are read for one answer, whatever of them it holds."""
COUNT_KEYS_MAX = 8192
"""Keys that one answer counts, up to the next whole step: a replica that does not lead counts in one turn."""
ROWS_PER_STEP = 512
"""Rows that a count looks at between two turns of the event loop."""
OVERDUE_MAX = 4096
"""Keys past their expiry that are looked at at a time. Where there are more, records tell which they are."""
_KEYS_PER_READ_MIN, _KEYS_PER_READ_MAX = 1, 16
"""Records that one read of the engine gets: one at first, since nobody knows how large they are; and no more at a time
than are looked at in vain, if the next ones are of the largest size, without a stall."""

KEYS_ONLY, REVERSE, BARE, COUNT_ONLY = map(int, (Flag.KEYS_ONLY, Flag.REVERSE, Flag.BARE, Flag.COUNT_ONLY))


class Expired(NamedTuple):
    """No answer: the deletes of these keys must be logged first."""

    keys: list[bytes]


# docs/protocol.md P37
class Page(NamedTuple):
    """Keys of a scan with their records, keys alone, or how many; and where to go on, None at the end: a start, a
    token, or backwards an end."""

    items: list[tuple[bytes, Record]] | list[bytes] | int
    next: bytes | int | None


Steps = Generator[None, None, Result | Expired]
"""Work in steps of some milliseconds; ends with the answer."""


def steps(state: State, op: Op, now_ms: int, readable: Tokens) -> Steps:
    """The answer to a RANGE, in steps."""
    _, start, end, limit, flags, *_ = op
    flags = int(flags)
    if flags & COUNT_ONLY:
        return (yield from _count(state, start, end, limit, now_ms, readable))
    if flags & BARE:
        return _bare(state, start, end, limit, flags, now_ms, readable)
    return scan(state, start, end, limit, flags, now_ms, readable)


def keys_in(
    state: State, start: bytes, end: bytes, limit: int, readable: Tokens, *, backwards: bool = False
) -> tuple[list[bytes], bytes | None]:
    """Up to `limit` keys in [start, end) in order, also those past their expiry, and where to go on."""
    keys = [key[1:] for key, _ in islice(_order(state, start, end, backwards=backwards), limit + 1)]
    following = keys[limit - backwards] if len(keys) > limit else None
    return _of(readable, state, keys[:limit]), following


def scan(
    state: State, start: bytes, end: bytes, limit: int, flags: int, now_ms: int, readable: Tokens
) -> Page | Expired:
    """One page in key order; shorter, or empty, where keys are not `readable`. A `limit` of 0 stands for the bound."""
    backwards = bool(flags & REVERSE)
    keys, following = keys_in(state, start, end, page_keys(limit), readable, backwards=backwards)
    items: list[tuple[bytes, Record]] = []
    expired: list[bytes] = []
    at = size = read = 0
    some_max = _KEYS_PER_READ_MIN
    while at < len(keys):
        some = keys[at : at + some_max]
        for key, row in zip(some, state.engine.multi_get(data_keys_of(some)), strict=True):
            assert row is not None, f"{key!r} is in the index and has no record"
            if size >= PAGE_BYTES_MAX or read >= READ_BYTES_MAX:
                return Expired(expired) if expired else Page(items, keys[at - 1] if backwards else key)
            size += take(items, expired, key, row, flags, now_ms, state.record_time_ms)
            read += len(row)
            at += 1
        # The next ones as large as these should not be read in vain.
        left = (READ_BYTES_MAX if flags & KEYS_ONLY else PAGE_BYTES_MAX) - read
        some_max = max(1, min(2 * some_max, _KEYS_PER_READ_MAX, left * at // max(1, read)))
    return Expired(expired) if expired else Page(items, following)


def take(
    items: list[tuple[bytes, Record]],
    expired: list[bytes],
    key: bytes,
    row: bytes,
    flags: int,
    now_ms: int,
    record_time_ms: int,
) -> int:
    """Add the record to the page unless it is past its expiry. Returns how much the page grew."""
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
    state: State, start: bytes, end: bytes, limit: int, flags: int, now_ms: int, readable: Tokens
) -> Page | Expired:
    overdue = _overdue_or_none(state, now_ms)
    if overdue is None:
        found = scan(state, start, end, limit, flags | KEYS_ONLY, now_ms, readable)
        return found if isinstance(found, Expired) else Page(_keys_of(found), found.next)
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


def _count(state: State, start: bytes, end: bytes, limit: int, now_ms: int, readable: Tokens) -> Steps:
    overdue = _overdue_or_none(state, now_ms)
    if overdue is None:
        found = scan(state, start, end, limit, KEYS_ONLY, now_ms, readable)
        return found if isinstance(found, Expired) else Page(len(_keys_of(found)), found.next)
    limit = min(limit, COUNT_KEYS_MAX) if limit > 0 else COUNT_KEYS_MAX
    order = _order(state, start, end)
    has_strangers = _has_strangers(readable, state)  # as the iterator has them: they may be dropped before it ends
    total = looked = 0
    while True:
        keys = [key[1:] for key, _ in islice(order, ROWS_PER_STEP)]
        looked += len(keys)
        mine = _held(readable, keys) if has_strangers else keys
        page = _without(overdue, mine, None, state.record_time_ms)
        if isinstance(page, Expired):
            return page
        total += len(page.items)  # type: ignore[arg-type]  # keys alone
        if len(keys) < ROWS_PER_STEP:
            return Page(total, None)
        if looked >= limit:
            return Page(total, keys[-1] + b"\0")
        yield


def _without(
    overdue: dict[bytes, int], keys: list[bytes], following: bytes | None, record_time_ms: int
) -> Page | Expired:
    """The keys that are not past their expiry."""
    if not overdue:
        return Page(keys, following)
    expired = [key for key in keys if overdue.get(key, 0) > record_time_ms]
    return Expired(expired) if expired else Page([key for key in keys if key not in overdue], following)


def _overdue_or_none(state: State, now_ms: int) -> dict[bytes, int] | None:
    """All keys past their expiry, and when that was; None if they are too many."""
    found = islice(state.engine.iterate(rows.ALL_EXPIRY[0], rows.expiry_key(now_ms + 1, b"")), OVERDUE_MAX + 1)
    overdue = {row_key[9:]: int.from_bytes(row_key[1:9], "big") for row_key, _ in found}
    return None if len(overdue) > OVERDUE_MAX else overdue


def _order(state: State, start: bytes, end: bytes, *, backwards: bool = False) -> Iterator[tuple[bytes, bytes]]:
    last = ORDER + end if end else rows.ALL_ORDER[1]
    return (state.engine.iterate_back if backwards else state.engine.iterate)(ORDER + start, last)


def _of(readable: Tokens, state: State, keys: list[bytes]) -> list[bytes]:
    return _held(readable, keys) if _has_strangers(readable, state) else keys


def _has_strangers(readable: Tokens, state: State) -> bool:
    """Whether keys of the state may not be readable."""
    return readable.spans != state.ownership.owned.spans or state.ownership.has_strangers


def _held(readable: Tokens, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if readable.holds(token_of(key))]


def page_keys(limit: int) -> int:
    """Return how many keys a page of so many has at most."""
    return min(limit, PAGE_KEYS_MAX) if limit > 0 else PAGE_KEYS_MAX


def _keys_of(page: Page) -> list[bytes]:
    return [key for key, _ in page.items]  # type: ignore[union-attr,misc]  # of a scan
