"""The parser of the Redis protocol: every cut of the stream gives the same commands, and every length is checked."""

from __future__ import annotations

import itertools

import hiredis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.server.redis import parser as redis_parser
from kvstore.server.redis.parser import OversizedCommand, Parser

arguments = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"\r\n", b"*3\r\n$3\r\n", b"$1\r\n", b"GET", b"x" * 5000, b"*1", b"\r", b"\n"]),
)
mixed = st.lists(st.lists(arguments, min_size=1, max_size=5), min_size=1, max_size=6)
alike = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(arguments, min_size=n, max_size=n), max_size=14))
commands = st.one_of(mixed, st.tuples(alike, mixed).map(lambda both: [*both[0], *both[1]]))


def packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def all_of(parser: Parser, data: bytes) -> list[list[bytes]]:
    """Return the commands that `data` completes, which may take several calls."""
    found = parser.parse(data)
    while parser.is_behind:
        found += parser.parse(b"")
    return found


def parsed(*chunks: bytes) -> list[list[bytes]]:
    parser = Parser()
    found = [command for chunk in chunks for command in all_of(parser, chunk)]
    assert parser.error is None
    assert len(parser.kept) == 0
    return found


@given(commands, st.lists(st.integers(0, 400), max_size=8))
@example([[b"SET", b"k", b"v\r\n*3"], [b"GET", b"k"]], [5, 20])
def test_every_cut_of_the_stream_gives_the_same_commands(wanted: list[list[bytes]], cuts: list[int]) -> None:
    stream = b"".join(packed(*words) for words in wanted)
    places = [0, *sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert parsed(*chunks) == wanted


@given(commands)
def test_byte_by_byte_input_gives_the_same_commands(wanted: list[list[bytes]]) -> None:
    stream = b"".join(packed(*words) for words in wanted)[:2000]
    parser, reference = Parser(), hiredis.Reader()
    for place in range(len(stream)):
        byte = stream[place : place + 1]
        reference.feed(byte)
        expected = reference.gets()
        assert parser.parse(byte) == ([] if expected is False else [expected])


fragments = st.sampled_from([b"*", b"$", b"1", b"2", b"-1", b"\r", b"\n", b"\r\n", b"GET", b"x", b" ", b"*2\r\n$3\r\n"])


@given(st.one_of(st.binary(max_size=300), st.lists(fragments, max_size=60).map(b"".join)), st.integers(1, 7))
@example(b"*1\r\n\n", 1)
def test_arbitrary_bytes_never_raise_and_memory_stays_bounded(noise: bytes, step: int) -> None:
    parser = Parser()
    for place in range(0, len(noise), step):
        parser.parse(noise[place : place + step])
    assert len(parser.kept) <= len(noise)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"PING\r\n", [b"PING"]),
        (b"  set  k   v \n", [b"set", b"k", b"v"]),
        (b'set k "a b\\n\\x41\\"c"\r\n', [b"set", b"k", b'a b\nA"c']),
        (b"set k 'a b'\r\n", [b"set", b"k", b"a b"]),
        (b'set k ""\r\n', [b"set", b"k", b""]),
    ],
)
def test_inline_commands_are_split_and_quoted_as_in_a_shell(line: bytes, words: list[bytes]) -> None:
    assert parsed(line) == [words]
    assert parsed(*(line[i : i + 1] for i in range(len(line)))) == [words]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_argument_that_looks_like_the_protocol_stays_an_argument(place: int, count: int) -> None:
    """If the fast path accepted the line ends inside it, a key could smuggle in another command."""
    for smuggled in (b"k\r\n$1\r\nv", b"k\r\n$1\r\nv\r\n*2\r\n$3\r\nDEL\r\n$1\r\na", b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"):
        words = [b"x"] * count
        words[min(place, count - 1)] = smuggled
        assert parsed(packed(*words) + packed(b"PING")) == [words, [b"PING"]]


def test_empty_lines_and_empty_arrays_are_ignored() -> None:
    assert parsed(b"\r\n\r\n*0\r\n*-1\r\nPING\r\n") == [[b"PING"]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"*1\r\n:5\r\n", r"expected '\$', got ':'"),
        (b"*1\r\n*1\r\n$1\r\na\r\n", r"expected '\$', got '\*'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*2\r\n$-0\r\n\r\n$1\r\na\r\n", "invalid bulk length"),
        (b"*x\r\n", "invalid multibulk length"),
        (b"*99999999999\r\n", "invalid multibulk length"),
        (b"*2000000\r\n", "invalid multibulk length"),
        (b"*1\r\n$99999999999\r\n", "invalid bulk length"),
        (b"*1\r\n$3\r\nabcXY", "line end after an argument"),
        (b"*" + b"1" * 40, "header is too long"),
        (b"*1\n$1\r\na\r\n", "invalid multibulk length"),
        (b"a" * (redis_parser.INLINE_BYTES_MAX + 1), "too big inline request"),
        (b'set k "abc\r\n', "unbalanced quotes"),
        (b"~3\r\n*1\r\n:1\r\n", r"expected '\$'"),
    ],
    ids=range(14),
)
def test_malformed_bytes_end_the_stream(data: bytes, reason: str) -> None:
    for chunks in ([packed(b"PING") + data], [packed(b"PING"), *(data[i : i + 3] for i in range(0, len(data), 3))]):
        parser = Parser()
        found = [command for chunk in chunks for command in parser.parse(chunk)]
        assert found[0] == [b"PING"], "what came before is a command"
        assert parser.error is not None
        with pytest.raises(redis_parser.ProtocolError, match=reason):
            raise parser.error
        assert parser.parse(packed(b"PING")) == [], "nothing is read after it"


