"""Reads a state: values, scans, counts. The caller decides whether the answer may be given. Decides only.

`now_ms` is the time that decides whether a key has expired: the leader's clock, or the state's record time. A key that
has expired at `now_ms` but not at the state's record time must not be reported as absent, because another leader whose
clock is behind would return it again. Such keys are returned as Expired, and the leader first logs their deletes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvstore.errors import InvalidRequest, NotLeader
from kvstore.partition.leading import range_reads
from kvstore.partition.leading.range_reads import (
    KEYS_ONLY,
    PAGE_BYTES_MAX,
    READ_BYTES_MAX,
    Expired,
    ScanPage,
    Steps,
    page_keys,
    take,
)
from kvstore.partition.leading.serving_ranges import moved
from kvstore.partition.state import rows
from kvstore.partition.state.commands import Count, Get, Meta, Op, Range, Record, Result, Scan, ScanTokens
from kvstore.partition.state.rows import (
    data_key,
    key_of_data,
    record_of,
    token_bound,
    token_of_data,
)
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import PART, WHOLE, Tokens

ROWS_PER_STEP = 512
"""Rows that a scan by token reads between two turns of the event loop."""
STEP_BYTES = 4 << 20
"""Bytes that such a scan reads between two turns."""
PAGE_ROWS_MAX = 8192
"""Rows that one page reads, up to the end of a token. A replica that does not lead reads them in one turn."""
STEPS_AT_ONCE = PAGE_ROWS_MAX // ROWS_PER_STEP + 2
"""Steps that a replica that does not lead takes in its one turn. Only the keys of a single token can need more."""
TOKEN_KEYS_MAX = 100_000
TOKEN_BYTES_MAX = 16 << 20
"""A page contains all keys of a token; a hash tag with more keys or bytes than this does not fit."""
EXPIRED_MAX = 256
"""Number of keys whose deletes one read requests at a time: the deletes go into one entry."""
OVERDUE_MAX = 4096
"""Number of keys past their expiry that a sweep checks, because some may be in ranges that take no writes."""


def find(state: ReplicaState, ops: list[Op], now_ms: int, readable: Tokens) -> list[Result | Expired]:
    """Return the answers to GETs and METAs, with one lookup for all of them. The answer is Moved for keys that are not
    `readable`."""
    record_time_ms = state.record_time_ms
    slices = readable.slices
    answers: list[Result | Expired] = []
    row_keys = [data_key(state.hash, op.key) for op in ops]
    for op, row_key, row in zip(ops, row_keys, state.engine.multi_get(row_keys), strict=True):
        slice_ = slices[row_key[1]]
        if slice_ != WHOLE and not (slice_ == PART and readable.holds_row(row_key)):
            answers.append(moved(state.ownership, row_key))
            continue
        if row is None:
            answers.append(None)
            continue
        record = record_of(row)
        if 0 < record[4] <= now_ms:
            answers.append(None if record[4] <= record_time_ms else Expired([op.key]))
        elif op.__class__ is Get:
            answers.append(record)
        else:
            answers.append((len(record[0]), *record[1:]))
    return answers


def steps(state: ReplicaState, op: Op, now_ms: int, readable: Tokens) -> Steps:
    """Return an iterator that answers any read in steps, from tokens that are `readable`. Raises InvalidRequest."""
    match op:
        case Get() | Meta():
            return find(state, [op], now_ms, readable)[0]
        case Count():
            return state.key_count
        case Scan():
            return range_reads.scan(state, op.key, op.end, op.limit, int(op.flags) & KEYS_ONLY, now_ms, readable)
        case Range():
            return (yield from range_reads.steps(state, op, now_ms, readable))
        case ScanTokens():
            return (yield from _scan_tokens(state, op.token, op.limit, int(op.flags), now_ms, readable))
    raise InvalidRequest(f"expected a read, got operation {op.code}")


def answer(state: ReplicaState, op: Op, now_ms: int, readable: Tokens) -> Result | Expired:
    """Answer any read at once. Raises InvalidRequest. Raises NotLeader if the answer would take long because a token
    has many keys; only the leader answers such reads, in steps between other work."""
    work = steps(state, op, now_ms, readable)
    try:
        for _ in range(STEPS_AT_ONCE):
            next(work)
    except StopIteration as end:
        return end.value
    work.close()
    raise NotLeader(state.partition)


# docs/protocol.md P37
def _scan_tokens(state: ReplicaState, token: int, limit: int, flags: int, now_ms: int, readable: Tokens) -> Steps:
    """Return one page in token order, with all keys of a token. The page ends early if many rows yielded nothing,
    because millions of rows past their expiry may be adjacent."""
    limit = page_keys(limit)
    items: list[tuple[bytes, Record]] = []
    expired: list[bytes] = []
    size, last, visited, read = 0, -1, 0, 0
    unread, record_time_ms = STEP_BYTES, state.record_time_ms
    rows_left = _ReadableRows(state, token, readable)
    for row_key, row in rows_left:
        here = token_of_data(row_key)
        if here != last:
            is_full = len(items) >= limit or size >= PAGE_BYTES_MAX
            if is_full or visited >= PAGE_ROWS_MAX or read >= READ_BYTES_MAX:
                return Expired(expired) if expired else ScanPage(items, here)
            last = here
        visited, read, unread = visited + 1, read + len(row), unread - len(row)
        size += take(items, expired, key_of_data(row_key), row, flags, now_ms, record_time_ms)
        if len(items) > TOKEN_KEYS_MAX or size > TOKEN_BYTES_MAX:
            raise InvalidRequest(f"token {here} has more keys than fit into a page; scan in key order instead")
        if len(expired) >= EXPIRED_MAX:
            break
        if visited % ROWS_PER_STEP == 0 or unread <= 0:
            unread = STEP_BYTES
            rows_left.hold()
            yield
    return Expired(expired) if expired else ScanPage(items, None)


class _ReadableRows:
    """The readable records from a token on, in the order of tokens. Other records are skipped without being read,
    because a move leaves millions of them."""

    def __init__(self, state: ReplicaState, token: int, readable: Tokens) -> None:
        spans = ((max(token, first), last) for first, last in readable.spans if token <= last)
        self._engine = state.engine
        self._left = deque((token_bound(first), token_bound(last + 1)) for first, last in spans)
        """Bounds of the ranges that have no iterator yet."""
        self._held: deque[Iterator[tuple[bytes, bytes]]] = deque()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        while self._held or self._left:
            yield from self._held.popleft() if self._held else self._engine.iterate(*self._left.popleft())

    def hold(self) -> None:
        """Keep the records that are left as they are now, because other work comes before they are read. Otherwise a
        page would show only some writes of a batch, or miss keys of a range that was moved and dropped meanwhile."""
        while self._left:
            self._held.append(self._engine.iterate(*self._left.popleft()))


def overdue(
    state: ReplicaState, now_ms: int, most: int, writable: Tokens, begin: bytes = b""
) -> tuple[list[bytes], bytes]:
    """Return up to `most` `writable` keys that have expired, the earliest expiry first, and where to continue; empty at
    the end. Considers at most OVERDUE_MAX keys from `begin` on."""
    found: list[bytes] = []
    token_of = state.hash.token_of
    first, end = max(begin, rows.ALL_EXPIRY[0]), rows.expiry_key(now_ms + 1, b"")
    for visited, (row_key, _) in enumerate(state.engine.iterate(first, end)):
        if visited == OVERDUE_MAX or len(found) == most:
            return found, row_key
        if writable.holds(token_of(row_key[9:])):
            found.append(row_key[9:])
    return found, b""
