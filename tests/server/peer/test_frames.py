"""Frames between servers: their encoding, and the rejection of malformed frames."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.client.core.scanning import Merge
from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    Moved,
    NotLeader,
    OutcomeUnknown,
    PositionTrimmed,
    QuotaExceeded,
    RateExceeded,
    StoreError,
)
from kvstore.limits import KEY_BYTES_MAX
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Get, Put, Range, Record, RequestId, Scan
from kvstore.partition.state.internal import Attempt
from kvstore.server.grpc.decode import check_operation_sizes
from kvstore.server.peer import frames
from kvstore.server.peer.frames import Answer, Call, FrameError, Frames, Goodbye, Lane, Operations, Ping, Results
from kvstore.types import PartitionId

REQUEST = RequestId(b"c" * 16, 7, 5, 1_000)
ATTEMPT = Attempt(PartitionId("p1"), 3, 4)


def through(message: frames.Message) -> frames.Message:
    (received,) = Frames().feed(frames.encode(message))
    return received


def op_through(op: commands.Op) -> commands.Op:
    """Return the message as the other side receives it."""
    column = {1: "gets", 3: "puts"}.get(op.code, "others")
    sent = through(Operations(1, [Lane("p1", **{column: [(9, op)]})]))
    assert isinstance(sent, Operations)
    (good, bad) = sent.lanes[0].in_order()
    assert bad == []
    assert good[0][0] == 9
    return good[0][1]


def result_through(result: Any) -> Any:
    sent = through(Results(others=[(9, result)]))
    assert isinstance(sent, Results)
    return sent.others[0][1]


@pytest.mark.parametrize(
    ("message", "hex_bytes"),
    [
        (
            Operations(3, [Lane("p1", gets=[(1, Get(b"k"))], puts=[(2, Put(b"k", b"v"))])], 5),
            "00000023 9401039194a27031 9192019401c4016b0000 9192029703c4016bc40176000000c0 90 05",
        ),
        (
            Results(numbers=[(1, 5)], records=[(2, (b"v", 1, 1, 2, 0))], absent=[3], progress=[("p1", 5, 6)]),
            "0000001b 9602 91920105 91920295c4017601010200 9103 90 9193a270310506",
        ),
        (Call(1, "p1", "serving", b"x"), "00000011 950301a27031a773657276696e67c40178"),
        (Answer(1, b"y"), "00000007 940401c40179c0"),
        (Ping(4), "00000003 920504"),
        (Goodbye(), "00000002 9106"),
    ],
    ids=["operations", "results", "call", "answer", "ping", "goodbye"],
)
def test_golden_bytes(message: frames.Message, hex_bytes: str) -> None:
    """DO NOT CHANGE: servers of two versions communicate during an upgrade."""
    assert frames.encode(message).hex() == hex_bytes.replace(" ", "")
    assert through(message) == message


EXAMPLES = {
    commands.Get: (b"k", commands.Level.STRICT, 5),
    commands.Meta: (b"k",),
    commands.Put: (b"k", b"v", 5, commands.Flag.IF_ABSENT, 3, REQUEST),
    commands.Delete: (b"k", 1, 2, REQUEST),
    commands.Increment: (b"k", -5, REQUEST),
    commands.Append: (b"k", b"s", REQUEST),
    commands.Expire: (b"k", 5, 1, REQUEST),
    commands.Batch: (b"k", (commands.Put(b"k", b"v"), commands.Get(b"j")), 0, REQUEST),
    commands.DeleteRange: (b"", b"z", REQUEST),
    commands.Scan: (b"", b"", 10, 0, commands.Level.STALE, 3),
    commands.Range: (b"a", b"b", 10, int(commands.Flag.REVERSE | commands.Flag.BARE), commands.Level.STALE, 3),
    commands.ScanTokens: (5, 10, commands.Level.STALE),
    commands.Count: (),
    commands.Check: (b"k", 4, 7, REQUEST),
    commands.Transact: (b"k", (commands.Put(b"k", b"v"), commands.Get(b"j")), 0, REQUEST),
    commands.Prepare: (b"k", b"h", ATTEMPT, (commands.Put(b"k", b"v"), commands.Get(b"j")), 0, 2, 5),
    commands.Resolve: (b"k", ATTEMPT, 9, True, 5),
    commands.Inquire: (b"h", ATTEMPT, b"k", 9, 5),
}


def test_every_operation_has_an_example() -> None:
    assert set(EXAMPLES) == set(commands.TYPES.values())


@pytest.mark.parametrize(("make", "arguments"), EXAMPLES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_every_operation_arrives_as_sent(make: Any, arguments: tuple[Any, ...]) -> None:
    op = make(*arguments)
    arrived = op_through(op)
    assert arrived == op
    if isinstance(op.request, RequestId):
        assert isinstance(arrived.request, RequestId), "partitions read a request id's fields by name"


def test_operations_of_all_columns_keep_submission_order() -> None:
    lane = Lane(
        "p1",
        gets=[(2, commands.Get(b"a")), (5, commands.Get(b"b"))],
        puts=[(1, commands.Put(b"a", b"")), (4, commands.Put(b"b", b""))],
        others=[(3, commands.Delete(b"a"))],
    )
    arrived = through(Operations(1, [lane]))
    assert isinstance(arrived, Operations)
    assert [number for number, _ in arrived.lanes[0].in_order()[0]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "result",
    [None, 7, True, (5, 6), [], Record(b"v", 1, 2, 3, 4), ([(b"k", (b"v", 1, 2, 3, 4))], b"next"), [1, None, (2, 3)]],
    ids=str,
)
def test_every_shape_of_result_arrives(result: Any) -> None:
    def plain(value: Any) -> Any:
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    assert plain(result_through(result)) == plain(result)


ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StoreError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_arrives_unchanged(cls: type[StoreError]) -> None:
    arguments = {
        ConditionFailed: (7,),
        NotLeader: ("p1", "n2", "host:1"),
        Moved: ("p2", 9),
        PositionTrimmed: ("p1", 3, 9),
        QuotaExceeded: ("shop", "keys", 40, 41, 2),
        RateExceeded: ("shop", 100, 33, 12),
    }.get(cls, ("why",))
    arrived = result_through(cls(*arguments))
    assert type(arrived) is cls
    assert arrived.args == arguments


def test_errors_inside_results_arrive() -> None:
    arrived = result_through([1, ConditionFailed(7)])
    assert type(arrived[1]) is ConditionFailed


def test_error_of_newer_server_is_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(StoreError):
        pass

    monkeypatch.setattr(errors, "Newer", Newer, raising=False)
    assert isinstance(result_through(Newer("x")), OutcomeUnknown)


@pytest.mark.parametrize(
    "op",
    [
        (),
        (99, b"k"),
        ("1", b"k"),
        (True, b"k", 0, 0),
        (5, b"k"),
        (5, b"k", 1, None, 0),
        (5, b"k", "1", None),
        (5, "k", 1, None),
        (5, b"k", True, None),
        (2, b"k", 9, 0),
        (8, b"k", [[3, b"k", b"v", 0, 0, 0, None, 0]], 0, None),
        5,
        (5, b"", 1, None),
        (5, b"k" * 4097, 1, None),
        (6, b"k", b"v" * ((1 << 20) + 1), None),
        (4, b"k", 0, 0, [b"c", 1]),
        (4, b"k", 0, 0, 5),
        (8, b"k", [[8, b"k", [], 0, None]], 0, None),
        (8, b"k", [[99, b"k"]], 0, None),
        (8, b"k", [5], 0, None),
        (8, b"k", 5, 0, None),
    ],
    ids=lambda op: str(op)[:30],
)
def test_malformed_operation_is_refused_alone(op: Any) -> None:
    sent = through(Operations(1, [Lane("p1", others=[(1, op), (2, commands.Count())])]))
    assert isinstance(sent, Operations)
    good, bad = sent.lanes[0].in_order()
    assert good == [(2, commands.Count())]
    assert [(number, type(error)) for number, error in bad] == [(1, InvalidRequest)]


def test_operation_without_its_last_fields_gets_their_defaults() -> None:
    sent = through(Operations(1, [Lane("p1", others=[(1, (11, 5, 10, 3))])]))
    assert isinstance(sent, Operations)
    assert sent.lanes[0].in_order() == ([(1, commands.ScanTokens(5, 10, commands.Level.STALE, 0))], [])


@pytest.mark.parametrize(
    "lane",
    [
        Lane("p1", gets=[(1, (3, b"k", 0, 0))]),
        Lane("p1", gets=[(1, (1, b"", 0, 0))]),
        Lane("p1", gets=[(1, (1, b"k", 9, 0))]),
        Lane("p1", gets=[(1, (1, b"k", 0, 0, 0))]),
        Lane("p1", puts=[(1, (3, b"k", b"v", 0, 0, 0, None, 0))]),
        Lane("p1", puts=[(1, (3, b"k", b"v" * ((1 << 20) + 1), 0, 0, 0, None))]),
        Lane("p1", puts=[(-1, (3, b"k", b"v", 0, 0, 0, None))]),
        Lane("", gets=[]),
    ],
    ids=["code", "empty key", "level", "long get", "long put", "value", "number", "name"],
)
def test_malformed_column_is_a_frame_error(lane: Lane) -> None:
    with pytest.raises(FrameError):
        through(Operations(1, [lane]))


def test_scan_may_begin_beyond_the_longest_key() -> None:
    """A ring change during a scan used to end every scan whose last key had 4,096 bytes."""
    merge: Merge[int] = Merge(["p1"], b"")
    last = b"k" * KEY_BYTES_MAX
    merge.feed("p1", [(last, 1)], b"l")
    merge.take()
    ((_, start, *_),) = merge.restarted(["p1", "p2"]).wanted()[:1]
    scan = Scan(start, b"", 10)
    assert op_through(Range(start, b"", 10)) == Range(start, b"", 10)
    check_operation_sizes(Code.SCAN, start, b"")
    assert op_through(scan) == scan
    with pytest.raises(FrameError, match="of length <= 4097"):
        frames.restored((int(Code.SCAN), start + b"\0", b"", 10, 0, 0, 0))


@given(st.binary(max_size=200))
def test_noise_only_raises_frame_errors(noise: bytes) -> None:
    with suppress(FrameError):
        list(Frames().feed(frames.HEADER.pack(len(noise)) + noise))


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_survive_any_split_of_the_stream(bodies: list[bytes], step: int) -> None:
    sent = [Answer(number, body) for number, body in enumerate(bodies)]
    stream = b"".join(map(frames.encode, sent))
    cutter = Frames()
    found = [each for place in range(0, len(stream), step) for each in cutter.feed(stream[place : place + step])]
    assert found == sent


def test_excessive_length_is_refused_before_buffering() -> None:
    with pytest.raises(FrameError, match="at most"):
        list(Frames().feed(frames.HEADER.pack(frames.FRAME_BYTES_MAX + 1)))


def test_oversized_frame_is_not_sent() -> None:
    with pytest.raises(FrameError, match="at most"):
        frames.encode(Results(others=[(1, b"x" * frames.FRAME_BYTES_MAX)]))