def test_huge_count_allocates_nothing() -> None:
    parser = Parser()
    assert parser.parse(b"*1000000\r\n") == []
    assert parser.parse(b"$1\r\na\r\n" * 10) == []
    assert len(parser.kept) < 100


@pytest.mark.parametrize("step", [1 << 20, 65_536, 1000])
def test_oversized_argument_is_skipped_and_the_next_command_is_read(step: int) -> None:
    size = redis_parser.BULK_BYTES_MAX + 1
    data = packed(b"SET", b"k", b"x" * size) + packed(b"GET", b"k") + packed(b"MSET", b"a", b"y" * size, b"b", b"c")
    parser = Parser()
    found, held = [], 0
    for place in range(0, len(data), step):
        found += parser.parse(data[place : place + step])
        held = max(held, len(parser.kept))
    assert [type(each) for each in found] == [OversizedCommand, list, OversizedCommand]
    assert isinstance(found[0], OversizedCommand)
    assert "expected an argument of at most" in found[0].reason
    assert found[1] == [b"GET", b"k"]
    assert held <= step + 100


def test_oversized_command_is_skipped() -> None:
    count = redis_parser.COMMAND_BYTES_MAX // (1 << 20) + 1
    parser = Parser()
    found = parser.parse(packed(b"MSET", *(b"x" * (1 << 20) for _ in range(count))) + packed(b"PING"))
    assert isinstance(found[0], OversizedCommand)
    assert "expected a command of at most" in found[0].reason
    assert found[1:] == [[b"PING"]]


def test_command_with_too_many_arguments_is_skipped() -> None:
    found = all_of(Parser(), packed(*(b"k" for _ in range(redis_parser.ARGUMENTS_MAX + 1))) + packed(b"PING"))
    assert isinstance(found[0], OversizedCommand)
    assert found[1:] == [[b"PING"]]


LONG = redis_parser.AT_ONCE_MAX * 3


@pytest.mark.parametrize(
    ("start", "piece", "count"),
    [
        (b"", b"\n", 0),
        (b"", b"*0\r\n", 0),
        (b"", b"x\n", LONG),
        (b"", b'""\r\n', LONG),
        (b"", b"*1\r\n$2\r\n\r\n\r\n", LONG),
        (b"*%d\r\n" % (redis_parser.ARGUMENTS_MAX + LONG), b"$1\r\na\r\n", 0),
    ],
    ids=["empty lines", "empty arrays", "lines", "quotes", "line ends in arguments", "skipped arguments"],
)
def test_one_call_reads_a_limited_number_of_lines(start: bytes, piece: bytes, count: int) -> None:
    """Half a MiB of empty lines held the event loop of a node for a second."""
    parser = Parser()
    parser.parse(start)
    calls, found, held = 1, parser.parse(piece * LONG), [len(parser.kept)]
    while parser.is_behind:
        found += parser.parse(b"")
        held.append(len(parser.kept))
        calls += 1
    assert calls >= LONG // redis_parser.AT_ONCE_MAX - 1
    assert len(found) == count
    assert held[-1] == 0
    assert held == sorted(held, reverse=True)
    assert parser.error is None


@pytest.mark.parametrize(
    ("words", "step"),
    [([b"SET", b"k", b"x" * (1 << 20)], 16_384), ([b"DEL", *([b"k"] * 2_000)], 7), ([b"DEL", *([b"k"] * 200)], 1)],
    ids=["a large value", "an argument a piece", "a byte a piece"],
)
def test_command_in_pieces_is_not_read_again_for_each_piece(
    words: list[bytes], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes wait unchanged. Each header is read once as it arrives, and once when the command is complete.
    Otherwise a client that sends one of many arguments at a time would hold the event loop for milliseconds with
    each."""
    walks, headers = 0, 0
    walk, see = Parser._read_one, redis_parser._PartialCommand._skip_header

    def counted_walk(self: Parser, data: bytes, pos: int, found: list[list[bytes]]) -> int | None:
        nonlocal walks
        walks += pos == 0
        return walk(self, data, pos, found)

    def counted_see(self: redis_parser._PartialCommand, header: bytearray, end: int) -> bool:
        nonlocal headers
        headers += 1
        return see(self, header, end)

    monkeypatch.setattr(Parser, "_read_one", counted_walk)
    monkeypatch.setattr(redis_parser._PartialCommand, "_skip_header", counted_see)
    data = packed(*words)
    parser = Parser()
    pieces = [data[place : place + step] for place in range(0, len(data), step)]
    for piece in pieces[:-1]:
        assert parser.parse(piece) == []
    assert parser.parse(pieces[-1]) == [words]
    assert (walks, headers) == (2, len(words) + 1), "with the first piece and with the last"


headers = st.sampled_from([b"0", b"-0", b"00", b"+1", b"1", b"-1", b"01", b"2", b"3", b"70000", b"2000000", b"", b" 1"])
pieces = st.tuples(st.sampled_from([b"$", b"*", b":"]), headers, st.sampled_from([b"\r\n", b"\n"])).map(b"".join)


@given(st.lists(st.one_of(pieces, st.sampled_from([b"\r\n", b"a\r\n", b"ab"])), max_size=12).map(b"".join))
@example(b"$-0\r\n")
def test_incomplete_command_is_not_read_before_it_can_be_complete(rest: bytes) -> None:
    """Otherwise each further byte would read the whole command again: three bytes a second held the event loop of a
    node."""
    data = b"*3\r\n" + rest
    try:
        end = Parser()._read_one(data, 0, [])
    except redis_parser.ProtocolError:
        return
    if end is None:
        assert redis_parser._PartialCommand().is_incomplete(bytearray(data))
