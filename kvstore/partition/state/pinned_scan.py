"""Reads the records of a pinned view in the order of (token, key), step by step, and estimates where the view can be
split. Decides only."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state.engine import View, ViewCursor
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.rows import ALL_ORDER, ORDER, data_key, token_bound, token_of_data
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import data_pb2, pinned_page

STEP_ROWS, STEP_BYTES = 128, 128 << 10
"""Limits of one step, which takes one or two hundred microseconds."""
STEP_SEEKS = 64
"""Rows that one step looks up one by one."""
FEW_KEYS = 1_000
"""If at most this many keys are within the bounds, they are looked up one by one instead of reading everything."""
SAMPLES, SAMPLE_ROWS, SAMPLE_BYTES = 64, 8, 64 << 10
"""Number of places at which a state is sampled to estimate the size and the density of its records, and the limits of
one sample."""
SPLITS_MAX = 4096
_HEADERS = pinned_page.HEADER_BYTES


# docs/protocol.md K6
class PinnedScan:
    """One read of a pinned view. Call `step` until it returns True, because a page is full or everything has been read,
    and then call `page`."""

    def __init__(
        self,
        held: PinnedView,
        span: TokenSpan,
        *,
        start: bytes = b"",
        end: bytes = b"",
        after: bytes = b"",
        keys_only: bool = False,
        intents_only: bool = False,
        page_bytes: int,
    ) -> None:
        """Read the keys in [start, end) whose tokens are in `span`, from the row after row key `after`. A page has
        about `page_bytes` bytes. The view's intents must be resolved. With `intents_only`, read only the rows that the
        committed intents write, among them deletes and records that have expired. Raises ViewClosed."""
        assert held.is_resolved, "intents of a pinned view are not resolved"
        self._held, self._start, self._end = held, start, end
        self._keys_only, self._intents_only, self._page_bytes = keys_only, intents_only, page_bytes
        few = _few(held, start, end) if (start or end) and not intents_only else None
        if few is None:
            self._cursors = _cursors(held, span, after, intents_only=intents_only)
        else:
            changed = [(key, row) for key, row in _changed(held) if _is_between(key, start, end)]
            picked, replaced = (
                [key for key in keys if key > after and span.holds(token_of_data(key)) and held.owned.holds_row(key)]
                for keys in (few, [key for key, _ in changed])
            )
            rows = dict(changed)
            self._cursors = iter([_replacing(_PickedRows(held.view, picked), [(key, rows[key]) for key in replaced])])
        self._cursor: ViewCursor | None = next(self._cursors, None)
        self._last = after
        self._begin_page()

    def _begin_page(self) -> None:
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []
        self._bytes = 0
        self._seen = 0

    def step(self) -> bool:
        """Read some more rows. Returns True once a page can be sent. Raises ViewClosed, or OSError."""
        if self._cursor is not None:
            self._read(self._cursor)
        return self._cursor is None or self._bytes >= self._page_bytes or self._seen >= 128 * STEP_ROWS

    def _read(self, cursor: ViewCursor) -> None:
        keys, rows = cursor.take(STEP_ROWS, min(STEP_BYTES, self._page_bytes - self._bytes))
        if not keys:
            self._cursor = next(self._cursors, None)
            return
        self._last = keys[-1]
        self._seen += len(keys)
        if self._start or self._end:
            keys, rows = self._chosen(keys, rows)
        if self._keys_only:
            rows = [row[: _HEADERS[row[0]]] for row in rows]
        self._bytes += sum(map(len, keys)) + sum(map(len, rows))
        self._keys += keys
        self._rows += rows

    def _chosen(self, keys: list[bytes], rows: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        pairs = [pair for pair in zip(keys, rows, strict=True) if _is_between(pair[0], self._start, self._end)]
        return [key for key, _ in pairs], [row for _, row in pairs]

    def page(self) -> data_pb2.PinnedPage:
        """Return a page with the rows that were read since the last page."""
        time_ms = self._held.time_ms if self._held.hides_expired and not self._intents_only else 0
        page = pinned_page.encode(self._keys, self._rows, time_ms, self._last, ends=self._cursor is None)
        self._begin_page()
        return page


def _is_between(row_key: bytes, start: bytes, end: bytes) -> bool:
    """Return True if the key of a row key is in [start, end). An empty `end` means up to the last key."""
    key = row_key[pinned_page.TOKEN_BYTES :]
    return start <= key and (not end or key < end)


def _cursors(held: PinnedView, span: TokenSpan, after: bytes, *, intents_only: bool) -> Iterator[ViewCursor]:
    """Yield cursors over the owned tokens of a span, behind `after`."""
    behind = after + b"\x00" if after else b""
    changed = _changed(held)
    for first, last in held.owned.spans:
        begin, end = token_bound(max(first, span.first)), token_bound(min(last, span.last) + 1)
        begin = max(begin, behind)
        if begin < end:
            inside = [pair for pair in changed if begin <= pair[0] < end]
            yield _ReplacedRows(None, inside) if intents_only else _replacing(held.view.cursor(begin, end), inside)


def _changed(held: PinnedView) -> list[tuple[bytes, bytes]]:
    """Return the rows that committed intents of the view write, in order."""
    return sorted(held.committed_rows.items()) if held.committed_rows else []


def _replacing(cursor: ViewCursor, changed: list[tuple[bytes, bytes]]) -> ViewCursor:
    """Return a cursor that shows the changed rows in place of those of `cursor`."""
    return _ReplacedRows(cursor, changed) if changed else cursor


# docs/protocol.md Tx13
class _ReplacedRows:
    """A cursor that shows some rows of another cursor changed. `changed` are the row keys and new rows, in order and
    within the range of the other cursor. Deletes leave rows out. Without another cursor, all changed rows are shown,
    also deletes."""

    def __init__(self, cursor: ViewCursor | None, changed: list[tuple[bytes, bytes]]) -> None:
        self._cursor, self._changed = cursor, deque(changed)
        self._read = deque[tuple[bytes, bytes]]()
        """Rows of the other cursor that were not returned yet."""
        self._has_ended = cursor is None

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        if self._cursor is not None and not self._changed and not self._read and not self._has_ended:
            return self._cursor.take(rows_max, bytes_max)
        keys: list[bytes] = []
        rows: list[bytes] = []
        size = 0
        while len(keys) < rows_max and size < bytes_max:
            if self._cursor is not None and not self._read and not self._has_ended:
                self._read.extend(zip(*self._cursor.take(rows_max, bytes_max), strict=True))
                self._has_ended = not self._read
            if not self._read and not self._changed:
                break
            key, row = self._next()
            if self._cursor is None or not pinned_page.is_deleted(row):
                keys.append(key)
                rows.append(row)
                size += len(key) + len(row)
        return keys, rows

    def _next(self) -> tuple[bytes, bytes]:
        """Remove the next row from what was read or from what is changed."""
        if not self._changed or (self._read and self._read[0][0] < self._changed[0][0]):
            return self._read.popleft()
        if self._read and self._read[0][0] == self._changed[0][0]:
            self._read.popleft()
        return self._changed.popleft()


def _few(held: PinnedView, start: bytes, end: bytes) -> list[bytes] | None:
    """Return the row keys of keys in [start, end), in order; None if there are more than FEW_KEYS."""
    last = ORDER + end if end else ALL_ORDER[1]
    keys, _ = held.view.cursor(ORDER + start, last).take(FEW_KEYS + 1, KEY_BYTES_MAX * (FEW_KEYS + 1))
    return sorted(data_key(held.hash, key[1:]) for key in keys) if len(keys) <= FEW_KEYS else None


class _PickedRows:
    """A cursor over rows whose keys are known."""

    def __init__(self, view: View, keys: list[bytes]) -> None:
        self._view, self._left = view, deque(keys)

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        keys: list[bytes] = []
        rows: list[bytes] = []
        size = 0
        while self._left and size < bytes_max and len(keys) < min(rows_max, STEP_SEEKS):
            key = self._left.popleft()
            found = self._view.cursor(key, key + b"\x00").take(1, bytes_max)
            keys += found[0]
            rows += found[1]
            size += len(key) + sum(map(len, found[1]))
        return keys, rows


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sizes(held: PinnedView, samples: list[Sample], split_bytes: int) -> tuple[int, list[int]]:
    """Estimate the size of the view and where to split it, from samples of all its stretches. Returns the number of
    bytes of keys and values, and the last token of each split of about `split_bytes` bytes except the last split."""
    rows = sum(each.rows * each.width for each in samples)
    total = round(held.records * sum(each.bytes * each.width for each in samples) / rows) if rows else 0
    wanted = min(-(-total // split_bytes), SPLITS_MAX) if split_bytes else 1
    if wanted <= 1:
        return total, []
    heights = list(accumulate((each.bytes * each.width for each in samples), initial=0.0))
    ends = {_token_at(samples, heights, heights[-1] * number / wanted) for number in range(1, wanted)}
    return total, sorted(ends - {held.owned.spans[-1].last})


class Sample(NamedTuple):
    """A stretch of tokens, with the number of records and bytes per token, estimated from its first rows."""

    span: TokenSpan
    rows: float
    bytes: float

    @property
    def width(self) -> int:
        return self.span.last - self.span.first + 1


def stretches(held: PinnedView) -> list[TokenSpan]:
    """Divide the view's tokens into stretches of equal width."""
    step = max(1, -(-sum(last - first + 1 for first, last in held.owned.spans) // SAMPLES))
    return [
        TokenSpan(begin, min(begin + step - 1, last))
        for first, last in held.owned.spans
        for begin in range(first, last + 1, step)
    ]


def sample(view: View, span: TokenSpan) -> Sample:
    """Sample the first rows of a stretch. Raises ViewClosed."""
    keys, rows = view.cursor(token_bound(span.first), token_bound(span.last + 1)).take(SAMPLE_ROWS, SAMPLE_BYTES)
    size = sum(len(key) - pinned_page.TOKEN_BYTES for key in keys) + sum(len(row) - _HEADERS[row[0]] for row in rows)
    is_all = len(keys) < SAMPLE_ROWS and size < SAMPLE_BYTES
    reach = span.last if is_all else token_of_data(keys[-1])
    width = reach - span.first + 1
    return Sample(span, len(keys) / width, size / width)


def _token_at(samples: list[Sample], heights: list[float], height: float) -> int:
    """Return the token up to which there are about `height` bytes."""
    place = min(max(bisect_left(heights, height), 1), len(samples)) - 1
    span, _, density = samples[place]
    inside = (height - heights[place]) / density if density else 0
    return min(span.first + int(inside), span.last)
