"""Whole clusters under faults of every kind while an auditor marks and workers repair. A disk is lost repeatedly,
nodes die and pause, sessions end, the metadata store fails for moments. Nothing acknowledged is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.repairer import LedgerRepairer
from tests.sim.run import run
from tests.sim.strikes.knobs import hinted

pytestmark = pytest.mark.sim

FAULTS = (
    *("wipe", "kill", "kill_leader", "power_cut", "session_expiry", "metadata_trouble", "metadata_cut"),
    *("pause", "isolate", "flip_bits"),
)
HASTY = AutorecoveryConfig(
    lost_bookie_delay_s=1, check_interval_s=5.0, placement_interval_s=5.0, open_ledger_grace_s=2.0
)


def test_nothing_is_lost_while_ledgers_are_repaired_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[bool] = []
    original = LedgerRepairer.repair

    async def repair(self: LedgerRepairer, *arguments: Any, **named: Any) -> Any:
        done = await original(self, *arguments, **named)
        mended.append(done.is_complete)
        return done

    monkeypatch.setattr(LedgerRepairer, "repair", repair)
    for seed in range(1, 5):
        knobs = hinted(seed, FAULTS, {"nodes": 4, "log.roll_entries": 8})
        run(seed, replace(knobs, chaos_s=10.0, autorecovery=HASTY))
    assert any(mended), "no run had anything to repair"
