"""Evaluates plain puts in batches, in columns, because bulk loads bring them by the million. Decides only.

The outcome is the same as in `operations`, which evaluates one operation at a time and also handles all batches that
are not plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kvstore.limits import BATCH_BYTES_MAX, BATCH_OPS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.leading.new_requests import new_or_none
from kvstore.partition.leading.reading import ReadBudget
from kvstore.partition.state.commands import Op, Put
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.overlay import UNTOUCHED, Overlay, Row, Untouched
from kvstore.partition.state.retry_table import RetryTable
from kvstore.partition.state.rows import AGED, EXPIRES

_PUTS = {Put}
_columns_of = attrgetter("value", "expires_ms", "flags", "request")


def put_all(
    draft: Draft, ops: tuple[Op, ...], row_keys: list[bytes], reading: ReadBudget, overlay: Overlay
) -> list[int] | None:
    """Write the keys of a batch, and return the new versions. `row_keys` are the row keys of the batch's keys. Returns
    None, with nothing written, if the batch is not plain. A batch is not plain if it has flags, expiries, invalid sizes
    or a repeated key, if an entry in flight changes one of its keys, or if an existing record has an expiry. Raises
    OSError."""
    if not 0 < len(ops) <= BATCH_OPS_MAX:
        return None
    keys: list[bytes] = []
    values: list[bytes] = []
    for op in ops:
        if op.__class__ is not Put or op.expires_ms or op.flags:
            return None
        keys.append(op.key)
        values.append(op.value)
    size = _batch_size(keys, values)
    if not size or overlay.touched_of(keys) or not _are_new(draft, keys):
        return None
    created: list[int] = []
    while len(created) < len(row_keys):
        some = _created(reading.multi_get(row_keys[len(created) : len(created) + reading.at_once]))
        reading.left -= reading.size
        if some is None:
            return None
        created += some
    return list(draft.put_all(keys, row_keys, values, created, size))


def evaluate_batched(
    draft: Draft,
    ops: Sequence[Op],
    keys: list[bytes],
    row_keys: list[bytes],
    rows: Sequence[bytes | None],
    overlay: Overlay,
    touched: set[bytes],
    retries: RetryTable,
) -> Sequence[int] | None:
    """Evaluate operations that arrived individually, provided that all are plain puts and all request ids are new. Keys
    may repeat. `touched` are the keys that entries in flight change, and `rows` are the engine's rows of all keys.
    Returns the versions, or None if the operations must be evaluated individually."""
    if set(map(type, ops)) != _PUTS:
        return None
    values, expiries, flags, requests = zip(*map(_columns_of, ops), strict=True)
    if any(expiries) or any(flags):
        return None
    count = len(keys)
    size = _batch_size(keys, values)
    created = _created(rows) if size else None
    if created is None:
        return None
    is_first = not touched and _are_new(draft, keys)
    if not is_first and not _follow(created, keys, draft, overlay):
        return None
    if requests.count(None) == count:
        return draft.put_all(keys, row_keys, values, created, size)
    asked = new_or_none(requests, keys, row_keys, draft, overlay, retries)
    if asked is None:
        return None
    versions = draft.put_all(keys, row_keys, values, created, size)
    draft.answer_all(asked, versions)
    return versions


def _follow(created: list[int], keys: list[bytes], draft: Draft, overlay: Overlay) -> bool:
    """Let earlier writes of this batch or of an entry in flight override the engine's record for keys that they wrote.
    Return False if such a record expires."""
    latest: dict[bytes, int] = {}
    for version, (place, key) in enumerate(enumerate(keys), draft.last_seq + 1):
        begun = latest.get(key)
        if begun is None:
            row: Row | Untouched | None = draft.layer.rows.get(key, UNTOUCHED)
            if row is UNTOUCHED:
                row = overlay.find(key)
            if row is UNTOUCHED:
                begun = created[place]
            elif row is not None and row[4]:
                return False
            else:
                begun = 0 if row is None else row[2]
        created[place] = begun
        latest[key] = begun or version
    return True


def _are_new(draft: Draft, keys: list[bytes]) -> bool:
    """Return True if all keys differ and the draft contains none of them."""
    return len(set(keys)) == len(keys) and draft.layer.rows.keys().isdisjoint(keys)


def _batch_size(keys: list[bytes], values: Sequence[bytes]) -> int:
    """Return the bytes of keys and values if the store accepts them in one batch, else 0."""
    of_keys, of_values = list(map(len, keys)), list(map(len, values))
    if not min(of_keys) or max(of_keys) > KEY_BYTES_MAX or max(of_values) > VALUE_BYTES_MAX:
        return 0
    size = sum(of_keys) + sum(of_values)
    return size if size <= BATCH_BYTES_MAX else 0


def _created(rows: Sequence[bytes | None]) -> list[int] | None:
    """Return the sequence that created each record, 0 for an absent record; None if a record expires."""
    if not any(rows):
        return [0] * len(rows)
    if max([row[0] for row in rows if row is not None]) >= EXPIRES:
        return None
    read = int.from_bytes  # as `created_of` does for rows without an expiry: a call for each would double the time
    return [0 if row is None else read(row[17:25] if row[0] == AGED else row[1:9], "big") for row in rows]
