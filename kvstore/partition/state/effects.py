"""Adds the changes of a log entry to a write batch of the engine: mutations of keys, and control records about token
ranges. Decides only.

Mutations are added without reading. Importing rows and dropping a range read the old rows, to update the indexes. The
old rows are the same on every replica.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import add, sub
from typing import NamedTuple

from crc32c import crc32c

from kvstore.errors import Corrupted
from kvstore.partition.state.checksum import fold
from kvstore.partition.state.decisions import Decisions, decision_of, end_of
from kvstore.partition.state.engine import Engine, EngineBatch
from kvstore.partition.state.entry import (
    CREATE,
    DECISION,
    DELETE,
    END,
    INTENT,
    NOTE,
    OF_TRANSACTIONS,
    OVERWRITE,
    RESOLVED,
    SINGLE,
    Entry,
)
from kvstore.partition.state.intents import Intents, encode_row, intent_of, record_of_row, resolved_of
from kvstore.partition.state.move_records import Drop, ImportBegin, ImportRows, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.rows import (
    AGED,
    ALL_DATA,
    ALL_DECISIONS,
    ALL_INTENTS,
    ORDER,
    data_key,
    data_keys_of,
    encode_record,
    expiry_key,
    expiry_of,
    key_of_data,
    name_of_row,
    pack_aged,
    pack_fresh,
    token_bound,
    token_of_data,
    transaction_key,
)
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.hashing import KeyHash

_MOVING = (ALL_DATA[0], ALL_INTENTS[0], ALL_DECISIONS[0])
"""Prefixes of the rows that move with a range."""


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


# docs/protocol.md Tx14
def moving_bounds(span: TokenSpan) -> tuple[tuple[bytes, bytes], ...]:
    """Return the ranges [first, second) of row keys that contain everything that moves with a token range, except
    request ids, in ascending order: the records, the intents and the decisions."""
    first, end = bounds(span)
    return (first, end), transaction_bounds(ALL_INTENTS, first, end), transaction_bounds(ALL_DECISIONS, first, end)


def transaction_bounds(rows: tuple[bytes, bytes], begin: bytes, end: bytes) -> tuple[bytes, bytes]:
    """Return the range [first, second) of row keys of the intents or decisions whose keys have records in the range
    [begin, end) of row keys. `rows` is ALL_INTENTS or ALL_DECISIONS."""
    return rows[0] + begin[1:], rows[0] + end[1:] if end < ALL_DATA[1] else rows[1]


def remove(engine: Engine, batch: EngineBatch, begin: bytes, end: bytes) -> None:
    """Remove records with their index rows, and the intents and decisions of their tokens."""
    for rows in (ALL_INTENTS, ALL_DECISIONS):
        for row_key, _ in engine.iterate(*transaction_bounds(rows, begin, end)):
            batch.delete(row_key)
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
        if row_key[:1] not in _MOVING or not span.holds(token_of_data(row_key)):
            raise Corrupted(f"move {record.move}: {row_key[:64]!r} is not in {span}")
        if row_key[:1] in (ALL_INTENTS[0], ALL_DECISIONS[0]):
            if row:
                batch.put(row_key, row)
            else:
                batch.delete(row_key)
            continue
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


def change(batch: EngineBatch, entry: Entry, hash: KeyHash, data_keys: list[bytes] | None, crc: int) -> tuple[int, int]:
    """Add the changes of an entry to the batch. `data_keys` are the row keys of the entry's keys, if the caller has
    them, and `crc` is the checksum before the entry. Returns the change in the number of keys, and the checksum after
    the entry."""
    keys, ages = entry.keys, entry.ages
    if entry.kinds in SINGLE:  # one put without expiries, handled without building lists
        seq, row_key = entry.first_seq, data_key(hash, keys[0]) if data_keys is None else data_keys[0]
        if ages:
            row = pack_aged(AGED, seq, entry.time_ms, seq - ages[0]) + entry.values[0]
        else:
            row = pack_fresh(0, seq, entry.time_ms) + entry.values[0]
            batch.put(ORDER + keys[0], b"")
        batch.put(row_key, row)
        return 0 if ages else 1, crc32c(row, crc32c(row_key, crc))
    if data_keys is None:
        data_keys = data_keys_of(hash, keys)
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
        if kind in OF_TRANSACTIONS:
            changed, row = transaction_change(kind, seq, row_key, value)
            if row:
                batch.put(changed, row)
            else:
                batch.delete(changed)
            written.append(value)
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


# ── intents and decisions ─────────────────────────────────────────────────────────────────────────────────────────────


def transaction_change(kind: int, seq: int, row_key: bytes, contents: bytes) -> tuple[bytes, bytes]:
    """Return the row key of the intent or decision that a mutation of a transaction changes, and the new row; an empty
    row means that the row is removed. `row_key` is the row key of the record of the mutation's key."""
    if kind == INTENT:
        return transaction_key(ALL_INTENTS, row_key, seq), encode_row(contents)
    if kind == DECISION:
        return transaction_key(ALL_DECISIONS, row_key, seq), encode_row(contents)
    if kind == RESOLVED:
        return transaction_key(ALL_INTENTS, row_key, resolved_of(contents).seq), b""
    assert kind == END, f"unknown kind {kind}"
    return transaction_key(ALL_DECISIONS, row_key, end_of(contents).seq), b""


