"""Damage that a bookie has found is marked (docs/protocol.md, A9)."""

from __future__ import annotations

import pytest

from kvstore.autorecovery.damage import DamageReports
from kvstore.meta import paths
from kvstore.types import LedgerId
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, B4
from tests.sim.recovering.audits import AuditBench, later, run

pytestmark = pytest.mark.sim


def test_damage_is_marked_when_autorecovery_is_on_and_ledger_names_bookie() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=5)
        await bench.ledger(8, B2, B3, B4, entries=5)
        reports = DamageReports(bench.world.env("n1"), bench.store, B1)
        reports.start()
        await bench.settings.disable()
        reports.found([7, 8, 9])
        await later(100)
        assert await bench.marked() == {}
        await bench.settings.enable()
        await later(40)
        assert (await bench.marked(), reports.marked) == ({7: [B1]}, 1)

    run(case)


def test_unreadable_ledger_does_not_stop_others_from_being_marked() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=5)
        await bench.store.set(paths.ledger(LedgerId(7)), b"no metadata", -1)
        await bench.ledger(8, B1, B2, B3, entries=5)
        reports = DamageReports(bench.world.env("n1"), bench.store, B1)
        reports.start()
        reports.found([7, 8])
        await later(100)
        assert await bench.marked() == {8: [B1]}

    run(case)


def test_damage_is_marked_when_metadata_store_is_back() -> None:
    async def case(bench: AuditBench) -> None:
        await bench.ledger(7, B1, B2, B3, entries=5)
        reports = DamageReports(bench.world.env("n1"), bench.store, B1)
        reports.start()
        bench.store.suspend()
        reports.found([7])
        await later(100)
        bench.store.resume()
        await later(40)
        assert await bench.marked() == {7: [B1]}

    run(case)
