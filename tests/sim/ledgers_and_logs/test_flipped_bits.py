"""Bits that flip between writer and bookie, and between bookie and tail: nothing without a valid digest is stored or
believed (docs/protocol.md, B21, L16 and T10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import BookieError
from kvstore.proto.digest import HEADER
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId
from kvstore.wal.bookies import BookieClients
from kvstore.wal.ports import ReadAnswer
from tests.sim.ledgers_and_logs.bench import B2, B3, Bench, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, Writer, numbers, opened
from tests.sim.stories.scenarios import Stage, knobs, play

pytestmark = pytest.mark.sim


def flip_polls(bench: Bench) -> None:
    """Make every long poll's answer name a higher last-add-confirmed than its bookie knows and bring the next entry."""
    long_poll = bench.bookies.long_poll

    def flipped(
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        timeout_ms: int,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        def answer(true: ReadAnswer | BookieError) -> None:
            if isinstance(true, ReadAnswer):
                entry = EntryId(previous_lac + 1)
                packet = bench.bookies.at[bookie].entries.get((ledger, entry))
                true = ReadAnswer(NO_ENTRY if packet is None else entry, packet, EntryId(true.max_lac + 64))
            done(true)

        long_poll(bookie, ledger, previous_lac, min(timeout_ms, 50), answer)

    bench.bookies.long_poll = flipped  # type: ignore[method-assign]


def test_tail_rejects_last_add_confirmed_without_valid_digest() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(2)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(3)  # on B1 only: a recovery may drop them
        flip_polls(bench)
        reader = bench.logs().reader(P, None)
        found = [entry.payload for _ in range(4) for entry in await reader.read(1000)]
        assert found == numbers(1, 2)
        for bookie in (B2, B3):
            bench.bookies.release_adds(bookie)
        async with asyncio.timeout(20):
            while len(found) < 5:
                found += [entry.payload for entry in await reader.read(1000)]
        assert found == numbers(1, 5), "confirmed entries still arrive"
        await reader.close()

    run(case)


def test_packets_damaged_in_transit_are_stored_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    flips: list[int] = []

    async def story(stage: Stage) -> None:
        random, add_to_all = stage.world.fork("flips"), BookieClients.add_to_all

        def flipped(packet: bytes) -> bytes:
            changed = bytearray(packet)
            bit = random.randrange(8 * 16, 8 * len(packet))
            if random.random() < 0.5:
                bit = 8 * (HEADER.size - 9) + random.randrange(3)  # a bit of the last-add-confirmed
            changed[bit // 8] ^= 1 << bit % 8
            flips.append(bit)
            return bytes(changed)

        def add_flipped(self: Any, bookies: Any, ledger: Any, entry: Any, packet: bytes, *rest: Any) -> None:
            for bookie in bookies:
                is_hit = bookie != self.own and random.random() < 0.04
                add_to_all(self, (bookie,), ledger, entry, flipped(packet) if is_hit else packet, *rest)

        monkeypatch.setattr(BookieClients, "add_to_all", add_flipped)
        for _ in range(60):
            await stage.put(stage.leader if stage.cluster.leader(P) else stage.cluster.nodes[0], attempts=3)
        monkeypatch.setattr(BookieClients, "add_to_all", add_to_all)
        served = [node.served for node in stage.cluster.nodes if node.served is not None]

        def refused() -> int:
            return sum(each.bookie.storage.statistics.refused_digest for each in served)

        await stage.until(lambda: refused() >= len(flips))  # the last ones are still in flight
        assert refused() == len(flips)

    flipped = 0
    for seed in range(1, 4):
        flips.clear()
        play(story, knobs(roll_entries=10), seed)
        flipped += len(flips)  # none in a run whose writes all went to the first ledger
    assert flipped
