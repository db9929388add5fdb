"""A tail's long poll goes to a bookie that gets the adds (docs/protocol.md, T3, T5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.types import BookieId, LedgerId, Quorum, Seq
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.log import PartitionLogs
from kvstore.wal.tailing.polling import CHECK_S, PollChoice
from kvstore.wal.tailing.tail import TailReader
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, RELEASE, Bench, P, run
from tests.sim.ledgers_and_logs.logs import Writer, opened
from tests.wal.ledgers import e

pytestmark = pytest.mark.sim

PROMPT_S = 0.1


def logs_beside(bench: Bench, own: BookieId, config: LogConfig) -> PartitionLogs:
    """Those of the node whose bookie `own` is."""
    store = bench.ports.ledgers._store
    choice = BookieChoice(bench.bookies.view, store, clock=bench.env.clock, random=bench.env.random, own=own)
    return PartitionLogs(bench.env, store, bench.bookies, choice, is_release=RELEASE.__eq__, config=config)


async def lags(bench: Bench, writer: Writer, reader: TailReader, count: int, gap_s: float = 1.0) -> list[float]:
    """How long after each of `count` appends the tail had the entry."""
    found: list[float] = []
    for _ in range(count):
        await asyncio.sleep(gap_s)
        writer.log.append(b"x", Seq(writer.seq), writer.entries.done)
        writer.seq += 1
        began = bench.env.clock.now()
        while not await reader.read(20_000):
            pass
        found.append(bench.env.clock.now() - began)
    return found


@pytest.mark.parametrize(
    ("quorum", "behind"),
    [
        (Quorum(3, 3, 2), (B1,)),
        (Quorum(5, 5, 3), (B1, B2)),
        (Quorum(5, 3, 2), (B1,)),
    ],
    ids=str,
)
def test_a_near_bookie_that_gets_no_adds_delays_one_entry_and_no_more(
    quorum: Quorum, behind: tuple[BookieId, ...]
) -> None:
    config = LogConfig(quorum=quorum, check_every_s=0.1)

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(config)))
        reader = logs_beside(bench, B1, config).reader(P, None)
        assert max(await lags(bench, writer, reader, 5)) < PROMPT_S
        for bookie in behind:
            bench.bookies.at[bookie].holds_adds = True
        late = [lag for lag in await lags(bench, writer, reader, 25) if lag >= PROMPT_S]
        assert len(late) <= 1
        assert max(late, default=0.0) < 3.0
        await reader.close()

    run(case, bookies=quorum.ensemble)


def test_a_bookie_that_has_caught_up_is_polled_again() -> None:
    config = LogConfig(check_every_s=0.1)

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(config)))
        reader = logs_beside(bench, B1, config).reader(P, None)
        bench.bookies.at[B1].holds_adds = True
        await lags(bench, writer, reader, 5)
        polled: list[BookieId] = []
        poll = bench.bookies.long_poll

        def noted(bookie: BookieId, *rest: object) -> None:
            polled.append(bookie)
            poll(bookie, *rest)  # type: ignore[arg-type]

        bench.bookies.long_poll = noted  # type: ignore[method-assign, assignment]
        assert max(await lags(bench, writer, reader, 5)) < PROMPT_S
        assert B1 not in polled
        bench.bookies.release_adds(B1)
        assert max(await lags(bench, writer, reader, int(CHECK_S) + 20)) < PROMPT_S
        assert set(polled[-5:]) == {B1}
        await reader.close()

    run(case)


def test_who_is_behind_is_polled_last() -> None:
    choice = PollChoice()
    assert choice.first((B1, B2, B3)) == B1
    assert choice.compare({B1: e(4), B2: e(7), B3: e(5)}, now=1.0) == 7
    assert choice.first((B1, B2, B3)) == B2
    choice.failed(B2, now=2.0)
    assert choice.first((B2, B1, B3)) == B1, "of those behind, who has been so for longest"
    assert choice.due(now=1.0 + CHECK_S) == [B1, B3]
    assert choice.due(now=1.0 + CHECK_S) == []
    choice.caught_up(B3)
    assert choice.first((B1, B2, B3)) == B3


def test_a_tail_that_is_closed_while_it_opens_a_ledger_asks_nobody_anything_any_more() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(LogConfig(check_every_s=0.1))))
        await writer.append(2)
        reader = bench.logs().reader(P, None)
        read_ledger = reader._ports.ledgers.read

        async def close_meanwhile(ledger: LedgerId) -> Any:
            found = await read_ledger(ledger)
            await reader.close()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader._ports.ledgers, "read", close_meanwhile)
            await reader._open(LedgerId(0), e(0))
        polled = []
        patched = reader._end._believe
        reader._end._believe = lambda *answer: polled.append(patched(*answer))  # type: ignore[method-assign]
        reader._end.poll(e(0))
        await bench.pass_time(3)
        assert polled == []

    run(case)
