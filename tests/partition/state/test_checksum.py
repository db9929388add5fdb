"""The checksum covers values in a form of its own (docs/protocol.md, P36)."""

from __future__ import annotations

from struct import pack

import pytest
from crc32c import crc32c

from kvstore.partition.state import rows
from kvstore.partition.state.checksum import ENCODING, Doubt, decode_checks, encode_checks
from kvstore.partition.state.entry import DELETE, KIND, NOTE, OF_TRANSACTIONS, Entry, decode
from kvstore.proto import entry_pb2
from kvstore.types import Seq
from kvstore.wal.ports import LogEntry
from tests.partition.effects import Writer, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.transaction_log import TransactionLog
from tests.ring import rings


def form(version: int, written_ms: int, created: int, expires_ms: int, value: bytes) -> bytes:
    """Encode the form by docs/reference/formats.md, without the store's code."""
    flags = (1 if created != version else 0) | (2 if expires_ms else 0)
    head = pack(">BQQ", flags, version, written_ms)
    head += pack(">Q", created) if created != version else b""
    return head + (pack(">Q", expires_ms) if expires_ms else b"") + value


def folded(crc: int, entry: Entry) -> int:
    keys, forms = b"", b""
    for kind, seq, key, value, created, expires_ms, _ in entry.mutations():
        keys += b"d" + pack(">I", rings.key_hash.token_of(key)) + key
        if kind in OF_TRANSACTIONS:
            forms += value
        elif kind not in (DELETE, NOTE):
            forms += form(seq, entry.time_ms, created, expires_ms, value)
    return crc32c(forms, crc32c(keys, crc))


@pytest.mark.parametrize("seed", range(10))
def test_checksum_covers_the_values_in_the_log(seed: int) -> None:
    writer, state, crc = Writer(seed), state_over(MemoryEngine()), 0
    for _ in range(60):
        logged = writer.any()
        entry = decode(logged.payload)
        state.apply(logged)
        crc = folded(crc, entry) if entry.keys and entry.kinds[0] & KIND < 16 else crc
        assert state.crc == crc


@pytest.mark.parametrize("seed", range(10))
def test_checksum_covers_the_contents_of_transactions(seed: int) -> None:
    log, state, crc = TransactionLog(seed), state_over(MemoryEngine()), 0
    for _ in range(60):
        log.any()
    for logged in log.log:
        state.apply(logged)
        crc = folded(crc, decode(logged.payload))
        assert state.crc == crc


def test_checksum_of_an_entry_has_golden_bytes() -> None:
    assert ENCODING == 1, "another form needs another number and golden bytes of its own"
    writer, state = Writer(0), state_over(MemoryEngine())
    state.apply(writer.put(a="1", b="22"))
    assert state.crc == folded(0, decode(writer.log[0].payload))
    assert f"{state.crc:08x}" == "b1e7c13b"


def test_check_of_an_unknown_encoding_is_not_compared() -> None:
    writer, state = Writer(0), state_over(MemoryEngine())
    state.apply(writer.put(a="1"))
    entry = decode(writer.put(b="2").payload)
    entry.check_seq, entry.check_crc, entry.check_encoding = 1, state.crc ^ 1, ENCODING + 1
    state.apply(LogEntry(writer.log[1].position, entry.encode()))
    assert state.doubt is None
    assert not state.checks


def test_check_names_its_encoding_unless_it_is_the_first() -> None:
    writer = Writer(0)
    entry = decode(writer.put(a="1").payload)
    entry.check_seq, entry.check_crc = 1, 2
    assert entry_pb2.Entry.FromString(entry.encode()).check.encoding == 0
    entry.check_encoding = 9
    assert decode(entry.encode()).check_encoding == 9


def test_remembered_checks_have_golden_bytes() -> None:
    doubt = Doubt(Seq(7), 0x0A0B0C0D, 0x01020304)
    row = encode_checks(doubt, {Seq(7): 0x0A0B0C0D})
    assert row.hex() == "01" + "0000000000000007" + "0a0b0c0d" + "01020304" + "0000000000000007" + "0a0b0c0d"
    assert decode_checks(row) == (doubt, {Seq(7): 0x0A0B0C0D})
    assert decode_checks(b"\x02" + row[1:]) == (None, {})


def test_difference_survives_restart_until_it_is_cleared() -> None:
    writer, engine = Writer(0), MemoryEngine()
    state = state_over(engine)
    state.apply(writer.put(a="1"))
    entry = decode(writer.put(b="2").payload)
    entry.check_seq, entry.check_crc = 1, state.crc ^ 1
    state.apply(LogEntry(writer.log[1].position, entry.encode()))
    again = state_over(engine)
    assert again.doubt == state.doubt == Doubt(Seq(1), again.checks[Seq(1)], entry.check_crc)
    again.clear_doubt()
    assert state_over(engine).doubt is None
    assert state_over(engine).checks == state.checks
    assert rows.CHECKS_KEY == b"c"
