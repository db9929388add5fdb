"""The bookie protocol as a client sees it, compared byte by byte with recordings of Apache's bookie."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.bookie.connections import limits as connection_limits
from kvstore.bookie.connections.service import TURN_REQUESTS, UNCOUNTED_MAX, BookieConnection
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto.bookkeeper import BookieOperation, Status
from kvstore.types import EntryId, LedgerId, LedgerState
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.support import CLUSTER, DIGEST, KEY, ME, OTHERS, Metadata, Shelf, lac_packet, metadata, packet
from tests.proto.golden import recorded
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7
NAMED = wire.bookie_context(ME)
RECORDED = recorded("bookie.hex")


def test_answers_equal_those_of_apaches_bookie(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        for name, (request, expected) in RECORDED.items():
            decoded = pb.Request.FromString(request)
            decoded.ClearField("context")  # it names a bookie that is not here
            payload = decoded.SerializeToString()
            peer.send(len(payload).to_bytes(4, "big") + payload)
            (answer,) = await peer.answers(1)
            assert answer.hex() == expected.hex(), name

    serve(world, scenario)


def test_requests_of_java_clients_are_understood(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        for name, (payload,) in recorded("shell.hex").items():
            if name.startswith("request"):
                peer.send(len(payload).to_bytes(4, "big") + payload)
                answer = wire.decode_response((await peer.answers(1))[0])
                assert answer.status != Status.BAD_REQUEST, name
                assert (answer.txn, answer.operation) == txn_of(payload)

    serve(world, scenario)


def txn_of(payload: bytes) -> tuple[int, int]:
    header = pb.Request.FromString(payload).header
    return header.txn_id, header.operation


# Which bookie is meant


def test_client_that_means_another_bookie_is_refused_and_disconnected(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        frame = wire.encode_read(1, L, 0, context=wire.bookie_context("b1-0000"))
        peer.send(frame, wire.encode_add(2, L, 0, KEY, packet(L, 0)))
        assert wire.decode_response((await peer.answers(1))[0]).status == Status.UNKNOWN_LEDGER_STATE
        await peer.closed
        assert not peer.frames
        assert L not in served.shelf.storage.inventory.ledgers

    serve(world, scenario)


def test_client_of_another_cluster_is_refused_before_any_request_is_done(world: SimWorld) -> None:
    """docs/protocol.md B32"""

    async def scenario(served: Served, peer: Peer) -> None:
        other = wire.bookie_context(ME, "another")
        peer.send(
            wire.encode_add(1, L, 0, KEY, packet(L, 0), context=other), wire.encode_add(2, L, 0, KEY, packet(L, 0))
        )
        assert wire.decode_response((await peer.answers(1))[0]).status == Status.UNAUTHORIZED
        await peer.closed
        assert not peer.frames
        assert L not in served.shelf.storage.inventory.ledgers
        assert served.shelf.storage.statistics.refused_cluster == 1

    serve(world, scenario)


def test_client_of_our_or_an_unnamed_cluster_is_served(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert (await peer.ask(wire.encode_read(1, L, 0))).status != Status.UNAUTHORIZED
        own = wire.bookie_context(ME, CLUSTER)
        assert (await peer.ask(wire.encode_read(2, L, 0, context=own))).status == Status.NO_LEDGER, "and it is named"
        assert served.shelf.storage.statistics.refused_cluster == 0

    serve(world, scenario)


def test_client_that_names_this_bookie_gets_definite_answers(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert (await peer.ask(wire.encode_read(1, L, 0, context=NAMED))).status == Status.NO_LEDGER
        assert (await peer.ask(wire.encode_read(2, L, 0))).status == Status.NO_LEDGER, (
            "naming the bookie once is enough"
        )
        assert served.meta.asked == []

    serve(world, scenario)


# docs/protocol.md B5
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_unnamed_bookie_denies_nothing_of_a_ledger_elsewhere(world: SimWorld, state: LedgerState) -> None:
    """The address may have belonged to a bookie that has the ledger."""
    meta = Metadata()
    meta.known = {L: metadata(L, *OTHERS, state=state), 8: metadata(8, state=state), 9: None}

    async def scenario(served: Served, peer: Peer) -> None:
        for frame in (
            wire.encode_read(1, L, 0),
            wire.encode_read(1, L, wire.LAST_ENTRY, fence_key=KEY),
            wire.encode_read(1, L, 0, fence_key=KEY, priority=100),
            wire.encode_read_lac(1, L),
            wire.encode_long_poll(1, L, 0, 0),
        ):
            answer = await peer.ask(frame)
            assert answer.status in (Status.UNKNOWN_LEDGER_STATE, Status.OK)
            assert answer.body is None
        assert (await peer.ask(wire.encode_read(2, 8, 0))).status == Status.NO_LEDGER
        assert (await peer.ask(wire.encode_read(3, 9, 0))).status == Status.NO_LEDGER
        served.meta.is_away = True
        assert (await peer.ask(wire.encode_read(4, 8, 0))).status == Status.UNKNOWN_LEDGER_STATE

    serve(world, scenario, meta)


# Malformed input


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x04\x02\x01\x00\x00",
        b"\x00\x00\x00\x10" + b"\xff" * 16,
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        (wire.PAYLOAD_MAX + 1).to_bytes(4, "big"),
    ],
)
def test_malformed_request_closes_only_its_connection(world: SimWorld, frame: bytes) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        other = await served.connect()
        peer.send(wire.encode_add(1, L, 0, KEY, packet(L, 0)))
        await peer.answers(1)
        peer.send(frame)
        await peer.closed
        assert (await other.ask(wire.encode_read(2, L, 0))).status == Status.OK

    serve(world, scenario)


@pytest.mark.parametrize("operation", [3, 4, 12])
def test_unserved_operation_is_a_bad_request_and_keeps_the_connection(world: SimWorld, operation: int) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        header = bytes((8, 3, 16, operation, 24, 5))
        peer.send(b"\x00\x00\x00\x08\x0a\x06" + header)
        (answer,) = await peer.answers(1)
        assert answer.hex() == "0a06" + header.hex() + "109403"
        assert (await peer.ask(wire.encode_read_lac(2, L))).status == Status.NO_ENTRY

    serve(world, scenario)


def test_request_with_missing_fields_is_a_bad_request(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        request = wire.decode_request(wire.encode_add(5, L, 0, KEY, packet(L, 0))[4:])
        request.add.ClearField("master_key")
        payload = request.SerializePartialToString()
        answer = await peer.ask(len(payload).to_bytes(4, "big") + payload)
        assert (answer.txn, answer.operation, answer.status) == (5, BookieOperation.ADD_ENTRY, Status.BAD_REQUEST)
        assert (await peer.ask(wire.encode_read_lac(2, L))).status == Status.NO_ENTRY

    serve(world, scenario)


def test_other_protocol_version_is_refused_as_such(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        frame = bytearray(wire.encode_read(5, L, 0))
        frame[7] = 2
        assert (await peer.ask(bytes(frame))).status == Status.BAD_VERSION

    serve(world, scenario)


def test_piggybacked_read_of_a_given_entry_is_a_bad_request(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        request = wire.decode_request(wire.encode_long_poll(5, L, 0, 10)[4:])
        request.read.entry = 3
        payload = request.SerializeToString()
        assert (await peer.ask(len(payload).to_bytes(4, "big") + payload)).status == Status.BAD_REQUEST

    serve(world, scenario)


@pytest.mark.parametrize("round", range(20))
def test_mangled_frames_never_harm_the_bookie(world: SimWorld, round: int) -> None:
    random = Random(round)
    frames = [
        wire.encode_add(1, L, 0, KEY, packet(L, 0)),
        wire.encode_read(2, L, 0, fence_key=KEY),
        wire.encode_long_poll(3, L, -1, 10),
        wire.encode_write_lac(4, L, 0, KEY, packet(L, 0)[:20]),
        wire.encode_list_entries(5, L),
        wire.encode_bookie_info(6, -1),
    ]

    async def scenario(served: Served, peer: Peer) -> None:
        for _ in range(60):
            frame = bytearray(random.choice(frames))
            for _ in range(random.randint(1, 4)):
                frame[random.randrange(4, len(frame))] = random.randrange(256)
            peer.send(bytes(frame))
            await pause(0.01)
            if peer.closed.done():
                peer = await served.connect()
        fine = await served.connect()
        assert (await fine.ask(wire.encode_read_lac(9, 12345, context=NAMED))).status == Status.NO_ENTRY

    serve(world, scenario)


def test_numbers_at_their_limits_are_answered(world: SimWorld) -> None:
    bounds = [-(1 << 63), -1, 0, (1 << 31) - 1, (1 << 63) - 1]

    def requests(ledger: int, entry: int) -> list[bytes]:
        body = DIGEST.packet(LedgerId(ledger), EntryId(entry), EntryId(entry), 5, b"hello")
        return [
            wire.encode_add(1, ledger, entry, KEY, body),
            wire.encode_add(2, ledger, entry, KEY, body, recovery=True),
            wire.encode_read(3, ledger, entry),
            wire.encode_long_poll(4, ledger, entry, 5),
            wire.encode_write_lac(5, ledger, entry, KEY, lac_packet(ledger, entry)),
            wire.encode_read_lac((1 << 64) - 1, ledger),
            wire.encode_list_entries(1 << 63, ledger),
            wire.encode_read(8, ledger, entry, fence_key=b""),
        ]

    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in bounds:
            for entry in bounds:
                asked = requests(ledger, entry)
                peer.send(*asked)
                answers = [wire.decode_response(payload) for payload in await peer.answers(len(asked))]
                assert {each.txn for each in answers} == {1, 2, 3, 4, 5, 8, 1 << 63, (1 << 64) - 1}
        served.shelf.storage.stop()
        again = await Shelf(served.shelf.env, served.config, served.meta).start()
        assert await again.entries((1 << 63) - 1) == (Status.OK, [(0, 1), ((1 << 31) - 1, 1), ((1 << 63) - 1, 1)])

    serve(world, scenario)


# Limits


def test_requests_over_a_connections_limit_are_refused_but_not_fences(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(wire.encode_add(0, L, 0, KEY, packet(L, 0)))
        polls = [wire.encode_long_poll(txn, L, 5, 1000) for txn in range(1, 21)]
        fence = wire.encode_read(21, 8, wire.LAST_ENTRY, fence_key=KEY, context=NAMED)
        peer.send(*polls, fence)
        answers = [wire.decode_response(payload) for payload in await peer.answers(21)]
        status = {answer.txn: Status(answer.status) for answer in answers}
        assert [status[txn] for txn in range(1, 21)] == [Status.OK] * 10 + [Status.TOO_MANY_REQUESTS] * 10
        assert status[21] is Status.NO_ENTRY
        assert served.shelf.storage.statistics.refused_overload == 10

    serve(world, scenario, connection_pending_max=10)


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode_bookie_info(1, 0),
        wire.encode_start_tls(1),
        wire.encode_read(1, L, 0, context=NAMED),
        wire.encode_add(1, L, 0, KEY, packet(L, 0)),
    ],
    ids=["info", "bad request", "read", "add"],
)
def test_connections_begin_a_limited_number_of_requests_in_a_turn(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch, frame: bytes
) -> None:
    """A client that sent tiny requests held the event loop for seconds, and the node's leases expired."""
    count, begun = 10_000, list[object]()
    handle = BookieConnection._handle
    monkeypatch.setattr(BookieConnection, "_handle", lambda self, payload: begun.append(self) or handle(self, payload))

    async def scenario(served: Served, peer: Peer) -> None:
        other = await served.connect()
        for each in (peer, other):
            await each.ask(frame)
        both = list(served.service.connections)
        begun.clear()
        for each in both:
            each.data_received(frame * count)
        assert len(begun) <= TURN_REQUESTS + UNCOUNTED_MAX
        for each in (peer, other):
            await each.answers(count)
        assert begun.count(both[0]) == begun.count(both[1]) == count

    serve(world, scenario, connection_pending_max=count)


