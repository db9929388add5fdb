"""Applies a control record about token ranges to a state's rows. Decides only.

To replace imported rows or to drop a range it reads the rows that go, for the indexes; they are the same everywhere."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import Corrupted
from kvstore.partition.state.engine import Batch, Engine
from kvstore.partition.state.move_records import Drop, ImportBegin, ImportRows, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.rows import ORDER, expiry_key, expiry_of, key_of_data, token_bound, token_of_data
from kvstore.partition.state.tokens import Span


class Effect(NamedTuple):
    """The changes that a record makes beside rows."""

    ownership: Ownership
    seq: int
    keys: int
    """By how much the number of keys that are owned changes."""


def apply_record(
    engine: Engine, batch: Batch, ownership: Ownership, record: MoveRecord, changed: Ownership, seq: int
) -> Effect:
    """Add the record's changes of rows to `batch`. `changed` is the ownership after it, `seq` the sequence of the entry
    that holds it. Raises Corrupted."""
    count = 0
    match record:
        case ImportBegin(span=span):
            remove(engine, batch, *bounds(span))
        case ImportRows():
            found = ownership.import_of(record.move)
            assert found is not None
            _replace(engine, batch, found.span, record)
        case Own():
            found = ownership.import_of(record.move)
            assert found is not None
            assert found.end is not None
            seq, count = max(seq, record.seq), found.end.records
        case Release():
            count = -record.records
        case Drop(move, until):
            going = ownership.droppable(move)
            assert going is not None
            first, end = going
            remove(engine, batch, first, min(until, end) if until else end)
    return Effect(changed, seq, count)


def bounds(span: Span) -> tuple[bytes, bytes]:
    """The records of a range are those in [first, second)."""
    return token_bound(span.first), token_bound(span.last + 1)


def remove(engine: Engine, batch: Batch, begin: bytes, end: bytes) -> None:
    """Remove records, and what the indexes say of them."""
    for row_key, row in engine.iterate(begin, end):
        key = key_of_data(row_key)
        batch.delete(row_key)
        batch.delete(ORDER + key)
        expires_ms = expiry_of(row)
        if expires_ms:
            batch.delete(expiry_key(expires_ms, key))


def _replace(engine: Engine, batch: Batch, span: Span, record: ImportRows) -> None:
    """The rows of an import, each key at most once."""
    keys, rows = record.keys, record.rows
    if len(keys) != len(rows) or len(set(keys)) != len(keys):
        raise Corrupted(f"move {record.move}: {len(rows)} rows for {len(set(keys))} different keys of {len(keys)}")
    for row_key, row, old in zip(keys, rows, engine.multi_get(keys), strict=True):
        if not span.holds(token_of_data(row_key)):
            raise Corrupted(f"move {record.move}: {row_key[:64]!r} is not in {span}")
        key = key_of_data(row_key)
        if old is not None:
            expires_ms = expiry_of(old)
            if expires_ms:
                batch.delete(expiry_key(expires_ms, key))
        if not row:
            batch.delete(row_key)
            batch.delete(ORDER + key)
            continue
        batch.put(row_key, row)
        batch.put(ORDER + key, b"")
        expires_ms = expiry_of(row)
        if expires_ms:
            batch.put(expiry_key(expires_ms, key), b"")
