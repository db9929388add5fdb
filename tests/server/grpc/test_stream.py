"""Sessions on the Redis port: authentication, answers, and what they hold for a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.access import EVERYTHING
from kvstore.client.core.values import Item
from kvstore.env.nursery import TaskNursery
from kvstore.errors import NotAuthenticated, Overloaded, StoreError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.proto import compact, kv_pb2
from kvstore.proto.frames import FrameReader
from kvstore.proto.session_stream import COMPACT, WELCOME, WORD, hello, message_of, protobuf_message_of
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.server.access.identities import Access, UserIdentity
from kvstore.server.access.stream_authenticator import StreamAuthenticator
from kvstore.server.config import Limits
from kvstore.server.grpc import session as sessions
from kvstore.server.grpc import stream as streams
from kvstore.server.grpc.session import Sessions
from kvstore.server.grpc.stream import SessionStream, SessionStreams
from kvstore.server.redis import listener as resp_listener
from kvstore.server.redis.listener import RespServer
from tests.client.serving import refuse_peers
from tests.server.access.tables import table
from tests.server.backends import OneServer, one_server
from tests.server.redis.resp_port import Raw
from tests.waiting import PATIENCE_S, wait_until

GET, PUT, META = kv_pb2.GET, kv_pb2.PUT, kv_pb2.META
_answers_of = compact.decoder_of_answers(Item)


class Wire:
    """A stream without a network: it records writes and whether reading is paused."""

    def __init__(self, host: str = "10.0.0.1") -> None:
        self._host = host
        self.frames = FrameReader(MESSAGE_BYTES_MAX)
        self.answers: list[Any] = []
        self.is_reading = True
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        if data == WELCOME:
            return
        for body in self.frames.feed(data):
            is_compact = body[0] == COMPACT
            self.answers.append(_answers_of(body[1:]) if is_compact else kv_pb2.Answers.FromString(body[1:]))

    def numbers(self) -> list[int]:
        """Return the numbers of the answered operations."""
        return [number for each in self.answers for number in (*each.numbers, *each.found, *each.absent)]

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return self._host, 51112

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, because nothing is buffered."""

    def abort(self) -> None:
        self.is_aborted = True


class Subject:
    """One stream of a server that leads every partition."""

    def __init__(self, backend: OneServer, owner: SessionStreams, host: str = "10.0.0.1") -> None:
        self.backend, self.owner = backend, owner
        self.wire = Wire(host)
        self.left = 0
        self.stream = cast("SessionStream", owner.accept([b"", WORD, b"1", b"n1"], cast("Any", self.wire), self._leave))

    def _leave(self) -> None:
        self.left += 1

    def send(self, *frames: compact.CompactFrame) -> None:
        self.stream.data_received(b"".join(map(message_of, frames)))

    def put(self, number: int, *keys: bytes) -> compact.CompactFrame:
        partition = self.partition_of(keys[0])
        lane = compact.CompactLane(partition, number, [PUT] * len(keys), list(keys), values=[b"v"] * len(keys))
        return compact.CompactFrame(self.ring_version, 0, [lane])

    def get(self, number: int, *keys: bytes, token: int = 0) -> compact.CompactFrame:
        lane = compact.CompactLane(self.partition_of(keys[0]), number, [GET] * len(keys), list(keys), token=token)
        return compact.CompactFrame(self.ring_version, 0, [lane])

    def partition_of(self, key: bytes) -> str:
        return self.backend.topology.ring.partition_of(key)

    @property
    def ring_version(self) -> int:
        return self.backend.topology.ring.routed

    async def wait_answers(self, *numbers: int) -> None:
        async def are_there() -> bool:
            return sorted(self.wire.numbers()) == sorted(numbers)

        await wait_until(are_there, what=f"answers to {numbers}")


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    async with one_server(tmp_path) as (env, backend):
        yield Subject(backend, SessionStreams(Sessions(backend, env.clock), "n1"))


async def test_operations_are_answered_by_number_with_the_progress(subject: Subject) -> None:
    subject.send(subject.put(1, b"k"))
    await subject.wait_answers(1)
    (answers,) = subject.wire.answers
    (progress,) = [each for each in answers.progress if each.partition == subject.partition_of(b"k")]
    assert progress.sequence >= answers.versions[0] > 0
    subject.send(subject.get(2, b"k", b"absent"))
    await subject.wait_answers(1, 2, 3)
    (record,) = [record for each in subject.wire.answers for record in each.records]
    assert (record.value, record.version) == (b"v", answers.versions[0])