def test_client_that_reads_no_answers_is_not_served_and_holds_no_memory(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        body = packet(L, 0, b"x" * 100_000)
        await peer.ask(wire.encode_add(0, L, 0, KEY, body))
        peer.transport.pause_reading()
        peer.send(*(wire.encode_read(txn, L, 0) for txn in range(1, 2001)))
        await pause(5)
        reads = served.shelf.storage.statistics.reads
        assert reads < 100, "200 MB of answers were requested"
        peer.transport.resume_reading()
        answers = await peer.answers(2000)
        assert [wire.decode_response(payload).txn for payload in answers] == list(range(1, 2001))

    serve(world, scenario, connection_bytes_max=1 << 20)


def test_answers_ready_together_are_written_together(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        await peer.ask(wire.encode_add(0, L, 0, KEY, packet(L, 0)))
        peer.deliveries = 0
        peer.send(*(wire.encode_add(entry, L, entry, KEY, packet(L, entry)) for entry in range(1, 101)))
        await peer.answers(100)
        assert peer.deliveries <= 5

    serve(world, scenario)


async def refused(served: Served) -> None:
    """A connection is accepted at most to be closed."""
    try:
        peer = await served.connect()
    except ConnectionResetError:
        return
    await peer.closed


def test_answer_for_a_client_that_does_not_read_is_refused_if_too_large(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        writer = await served.connect()
        await writer.ask(wire.encode_add(0, L, 0, KEY, packet(L, 0, b"x" * 100_000)))
        peer.send(*(wire.encode_long_poll(txn, L, -1, 60_000) for txn in range(1, 101)))
        await pause(1)
        peer.transport.pause_reading()
        await writer.ask(wire.encode_add(1, L, 1, KEY, packet(L, 1, lac=0)))
        await pause(1)
        (connection,) = [each for each in served.service.connections if each.unread_bytes]
        assert 0 < connection.unread_bytes <= connection_limits.UNREAD_SURE_BYTES + 200_000
        peer.transport.resume_reading()
        statuses = [wire.decode_response(payload).status for payload in await peer.answers(100)]
        assert set(statuses) == {Status.OK, Status.TOO_MANY_REQUESTS}

    monkeypatch.setattr(connection_limits, "UNREAD_TOTAL_BYTES", 1 << 20)
    serve(world, scenario)


def test_silent_connection_gives_way_when_there_are_too_many(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(wire.encode_read_lac(1, L, context=NAMED))
        silent = [await served.connect() for _ in range(2)]
        newcomer = await served.connect()
        assert (await newcomer.ask(wire.encode_read_lac(2, L, context=NAMED))).status
        await silent[0].closed
        assert not silent[1].closed.done()
        assert (await peer.ask(wire.encode_read_lac(3, L))).status
        assert served.shelf.storage.statistics.connections == 3

    serve(world, scenario, connections_max=3)


def test_connections_over_the_limit_are_refused(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        others = [await served.connect() for _ in range(2)]
        for each in (peer, *others):
            assert (await each.ask(wire.encode_read_lac(1, L))).status == Status.NO_ENTRY
        for _ in range(2):
            await refused(served)
        assert (await peer.ask(wire.encode_read_lac(2, L))).status == Status.NO_ENTRY
        assert served.shelf.storage.statistics.connections == 3
        others[0].transport.close()
        await pause(1)
        assert (await (await served.connect()).ask(wire.encode_read_lac(2, L))).status == Status.NO_ENTRY

    serve(world, scenario, connections_max=3)


def test_connection_that_ends_early_leaves_nothing_behind(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        peer.send(wire.encode_add(0, L, 0, KEY, packet(L, 0)), wire.encode_long_poll(1, L, 5, 500))
        peer.transport.abort()
        await pause(1)
        assert not served.service.connections
        assert served.shelf.storage.statistics.connections == 0

    serve(world, scenario)