def check_transactions(entry: Entry, intents: Intents, decisions: Decisions) -> None:
    """Raise Corrupted if the entry contains a mutation of a transaction that no leader may write: one that removes an
    intent or a decision that does not exist, or a second decision of an attempt."""
    for kind, seq, key, contents, *_ in entry.mutations():
        if kind == RESOLVED:
            resolved = resolved_of(contents)
            intent = intents.find(key, resolved.seq)
            is_right = intent is not None and intent.attempt == resolved.attempt
        elif kind == END:
            ended = end_of(contents)
            decision = decisions.find(ended.attempt)
            is_right = decision is not None and (decision.home, decision.seq) == (key, ended.seq)
        elif kind == DECISION:
            is_right = decisions.find(decision_of(key, seq, contents).attempt) is None
        else:
            is_right = kind != INTENT or bool(intent_of(key, seq, contents))
        if not is_right:
            raise Corrupted(f"the mutation at {seq} contradicts the transactions before it: {contents[:64].hex()}")


def index_transactions(entry: Entry, intents: Intents, decisions: Decisions) -> None:
    """Carry out the entry's changes of intents and decisions in the indexes. The entry has been checked."""
    for kind, seq, key, contents, *_ in entry.mutations():
        if kind == INTENT:
            intents.add(intent_of(key, seq, contents))
        elif kind == RESOLVED:
            intents.remove(key, resolved_of(contents).seq)
        elif kind == DECISION:
            decisions.add(decision_of(key, seq, contents))
        elif kind == END:
            decisions.remove(end_of(contents).attempt)


def load_transactions(engine: Engine, spans: Iterable[TokenSpan], intents: Intents, decisions: Decisions) -> None:
    """Add the intents and decisions that the engine contains, with tokens in `spans`, to the indexes."""
    for span in spans:
        first, end = bounds(span)
        for row_key, row in engine.iterate(*transaction_bounds(ALL_INTENTS, first, end)):
            intents.add(intent_of(*name_of_row(row_key), record_of_row(row)))
        for row_key, row in engine.iterate(*transaction_bounds(ALL_DECISIONS, first, end)):
            decisions.add(decision_of(*name_of_row(row_key), record_of_row(row)))


def transaction_row_keys(entry: Entry, data_keys: list[bytes]) -> list[bytes]:
    """Return the row keys of the intents and decisions that the entry changes. `data_keys` are the row keys of the
    records of its keys."""
    if not entry.transactions:
        return []
    return [
        transaction_change(each.kind, each.seq, row_key, each.value)[0]
        for each, row_key in zip(entry.mutations(), data_keys, strict=True)
        if each.kind in OF_TRANSACTIONS
    ]
