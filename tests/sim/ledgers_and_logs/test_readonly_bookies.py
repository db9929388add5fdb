"""A bookie that is registered as read-only gets no copies: they would use the space for fences and reclaim
(docs/protocol.md, B9 and B20)."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.autorecovery.rereplicate import Rereplicator
from kvstore.types import BookieId, EntryId, LedgerId
from kvstore.wal.copies.copier import Copier
from kvstore.wal.copies.pace import CopyPace
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, LEDGER, Bench, appended, run

COUNT = 12


async def closed(bench: Bench) -> None:
    """Create a closed ledger of which B3 lacks three entries."""
    handle = bench.handle(await bench.ledger())
    await appended(bench, handle, COUNT)
    await handle.close()
    for entry in (2, 3, 7):
        del bench.bookies.at[B3].entries[LEDGER, EntryId(entry)]


def copier_of(bench: Bench) -> Copier:
    """Return the copier of a leader, beside a worker."""
    bench.worker()

    async def mark(ledger: LedgerId, lacking: Collection[BookieId]) -> None:
        await bench.mark(*sorted(lacking), ledger=ledger)

    pace = CopyPace(bench.env.clock, 1 << 20)
    copier = Copier(bench.ports, bench.env.nursery, lambda: [(LEDGER, None)], mark=mark, pace=pace)
    copier.start()
    return copier


def set_readonly(bench: Bench, bookie: BookieId, readonly: bool) -> None:
    bench.bookies.at[bookie].is_readonly = readonly
    bench.bookies.view.changed()


def test_leader_notices_within_seconds_that_a_worker_has_repaired_a_ledger() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        copier = copier_of(bench)
        await bench.pass_time(40)
        assert copier.lacking == {LEDGER: frozenset({B3})}
        await bench.mark(B3)
        await bench.pass_time(10)
        assert not await bench.is_marked()
        assert copier.lacking == {}

    run(case, bookies=4)


def test_leader_reports_missing_copies_until_their_bookie_is_writable() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        set_readonly(bench, B3, True)
        copier = copier_of(bench)
        await bench.pass_time(60)
        assert len(bench.bookies.at[B3].of(LEDGER)) == COUNT - 3
        assert copier.lacking == {LEDGER: frozenset({B3})}
        assert copier.at_risk == set(), "an ack quorum has each entry"
        bench.bookies.stop(B2)
        await bench.pass_time(60)
        assert copier.lacking == {LEDGER: frozenset({B2, B3})}
        assert copier.at_risk == {LEDGER}, "three entries are only at B1"
        bench.bookies.start(B2)
        await bench.pass_time(60)
        assert copier.at_risk == set()
        set_readonly(bench, B3, False)
        await bench.pass_time(60)
        assert bench.bookies.at[B3].entries == bench.bookies.at[B1].entries
        assert not copier.lacking

    run(case, bookies=3)


def test_ledger_complete_on_read_only_bookie_lacks_nothing() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        set_readonly(bench, B2, True)
        copier = copier_of(bench)
        await bench.pass_time(30)
        assert bench.bookies.at[B3].entries == bench.bookies.at[B1].entries
        assert not copier.lacking

    run(case, bookies=3)


def test_scrub_of_read_only_bookie_repairs_nothing_and_reports_why() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        set_readonly(bench, B3, True)
        recopier = Rereplicator(bench.env, bench.store, bench.bookies.view, bench.bookies, lambda *_: None)
        found = await recopier.scrub(B3, repair=True)
        assert [fault for _, _, fault in found] == ["missing; not repaired: the bookie is read-only"] * 3
        assert len(bench.bookies.at[B3].of(LEDGER)) == COUNT - 3

    run(case, bookies=3)
