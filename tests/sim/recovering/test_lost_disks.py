"""Whole clusters that lose disks, without any command of an operator: nothing acknowledged is lost, and everything
has all its copies again (docs/protocol.md, A10)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.server.fsck.check import Fsck
from kvstore.server.fsck.findings import Severity
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.config import LogConfig
from tests.sim.judges.scrub import _copies
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.strikes.knobs import Knobs
from tests.sim.workloads import Load, Workload

pytestmark = pytest.mark.sim
log = logging.getLogger(__name__)

LOST_S = 3
WHOLE_S_MAX = 180.0
CALM = replace(
    knobs(retention_ms=3_600_000),
    nodes=4,
    log=LogConfig(roll_entries=30, roll_age_s=5.0, check_every_s=0.3),
    autorecovery=AutorecoveryConfig(lost_bookie_delay_s=LOST_S, check_interval_s=0, placement_interval_s=0),
    load=Load(registers=2, counters=1, banks=1, readers=1, pause_s=0.1),
)


ZONED = replace(CALM, nodes=6, zones=("a", "b", "c"))


def bookie_of(node: Node) -> BookieId:
    assert node.served is not None
    assert node.served.bookie is not None
    return node.served.bookie.id


def copies_made(stage: Stage) -> tuple[int, int]:
    """Return the copies and bytes made by workers since their processes began."""
    said = [node.served.worker.statistics() for node in stage.cluster.nodes if node.served and node.served.worker]
    return sum(each["copies_made"] for each in said), sum(each["copied_bytes"] for each in said)


def ledgers(stage: Stage) -> dict[LedgerId, LedgerMetadata]:
    """Return the ledgers that a list names."""
    rules = stage.cluster.rules
    return {line.id: rules.ledgers[line.id] for lines in rules.lists.values() for line in lines}


def naming(stage: Stage, bookie: BookieId) -> list[LedgerId]:
    return [
        ledger for ledger, each in ledgers(stage).items() if any(bookie in part.ensemble for part in each.fragments)
    ]


def short(stage: Stage) -> list[tuple[LedgerId, EntryId, int]]:
    """Return entries of closed ledgers with fewer than Qw copies in the places that the metadata names."""
    storages = {bookie_of(node): node.served.bookie.storage for node in stage.cluster.nodes if node.served}  # type: ignore[union-attr]
    found = []
    for ledger, metadata in ledgers(stage).items():
        for entry in map(EntryId, range(metadata.last_entry + 1 if metadata.state is LedgerState.CLOSED else 0)):
            held = _copies(metadata, entry, storages).keys() & set(metadata.write_set(entry))
            if len(held) < metadata.quorum.write:
                found.append((ledger, entry, len(held)))
    return found


def crowded(stage: Stage) -> list[LedgerId]:
    """Return closed ledgers with two copies of an entry in one zone. Ensembles are as wide as write sets."""
    zones = {node.name: node.zone for node in stage.cluster.nodes if node.zone}
    return [
        ledger
        for ledger, each in ledgers(stage).items()
        for part in each.fragments
        if each.state is LedgerState.CLOSED and zones
        if len({zones[bookie.partition("-")[0]] for bookie in part.ensemble}) < len(part.ensemble)
    ]


async def checked(stage: Stage) -> list[str]:
    """Return the findings of fsck that are more than notes."""
    store = await stage.cluster.metadata.connect()
    report = await Fsck(stage.world.env("fsck"), store).run()
    await store.close()
    return [finding.message for finding in report.findings if finding.severity is not Severity.NOTE]


async def lose_disk(stage: Stage, node: Node) -> BookieId:
    """Remove the directories of the node, which returns as a new bookie. Returns the lost id."""
    former = bookie_of(node)
    node.crash()
    node.wipe()
    await asyncio.sleep(1)
    node.start()
    await stage.until(lambda: node.served is not None)
    assert bookie_of(node) != former
    return former


@pytest.mark.parametrize(("seed", "chosen"), [(1, CALM), (1, ZONED)], ids=("anywhere", "in zones"))
def test_all_copies_are_restored_after_three_lost_disks_under_load(seed: int, chosen: Knobs) -> None:
    async def story(stage: Stage) -> None:
        workload = Workload(stage.cluster, stage.world.fork("workload"), CALM.load)
        users = [stage.cluster.spawn(each, name="user") for each in workload.workers]
        for number in (0, 2, 1):
            await asyncio.sleep(6)
            began = stage.world.loop.time()
            former = await lose_disk(stage, stage.cluster.nodes[number])
            named = len(naming(stage, former))
            assert named, "ledgers name the lost bookie"
            await stage.until(lambda former=former: not naming(stage, former), WHOLE_S_MAX)
            await stage.until(lambda: not short(stage) and not crowded(stage), WHOLE_S_MAX)
            copies, size = copies_made(stage)
            took_s = stage.world.loop.time() - began
            log.info("%s: %d ledgers whole after %.1f s, %d copies, %d bytes", former, named, took_s, copies, size)
        workload.stop()
        for user in users:
            await user
        await asyncio.sleep(30)
        assert await checked(stage) == []

    play(story, chosen, seed)


def test_rolling_restart_copies_no_byte() -> None:
    async def story(stage: Stage) -> None:
        for number in range(60):
            await stage.put_until_done(stage.leader, b"k%d" % number)
        await asyncio.sleep(10)
        assert not short(stage)
        before = {node.name: node.disk for node in stage.cluster.nodes}
        made = 0
        for node in stage.cluster.nodes:
            await node.stop()
            await asyncio.sleep(LOST_S - 1)
            node.start()
            await stage.until(lambda node=node: node.served is not None)
            made += copies_made(stage)[0]
            await asyncio.sleep(5)
        assert before == {node.name: node.disk for node in stage.cluster.nodes}
        await asyncio.sleep(30)
        assert (made, copies_made(stage)) == (0, (0, 0))
        assert not short(stage)

    play(story, CALM)
