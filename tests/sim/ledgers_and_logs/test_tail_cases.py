"""Tails of a log, case by case, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.types import Seq
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Bench, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, numbers, opened, read_all

pytestmark = pytest.mark.sim


def test_tail_is_never_behind_an_idle_leader() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        reader = bench.logs().reader(P, None)
        await writer.append(1)
        began = bench.env.clock.now()
        assert [entry.payload for entry in await reader.read(5000)] == [b"1"]
        assert bench.env.clock.now() - began < 0.05
        waiting = bench.env.nursery.spawn(reader.read(5000), name="long poll")
        await asyncio.sleep(1)
        writer.log.append(b"2", Seq(2), writer.entries.done)
        began = bench.env.clock.now()
        assert [entry.payload for entry in await waiting] == [b"2"]
        assert bench.env.clock.now() - began < 0.05
        await reader.close()

    run(case)


def test_tail_waits_no_longer_than_its_timeout() -> None:
    async def case(bench: Bench) -> None:
        await opened(bench.logs(NEVER))
        reader = bench.logs().reader(P, None)
        began = bench.env.clock.now()
        assert list(await reader.read(700)) == []
        assert 0.6 < bench.env.clock.now() - began < 0.8
        assert list(await reader.read(0)) == []
        await reader.close()

    run(case)


def test_tail_continues_from_any_position() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(17)
        await asyncio.sleep(0.5)
        for count, position in enumerate(writer.entries.confirmed[:-1], start=1):
            assert (await read_all(bench.logs(), 1, after=position))[0] == b"%d" % (count + 1)

    run(case)


def test_tail_returns_nothing_after_last_confirmed_entry() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(2)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(3)  # on B1 only
        reader = bench.logs().reader(P, None)
        found = [entry.payload for entry in await reader.read(1000)]
        found += [entry.payload for entry in await reader.read(3000)]
        assert found == numbers(1, 2)
        await reader.close()

    run(case)


def test_tail_crosses_to_next_ledger_exactly_at_closed_end() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(3)
        reader = bench.logs().reader(P, None)
        seen = [entry.payload for entry in await reader.read(1000)]
        new = Writer(await opened(bench.logs(NEVER)), seq=4)
        await new.append(3)
        while len(seen) < 6:
            seen += [entry.payload for entry in await reader.read(1000)]
        assert seen == numbers(1, 6)
        await reader.close()

    run(case)


def test_tail_reads_around_missing_bookie() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(5)
        for gone in (B1, B2, B3):
            bench.bookies.stop(gone)
            assert await read_all(bench.logs(), 5) == numbers(1, 5)
            bench.bookies.start(gone)

    run(case)


def test_tail_waits_for_log_that_does_not_exist_yet() -> None:
    async def case(bench: Bench) -> None:
        reader = bench.logs().reader(P, None)
        waiting = bench.env.nursery.spawn(reader.read(5000), name="waits")
        await asyncio.sleep(0.5)
        await Writer(await opened(bench.logs(NEVER))).append(1)
        assert [entry.payload for entry in await waiting] == [b"1"]
        await reader.close()

    run(case)
