"""After a refusal, nothing is executed that its sender sent before it received it (docs/protocol.md M15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.errors import Moved, NotLeader, StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Op
from kvstore.server.peer import frames as peer_frames
from kvstore.server.peer.frames import Lane, Operations, Results
from kvstore.server.peer.link import PeerLink
from kvstore.server.peer.refusals import UnreceivedRefusals
from kvstore.server.peer.server import PeerConnection
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import PeerSink, Pending
from kvstore.types import PartitionId, ServerId
from tests.server.backends import Collector
from tests.server.peer.test_links import LinkOwner, Links, Stream, prove, submit
from tests.server.servers import Servers, servers

P1, P2, N2 = PartitionId("p1"), PartitionId("p2"), ServerId("n2")
PUT = commands.Put(b"k", b"v")
BATCH = commands.Batch(b"a", (commands.Put(b"a", b"v"), commands.Delete(b"k")))
MOVED = Moved("", 0)


# ── what is remembered ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("refused", "later"), [(PUT, PUT), (PUT, BATCH), (BATCH, PUT)])
def test_write_waits_until_sender_received_the_refusal(refused: Op, later: Op) -> None:
    refusals = UnreceivedRefusals()
    assert refusals.of(P1, later, 0) is None
    refusals.note_sent(1)
    refusals.refuse(refused)
    assert isinstance(refusals.of(P2, later, 1), Moved), "whichever partition it goes to"
    refusals.note_sent(2)
    assert isinstance(refusals.of(P1, later, 1), Moved)
    assert refusals.of(P1, later, 2) is None


def test_second_refusal_on_a_key_waits_for_its_own_frame() -> None:
    refusals = UnreceivedRefusals()
    for frame in (1, 2):
        refusals.refuse(PUT)
        refusals.note_sent(frame)
    refusals.forget(1)
    assert isinstance(refusals.of(P1, PUT, 1), Moved)
    assert refusals.of(P1, PUT, 2) is None


def test_reads_and_other_keys_ignore_refused_writes() -> None:
    refusals = UnreceivedRefusals()
    refusals.refuse(PUT)
    for op in (commands.Get(b"k"), commands.Meta(b"k"), commands.DeleteRange(b"a", b"z"), commands.Delete(b"x")):
        assert refusals.of(P1, op, 0) is None
    refusals = UnreceivedRefusals()
    refusals.refuse(commands.Get(b"k"))
    assert not refusals.keys.frame_of


def test_whole_partition_waits_after_a_not_leader_refusal() -> None:
    refusals = UnreceivedRefusals()
    refusals.partitions.refuse([P1])
    refusals.note_sent(1)
    assert isinstance(refusals.of(P1, commands.Get(b"x"), 0), NotLeader)
    assert refusals.of(P2, PUT, 0) is None
    assert refusals.of(P1, PUT, 1) is None


def test_received_refusals_are_forgotten() -> None:
    refusals = UnreceivedRefusals()
    for frame in range(1, 4):
        refusals.refuse(commands.Put(b"%d" % frame, b"v"))
        refusals.note_sent(frame)
    refusals.refuse(commands.Put(b"1", b"v"))
    refusals.note_sent(4)
    refusals.forget(2)
    assert refusals.keys.frame_of == {b"3": 3, b"1": 4}
    refusals.forget(4)
    assert not refusals.keys.frame_of


# ── the answering side ────────────────────────────────────────────────────────────────────────────────────────────────


class Owning:
    """A dispatcher of a server that knows about a key's flip, or does not."""

    def __init__(self) -> None:
        self.owns = False
        self.done: list[int] = []

    def replica_here(self, *_: Any) -> None:
        """Return nothing: no operation may be executed directly."""

    def submit_here(self, partition: PartitionId, op: Op, sink: PeerSink, token: int, ring_version: int) -> None:
        if self.owns:
            self.done.append(token)
            sink.complete(token, token)
        else:
            sink.reject(op, token, MOVED)

    def progress(self, partition: PartitionId) -> tuple[int, int]:
        return (0, 0)


def connection_of(owner: Owning) -> tuple[PeerConnection, Stream]:
    stream = Stream()
    return PeerConnection(cast(Any, LinkOwner(cast(Any, owner))), N2, cast(Any, stream)), stream


def sent(number: int, received: int, op: Op = PUT) -> bytes:
    return peer_frames.encode(Operations(1, [Lane("p1", others=[(number, op)])], received))


