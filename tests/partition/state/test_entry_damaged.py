"""Entries with flipped bits, or truncated: they are refused or applied, and raise nothing else. Normally their digest
protects the state from them (docs/protocol.md L16); an error that it misses must not leave a replica in an unknown
state."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from kvstore.errors import Corrupted, StoreError
from kvstore.partition.moves import pages
from kvstore.partition.state import changes, entry
from kvstore.partition.state.entry import CREATE, OVERWRITE, Entry, decode
from kvstore.partition.state.tokens import EVERYTHING
from kvstore.types import EntryId, PartitionId, Position
from kvstore.wal.ports import LogEntry
from tests.partition.effects import TIME_MS, Writer, check_indexes, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.ring import rings

BEFORE, DAMAGES = 12, 60


def damaged(payload: bytes, random: Random) -> bytes:
    data = bytearray(payload)
    for _ in range(random.choice((1, 1, 2, 3))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data[: random.randrange(len(data))] if random.random() < 0.2 else data)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_entry_is_refused_or_applied_completely(seed: int) -> None:
    random, writer = Random(seed), Writer(seed)
    log = [writer.any() for _ in range(BEFORE + 1)]
    *before, last = log
    for _ in range(DAMAGES):
        bad = LogEntry(last.position, damaged(last.payload, random))
        behind = Position(bad.position.ledger, EntryId(bad.position.entry + 1))
        state = state_over(MemoryEngine())
        state.apply_all(before)
        stood = state.position, state.seq, state.crc, state.fingerprint()
        try:
            state.apply_all([bad, LogEntry(behind, b"")] if random.random() < 0.5 else [bad])
        except StoreError:
            if state.position != bad.position:
                assert (state.position, state.seq, state.crc, state.fingerprint()) == stood
        assert state.is_complete
        state.retries.check()
        with suppress(StoreError):
            changes.feed_entry_of(bad)
        with suppress(StoreError):
            found = decode(bad.payload)
            if not found.is_control:
                pages.RangeChanges(EVERYTHING.spans[0], rings.key_hash).add(found)


@pytest.mark.parametrize(("ages", "is_right"), [([6], True), ([7], False), ([1 << 63], False)])
def test_record_created_before_the_first_sequence_is_refused(ages: list[int], is_right: bool) -> None:
    for kinds, first in ((bytes((OVERWRITE,)), 7), (bytes((CREATE, OVERWRITE)), 6)):
        made = Entry(PartitionId("p1"), 1, first, TIME_MS, kinds)
        made.keys, made.values, made.ages = [b"a", b"b"][: len(kinds)], [b"1", b"2"][: len(kinds)], ages
        if is_right:
            assert decode(made.encode()).ages == ages
        else:
            with pytest.raises(Corrupted, match="created"):
                decode(made.encode())


def test_encoded_entry_decodes_to_the_same_values() -> None:
    writer = Writer(3)
    state = state_over(MemoryEngine())
    for _ in range(200):
        logged = writer.any()
        assert entry.decode(logged.payload).encode() == logged.payload
        state.apply(logged)
    check_indexes(state)
