"""The auditor in whole clusters: real nodes that are restarted, killed and left down (docs/protocol.md, A4, A5, A6,
A9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.bookie.config import BookieConfig
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.marks import LedgerMark
from kvstore.meta.underreplication import Underreplication
from kvstore.partition.state import commands
from kvstore.types import BookieId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.config import LogConfig
from kvstore.wal.copies import copier
from kvstore.wal.repair import bookies_of
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

DELAY_S = 20
AUDITED = replace(
    knobs(retention_ms=3_600_000),
    nodes=4,
    log=LogConfig(roll_entries=4, check_every_s=0.3),
    autorecovery=AutorecoveryConfig(lost_bookie_delay_s=DELAY_S, check_interval_s=0),
)
UNREPAIRED = replace(AUDITED, autorecovery=replace(AUDITED.autorecovery, worker=False))
"""Marks stay, because no worker repairs."""


async def marks(stage: Stage) -> list[LedgerMark]:
    store = await stage.cluster.metadata.connect()
    found = [mark async for mark in Underreplication(store).marked()]
    await store.close()
    return found


async def marked_for(stage: Stage, bookie: BookieId) -> set[LedgerId]:
    """Return the ledgers marked because the bookie is missing. A leader marks others, if a bookie was slow and lacks
    copies."""
    return {mark.ledger for mark in await marks(stage) if bookie in mark.replicas}


async def ledgers(stage: Stage) -> list[LedgerMetadata]:
    store = await stage.cluster.metadata.connect()
    found = [(await LedgerStore(store).read(ledger))[0] for ledger in await LedgerStore(store).list_ids()]
    await store.close()
    return found


def auditors(stage: Stage) -> list[Node]:
    """Return the running nodes that believe that they are the auditor."""
    served = [(node, node.served.auditor) for node in stage.cluster.nodes if node.is_running and node.served]
    return [node for node, auditor in served if auditor is not None and auditor.statistics()["active"]]


async def write(stage: Stage, count: int) -> None:
    for number in range(count):
        await stage.put_until_done(stage.leader, b"key-%d" % number)


async def write_until_it_has_some(stage: Stage, bookie: BookieId) -> set[LedgerId]:
    """Write until closed ledgers name the bookie, which is permanent, and return these ledgers. An ensemble leaves
    out one of the four bookies, by chance the same one several times."""
    for _ in range(60):
        await write(stage, 5)
        has = {
            each.ledger
            for each in await ledgers(stage)
            if each.state is LedgerState.CLOSED and bookie in bookies_of(each)
        }
        if has:
            return has
        await asyncio.sleep(AUDITED.log.check_every_s)
    raise AssertionError(f"no ledger has {bookie} in its ensemble")


@pytest.mark.parametrize("seed", range(1, 4))
def test_rolling_restart_of_all_nodes_marks_nothing(seed: int) -> None:
    async def story(stage: Stage) -> None:
        await write(stage, 20)
        for node in stage.cluster.nodes:
            await node.stop()
            await asyncio.sleep(DELAY_S - 8)
            node.start()
            await stage.until(lambda node=node: node.served is not None)  # type: ignore[misc]
            await write(stage, 5)
        await asyncio.sleep(2 * DELAY_S)
        assert len(auditors(stage)) == 1
        assert await marks(stage) == []

    play(story, AUDITED, seed)


@pytest.mark.parametrize("seed", range(1, 4))
def test_next_auditor_marks_ledgers_when_auditor_machine_stays_down(seed: int) -> None:
    async def story(stage: Stage) -> None:
        await write(stage, 30)
        await stage.until(lambda: len(auditors(stage)) == 1)
        (dead,) = auditors(stage)
        assert dead.served is not None
        assert dead.served.bookie is not None
        bookie = dead.served.bookie.id
        had = await write_until_it_has_some(stage, bookie)
        assert auditors(stage) == [dead]
        dead.crash(power=True)
        await asyncio.sleep(DELAY_S - 5)
        assert await marked_for(stage, bookie) == set()
        await asyncio.sleep(60)
        assert len(auditors(stage)) == 1
        named = {each.ledger for each in await ledgers(stage) if bookie in bookies_of(each)}
        assert named >= had
        assert await marked_for(stage, bookie) >= named

    play(story, UNREPAIRED, seed)


# docs/protocol.md A9
def test_findings_of_bookie_scrub_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Knobs.bookie

    def eager(self: Knobs, name: str, listen: str) -> BookieConfig:
        return replace(told(self, name, listen), scrub_first_s=5, scrub_rest_s=5)

    monkeypatch.setattr(Knobs, "bookie", eager)
    monkeypatch.setattr(copier, "ROUND_S", 100_000.0)

    async def story(stage: Stage) -> None:
        other = stage.others(stage.leader)[0]
        stage.cluster.lossy = other
        for number in range(60):
            await stage.ask(commands.Put(b"k%d" % number, b"%04d" % number * 500), stage.leader)
        assert other.served is not None
        bookie = other.served.bookie
        assert bookie is not None
        segment = min(path for path in other.disk.names.now.files if path.endswith(".journal"))
        data = bytes(other.disk.names.now.files[segment].cache.data)
        values = [b"%04d" % number * 500 for number in range(60)]
        other.disk.flip_bit(segment, 8 * next(data.index(value) for value in values if value in data))
        await stage.until(lambda: bool(bookie.upkeep[0].scrubber.damaged), 60)
        await asyncio.sleep(1)
        (damaged,) = {ledger for ledger, _ in bookie.upkeep[0].scrubber.damaged}
        before = {mark.ledger: mark for mark in await marks(stage)}[damaged]
        assert bookie.id in before.replicas
        await asyncio.sleep(20)
        after = {mark.ledger: mark for mark in await marks(stage)}[damaged]
        assert after.version > before.version, "each round writes the mark again"

    chosen = replace(knobs(roll_entries=10, retention_ms=3_600_000), segment_bytes=16 << 10)
    play(story, replace(chosen, autorecovery=AutorecoveryConfig(auditor=False, worker=False)))