def refused(stream: Stream) -> list[int]:
    return [number for each in stream.written if isinstance(each, Results) for number, _ in each.others]


async def test_write_behind_early_write_is_not_done_first() -> None:
    owner = Owning()
    connection, stream = connection_of(owner)
    connection.data_received(sent(1, 0))
    owner.owns = True
    connection.data_received(sent(2, 0))
    connection.flush()
    connection.data_received(sent(3, len(stream.written) - 1))
    connection.data_received(sent(4, 0, commands.Put(b"other", b"v")))
    connection.flush()
    assert owner.done == [4]
    assert refused(stream) == [1, 2, 3]
    connection.data_received(sent(5, len(stream.written)))
    assert owner.done == [4, 5]
    assert not connection._refused_keys


async def test_queued_write_is_refused_although_later_frames_acknowledge() -> None:
    owner = Owning()
    connection, stream = connection_of(owner)
    connection.data_received(sent(1, 0))
    connection.flush()
    connection._flow.is_held = True
    connection.data_received(sent(2, 0))
    owner.owns = True
    connection.data_received(sent(3, len(stream.written)))
    connection._flow.is_held = False
    connection.flush()
    await asyncio.sleep(0)
    assert owner.done == [], "the second was sent before the first one's refusal arrived, and the third waits for it"
    assert refused(stream) == [1, 2, 3]


async def test_refusal_is_sent_without_other_results() -> None:
    connection, stream = connection_of(Owning())
    connection.reject(PUT, 1, MOVED)
    await asyncio.sleep(0)
    assert refused(stream) == [1]


# ── the asking side ───────────────────────────────────────────────────────────────────────────────────────────────────


class Asking(Links):
    """The owner of a link, and its dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[int] = []

    def take_refusals(self, flight: Flight, errors: list[tuple[int, NotLeader | Moved]]) -> None:
        self.returned += [number for number, _ in errors]
        for number, _ in errors:
            flight.end(number)


@pytest.mark.parametrize("error", [MOVED, NotLeader("p1")], ids=("moved", "not led"))
async def test_operation_states_that_it_precedes_a_refusal(error: StoreError) -> None:
    """This holds also for operations that are sent after it, or that follow another result in the same frame."""
    links, stream = Asking(), Stream()
    link = PeerLink(cast(Any, links), N2)
    link.connection_made(cast(Any, stream))
    prove(link)

    class Pipelining(Collector):
        def complete(self, token: int, result: Any) -> None:
            submit(link, Pending(9, PUT, self, 9))

    sink = Pipelining()
    submit(link, Pending(1, PUT, sink, 1))
    submit(link, Pending(2, commands.Put(b"other", b"v"), sink, 2))
    await asyncio.sleep(0)
    submit(link, Pending(3, PUT, sink, 3))
    link.data_received(peer_frames.encode(Results(numbers=[(2, 7)], others=[(1, error)])))
    assert links.returned == [1]
    await asyncio.sleep(0)
    frames = [each for each in stream.written if isinstance(each, Operations)]
    assert [(each.received, [number for number, _ in each.lanes[0].puts]) for each in frames] == [
        (0, [1, 2]),
        (0, [3]),
        (1, [4]),
    ], "the last was submitted when the refused one stood before it"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Servers]:
    """Start servers, of which n1 is asked and n2 leads."""
    async with servers(tmp_path, ["n1", "n2"], partitions=2) as started:
        await started.lead("p1", "n2")
        yield started


async def test_early_write_at_new_owner_blocks_later_ones(cluster: Servers) -> None:
    """It is refused by the server, which does not know about the flip, or by a leader without the range yet."""
    rejected: list[int] = []

    class Peer(Collector, PeerSink):
        def reject(self, op: Op, token: int, error: NotLeader | Moved) -> None:
            rejected.append(token)

    peer, dispatcher = Peer(), cluster["n2"].dispatcher
    here, elsewhere = commands.Put(cluster.key_of("p1"), b"v"), commands.Put(cluster.key_of("p2"), b"v")
    dispatcher.submit_here(P1, elsewhere, peer, 1, cluster.ring.routed + 1)
    dispatcher.submit_here(P1, here, peer, 2, cluster.ring.routed + 1)
    dispatcher.reject(here, peer, 3, MOVED)
    assert rejected == [1, 3]
    assert isinstance((await peer.wait(2))[0], int)
