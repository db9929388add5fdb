"""The load that unauthenticated peers can put on a bookie without a password (docs/protocol.md, B12)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from kvstore.bookie.admission import AT_ONCE_MAX
from kvstore.bookie.connections import limits as connection_limits
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.rate_limited_log import BURST, RateLimitedLog
from kvstore.bookie.turns import FairQueue, Piece
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.version_two import BatchRead, encode_batch_read
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.peers.test_version_two import batch
from tests.bookie.support import KEY, ME, Metadata, packet
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7
NAMED = wire.bookie_context(ME)


def add(entry: int, size: int = 5) -> bytes:
    return wire.encode_add(entry, L, entry, KEY, packet(L, entry, b"x" * size))


@pytest.mark.parametrize("question", [wire.encode_force, wire.encode_list_entries])
def test_requests_waiting_for_a_sync_are_bounded(world: SimWorld, question: Callable[[int, int], bytes]) -> None:
    """While a disk hangs, requests would accumulate without limit."""

    async def scenario(_: Served, peer: Peer) -> None:
        await peer.ask(add(0))
        world.node("b1").disk.slow_syncs((1, 1))
        peer.send(add(1))
        await pause(0.1)
        peer.send(*(question(txn, L) for txn in range(100, 150)))
        answers = [wire.decode_response(payload) for payload in await peer.answers(51)]
        statuses = sorted(each.status for each in answers if each.txn >= 100)
        assert statuses == [Status.OK] * 10 + [Status.TOO_MANY_REQUESTS] * 40
        assert (await peer.ask(question(200, L))).status == Status.OK

    serve(world, scenario, connection_pending_max=10)


def test_requests_waiting_for_the_metadata_are_bounded(world: SimWorld) -> None:
    meta = Metadata()

    async def scenario(_: Served, peer: Peer) -> None:
        meta.gate = asyncio.Event()
        peer.send(*(wire.encode_read_lac(txn, 1000 + txn) for txn in range(1, 51)))
        await pause(0.1)
        assert len(meta.asked) == 10
        meta.gate.set()
        answers = [wire.decode_response(payload) for payload in await peer.answers(50)]
        assert sorted(each.status for each in answers) == [Status.NO_ENTRY] * 10 + [Status.TOO_MANY_REQUESTS] * 40

    serve(world, scenario, meta, connection_pending_max=10)


def test_metadata_reads_are_limited_in_number(world: SimWorld) -> None:
    """The metadata session is shared with this node's leaders."""
    meta = Metadata()

    async def scenario(_: Served, peer: Peer) -> None:
        meta.gate = asyncio.Event()
        peer.send(*(wire.encode_read(txn, 1000 + txn, 0) for txn in range(1, 1001)))
        await pause(0.1)
        assert len(meta.asked) == AT_ONCE_MAX
        meta.gate.set()
        answers = [wire.decode_response(payload) for payload in await peer.answers(1000)]
        assert {each.status for each in answers} == {Status.NO_LEDGER}
        assert len(meta.asked) == 1000

    serve(world, scenario, meta)


