"""The bookie client on a simulated network, with real bookies at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.storage import BookieStorage
from kvstore.env.ports import Env
from kvstore.errors import BookieError, LedgerFenced, StoreError
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import BadFrame
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import NO_ENTRY, BookieId, DigestType, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal import batches, connection
from kvstore.wal.bookies import BookieClients, _Remote
from kvstore.wal.connection import RETRY_MAX_S, NotAdmitted
from kvstore.wal.ports import ReadAnswer
from tests.sim.ledgers_and_logs.ledgers import make_root
from tests.sim.world.env import SimWorld

pytestmark = pytest.mark.sim

LEDGER = LedgerId(7)
BOOKIE = BookieId("b1-1")
KEY = master_key(b"")
DIGEST = EntryDigest(DigestType.CRC32C)
CLUSTER = "c-ours"


class Wire:
    """A client, and one bookie behind a network."""

    def __init__(self, world: SimWorld, cluster: str) -> None:
        self.world = world
        self.tree = MemoryTree()
        make_root(self.tree)
        self.env = world.env("client")
        self.address: str | None = "b1:3181"
        self.bookies = BookieClients(self.env, lambda _: self.address, cluster=cluster)
        self.answers: list[StoreError | None] = []

    async def start(self) -> None:
        ensemble = (BOOKIE, BookieId("b2-1"))
        metadata = LedgerMetadata(LEDGER, Quorum(2, 2, 2), (Fragment(EntryId(0), ensemble),), token=1)
        await LedgerStore(MemoryStore(self.tree)).create(metadata)
        self.world.node("b1").start(self._main)
        await asyncio.sleep(0.5)

    async def _main(self, env: Env) -> None:
        config = BookieConfig(name="b1", listen="b1:3181", reserve_bytes=0)
        store = MemoryStore(self.tree)
        storage = BookieStorage(env, config, BOOKIE, MetadataAuthority(store, ClusterIdentity(store)))
        await storage.start()
        await env.transport.listen("b1:3181", BookieService(storage, config, CLUSTER).handler)
        await asyncio.Event().wait()

    def add(self, entry: int, *, to: BookieId = BOOKIE, recovery: bool = False) -> None:
        packet = DIGEST.packet(LEDGER, EntryId(entry), EntryId(entry - 1), 5 * (entry + 1), b"hello")
        self.bookies.add(to, LEDGER, EntryId(entry), packet, KEY, recovery, self.answers.append)

    async def added(self, count: int, within_s: float = 1.0) -> list[StoreError | None]:
        """Return the results of `count` adds."""
        async with asyncio.timeout(within_s):
            while True:
                if len(self.answers) >= count:
                    return self.answers
                await asyncio.sleep(0.001)


def run(case: Callable[[Wire], Coroutine[Any, Any, None]], cluster: str = CLUSTER) -> None:
    with SimWorld(1) as world:

        async def main() -> None:
            wire = Wire(world, cluster)
            await wire.start()
            await case(wire)

        world.run(main())


def test_adds_of_one_turn_are_stored_in_order_and_read_back() -> None:
    async def case(wire: Wire) -> None:
        for entry in range(5):
            wire.add(entry)
        assert await wire.added(5) == [None] * 5
        answer = await wire.bookies.read(BOOKIE, LEDGER, EntryId(3))
        assert answer.packet is not None
        assert DIGEST.open(LEDGER, EntryId(3), answer.packet).payload == b"hello"
        assert answer.max_lac == 3
        assert await wire.bookies.read_lac(BOOKIE, LEDGER, DIGEST) == 3
        assert list(await wire.bookies.entries(BOOKIE, LEDGER)) == [0, 1, 2, 3, 4]

    run(case)


def test_repeated_add_is_answered_again() -> None:
    async def case(wire: Wire) -> None:
        for _ in range(3):
            wire.add(0)
        assert await wire.added(3) == [None] * 3

    run(case)


def test_explicit_lac_is_known_to_readers() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.bookies.write_lac(BOOKIE, LEDGER, KEY, DIGEST.lac_packet(LEDGER, EntryId(0)), EntryId(0))
        await asyncio.sleep(0.1)
        assert await wire.bookies.read_lac(BOOKIE, LEDGER, DIGEST) == 0

    run(case)


def test_long_poll_is_answered_one_round_trip_after_its_entry() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        got: list[ReadAnswer | BookieError] = []
        wire.bookies.long_poll(BOOKIE, LEDGER, NO_ENTRY, 5000, got.append)
        await asyncio.sleep(1)
        assert got == []
        wire.add(1)
        await wire.added(2)
        await asyncio.sleep(0.02)
        (answer,) = got
        assert isinstance(answer, ReadAnswer)
        assert (answer.entry, answer.max_lac) == (0, 0)

    run(case)


def test_confirmed_absence_is_an_answer_and_fence_refuses_adds() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        assert (await wire.bookies.read(BOOKIE, LEDGER, EntryId(9))).packet is None
        assert (await wire.bookies.read(BOOKIE, LEDGER, EntryId(1), fence_key=KEY)).packet is None
        wire.add(1)
        wire.add(0)
        answers = await wire.added(3)
        assert [type(answer) for answer in answers[1:]] == [LedgerFenced, LedgerFenced]
        wire.add(1, recovery=True)
        assert (await wire.added(4))[3] is None

    run(case)


def opened(packets: Sequence[bytes]) -> list[EntryId]:
    return [DIGEST.open(LEDGER, None, packet).entry for packet in packets]


# docs/protocol.md T12
def test_batch_returns_consecutive_entries_that_bookie_has() -> None:
    async def case(wire: Wire) -> None:
        for entry in (0, 1, 2, 5, 6):
            wire.add(entry)
        await wire.added(5)
        read = partial(wire.bookies.read_batch, BOOKIE, LEDGER)
        assert opened(await read(range(10), bytes_max=1 << 20)) == [0, 1, 2, 5, 6]
        assert opened(await read(range(1, 6), bytes_max=1 << 20)) == [1, 2, 5]
        assert opened(await read(range(10), bytes_max=1)) == [0]
        assert await read(range(3, 10), bytes_max=1 << 20) == []
        assert opened(await read(range(5, 10), bytes_max=1 << 20, fence_key=KEY, priority=100)) == [5, 6]
        wire.add(7)
        assert isinstance((await wire.added(6))[5], LedgerFenced)
        answer = await wire.bookies.read(BOOKIE, LEDGER, EntryId(9))
        assert answer.packet is None, "the other connection is unchanged"

    run(case)


def test_bookie_without_batches_is_asked_for_none_until_possible_upgrade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        sent: list[float] = []

        def refuse(_: bytes) -> None:
            sent.append(wire.env.clock.now())
            raise BadFrame("operation 7 of version 2 is not known")

        with monkeypatch.context() as patch:
            patch.setattr(version_two, "decode_request", refuse)
            for _ in range(200):
                with pytest.raises(BookieError):
                    await wire.bookies.read_batch(BOOKIE, LEDGER, range(2), bytes_max=100)
                assert (await wire.bookies.read(BOOKIE, LEDGER, EntryId(0))).packet is not None
                await asyncio.sleep(0.5)
        gaps = [after - before for before, after in pairwise(sent)]
        assert gaps == sorted(gaps)
        assert gaps[0] >= batches.DELAY_MIN_S
        assert 3 <= len(sent) <= 8
        await asyncio.sleep(batches.DELAY_MAX_S)
        assert opened(await wire.bookies.read_batch(BOOKIE, LEDGER, range(2), bytes_max=100)) == [0]

    run(case)


def test_silent_bookie_costs_one_batch_a_quarter_of_a_second() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        assert opened(await wire.bookies.read_batch(BOOKIE, LEDGER, range(2), bytes_max=100)) == [0]
        wire.world.node("b1").pause()
        began = wire.env.clock.now()
        for _ in range(20):
            with pytest.raises(BookieError):
                await wire.bookies.read_batch(BOOKIE, LEDGER, range(2), bytes_max=100)
        assert wire.env.clock.now() - began < batches.TIMEOUT_S + 0.1

    run(case)


def test_killed_bookie_fails_all_outstanding_requests_at_once() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.node("b1").disk.slow_syncs((5.0, 5.0))
        for entry in range(1, 4):
            wire.add(entry)
        await asyncio.sleep(0.05)
        wire.world.node("b1").crash()
        began = wire.env.clock.now()
        answers = await wire.added(4)
        assert wire.env.clock.now() - began < 0.05
        assert [type(answer) for answer in answers[1:]] == [BookieError] * 3

    run(case)


# docs/protocol.md W2
def test_silent_bookie_fails_adds_after_two_seconds_without_progress() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.node("b1").pause()
        began = wire.env.clock.now()
        for entry in range(1, 4):
            wire.add(entry)
        await wire.added(4, within_s=5)
        assert connection.ADD_SILENCE_S <= wire.env.clock.now() - began <= connection.ADD_SILENCE_S + 0.5

    run(case)


def test_client_that_was_paused_does_not_take_bookie_for_silent() -> None:
    async def case(wire: Wire) -> None:
        client = wire.world.node("client")

        async def add() -> None:
            wire.add(0)
            await wire.added(1)
            wire.world.node("b1").disk.slow_syncs((0.5, 0.5))
            wire.add(1)

        wire.env.nursery.spawn(add(), name="add")
        await asyncio.sleep(0.1)
        client.pause()
        await asyncio.sleep(2 * connection.ADD_SILENCE_S)
        client.resume()
        assert await wire.added(2, within_s=5) == [None, None]

    run(case)


def test_slow_bookie_that_makes_progress_is_not_silent() -> None:
    async def case(wire: Wire) -> None:
        wire.world.node("b1").disk.slow_syncs((1.0, 1.0))
        for entry in range(6):
            wire.add(entry)
            await asyncio.sleep(0.9)
        assert await wire.added(6, within_s=10) == [None] * 6

    run(case)


def test_returned_bookie_is_reached_again() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.node("b1").crash()
        await asyncio.sleep(0.01)
        wire.add(1)
        assert isinstance((await wire.added(2))[1], BookieError)
        wire.world.node("b1").restart()
        await asyncio.sleep(1)
        wire.add(1)
        assert (await wire.added(3))[2] is None

    run(case)


def test_end_of_former_connection_fails_nothing_on_present_one() -> None:
    """The system reports the end late. By then entries may be in flight on the next connection."""

    async def case(wire: Wire) -> None:
        wire.add(0)
        assert await wire.added(1) == [None]
        client = wire.bookies._at(BOOKIE)
        assert isinstance(client, _Remote)
        former = client.connection.link
        assert former is not None
        client.connection._abort("what came was no frame")
        await asyncio.sleep(1)
        wire.add(1)
        assert await wire.added(2) == [None] * 2
        assert client.connection.link is not former
        wire.add(2)
        former.connection_lost(None)
        assert await wire.added(3) == [None] * 3

    run(case)


def test_calls_to_unreachable_bookie_fail_at_once_and_retries_back_off() -> None:
    async def case(wire: Wire) -> None:
        wire.world.node("b1").crash()
        began = wire.env.clock.now()
        for entry in range(100):
            wire.add(entry)
            await asyncio.sleep(0.05)
        await wire.added(100)
        assert wire.env.clock.now() - began < 6
        assert all(isinstance(answer, BookieError) for answer in wire.answers)

    run(case)


def test_another_bookie_at_same_address_is_not_accepted() -> None:
    """A wiped disk returns as another incarnation. It must neither take the add nor report that an entry does not
    exist."""

    async def case(wire: Wire) -> None:
        other = BookieId("b1-2")
        wire.add(0, to=other)
        assert isinstance((await wire.added(1))[0], BookieError)
        await asyncio.sleep(1)
        with pytest.raises(BookieError):
            await wire.bookies.read(other, LEDGER, EntryId(0))

    run(case)


def test_bookie_with_unknown_address_fails() -> None:
    async def case(wire: Wire) -> None:
        wire.address = None
        wire.add(0)
        assert isinstance((await wire.added(1))[0], BookieError)

    run(case)


def test_bytes_outstanding_to_one_bookie_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OUTSTANDING_MAX", 10)

    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.node("b1").pause()
        for entry in range(1, 15):
            wire.add(entry)
        await asyncio.sleep(0.01)
        assert len(wire.answers) == 1 + 4
        assert all(isinstance(answer, BookieError) for answer in wire.answers[1:])

    run(case)


def test_unanswered_read_ends_in_five_seconds_and_closes_connection() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.network.cut("client", "b1")
        began = wire.env.clock.now()
        with pytest.raises(BookieError):
            await wire.bookies.read(BOOKIE, LEDGER, EntryId(0))
        assert 4.9 < wire.env.clock.now() - began < 5.6
        wire.world.network.heal()
        await asyncio.sleep(0.2)
        assert (await wire.bookies.read(BOOKIE, LEDGER, EntryId(0))).packet is not None

    run(case)


def test_closed_client_fails_everything_and_connects_no_more() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        await wire.added(1)
        wire.world.node("b1").pause()
        wire.add(1)
        wire.bookies.close()
        assert isinstance((await wire.added(2))[1], BookieError)
        wire.add(2)
        assert isinstance((await wire.added(3))[2], BookieError)

    run(case)


def test_bookie_of_another_cluster_refuses_with_specific_error() -> None:
    """docs/protocol.md B32"""

    async def case(wire: Wire) -> None:
        wire.add(0)
        (error,) = await wire.added(1)
        assert isinstance(error, NotAdmitted)
        assert "of another cluster than c-another" in str(error)
        await asyncio.sleep(RETRY_MAX_S)
        with pytest.raises(NotAdmitted):
            await wire.bookies.read(BOOKIE, LEDGER, EntryId(0))

    run(case, "c-another")


def test_client_without_cluster_id_is_served() -> None:
    async def case(wire: Wire) -> None:
        wire.add(0)
        assert await wire.added(1) == [None]

    run(case, "")