async def test_single_get_is_answered_in_the_same_call(subject: Subject) -> None:
    subject.send(subject.put(1, b"k"))
    await subject.wait_answers(1)
    version = subject.wire.answers[0].versions[0]
    subject.send(subject.get(2, b"k"), subject.get(3, b"k2"))
    assert subject.wire.numbers() == [1, 2, 3]
    answers = subject.wire.answers[1]
    assert answers.records == [Item(b"v", version, version, answers.records[0].written_ms, 0)]
    assert answers.progress[0].sequence >= version


async def test_gets_of_one_lane_are_answered_in_the_same_call(subject: Subject) -> None:
    keys = [b"{k}%d" % number for number in range(5)]
    subject.send(subject.put(1, *keys[:3], b"{k}last"))
    await subject.wait_answers(1, 2, 3, 4)
    submitted = len(subject.backend.submitted)
    subject.send(subject.get(5, *keys, b"{k}last"))
    assert sorted(subject.wire.numbers()) == list(range(1, 11))
    answers = subject.wire.answers[-1]
    assert (answers.found, answers.absent) == ([5, 6, 7, 10], [8, 9])
    assert [item.value for item in answers.records] == [b"v"] * 4
    versions = subject.wire.answers[0].versions
    assert [item.version for item in answers.records] == versions
    assert answers.progress[0].sequence >= versions[-1]
    assert len(subject.backend.submitted) == submitted + 6


@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"{k}2"]])
@pytest.mark.parametrize(
    "alter",
    [
        lambda lane: lane.codes.append(GET),
        lambda lane: lane.keys.append(b"k"),
        lambda lane: lane.keys.__setitem__(-1, b""),
        lambda lane: lane.keys.__setitem__(-1, b"x" * (KEY_BYTES_MAX + 1)),
    ],
)
async def test_malformed_gets_are_refused(subject: Subject, alter: Any, keys: list[bytes]) -> None:
    frame = subject.get(1, *keys)
    alter(frame.lanes[0])
    subject.send(frame)
    await wait_until(lambda: is_there(subject.wire.answers), what="they are answered")
    failures = [failure for each in subject.wire.answers for failure in each.failures]
    assert {each.reason for each in failures} == {"INVALID_REQUEST"}


async def is_there(answers: list[Any]) -> bool:
    return bool(answers)


@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"{k}2"]])
@pytest.mark.parametrize(
    "alter",
    [
        lambda lane: setattr(lane, "token", 1 << 40),
        lambda lane: setattr(lane, "level", kv_pb2.STRICT),
        lambda lane: setattr(lane, "codes", [META] * len(lane.codes)),
    ],
)
async def test_other_reads_wait_for_their_turn(subject: Subject, alter: Any, keys: list[bytes]) -> None:
    """A token that the partition has not reached: the read must be refused, not answered with older state."""
    frame = subject.get(1, *keys)
    alter(frame.lanes[0])
    subject.send(frame)
    assert subject.wire.answers == []

    async def is_answered() -> bool:
        return bool(subject.wire.answers)

    await wait_until(is_answered, what="its turn")


async def test_get_by_another_ring_waits_for_its_turn(subject: Subject) -> None:
    frame = subject.get(1, b"k")
    frame.ring_version -= 1
    subject.send(frame)
    assert subject.wire.answers == []


@pytest.mark.parametrize("keys", [[b"k"], [b"k", b"{k}2"]])
async def test_get_does_not_overtake_an_earlier_write_of_its_stream(subject: Subject, keys: list[bytes]) -> None:
    subject.send(subject.put(1, b"k"), subject.get(2, *keys))
    assert subject.wire.answers == []
    await subject.wait_answers(*range(1, 2 + len(keys)))


async def test_empty_frame_is_a_heartbeat(subject: Subject) -> None:
    subject.send(compact.CompactFrame(0, 0, []))
    assert subject.wire.numbers() == []
    assert len(subject.wire.answers) == 1


async def test_options_results_and_failures_use_protobuf(subject: Subject) -> None:
    options = [kv_pb2.Options(delta=5)]
    lane = kv_pb2.Lane(first=1, codes=[kv_pb2.INCREMENT], keys=[b"n"], options=options)
    subject.stream.data_received(protobuf_message_of(kv_pb2.Frame(lanes=[lane])))

    async def is_answered() -> bool:
        return bool(subject.wire.answers)

    await wait_until(is_answered, what="the sum")
    (answers,) = subject.wire.answers
    assert [(each.number, each.integer) for each in answers.results] == [(1, 5)]
    assert [each.partition for each in answers.progress if each.sequence] == [subject.partition_of(b"n")]


