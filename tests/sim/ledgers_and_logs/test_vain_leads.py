"""A replica that opens its log and then cannot lead waits longer before each election (docs/protocol.md, G22)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.partition.election.tail import Tail
from kvstore.wal.lists import LedgerLists
from tests.sim.stories.scenarios import P, Stage, knobs, play

pytestmark = pytest.mark.sim

VAIN_S = 450.0


def test_unsuccessful_leaderships_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        store = await stage.cluster.metadata.connect()
        lists = LedgerLists(store)

        async def stuck(*_: object) -> None:
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(Tail, "wait_applied", stuck)
            before = (await lists.read(P))[0].epoch
            stage.leader.crash()
            await asyncio.sleep(VAIN_S)
            leads = (await lists.read(P))[0].epoch - before
        assert 5 < leads < 30, "each replica at most once a minute in the end"
        await store.close()
        await stage.until(lambda: stage.cluster.leader(P) is not None, within_s=90)

    play(story, knobs())
