"""Plain GETs of another server are answered in the call that received them, and never before a waiting read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvstore.partition.leading.leader_reads import NOW_BYTES
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Get, Level, Meta, Put, Record
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.peer import frames, server
from kvstore.server.peer.frames import Lane, Operations, Results
from kvstore.server.peer.server import PeerConnection
from kvstore.types import PartitionId, ServerId
from tests.partition.one_partition import Partition
from tests.ring.rings import new_ring
from tests.server.peer.test_links import Stream

GET, PUT = int(Code.GET), int(Code.PUT)
P1, N2 = PartitionId("p1"), ServerId("n2")


class Leading:
    """A dispatcher and its server, which leads one partition."""

    operations = 0
    operations_max = 10_000
    traces = None
    serving = True

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.dispatcher = self
        self.topology = ClusterTopology(new_ring([P1], {N2: ""}, 1))
        self.submitted: list[int] = []
        self.is_known = True

    def now(self) -> float:
        return self.partition.now()

    def replica_here(self, partition: PartitionId, ring_version: int) -> Any:
        return self if self.is_known else None

    def read_now(self, keys: Any, tokens: Any, now: float, *, in_turn: bool) -> Any:
        return self.partition.leader.reads.now(keys, tokens, now, in_turn=in_turn)

    def submit(self, ops: Any, sink: Any, numbers: Any) -> None:
        self.submitted += numbers

    def submit_here(self, partition: PartitionId, op: Any, sink: Any, number: int, ring_version: int) -> None:
        self.submitted.append(number)

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return self.partition.leader._state.seq, 0


class Pausing(Stream):
    def pause_reading(self) -> None:
        """Do nothing: these tests do not slow down the sender."""

    resume_reading = pause_reading


class Subject:
    """One link to the server."""

    def __init__(self) -> None:
        self.partition = Partition().start()
        self.partition.do(commands.Put(b"k", b"v"))
        self.leading, self.stream = Leading(self.partition), Pausing()
        self.connection = PeerConnection(cast("Any", self.leading), N2, cast("Any", self.stream))

    def send(self, *lanes: Lane) -> list[frames.Message]:
        """Send the lanes, and return the immediate answers."""
        self.stream.written.clear()
        return self.do(self.connection.data_received, frames.encode(Operations(1, list(lanes))))

    def do(self, step: Callable[..., None], *arguments: Any) -> list[frames.Message]:
        """Do a step, and return the answers once the event loop has nothing more to do."""
        self.partition.loop.call_soon(step, *arguments)
        self.partition.settle()
        return self.stream.written


@pytest.fixture
def subject() -> Subject:
    return Subject()


def gets(*keys: bytes, first: int = 1, level: int = 0, token: int = 0) -> list[Any]:
    return [(number, Get(key, level, token)) for number, key in enumerate(keys, first)]


def test_reads_of_a_frame_are_answered_in_one_call(subject: Subject) -> None:
    (results,) = subject.send(Lane("p1", gets=gets(b"k", b"absent", b"k")))
    assert isinstance(results, Results)
    assert [(number, record[0]) for number, record in results.records] == [(1, b"v"), (3, b"v")]
    assert results.absent == [2]
    assert results.progress == [("p1", 1, 0)]
    assert not subject.leading.submitted
    assert subject.connection._in_flight == 0


def test_writes_in_the_same_frame_proceed(subject: Subject) -> None:
    (results,) = subject.send(Lane("p1", gets=gets(b"k"), puts=[(2, Put(b"l", b"w", 0, 0, 0, None))]))
    assert isinstance(results, Results)
    assert [number for number, _ in results.records] == [1]
    assert subject.leading.submitted == [2]


@pytest.mark.parametrize(
    "lane",
    [
        Lane("p1", gets=gets(b"k", level=int(Level.STRICT))),
        Lane("p1", gets=gets(b"k", token=7)),
        Lane("p1", gets=gets(b"k"), others=[(2, Meta(b"k", 0, 0))]),
        Lane("p1", gets=gets(*[b"k"] * (server.AT_ONCE_MAX + 1))),
    ],
    ids=["strict", "session", "beside others", "too many"],
)
def test_rarer_operations_wait_for_their_turn(subject: Subject, lane: Lane) -> None:
    assert subject.send(lane) == []
    assert subject.leading.submitted


def test_reads_queue_when_ring_version_differs(subject: Subject) -> None:
    subject.leading.is_known = False
    assert subject.send(Lane("p1", gets=gets(b"k"))) == []
    assert subject.leading.submitted == [1]


def test_reads_do_not_overtake_a_waiting_read_at_the_leader(subject: Subject) -> None:
    """It will see the later state, and a client may have requested both, one after the other."""
    subject.partition.submit(commands.Get(b"k", Level.STRICT))
    assert subject.send(Lane("p1", gets=gets(b"k"))) == []
    subject.partition.acknowledge()
    assert len(subject.send(Lane("p1", gets=gets(b"k", first=2)))) == 1


def test_reads_do_not_overtake_waiting_operations_of_the_link(subject: Subject) -> None:
    subject.do(subject.connection.pause_writing)
    assert subject.send(Lane("p1", gets=gets(b"k"))) == []
    subject.do(subject.connection.resume_writing)
    assert subject.leading.submitted == [1]


def test_large_answers_leave_in_bounded_frames(subject: Subject) -> None:
    subject.partition.do(commands.Put(b"l", b"x" * 2_000))
    results = subject.send(*(Lane("p1", gets=gets(*[b"l"] * 1_000, first=1_000 * n)) for n in range(6)))
    assert [type(each) for each in results] == [Results] * len(results)
    sizes = [sum(len(cast("Record", record)[0]) for _, record in cast("Results", each).records) for each in results]
    assert sum(sizes) == 6_000 * 2_000
    assert max(sizes) <= server.RESULT_BYTES + server.AT_ONCE_MAX * NOW_BYTES
