"""Marked ledgers that are not closed: their owner, and when they are recovered (docs/protocol.md, A11, A12, A13)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.autorecovery.repairer import LedgerRepairer
from kvstore.errors import VersionConflict
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.types import LedgerState
from kvstore.wal.copies.pace import CopyPace
from tests.sim.ledgers_and_logs.bench import (
    B1,
    B2,
    B3,
    B4,
    LEDGER,
    Appended,
    Bench,
    P,
    appended,
    holders,
    run,
)
from tests.sim.recovering.cases import COUNT, listed, of_a_log, of_p1, until, until_unmarked

pytestmark = pytest.mark.sim


# docs/protocol.md A13
def test_recovery_by_operator_waits_out_lease_of_former_leader() -> None:
    """Until the lease ends, the former leader may answer reads alone, without the entries that the recovery has
    found."""

    async def case(bench: Bench) -> None:
        await of_a_log(bench, 5000)
        store = MemoryStore(bench.tree)
        repairer = LedgerRepairer(bench.ports_on(store), store, bench.env.nursery, CopyPace(bench.env.clock, 1 << 20))
        recovering = asyncio.ensure_future(repairer.recover(LEDGER))
        await bench.pass_time(5.4)
        assert (await bench.recorded()).state is LedgerState.IN_RECOVERY
        found = await recovering
        assert (found.state, found.last_entry) == (LedgerState.CLOSED, COUNT - 1)

    run(case)


def test_ledger_of_dead_writer_is_recovered_and_then_repaired() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        handle.release()
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker()
        await bench.pass_time(25)
        assert (await bench.recorded()).state is LedgerState.OPEN, "its writer has time to replace the bookie"
        await until_unmarked(bench)
        found = await bench.recorded()
        assert (found.state, found.last_entry) == (LedgerState.CLOSED, COUNT - 1)
        assert found.fragments[-1].ensemble == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT))

    run(case, bookies=4)


def test_ledger_in_use_is_never_fenced() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        handle, entries = bench.handle(await bench.ledger()), Appended()
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker()
        for number in range(10):
            handle.append(b"entry %d" % number, entries.done)
            await bench.pass_time(20)
        assert len(entries.confirmed) == 10
        assert (await bench.recorded()).state is LedgerState.OPEN
        assert not bench.halted

    run(case, bookies=3)


def test_idle_writer_acknowledges_nothing_after_its_ledger_was_recovered() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker()
        await until_unmarked(bench)
        entries = Appended()
        handle.append(b"too late", entries.done)
        await bench.pass_time(1)
        assert not entries.confirmed
        assert len(entries.errors) == 1

    run(case, bookies=3 + 1)


def test_idle_writer_loses_nothing_when_ensemble_returns_with_empty_disks() -> None:
    """Apache's #4812: entries missing on bookies that are younger than the ledger do not end a recovery."""

    async def case(bench: Bench) -> None:
        await bench.set_up(B1)
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        handle.release()
        await bench.set_up(B2, B3)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].entries.clear()
            bench.bookies.at[bookie].lacs.clear()
        bench.bookies.stop(B1)
        await bench.mark(B1)
        bench.worker()
        await bench.pass_time(300)
        assert (await bench.recorded()).state is LedgerState.OPEN
        assert not bench.bookies.at[B2].fenced
        bench.bookies.start(B1)
        await until_unmarked(bench)
        assert holders(bench, COUNT - 1) == [B1, B2, B3], "it is copied because it is confirmed"

    run(case, bookies=4)


def test_ledger_with_unknown_end_is_left_unchanged() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, COUNT)
        bench.bookies.stop(B2, B3)
        await bench.mark(B2, B3)
        bench.worker()
        await bench.pass_time(300)
        assert (await bench.recorded()).state is LedgerState.OPEN
        assert not bench.bookies.at[B1].fenced
        bench.bookies.start(B2, B3)
        await until_unmarked(bench)
        entries = Appended()
        handle.append(b"goes on", entries.done)
        await bench.pass_time(10)
        assert len(entries.confirmed) == 1, "the writer was only idle"

    run(case, bookies=5)


def test_partition_ledger_belongs_to_its_leader_while_there_is_one() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        await of_a_log(bench, 500)
        leader = MemoryStore(bench.tree)
        await ensure_path(leader, paths.partition(P))
        await leader.create(paths.partition_leader(P), ephemeral=True)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker()
        await bench.pass_time(300)
        assert (await bench.recorded()).state is LedgerState.OPEN
        assert not bench.bookies.at[B1].fenced
        await leader.close()
        await until_unmarked(bench)
        assert (await bench.recorded()).state is LedgerState.CLOSED

    run(case, bookies=4)


# docs/protocol.md A11
def test_unlisted_ledger_is_recovered_although_its_log_has_a_leader() -> None:
    """A process that ends between the creation and the listing of a ledger leaves it open for good. No leader writes
    it, so no leader replaces its lost bookie."""

    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        await bench.ledgers.create(of_p1(LEDGER))
        leader = MemoryStore(bench.tree)
        await ensure_path(leader, paths.partition(P))
        await leader.create(paths.partition_leader(P), ephemeral=True)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker()
        await bench.pass_time(25)
        assert (await bench.recorded()).state is LedgerState.OPEN, "its creator has time to list it"
        await until_unmarked(bench)
        found = await bench.recorded()
        assert (found.state, found.fragments[-1].ensemble) == (LedgerState.CLOSED, (B1, B2, B4))
        with pytest.raises(VersionConflict):
            await listed(bench, LEDGER, lease_ms=500)

    run(case, bookies=4)


def test_recovered_entries_are_hidden_until_lease_of_former_leader_ends() -> None:
    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        await of_a_log(bench, 5000)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker(grace_s=1.0)
        await until(lambda: LEDGER in bench.bookies.at[B1].fenced)
        fenced_at = bench.env.clock.now()
        while (await bench.recorded()).state is not LedgerState.CLOSED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert bench.env.clock.now() - fenced_at >= 5.4, "the lease, and a tenth"

    run(case, bookies=4)
