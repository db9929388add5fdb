"""Ids of new ledgers: a metadata store with an older counter is detected before a ledger is created, case by case, in
virtual time (docs/protocol.md, G27)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvstore.errors import MetadataLost, NoSuchNode, NotEnoughBookies
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.registration import RegisteredBookies
from kvstore.types import NO_LEDGER, BookieId, LedgerId, PartitionId
from kvstore.wal.new_ids import ANSWERS_S, NewLedgerIds
from tests.meta.drivers import LaggingStore
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, Bench, first_seq, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, opened
from tests.sim.ledgers_and_logs.model_bookies import ModelView

pytestmark = pytest.mark.sim

ENSEMBLE = (B1, B2, B3)


def set_back(bench: Bench, to: int) -> None:
    """Set the store's id counter to that of an older copy."""
    bench.tree._nodes[paths.IDGEN].births = to


def new_ids(bench: Bench, store: MemoryStore | None = None) -> NewLedgerIds:
    """Return the ids of a process that has just started."""
    store = store or MemoryStore(bench.tree)
    choice = bench.ports_on(store).choice
    identity, env = ClusterIdentity(store, "simulated"), bench.env
    return NewLedgerIds(store, bench.bookies, choice, identity, clock=env.clock, nursery=env.nursery)


async def why_older(bench: Bench) -> bytes:
    return (await MemoryStore(bench.tree).get(paths.OLDER_COPY))[0]


def has_seen(bench: Bench, ledger: int, *bookies: BookieId) -> None:
    for each in bookies:
        bench.bookies.at[each].newest = LedgerId(ledger)


async def made(bench: Bench) -> list[LedgerId]:
    return await LedgerStore(MemoryStore(bench.tree)).list_ids()


# docs/protocol.md G27
def test_new_id_that_one_bookie_has_seen_is_refused_and_the_store_marked() -> None:
    """Also if the new ensemble does not know that ledger."""
    knows = B1

    async def case(bench: Bench) -> None:
        set_back(bench, 5)
        has_seen(bench, 7, knows)
        with pytest.raises(MetadataLost, match=f"ledger id 5, but bookie {knows} has ledger 7"):
            await new_ids(bench).next_id(NO_LEDGER, ENSEMBLE, 2)
        assert b"bookie" in await why_older(bench)
        with pytest.raises(MetadataLost, match="older copy"):
            await opened(bench.logs(NEVER))
        assert await made(bench) == []

    run(case, bookies=5)
    knows = B4
    run(case, bookies=5)


def test_new_id_above_all_seen_ids_is_given() -> None:
    async def case(bench: Bench) -> None:
        set_back(bench, 8)
        has_seen(bench, 7, B1, B2)
        assert await new_ids(bench).next_id(LedgerId(6), ENSEMBLE, 2) == 8
        with pytest.raises(NoSuchNode):
            await why_older(bench)

    run(case)


def test_new_ids_remember_ids_seen_in_lists() -> None:
    """The bookies have lost everything, so nobody else has seen the later ids."""

    async def case(bench: Bench) -> None:
        logs = bench.logs(NEVER)
        for _ in range(3):
            await opened(logs)
        assert len(await made(bench)) == 3
        set_back(bench, 0)
        with pytest.raises(MetadataLost, match="the list of a partition has ledger"):
            await logs.open_as_leader(PartitionId("p2"), 500, first_seq)
        assert len(await made(bench)) == 3

    run(case)


def test_leader_that_rolls_to_an_old_id_ends_and_keeps_its_entries() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        set_back(bench, 0)
        before = await made(bench)
        await writer.append(40)
        await bench.pass_time(60)
        assert isinstance(writer.log.lost, MetadataLost)
        assert await made(bench) == before, "no ledger was made under an old id"
        assert writer.entries.confirmed

    run(case)


def test_concurrent_creators_take_no_id_for_an_old_one() -> None:
    """Bookies learn of each new ledger at once, also while other creators are getting their ids."""

    async def case(bench: Bench) -> None:
        async def create(number: int) -> LedgerId:
            await bench.pass_time(number % 7 / 1000)
            bench.bookies.at[B1].stalls_s = number % 5 / 100
            ledger = await new_ids(bench).next_id(NO_LEDGER, ENSEMBLE, 2)
            for each in ENSEMBLE:
                has_seen(bench, max(ledger, bench.bookies.at[each].newest), each)
            return ledger

        found = await asyncio.gather(*(create(number) for number in range(50)))
        assert len(set(found)) == 50

    run(case)


