"""Several entries are copied at a time, within a rate (docs/protocol.md, W8)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import LedgerError
from kvstore.types import EntryId
from kvstore.wal.copies.copying import AT_ONCE_MAX, Copying
from kvstore.wal.copies.pace import CopyPace, GuardedCopyPace
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, LEDGER, Bench, appended, run
from tests.sim.ledgers_and_logs.model_bookies import DELAY_S

FAST = 1 << 30


async def closed(bench: Bench, count: int) -> Copying:
    """Copy a closed ledger of `count` entries of which B3 has lost all its copies."""
    handle = bench.handle(await bench.ledger())
    await appended(bench, handle, count)
    await handle.close()
    bench.bookies.at[B3].entries.clear()
    metadata = await bench.recorded()
    return Copying(metadata, bench.bookies, bench.env.nursery, CopyPace(bench.env.clock, FAST))


def test_several_entries_are_in_flight_at_once() -> None:
    async def case(bench: Bench) -> None:
        count = 20 * AT_ONCE_MAX
        work = await closed(bench, count)
        began = bench.env.clock.now()
        assert await work.fill(work.reader.metadata, EntryId(count - 1), await work.held([B3]), [B3]) == count
        one_by_one_s = count * 3 * DELAY_S
        assert bench.env.clock.now() - began < one_by_one_s / 8
        assert bench.bookies.at[B3].of(LEDGER) == list(range(count))

    run(case)


def test_rate_is_kept() -> None:
    async def case(bench: Bench) -> None:
        count = 200
        work = await closed(bench, count)
        size = sum(len(packet) for packet in bench.bookies.at[B1].entries.values())
        work._pace.bytes_per_s = size // 4
        began = bench.env.clock.now()
        await work.fill(work.reader.metadata, EntryId(count - 1), await work.held([B3]), [B3])
        assert 3.5 < bench.env.clock.now() - began < 4.5

    run(case)


def test_copying_stays_within_rate_over_measured_time() -> None:
    async def case(bench: Bench) -> None:
        pace = CopyPace(bench.env.clock, 1_000)
        for size, pause_s in ((500, 0.0), (100, 0.2), (50, 30.0), (2_000, 0.9), (1, 0.0)):
            spending = [bench.env.nursery.spawn(pace.spend(size), name="spend") for _ in range(5)]
            await asyncio.sleep(0.07)
            assert pace.spent_bytes <= pace.bytes_per_s * pace.busy_s + 1e-6
            for each in spending:
                await each
            assert pace.spent_bytes <= pace.bytes_per_s * pace.busy_s + 1e-6
            await asyncio.sleep(pause_s)
        assert pace.spent_bytes == 5 * 2_651
        assert pace.busy_s == pytest.approx(5 * 2.651 + 0.2 + 0.9, abs=0.1), "the idle half minute does not count"

    run(case)


def test_cancelled_waiter_does_not_delay_others() -> None:
    async def case(bench: Bench) -> None:
        pace = CopyPace(bench.env.clock, 100)
        given_up = [asyncio.ensure_future(pace.spend(1_000)) for _ in range(5)]
        await asyncio.sleep(1.0)
        for each in given_up:
            each.cancel()
        await asyncio.sleep(0)
        began = bench.env.clock.now()
        await pace.spend(100)
        assert bench.env.clock.now() - began == pytest.approx(1.0, abs=0.01)
        assert pace.spent_bytes == 100

    run(case)


def test_stopped_worker_is_not_held_by_low_rate() -> None:
    async def case(bench: Bench) -> None:
        is_off = False

        def resume() -> None:
            if is_off:
                raise LedgerError("switched off")

        pace = GuardedCopyPace(CopyPace(bench.env.clock, 1), resume)
        waiting = asyncio.ensure_future(pace.spend(1_000_000))
        await asyncio.sleep(10.0)
        is_off, began = True, bench.env.clock.now()
        with pytest.raises(LedgerError):
            await waiting
        assert bench.env.clock.now() - began < 2.0

    run(case)


def test_error_ends_work_and_copied_entries_stay() -> None:
    async def case(bench: Bench) -> None:
        work = await closed(bench, 200)
        for entry in range(100, 200):
            for bookie in (B1, B2):
                del bench.bookies.at[bookie].entries[LEDGER, EntryId(entry)]
        with pytest.raises(LedgerError):
            await work.fill(work.reader.metadata, EntryId(199), await work.held([B3]), [B3])
        assert bench.bookies.at[B3].of(LEDGER)[:100] == list(range(100))

    run(case)