async def test_client_that_does_not_read_answers_is_not_read(subject: Subject) -> None:
    subject.stream.pause_writing()
    subject.send(subject.put(1, b"k"), subject.put(2, b"k"))
    assert not subject.wire.is_reading
    assert subject.backend.submitted == [], "nothing is begun for him"
    subject.stream.resume_writing()
    assert subject.wire.is_reading
    await subject.wait_answers(1, 2)


async def test_answers_wait_as_results_while_writing_is_paused(subject: Subject) -> None:
    subject.backend.hold()
    subject.send(subject.put(1, b"k"))
    subject.stream.pause_writing()
    subject.backend.let_go()

    async def is_done() -> bool:
        return not subject.stream._session._open

    await wait_until(is_done, what="the write")
    assert subject.wire.answers == []
    subject.stream.resume_writing()
    assert subject.wire.numbers() == [1]


async def test_stream_at_its_limit_of_operations_is_not_read(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "OPEN_MAX", 2)
    subject.backend.hold()
    subject.send(subject.put(1, b"a", b"b"), subject.put(3, b"c"))
    assert not subject.wire.is_reading
    assert len(subject.backend.submitted) == 2
    subject.send(subject.put(4, b"d"))  # it had arrived already
    subject.backend.let_go()
    await subject.wait_answers(1, 2, 3, 4)
    assert subject.wire.is_reading


def lane_of(**fields: Any) -> bytes:
    """Return the message of a frame with one lane."""
    lane = compact.CompactLane("", **{"first": 1, "codes": [], "keys": [], **fields})
    return message_of(compact.CompactFrame(0, 0, [lane]))