def test_silent_bookie_delays_an_id_by_a_quarter_second_at_most() -> None:
    async def case(bench: Bench) -> None:
        bench.bookies.at[B3].stalls_s = 5.0
        before = bench.env.clock.now()
        await new_ids(bench).next_id(NO_LEDGER, ENSEMBLE, 2)
        assert bench.env.clock.now() - before < ANSWERS_S + 0.05

    run(case)


def test_late_answer_counts_for_the_next_id() -> None:
    async def case(bench: Bench) -> None:
        set_back(bench, 3)
        bench.bookies.at[B3].stalls_s = 0.4
        has_seen(bench, 9, B3)
        ids = new_ids(bench)
        assert await ids.next_id(NO_LEDGER, ENSEMBLE, 2) == 3
        await bench.pass_time(1)
        with pytest.raises(MetadataLost):
            await ids.next_id(NO_LEDGER, ENSEMBLE, 2)

    run(case)


def test_new_id_needs_an_ack_quorum_of_answers() -> None:
    async def case(bench: Bench) -> None:
        bench.bookies.stop(B2, B3)
        births = bench.tree._nodes[paths.IDGEN].births
        with pytest.raises(NotEnoughBookies, match="got none from"):
            await new_ids(bench).next_id(NO_LEDGER, ENSEMBLE, 2)
        assert bench.tree._nodes[paths.IDGEN].births == births

    run(case)


def test_lagging_server_after_an_import_is_no_older_copy() -> None:
    """The first id comes from a former range, because the server that answered does not know the new one until it is
    synced."""

    async def case(bench: Bench) -> None:
        has_seen(bench, 1 << 32, B1)
        store = LaggingStore(bench.tree)
        ids = new_ids(bench, store)
        store.lag()
        importer = MemoryStore(bench.tree)
        await importer.create(paths.IDGEN_LONG)
        await importer.create(f"{paths.IDGEN_LONG}/HOB-0000000002")
        assert await ids.next_id(NO_LEDGER, ENSEMBLE, 2) == 2 << 32

    run(case)


def test_id_that_a_list_names_is_not_given_again() -> None:
    async def case(bench: Bench) -> None:
        set_back(bench, 5)
        with pytest.raises(MetadataLost, match="ledger id 5, but the list of the partition has ledger 6"):
            await new_ids(bench).next_id(LedgerId(6), ENSEMBLE, 2)

    run(case)


class Interrupted(MemoryStore):
    """Lets something happen right after an id was given."""

    after: Callable[[], None]

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        created = await super().create(path, data, ephemeral=ephemeral, sequential=sequential)
        self.after()
        return created


def test_higher_id_that_is_seen_later_is_another_creators() -> None:
    async def case(bench: Bench) -> None:
        store = Interrupted(bench.tree)
        ids = new_ids(bench, store)
        store.after = lambda: ids.saw(LedgerId(7), "bookie")
        set_back(bench, 5)
        assert await ids.next_id(NO_LEDGER, ENSEMBLE, 2) == 5
        with pytest.raises(MetadataLost):
            await ids.next_id(NO_LEDGER, ENSEMBLE, 2)

    run(case)


class OtherView(ModelView):
    """A view in which B4 is not registered."""

    @property
    def current(self) -> RegisteredBookies:
        found = super().current
        return RegisteredBookies({each: "" for each in found.writable if each != B4}, found.readonly)


def test_bookies_of_the_ensemble_are_asked_without_a_registration() -> None:
    """A session may end while its bookie answers."""

    async def case(bench: Bench) -> None:
        bench.bookies.view = OtherView(bench.bookies.at)
        has_seen(bench, 7, B4)
        set_back(bench, 5)
        with pytest.raises(MetadataLost, match=f"bookie {B4} has ledger 7"):
            await new_ids(bench).next_id(NO_LEDGER, (B1, B2, B4), 3)

    run(case, bookies=4)


def test_silent_bookies_of_the_ensemble_are_chosen_last() -> None:
    async def case(bench: Bench) -> None:
        for each in (B2, B3):
            bench.bookies.at[each].is_silent = True
        ids = new_ids(bench)
        with pytest.raises(NotEnoughBookies):
            await ids.next_id(NO_LEDGER, ENSEMBLE, 2)
        assert ids._choice.spares() == {B1, B4}

    run(case, bookies=4)
