"""Operations as bytes, and the classes that describe them."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level, Op, RequestId
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.operations import size_of
from kvstore.types import PartitionId

REQUEST = RequestId(b"c" * 16, 7, 5, 1_000)
ATTEMPT = Attempt(PartitionId("p1"), 3, 4)
REQUEST_HEX = "94 c410" + "63" * 16 + " 07 05 cd03e8"
GOLDEN: list[tuple[Op, str]] = [
    (commands.Get(b"k", Level.SESSION, 5), "94 01 c4016b 02 05"),
    (commands.Get(b"k"), "94 01 c4016b 00 00"),
    (commands.Meta(b"k", Level.STALE, 300), "94 02 c4016b 03 cd012c"),
    (commands.Put(b"k", b"v"), "97 03 c4016b c40176 00 00 00 c0"),
    (
        commands.Put(b"k", b"v", 500, Flag.IF_VERSION | Flag.RETURN_OLD, 9, REQUEST),
        "97 03 c4016b c40176 cd01f4 14 09" + REQUEST_HEX,
    ),
    (commands.Delete(b"k"), "95 04 c4016b 00 00 c0"),
    (commands.Delete(b"k", Flag.IF_VERSION, 7, REQUEST), "95 04 c4016b 04 07" + REQUEST_HEX),
    (commands.Increment(b"k", -5, REQUEST), "94 05 c4016b fb" + REQUEST_HEX),
    (commands.Append(b"k", b"s"), "94 06 c4016b c40173 c0"),
    (commands.Expire(b"k", 300, Flag.IF_LONGER), "95 07 c4016b cd012c cd0100 c0"),
    (
        commands.Batch(b"k", (commands.Put(b"k", b"v"), commands.Get(b"j"), commands.Check(b"i", 4, 2)), 1024, REQUEST),
        "95 08 c4016b 93 97 03 c4016b c40176 00 00 00 c0 94 01 c4016a 00 00 95 0d c40169 04 02 c0 cd0400" + REQUEST_HEX,
    ),
    (commands.DeleteRange(b"a", b"z", REQUEST), "94 09 c40161 c4017a" + REQUEST_HEX),
    (commands.Scan(b"a", b"", 10, Flag.KEYS_ONLY, Level.STALE, 3), "97 0a c40161 c400 0a cd0800 03 03"),
    (commands.ScanTokens(5, 10, Level.STRICT), "95 0b 05 0a 01 00"),
    (commands.Count(level=Level.STALE), "93 0c c400 03"),
    (commands.Check(b"k", Flag.IF_ABSENT), "95 0d c4016b 01 00 c0"),
    (commands.Range(b"a", b"b", 10, Flag.REVERSE | Flag.BARE), "97 0e c40161 c40162 0a cd3000 00 00"),
    (
        commands.Transact(b"k", (commands.Put(b"k", b"v"), commands.Check(b"i", 4, 2)), 0, REQUEST),
        "95 0f c4016b 92 97 03 c4016b c40176 00 00 00 c0 95 0d c40169 04 02 c0 00" + REQUEST_HEX,
    ),
    (
        commands.Prepare(b"k", b"h", ATTEMPT, (commands.Put(b"k", b"v"),), 1024, 2, 5, True, 7),
        "9a 10 c4016b c40168 93 a27031 03 04 91 97 03 c4016b c40176 00 00 00 c0 cd0400 02 05 c3 07",
    ),
    (commands.Resolve(b"k", ATTEMPT, 9, True, 5), "96 11 c4016b 93 a27031 03 04 09 c3 05"),
    (commands.Inquire(b"h", ATTEMPT, b"k", 9, 5), "96 12 c40168 93 a27031 03 04 c4016b 09 05"),
]


# docs/protocol.md V3
@pytest.mark.parametrize(("op", "golden"), GOLDEN, ids=str)
def test_golden_bytes(op: Op, golden: str) -> None:
    """DO NOT CHANGE: operations travel between servers of two versions."""
    assert msgspec.msgpack.encode(op).hex() == golden.replace(" ", "")


def test_size_of_counts_every_value() -> None:
    for op, _ in GOLDEN:
        own = sum(len(getattr(op, field, b"")) for field in ("key", "value", "end"))
        assert size_of(op) == (sum(map(size_of, op.ops)) if op.ops else own), op


def test_every_operation_has_golden_bytes() -> None:
    assert {type(op) for op, _ in GOLDEN} == set(commands.TYPES.values())
