"""A ledger whose copies share a zone, and new bookies that cannot be supplied (docs/protocol.md, W11)."""

from __future__ import annotations

from kvstore.errors import BookieError, StoreError
from kvstore.types import BookieId, EntryId, LedgerId, Quorum
from kvstore.wal.choice import BookieChoice
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4, B5, B6, Bench, appended, holders, run
from tests.sim.ledgers_and_logs.model_bookies import ModelBookies

COUNT = 12
SPARES = (B4, B5, B6)


class FullDisks:
    """Bookies that take some entries of a ledger and then no more."""

    def __init__(self, bench: Bench, *bookies: BookieId) -> None:
        self.bookies = set(bookies)
        self.refused: list[BookieId] = []
        self._store = bench.bookies._store
        bench.bookies._store = self  # type: ignore[assignment]

    def __call__(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, packet: bytes, recovery: bool
    ) -> StoreError | None:
        if bookie in self.bookies and entry == COUNT - 1:
            self.refused.append(bookie)
            return BookieError(f"{bookie}: its disk is full")
        return self._store(bookie, ledger, entry, packet, recovery)


async def crowded(bench: Bench) -> None:
    """Create a marked, closed ledger with two copies in one zone. Three spare bookies are in a third zone."""
    for bookie, zone in ((B1, "a"), (B2, "a"), (B3, "b"), (B4, "c"), (B5, "c"), (B6, "c")):
        bench.bookies.at[bookie].zone = zone
    handle = bench.handle(await bench.ledger())
    await appended(bench, handle, COUNT)
    await handle.close()
    await bench.mark()


def test_new_bookies_that_cannot_be_supplied_are_few_and_retried_ever_less() -> None:
    """Each bookie keeps copies that no metadata names."""

    async def case(bench: Bench) -> None:
        await crowded(bench)
        full = FullDisks(bench, *SPARES)
        bench.worker()
        await bench.pass_time(600)
        assert len(set(full.refused)) == 1
        assert 3 <= len(full.refused) <= 8
        await bench.pass_time(3000)
        assert len(set(full.refused)) <= 3
        assert len(full.refused) <= 20
        full.bookies.clear()
        await bench.pass_time(1000)
        assert not await bench.is_marked()
        (newcomer,) = set(SPARES) & set((await bench.recorded()).fragments[0].ensemble)
        assert newcomer in holders(bench, COUNT - 1)

    run(case, bookies=6, limit_s=6000)


def test_new_bookie_that_becomes_read_only_gives_way_to_another() -> None:
    async def case(bench: Bench) -> None:
        await crowded(bench)
        full = FullDisks(bench, SPARES[0], SPARES[1])
        bench.worker()
        for _ in range(30):
            await bench.pass_time(20)
            for bookie in SPARES:
                bench.bookies.at[bookie].is_readonly = bookie in full.refused
            bench.bookies.view.changed()
        assert not await bench.is_marked()
        assert SPARES[2] in (await bench.recorded()).fragments[0].ensemble

    run(case, bookies=6, limit_s=6000)


def test_new_ensemble_has_as_many_places_as_there_are_machines() -> None:
    """A machine that lost its disk is registered twice for a while. If both registrations were in one ensemble, its
    next loss would leave too few bookies to determine the end of the ledger."""

    async def case(bench: Bench) -> None:
        own, former, now = (BookieId(f"{name}-{7:012x}") for name in ("n4", "n2", "n1"))
        again = BookieId(f"n2-{8:012x}")
        for writable, places in ((own, former, again), 2), ((own, former, again, now), 3):
            view = ModelBookies(*writable).view
            choice = BookieChoice(view, bench.store, clock=bench.env.clock, random=bench.env.random, own=own)
            quorum, ensemble = choice.new_ensemble(Quorum(3, 3, 2))
            assert quorum == Quorum(places, places, 2)
            assert len({bookie.partition("-")[0] for bookie in ensemble}) == places

    run(case)
