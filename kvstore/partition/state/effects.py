"""Adds the changes of a log entry to a write batch of the engine: mutations of keys, and control records about token
ranges. Decides only.

Mutations are added without reading. Importing rows and dropping a range read the old rows, to update the indexes. The
old rows are the same on every replica.
"""

from __future__ import annotations

from itertools import repeat
from operator import add, sub
from typing import NamedTuple

from crc32c import crc32c

from kvstore.errors import Corrupted
from kvstore.partition.state.checksum import fold
from kvstore.partition.state.engine import Engine, EngineBatch
from kvstore.partition.state.entry import CREATE, DELETE, LONE, NOTE, OVERWRITE, Entry
from kvstore.partition.state.move_records import Drop, ImportBegin, ImportRows, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.rows import (
    AGED,
    ORDER,
    data_key,
    data_keys_of,
    encode_record,
    expiry_key,
    expiry_of,
    key_of_data,
    pack_aged,
    pack_fresh,
    token_bound,
    token_of_data,
)
from kvstore.partition.state.tokens import TokenSpan


class Effect(NamedTuple):
    """The changes that a control record makes besides changing rows."""

    ownership: Ownership
    seq: int
    keys: int
    """Change in the number of owned keys."""


def apply_record(
    engine: Engine, batch: EngineBatch, ownership: Ownership, record: MoveRecord, changed: Ownership, seq: int
) -> Effect:
    """Add the record's changes of rows to `batch`. `changed` is the ownership after the record, `seq` the sequence of
    its entry. Raises Corrupted."""
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


def bounds(span: TokenSpan) -> tuple[bytes, bytes]:
    """Return the range [first, second) of row keys that contains the records of a token range."""
    return token_bound(span.first), token_bound(span.last + 1)


def remove(engine: Engine, batch: EngineBatch, begin: bytes, end: bytes) -> None:
    """Remove records and their index rows."""
    for row_key, row in engine.iterate(begin, end):
        key = key_of_data(row_key)
        batch.delete(row_key)
        batch.delete(ORDER + key)
        expires_ms = expiry_of(row)
        if expires_ms:
            batch.delete(expiry_key(expires_ms, key))


def _replace(engine: Engine, batch: EngineBatch, span: TokenSpan, record: ImportRows) -> None:
    """Replace rows by those of an import. Each key occurs at most once."""
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


# ── mutations of keys ─────────────────────────────────────────────────────────────────────────────────────────────────


def change(batch: EngineBatch, entry: Entry, data_keys: list[bytes] | None, crc: int) -> tuple[int, int]:
    """Add the changes of an entry to the batch. `data_keys` are the row keys of the entry's keys, if the caller has
    them, and `crc` is the checksum before the entry. Returns the change in the number of keys, and the checksum after
    the entry."""
    keys, ages = entry.keys, entry.ages
    if entry.kinds in LONE:  # one put without expiries, handled without building lists
        seq, row_key = entry.first_seq, data_key(keys[0]) if data_keys is None else data_keys[0]
        if ages:
            row = pack_aged(AGED, seq, entry.time_ms, seq - ages[0]) + entry.values[0]
        else:
            row = pack_fresh(0, seq, entry.time_ms) + entry.values[0]
            batch.put(ORDER + keys[0], b"")
        batch.put(row_key, row)
        return 0 if ages else 1, crc32c(row, crc32c(row_key, crc))
    if data_keys is None:
        data_keys = data_keys_of(keys)
    are_puts = len(entry.values) == len(keys) and not (entry.expires_ms or entry.replaced_ms)
    created, written = (_put_all if are_puts else _change_all)(batch, entry, data_keys)
    return created, fold(crc, data_keys, written)


def _put_all(batch: EngineBatch, entry: Entry, data_keys: list[bytes]) -> tuple[int, list[bytes]]:
    """Put records without expiries. Return the number of keys created and the rows written."""
    kinds, keys, ages = entry.kinds, entry.keys, entry.ages
    first, time_ms = entry.first_seq, entry.time_ms
    seqs = range(first, first + len(keys))
    if not ages:
        heads, created = list(map(pack_fresh, repeat(0), seqs, repeat(time_ms))), keys
    elif len(ages) == len(keys):
        heads, created = list(map(pack_aged, repeat(AGED), seqs, repeat(time_ms), map(sub, seqs, ages))), []
    else:
        each = iter(ages)
        heads = [
            pack_fresh(0, seq, time_ms) if kind == CREATE else pack_aged(AGED, seq, time_ms, seq - next(each))
            for kind, seq in zip(kinds, seqs, strict=True)
        ]
        created = [key for kind, key in zip(kinds, keys, strict=True) if kind == CREATE]
    written = list(map(add, heads, entry.values))
    for _ in map(batch.put, data_keys, written):
        pass
    for _ in map(batch.put, map(ORDER.__add__, created), repeat(b"")):
        pass
    return len(created), written


def _change_all(batch: EngineBatch, entry: Entry, data_keys: list[bytes]) -> tuple[int, list[bytes]]:
    """Apply any mutations. Return by how much the number of keys changes, and the rows written."""
    change, written = 0, []
    time_ms = entry.time_ms
    for row_key, (kind, seq, key, value, created, expires_ms, replaced_ms) in zip(
        data_keys, entry.mutations(), strict=True
    ):
        if kind == NOTE:
            continue
        if replaced_ms:
            batch.delete(expiry_key(replaced_ms, key))
        if kind == DELETE:
            batch.delete(row_key)
            batch.delete(ORDER + key)
            written.append(b"")
            change -= 1
            continue
        assert kind in (CREATE, OVERWRITE), f"unknown kind {kind}"
        if kind == CREATE:
            batch.put(ORDER + key, b"")
            change += 1
        if expires_ms:
            batch.put(expiry_key(expires_ms, key), b"")
        row = encode_record(value, seq, created, time_ms, expires_ms)
        batch.put(row_key, row)
        written.append(row)
    return change, written