def test_batches_for_a_client_that_does_not_read_are_refused_if_too_many(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        writer = await served.connect()
        await writer.ask(add(0))
        world.node("b1").disk.slow_syncs((1, 1))
        writer.send(add(1, 100_000))
        await pause(0.1)
        peer.send(*(batch(1, 1, 1 << 20) for _ in range(200)))
        await pause(0.1)
        peer.transport.pause_reading()
        await pause(3)
        (connection,) = [each for each in served.service.connections if each.unread_bytes]
        assert 0 < connection.unread_bytes <= connection_limits.UNREAD_SURE_BYTES + 200_000
        peer.transport.resume_reading()
        codes = [int.from_bytes(answer[4:8], "big") for answer in await peer.answers(200)]
        assert set(codes) == {0, 106}

    monkeypatch.setattr(connection_limits, "UNREAD_TOTAL_BYTES", 1 << 20)
    serve(world, scenario)


# docs/protocol.md B12
@pytest.mark.parametrize("how", ["singly", "in batches"])
def test_fencing_reads_for_a_client_that_does_not_read_are_bounded(world: SimWorld, how: str) -> None:
    """They wait for the sync of the fence, and all become ready with it."""

    async def scenario(served: Served, peer: Peer) -> None:
        writer = await served.connect()
        await writer.ask(add(0, 1 << 20))
        world.node("b1").disk.slow_syncs((1, 1))
        if how == "singly":
            peer.send(*(wire.encode_read(txn, L, 0, fence_key=KEY) for txn in range(200)))
        else:
            asked = BatchRead(L, 0, 99, 1, 1 << 20, fence_key=KEY, is_priority=True)
            peer.send(*(encode_batch_read(asked) for _ in range(200)))
        await pause(0.1)
        peer.transport.pause_reading()
        await pause(3)
        (connection,) = [each for each in served.service.connections if each.unread_bytes]
        assert 16 << 20 < connection.unread_bytes <= connection_limits.UNREAD_MAX_BYTES + (1 << 20)
        peer.transport.resume_reading()
        answers = await peer.answers(200)
        assert sum(len(each) > 1 << 20 for each in answers) in range(16, 33)
        assert (await writer.ask(add(1))).status == Status.FENCED

    serve(world, scenario)


def test_fencing_reads_are_answered_while_others_read_nothing(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        writer = await served.connect()
        await writer.ask(add(0, 1 << 20))
        peer.transport.pause_reading()
        peer.send(*(wire.encode_read(txn, L, 0) for txn in range(8)))
        await pause(1)
        recovering = await served.connect()
        recovering.send(*(wire.encode_read(txn, L, 0, fence_key=KEY) for txn in range(8)))
        answers = [wire.decode_response(payload) for payload in await recovering.answers(8)]
        assert {each.status for each in answers} == {Status.OK}

    monkeypatch.setattr(connection_limits, "UNREAD_TOTAL_BYTES", 1 << 20)
    serve(world, scenario)


def test_entry_lists_are_made_one_per_event_loop_turn(world: SimWorld) -> None:
    """The list of a ledger with many holes takes 60 ms: others must be served in between."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(add(0))
        made, in_this_turn, together = 0, 0, 0

        def next_turn() -> None:
            nonlocal in_this_turn
            in_this_turn = 0

        def counted(ledger: Ledger) -> list[tuple[int, int]]:
            nonlocal made, in_this_turn, together
            made, in_this_turn = made + 1, in_this_turn + 1
            together = max(together, in_this_turn)
            asyncio.get_running_loop().call_soon(next_turn)
            return runs(ledger)

        inventory = served.shelf.storage.inventory
        runs, inventory.runs = inventory.runs, counted  # type: ignore[method-assign]
        peer.send(*(wire.encode_list_entries(txn, L) for txn in range(50)))
        await peer.answers(50)
        assert (made, together) == (50, 1)

    serve(world, scenario)


def test_fair_queue_serves_every_owner_in_turn() -> None:
    async def scenario() -> list[str]:
        turns, done, all_done = FairQueue(), [], asyncio.Event()

        def piece(name: str) -> Piece:
            def work(ended: Callable[[], None]) -> None:
                done.append(name)
                ended()
                if len(done) == 6:
                    all_done.set()

            return work

        for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
            turns.add(name[0], piece(name))
        assert done == []
        await all_done.wait()
        return done

    assert asyncio.run(scenario()) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_polls_of_a_closed_connection_wait_no_longer(world: SimWorld) -> None:
    """An unauthenticated peer that reconnects repeatedly would leave 10,000 polls behind each time, for a minute."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(add(0))
        ledger = served.shelf.storage.inventory.ledgers[L]
        for _ in range(5):
            stranger = await served.connect()
            stranger.send(*(wire.encode_long_poll(txn, L, 5, 60_000) for txn in range(20)))
            await pause(0.1)
            assert len(ledger.waiters) == 20
            stranger.transport.abort()
            await pause(0.1)
            assert not ledger.waiters
            assert served.service.polls == 0

    serve(world, scenario)


def test_connection_with_many_polls_gives_way_when_all_have_too_many(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are answered in one turn of the event loop when the ledger gets an entry."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(add(0))
        strangers = [await served.connect() for _ in range(4)]
        for stranger in strangers:
            stranger.send(*(wire.encode_long_poll(txn, L, 5, 1000) for txn in range(50)))
        await pause(0.1)
        assert served.service.polls == 100 + 2 * 10
        peer.send(*(wire.encode_long_poll(txn, L, 5, 1000) for txn in range(10)))
        answers = [wire.decode_response(payload) for payload in await peer.answers(10)]
        assert {each.status for each in answers} == {Status.OK}, "any connection may have this few"
        refused = 0
        for stranger in strangers:
            answers = [wire.decode_response(payload) for payload in await stranger.answers(50)]
            refused += sum(each.status == Status.TOO_MANY_REQUESTS for each in answers)
        assert refused == 80
        assert served.service.polls == 0

    monkeypatch.setattr(connection_limits, "POLLS_TOTAL_MAX", 100)
    monkeypatch.setattr(connection_limits, "POLLS_SURE", 10)
    serve(world, scenario)


def test_batch_that_begins_with_the_last_entry_has_only_that(world: SimWorld) -> None:
    """The entry after −1 is entry 0, which does not follow the last one."""

    async def scenario(_: Served, peer: Peer) -> None:
        for entry in range(3):
            await peer.ask(add(entry))
        peer.send(batch(wire.LAST_ENTRY, 10, 1 << 20))
        (answer,) = await peer.answers(1)
        size = int.from_bytes(answer[32:36], "big")
        assert answer[36:] == packet(L, 2, b"x" * 5)
        assert len(answer) == 36 + size

    serve(world, scenario)


def test_errors_of_unauthenticated_peers_are_counted_and_rate_limited(
    world: SimWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(add(0))
        damaged = packet(L, 1)[:-1] + b"!"
        peer.send(*(wire.encode_add(txn, L, 1, KEY, damaged) for txn in range(500)))
        answers = [wire.decode_response(payload) for payload in await peer.answers(500)]
        assert {each.status for each in answers} == {Status.BAD_REQUEST}
        served.shelf.storage.inventory.ledgers[L].index.places[0] += 1  # where no record begins
        peer.send(*(wire.encode_read(txn, L, 0) for txn in range(500)))
        await peer.answers(500)
        for _ in range(100):
            stranger = await served.connect()
            stranger.send(b"\xff" * 100)
            await stranger.closed
        statistics = served.shelf.storage.statistics
        assert (statistics.refused_digest, statistics.damaged_records, statistics.bad_requests) == (500, 500, 100)

    serve(world, scenario)
    lines = [record for record in caplog.records if record.name.startswith("kvstore.bookie")]
    assert 50 < len(lines) < 70


def test_log_line_reports_how_many_lines_were_suppressed(caplog: pytest.LogCaptureFixture, world: SimWorld) -> None:
    async def scenario() -> None:
        limited = RateLimitedLog(logging.getLogger("kvstore.bookie.any"))
        for number in range(BURST + 5):
            limited.emit(logging.WARNING, "number %d", number)
        await pause(1.5)
        limited.emit(logging.WARNING, "number %d", 99)

    world.run(scenario())
    assert [record.getMessage() for record in caplog.records][-2:] == ["number 19", "number 99 (and 5 lines like this)"]