@pytest.mark.parametrize(
    "message",
    [
        message_of(compact.CompactFrame(0, 0, [])),
        protobuf_message_of(kv_pb2.Frame()),
        lane_of(),
        lane_of(codes=[GET], keys=[b"k"]),
        lane_of(codes=[99] * 100, keys=[b"k"] * 100),
    ],
    ids=["empty", "empty protobuf", "empty lane", "GET", "malformed operations"],
)
async def test_streams_begin_a_limited_number_of_frames_in_a_turn(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    """A client that sent empty frames held the event loop of a node for ten seconds, and the node lost its leases."""
    begun, most, before = list[object](), 0, 0
    begin = SessionStream._begin
    monkeypatch.setattr(SessionStream, "_begin", lambda self, body: begun.append(self) or begin(self, body))
    both = [subject, Subject(subject.backend, subject.owner)]
    for each in both:
        each.stream.data_received(message * 5_000)
    assert not any(each.wire.is_reading for each in both)
    while len(begun) < 10_000:
        most, before = max(most, len(begun) - before), len(begun)
        await asyncio.sleep(0)
    assert 0 < most <= sessions.TURN_WORK
    assert begun.count(both[0].stream) == 5_000
    assert all(each.wire.is_reading or each.stream._session._open for each in both)


async def test_answers_do_not_resume_a_stream_before_its_turn(subject: Subject) -> None:
    subject.send(subject.put(1, b"k"))
    subject.stream.data_received(message_of(compact.CompactFrame(0, 0, [])) * (sessions.TURN_WORK + 1))
    count = len(subject.wire.answers)
    subject.stream.resume_writing()
    assert len(subject.wire.answers) == count
    assert not subject.wire.is_reading
    await subject.wait_answers(1)


def nonsense() -> Iterator[bytes]:
    yield b"\x00\x00\x00\x03\x01no"
    yield b"\x00\x00\x00\x03\x02\xff\xff"
    yield b"\x00\x00\x00\x02\x03?"
    yield b"\x00\x00\x00\x00"
    yield b"\xff\xff\xff\xff"
    yield (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big")
    yield message_of(compact.CompactFrame(0, 0, [compact.CompactLane("", 1 << 63, [GET], [b"k"])]))


@pytest.mark.parametrize("data", list(nonsense()))
async def test_malformed_message_ends_the_stream(subject: Subject, data: bytes) -> None:
    subject.send(compact.CompactFrame(0, 0, []))
    subject.stream.data_received(data)
    assert subject.wire.is_aborted
    subject.send(subject.put(1, b"k"))
    assert subject.backend.submitted == []


async def test_incomplete_frames_are_bounded_over_all_streams(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "INPUT_BYTES_MAX", 999)
    few = Subject(subject.backend, subject.owner, "10.0.0.2")
    many = [subject, *(Subject(subject.backend, subject.owner) for _ in range(2))]
    begun = (5_000).to_bytes(4, "big")
    few.stream.data_received(begun + bytes(396))
    for each, size in zip(many, (196, 296, 96), strict=True):
        assert not any(other.wire.is_aborted for other in many)
        each.stream.data_received(begun + bytes(size))
    assert [each.wire.is_aborted for each in (few, *many)] == [False, False, True, False], "the network with the most"
    assert subject.owner.statistics() == {"session_streams": 4, "session_streams_input_bytes": 700}
    for each in (few, *many):
        each.stream.connection_lost(None)
        assert each.left == 1
    assert subject.owner.statistics() == {"session_streams": 0, "session_streams_input_bytes": 0}


async def test_waiting_frames_are_bounded_over_all_streams(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing held 1.3 MB of empty frames with each of its streams."""
    monkeypatch.setattr(streams, "INPUT_BYTES_MAX", 10_000)
    empty = message_of(compact.CompactFrame(0, 0, []))
    other = Subject(subject.backend, subject.owner)
    for each, count in ((subject, 100), (other, 50)):
        each.stream.pause_writing()
        each.stream.data_received(empty * count)
    held = [each.stream.held_bytes for each in (subject, other)]
    assert held == [count * (len(empty) - 4 + streams.FRAME_BYTES) for count in (100, 50)]
    other.stream.data_received(empty * 100)
    assert [each.wire.is_aborted for each in (subject, other)] == [False, True]
    subject.stream.resume_writing()
    assert len(subject.wire.answers) == 100
    assert subject.owner.statistics()["session_streams_input_bytes"] == 0


async def test_lost_stream_keeps_its_writes_and_gets_no_answers(subject: Subject) -> None:
    subject.backend.hold()
    subject.send(subject.put(1, b"k"))
    subject.stream.connection_lost(None)
    subject.backend.let_go()

    async def is_done() -> bool:
        return not subject.stream._session._open

    await wait_until(is_done, what="the write")
    assert subject.wire.answers == []


async def test_result_that_arrives_during_a_send_has_its_own_progress(subject: Subject) -> None:
    """A client's token must never be behind the progress that the client has received."""
    session = subject.stream._session
    subject.stream.pause_writing()
    subject.stream._may_write = False
    large = kv_pb2.Frame(lanes=[kv_pb2.Lane(first=1, keys=[b"a", b"b"], values=[bytes(600_000)] * 2, codes=[PUT, PUT])])
    session.accept(large)
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    list(session.take())
    session.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=3, keys=[b"a", b"b"], codes=[GET, GET])]))
    session.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=5, keys=[b"a"], codes=[GET])]))
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    messages = session.take()
    next(messages)
    session.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=6, keys=[b"a"], values=[b"v"], codes=[PUT])]))
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    told = [(answers, {each.partition: each.sequence for each in answers.progress}) for answers in messages]
    ((answers, progress),) = [each for each in told if list(each[0].numbers) == [6]]
    assert progress[subject.partition_of(b"a")] >= answers.versions[0]


async def test_each_message_carries_the_progress(subject: Subject) -> None:
    session = subject.stream._session
    subject.stream.pause_writing()
    put = kv_pb2.Lane(first=1, keys=[b"a"], values=[bytes(600_000)], codes=[PUT])
    session.accept(kv_pb2.Frame(lanes=[put]))
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    list(session.take())
    session.accept(kv_pb2.Frame(lanes=[kv_pb2.Lane(first=2, keys=[b"a"] * 3, codes=[GET] * 3)]))
    await asyncio.wait_for(session.wait_all_done(), PATIENCE_S)
    messages = list(session.take())
    assert [len(each.found) for each in messages] == [2, 1]
    assert all(each.progress[0].sequence for each in messages)


