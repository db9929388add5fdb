"""A dead replica does not hold the log forever (docs/protocol.md, G20)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.meta.store import MetadataStore
from kvstore.partition.election import absences, retention
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from tests.sim.stories.scenarios import P, Stage, knobs, play

pytestmark = pytest.mark.sim

FORGET_S = 60.0


async def listed(store: MetadataStore) -> LedgerList:
    return (await LedgerLists(store).read(P))[0]


def test_dead_replica_stops_holding_log_and_returns_by_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "FORGET_S", FORGET_S)
    monkeypatch.setattr(absences, "SAVE_S", 3.0)

    async def story(stage: Stage) -> None:
        store = await stage.cluster.metadata.connect()
        await stage.put_until_done(stage.leader)
        dead = stage.others(stage.leader)[0]
        dead.crash()
        began = asyncio.get_running_loop().time()
        trimmed = (await listed(store)).trimmed_seq
        leads = 0
        while asyncio.get_running_loop().time() - began < FORGET_S - 10:
            for _ in range(10):
                await stage.put_until_done(stage.others(dead)[0])
                await asyncio.sleep(1)
            await stage.until(lambda: stage.cluster.leader(P) is not None)
            leader = stage.leader
            leader.crash()
            leader.start()
            leads += 1
            assert (await listed(store)).trimmed_seq <= trimmed + 10, "the dead replica counts for a while"
        await asyncio.sleep(4 * leads + 20)
        assert leads >= 4
        assert (await listed(store)).trimmed_seq > trimmed + 20
        await store.close()
        dead.start()  # the judge waits until it has caught up with the others

    play(story, knobs(roll_entries=4))
