"""The bytes of a session on a plain stream: nobody's may change without a new version."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.core.values import Item
from kvstore.proto import compact, kv_pb2
from kvstore.proto.session_stream import WELCOME, WORD, hello, message_of, protobuf_message_of, refusal_or_none

LANE = compact.CompactLane("p1", 7, [3, 3], [b"a", b"b"], 0, 0, [b"v", b""], [1, 2], b"c" * 16, 1, 1_000)
FRAME = compact.CompactFrame(4, 5_000, [LANE])
ANSWERS = compact.CompactAnswers(
    4, [compact.CompactProgress("p1", 300, 1_000)], [7, 8], [299, 300], [9], [Item(b"v", 299, 1, 1_000, 0)], [10]
)


def test_greeting_has_golden_bytes() -> None:
    assert hello("n1") == b"*4\r\n$12\r\nKVSTORE.PEER\r\n$7\r\nSESSION\r\n$1\r\n1\r\n$2\r\nn1\r\n"
    assert WELCOME == b"+KVSTORE SESSION 1\r\n"


def test_compact_frame_has_golden_bytes() -> None:
    assert message_of(FRAME).hex() == (
        "00000037019304cd1388919ba270310792030392c40161c401620000"
        "92c40176c400920102c410" + "63" * 16 + "01cd03e8"
    )  # fmt: skip
    assert compact.decode_frame(message_of(FRAME)[5:]) == FRAME


def test_compact_answers_have_golden_bytes() -> None:
    assert message_of(ANSWERS).hex() == (
        "000000290197049193a27031cd012ccd03e892070892cd012bcd012c9109"
        "9195c40176cd012b01cd03e800910a"
    )  # fmt: skip
    found = compact.decoder_of_answers(Item)(message_of(ANSWERS)[5:])
    assert found == ANSWERS
    assert found.records[0].__class__ is Item


def test_other_messages_are_sent_as_protobuf() -> None:
    message = kv_pb2.Answers(ring_version=4, absent=[1])
    assert protobuf_message_of(message) == b"\x00\x00\x00\x06\x02" + message.SerializeToString()


@pytest.mark.parametrize(
    "wrong",
    [
        [4, 5_000],
        [-1, 5_000, []],
        [4, 5_000, [["p1", -7, [1], [b"k"]]]],
        [4, 5_000, [["p1", 7, [1], ["text"]]]],
        [4, 5_000, [["p1", 7, [1], [b"k"], 0, 0, [], [-1]]]],
        [4, 5_000, [["p1", 7, [1], [b"k"], 0, 0, [], [], b"", 0, 0, "more"]]],
        {"ring_version": 4},
    ],
)
def test_inconsistent_frame_is_refused(wrong: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        compact.decode_frame(msgspec.msgpack.encode(wrong))


def test_empty_columns_may_be_left_out() -> None:
    frame = compact.decode_frame(msgspec.msgpack.encode([4, 0, [["p1", 7, [1], [b"k"]]]]))
    (lane,) = frame.lanes
    assert (lane.values, lane.sequences, lane.client, lane.level, lane.token) == ([], [], b"", 0, 0)


def test_server_accepts_only_streams_of_this_version_meant_for_it() -> None:
    assert refusal_or_none([WORD, b"1", b"n1"], "n1") is None
    assert refusal_or_none([WORD, b"1", b"n2"], "n1") == "session: this is server n1"
    assert refusal_or_none([WORD, b"2", b"n1"], "n1") == "session version: want 1"
    assert refusal_or_none([WORD, b"1", b"n1"], "n1", "c1") is None, "a client of 0.1"
    assert refusal_or_none([WORD, b"1", b"n1@c1"], "n1", "c1") is None
    assert refusal_or_none([WORD, b"1", b"n1@c2"], "n1", "c1") == "session: this is server n1 of cluster c1"
    assert refusal_or_none([WORD, b"1", b"n2@c1"], "n1", "c1") == "session: this is server n1"
    assert refusal_or_none([WORD, b"1", b"n1", b"more"], "n1") == "session: want a version and a server, got 4 words"