async def test_stream_on_the_redis_port_counts_as_a_client(tmp_path: Path) -> None:
    async with one_server(tmp_path) as (env, backend):
        owner = SessionStreams(Sessions(backend, env.clock), "n1")
        resp = RespServer(env, backend, Limits(), owner.with_peers(refuse_peers), dict)
        host, _, port = (await resp.open("127.0.0.1:0")).rpartition(":")
        client = Raw(*await asyncio.open_connection(host, int(port)))
        wrong = Raw(*await asyncio.open_connection(host, int(port)))
        try:
            wrong.writer.write(hello("n2"))
            assert await wrong.read_line() == b"-ERR session: this is server n1\r\n"
            assert await client.ask(hello("n1"), WELCOME) == WELCOME
            client.writer.write(message_of(compact.CompactFrame(0, 0, [compact.CompactLane("", 1, [GET], [b"k"])])))
            size = int.from_bytes(await client.read(4), "big")
            assert _answers_of((await client.read(size))[1:]).absent == [1]
            assert resp.statistics()["resp_connections"] == 2
            client.close()

            async def is_forgotten() -> bool:
                return resp.statistics()["resp_connections"] == 1 and not owner.statistics()["session_streams"]

            await wait_until(is_forgotten, what="the client has left")
        finally:
            wrong.close()
            await resp.close()


class SlowLogins:
    """Logins that end when the test says so, with one outcome."""

    def __init__(self, outcome: UserIdentity | StoreError) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self._outcome = outcome

    def known_or_none(self, user: str, password: bytes) -> None:
        return None

    async def login(self, user: str, password: bytes, address: str) -> UserIdentity:
        self.asked.set()
        await self.go_on.wait()
        if isinstance(self._outcome, StoreError):
            raise self._outcome
        return self._outcome


@pytest.mark.parametrize(
    "outcome",
    [NotAuthenticated("wrong"), Overloaded("busy"), UserIdentity("tenant", EVERYTHING)],
    ids=["wrong", "busy", "right"],
)
async def test_client_may_disconnect_while_its_password_is_checked(
    tmp_path: Path, outcome: UserIdentity | StoreError
) -> None:
    """An error in this task would end the node."""
    failed = list[str]()
    nursery = TaskNursery("node", on_error=lambda name, error: failed.append(f"{name}: {error!r}"))
    logins = SlowLogins(outcome)
    async with one_server(tmp_path) as (env, backend):
        authenticator = StreamAuthenticator(Access(table()), cast("Any", logins), nursery)
        owner = SessionStreams(Sessions(backend, env.clock), "n1", authenticator)
        resp = RespServer(env, backend, Limits(), owner.with_peers(refuse_peers), dict)
        host, _, port = (await resp.open("127.0.0.1:0")).rpartition(":")
        client = Raw(*await asyncio.open_connection(host, int(port)))
        try:
            client.writer.write(hello("n1", b"tenant", b"password"))
            await asyncio.wait_for(logins.asked.wait(), PATIENCE_S)
            client.close()

            async def is_forgotten() -> bool:
                return not owner.statistics()["session_streams"]

            await wait_until(is_forgotten, what="the client has left")
            logins.go_on.set()
            await asyncio.gather(*nursery._members)  # type: ignore[arg-type]
        finally:
            client.close()
            await resp.close()
            await nursery.close()
    assert not failed


async def test_stopping_server_answers_operations_in_flight_on_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for Redis clients: otherwise each of these writes would have an unknown outcome."""
    monkeypatch.setattr(resp_listener, "CLOSE_S", PATIENCE_S)
    monkeypatch.setattr(resp_listener, "CLOSE_CHECKS", int(100 * PATIENCE_S))
    async with one_server(tmp_path, 1) as (env, backend):
        owner = SessionStreams(Sessions(backend, env.clock), "n1")
        resp = RespServer(env, backend, Limits(), owner.accept, dict)
        host, _, port = (await resp.open("127.0.0.1:0")).rpartition(":")
        client, idle = [Raw(*await asyncio.open_connection(host, int(port))) for _ in range(2)]
        for each in (client, idle):
            assert await each.ask(hello("n1"), WELCOME) == WELCOME
        backend.hold()
        lane = compact.CompactLane(backend.topology.ring.partition_of(b"k"), 1, [PUT], [b"k"], values=[b"v"])
        client.writer.write(message_of(compact.CompactFrame(backend.topology.ring.routed, 0, [lane])))

        async def has_come() -> bool:
            return not all(each._session._open == 0 for each in owner._open)

        await wait_until(has_come, what="the write is under way")
        closing = asyncio.create_task(resp.close())
        assert await idle.reader.read() == b""
        backend.let_go()
        size = int.from_bytes(await client.read(4), "big")
        assert _answers_of((await client.read(size))[1:]).numbers == [1]
        assert await client.reader.read() == b""
        await closing
