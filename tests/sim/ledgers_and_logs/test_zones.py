"""Copies of one entry are in distinct zones (docs/protocol.md, W10, W11): when ledgers are placed, when bookies are
replaced, and again after the outage of a zone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from kvstore.meta.ledgers import LedgerStore
from kvstore.server.fsck.check import Fsck
from kvstore.server.fsck.findings import FsckFinding, Severity
from kvstore.types import LedgerMetadata, LedgerState
from kvstore.wal.config import LogConfig
from tests.sim.stories.scenarios import P, Stage, knobs, play

pytestmark = pytest.mark.sim

T = TypeVar("T")
ZONES = ("a", "b", "c")
SIX = replace(knobs(), nodes=6, partitions=3, zones=ZONES, log=LogConfig(roll_entries=4, check_every_s=0.3))
HELD = replace(SIX, partition=replace(SIX.partition, retention_ms=3_600_000))


def zone_of(bookie: str) -> str:
    return ZONES[(int(bookie[1:].partition("-")[0]) - 1) % 3]


async def ledgers(stage: Stage) -> list[LedgerMetadata]:
    """Return the ledgers with entries."""
    store = await stage.cluster.metadata.connect()
    found = [(await LedgerStore(store).read(ledger))[0] for ledger in await LedgerStore(store).list_ids()]
    await store.close()
    return [each for each in found if each.state is LedgerState.CLOSED and each.last_entry >= 0]


async def sharing(stage: Stage) -> list[LedgerMetadata]:
    """Return the closed ledgers with two copies of an entry in one zone."""
    return [
        each
        for each in await ledgers(stage)
        if any(len(set(map(zone_of, part.ensemble))) < len(part.ensemble) for part in each.fragments)
    ]


async def checked(stage: Stage) -> list[FsckFinding]:
    """Return the findings of fsck about zones."""
    store = await stage.cluster.metadata.connect()
    report = await Fsck(stage.world.env("fsck"), store).run()
    await store.close()
    return [finding for finding in report.findings if "share a zone" in finding.message]


async def write(stage: Stage, count: int) -> None:
    for number in range(count):
        await stage.until(lambda: stage.cluster.leader(P) is not None)
        await stage.put_until_done(stage.leader, b"key-%d" % number)


async def soon(find: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `find` as soon as it is not empty."""
    deadline = asyncio.get_running_loop().time() + 120
    while not (found := await find()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert found
    return found


async def none(found: Awaitable[list[LedgerMetadata]]) -> bool:
    return not await found


async def only_notes(stage: Stage) -> bool:
    return all(finding.severity is Severity.NOTE for finding in await checked(stage))


@pytest.mark.parametrize("seed", range(1, 4))
def test_ledgers_on_six_bookies_in_three_zones_have_copies_in_all_zones(seed: int) -> None:
    async def story(stage: Stage) -> None:
        for _ in range(20):  # batching decides how many writes fill a ledger
            await write(stage, 50)
            if len(await ledgers(stage)) >= 5:
                break
        assert len(await ledgers(stage)) >= 5
        assert len(await sharing(stage)) <= 1, "the first ledger may be older than the bookies of a zone"
        await soon(lambda: none(sharing(stage)))
        assert await checked(stage) == []

    play(story, HELD, seed)


@pytest.mark.parametrize("seed", range(1, 4))
def test_bookie_is_replaced_by_other_bookie_of_its_zone(seed: int) -> None:
    async def story(stage: Stage) -> None:
        for number in range(3):
            await write(stage, 10)
            node = stage.others(stage.leader)[number]
            node.crash()
            await write(stage, 10)
            node.start()
            await asyncio.sleep(8)
        assert not await sharing(stage)

    play(story, HELD, seed)


def test_entries_written_during_zone_outage_are_spread_when_zone_is_back() -> None:
    async def story(stage: Stage) -> None:
        await write(stage, 10)
        leads = zone_of(stage.leader.name)
        zone = next(zone for zone in ZONES if zone != leads)
        away = [node for node in stage.cluster.nodes if node.zone == zone]
        for node in away:
            node.crash()
        await asyncio.sleep(5)
        await write(stage, 30)
        assert await sharing(stage), "there was no third zone"
        assert await checked(stage) == [], "no other placement was possible"
        for node in away:
            node.start()
        found = await soon(lambda: checked(stage))
        assert all(f" in {zone}" not in finding.message for finding in found)
        await write(stage, 10)  # the open ledger is moved when it is closed
        await soon(lambda: none(sharing(stage)))
        await soon(lambda: only_notes(stage))  # of open ledgers; a ledger closed meanwhile is moved as well

    play(story, HELD)
