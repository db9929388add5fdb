"""A tail polls a bookie that gets the adds, or receives entries from its own bookie (docs/protocol.md, T3, T5, T11)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.errors import Corrupted
from kvstore.types import BookieId, DigestType, LedgerId, Quorum, Seq
from kvstore.wal.bookies import READ_TIMEOUT_S
from kvstore.wal.choice import BookieChoice
from kvstore.wal.config import LogConfig
from kvstore.wal.log import PartitionLogs
from kvstore.wal.ports import LogEntry
from kvstore.wal.tailing.fresh import BYTES_MAX, ENTRIES_MAX, FreshEntries
from kvstore.wal.tailing.polling import CHECK_S, FIRST_CHECK_S, PollChoice
from kvstore.wal.tailing.tail import GIVEN_MAX, TailReader
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Bench, P, run
from tests.sim.ledgers_and_logs.ledgers import RELEASE
from tests.sim.ledgers_and_logs.logs import Writer, opened
from tests.sim.ledgers_and_logs.model_bookies import DELAY_S
from tests.wal.ledgers import e

pytestmark = pytest.mark.sim

PROMPT_S = 0.1


def logs_beside(bench: Bench, own: BookieId, config: LogConfig) -> PartitionLogs:
    """Return the logs of the node with the bookie `own`."""
    store = bench.ports.ledgers._store
    choice = BookieChoice(bench.bookies.view, store, clock=bench.env.clock, random=bench.env.random, own=own)
    return PartitionLogs(bench.env, store, bench.bookies, choice, is_release=RELEASE.__eq__, config=config)


async def lags(bench: Bench, writer: Writer, reader: TailReader, count: int, gap_s: float = 1.0) -> list[float]:
    """Return the delays after which the tail had each of `count` appended entries."""
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
@pytest.mark.parametrize("own", [None, B1], ids=["asks", "listens"])
def test_near_bookie_without_adds_delays_only_one_entry(
    own: BookieId | None, quorum: Quorum, behind: tuple[BookieId, ...]
) -> None:
    config = LogConfig(quorum=quorum, check_every_s=0.1)

    async def case(bench: Bench) -> None:
        bench.bookies.own = own
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


@pytest.mark.parametrize("quorum", [Quorum(3, 3, 2), Quorum(5, 3, 2)], ids=str)
@pytest.mark.parametrize("listens", [False, True], ids=["asks", "listens"])
def test_bookie_replaced_in_ensemble_is_not_waited_for(quorum: Quorum, listens: bool) -> None:
    config = LogConfig(quorum=quorum, check_every_s=0.1)

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(config)))
        metadata = writer.log.handle.writer.metadata
        near = metadata.fragments[-1].ensemble[1]
        bench.bookies.own = near if listens else None
        reader = logs_beside(bench, near, config).reader(P, None)
        assert max(await lags(bench, writer, reader, 5)) < PROMPT_S
        bench.bookies.at[near].is_readonly = True  # it refuses the next add and answers reads
        assert max(await lags(bench, writer, reader, 15)) < PROMPT_S
        assert near not in writer.log.handle.writer.metadata.fragments[-1].ensemble
        await reader.close()

    run(case, bookies=quorum.ensemble + 1)


@pytest.mark.parametrize("gap_s", [1.0, 0.05, 0.003])
def test_striping_delays_an_entry_by_at_most_one_round_trip(gap_s: float) -> None:
    def lag_of(quorum: Quorum, own: BookieId) -> float:
        found: list[float] = []

        async def case(bench: Bench) -> None:
            bench.bookies.own = own
            config = LogConfig(quorum=quorum, check_every_s=0.1)
            writer = Writer(await opened(bench.logs(config)))
            reader = logs_beside(bench, own, config).reader(P, None)
            found.extend(await lags(bench, writer, reader, 25, gap_s))
            await reader.close()

        run(case, bookies=5)
        return max(found)

    plain = max(lag_of(Quorum(3, 3, 2), own) for own in (B1, B2, B3))
    striped = max(lag_of(Quorum(5, 3, 2), own) for own in (B1, B2, B3))
    assert striped <= plain + 3 * DELAY_S


def test_bookie_that_has_caught_up_is_polled_again() -> None:
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


class Taker:
    """Takes and records entries."""

    def __init__(self) -> None:
        self.got: list[LogEntry] = []
        self.may = True
        self.failure: Exception | None = None

    def may_take(self) -> bool:
        return self.may

    def take(self, entries: Sequence[LogEntry]) -> None:
        if self.failure is not None:
            raise self.failure
        self.got += entries


async def listening(bench: Bench) -> tuple[Writer, TailReader]:
    """Return a writer, and a tail that has read everything written and receives new entries."""
    config = LogConfig(check_every_s=0.1)
    bench.bookies.own = B1
    writer = Writer(await opened(bench.logs(config)))
    reader = logs_beside(bench, B1, config).reader(P, None)
    await writer.append(1)
    while not await reader.read(1_000):
        pass
    return writer, reader


def test_entries_stored_by_own_bookie_are_delivered_without_a_request() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker, wanted = Taker(), []
        reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.bookies, "read", lambda *_args, **_rest: pytest.fail("it was read back"))
            patch.setattr(bench.bookies, "long_poll", lambda *_: pytest.fail("it was asked"))
            for _ in range(20):
                wanted.append(writer.seq)
                await writer.append(1)
                await bench.pass_time(0.2)
                assert len(taker.got) == len(wanted)
        assert [each.position.entry for each in taker.got] == list(range(1, 21))
        assert not reading.done()
        await reader.close()
        reading.cancel()

    run(case)


def test_own_bookie_with_hanging_disk_delays_no_reader() -> None:
    async def case(bench: Bench) -> None:
        config = LogConfig(check_every_s=0.1)
        writer = Writer(await opened(bench.logs(config)))
        await writer.append(200)
        bench.bookies.own = B1
        bench.bookies.at[B1].stalls_s = READ_TIMEOUT_S
        reader = logs_beside(bench, B1, config).reader(P, None)
        began, got = bench.env.clock.now(), 0
        while got < 200:
            got += len(await reader.read(1_000))
        assert bench.env.clock.now() - began < 4.0
        await reader.close()

    run(case)


def test_entry_is_not_delivered_before_it_is_confirmed() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker = Taker()
        reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        writer.log.append(b"x", Seq(writer.seq), writer.entries.done)
        await bench.pass_time(0.5)
        assert (LedgerId(0), e(1)) in bench.bookies.at[B1].entries
        assert taker.got == []
        bench.bookies.release_adds(B2)
        await bench.pass_time(0.5)
        assert [each.position.entry for each in taker.got] == [1]
        await reader.close()
        reading.cancel()

    run(case)


def test_error_of_taker_is_raised_by_read() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker = Taker()
        taker.failure = Corrupted("not this state's")
        bench.env.nursery.spawn(writer.append(1), name="append")
        with pytest.raises(Corrupted, match="not this state's"):
            await reader.read(60_000, taker)
        await reader.close()

    run(case)


def test_entries_not_taken_are_returned_by_read() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker = Taker()
        taker.may = False
        reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        await writer.append(2)
        assert [each.position.entry for each in await reading] == [1]
        assert [each.position.entry for each in await reader.read(60_000, taker)] == [2]
        assert taker.got == []
        await reader.close()

    run(case)


def test_more_entries_than_fit_one_turn_wake_read() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker, count = Taker(), 3 * GIVEN_MAX
        reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        for _ in range(count):
            writer.log.append(b"x", Seq(writer.seq), writer.entries.done)
        await bench.pass_time(0.1)
        assert taker.got == []
        bench.bookies.release_adds(B2)
        await bench.pass_time(0.2)
        assert len(taker.got) == GIVEN_MAX
        found = [*taker.got, *await reading]
        assert [each.position.entry for each in found] == list(range(1, count + 1))
        await reader.close()

    run(case)


def test_cancelled_read_is_given_nothing() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        taker = Taker()
        reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        await bench.pass_time()
        reading.cancel()
        await writer.append(2)
        assert taker.got == []
        found = [*await reader.read(1_000), *await reader.read(1_000)]
        assert [each.position.entry for each in found] == [1, 2]
        await reader.close()

    run(case)


def test_cancelled_read_skips_nothing() -> None:
    async def case(bench: Bench) -> None:
        writer, reader = await listening(bench)
        await writer.append(5)
        bench.bookies.own = None
        for steps in range(40):
            again = logs_beside(bench, B1, LogConfig()).reader(P, None)
            reading = bench.env.nursery.spawn(again.read(1_000), name="read")
            assert isinstance(reading, asyncio.Task)
            for _ in range(steps):
                await asyncio.sleep(0.0001)
            reading.cancel()
            await asyncio.sleep(0)
            if reading.cancelled():
                assert [each.position.entry for each in await again.read(1_000)] == list(range(6))
            await again.close()
        await reader.close()

    run(case)


def test_advanced_or_closed_tail_is_notified_of_nothing() -> None:
    async def case(bench: Bench) -> None:
        config = LogConfig(check_every_s=0.1, roll_entries=3)
        bench.bookies.own = B1
        writer = Writer(await opened(bench.logs(config)))
        reader = logs_beside(bench, B1, config).reader(P, None)
        reading = bench.env.nursery.spawn(reader.read(60_000, taker := Taker()), name="read")
        for _ in range(8):
            await writer.append(1, gap_s=0.3)
            if reading.done():
                taker.got += await reading
                reading = bench.env.nursery.spawn(reader.read(60_000, taker), name="read")
        assert len(taker.got) == 8
        listeners = bench.bookies.at[B1].listeners
        assert [len(listeners[ledger]) for ledger in sorted(listeners)] == [0] * (len(listeners) - 1) + [1]
        reading.cancel()
        await reader.close()
        assert not any(listeners.values())

    run(case)


def test_tail_closed_during_its_check_does_not_begin_to_listen() -> None:
    async def case(bench: Bench) -> None:
        writer, other = await listening(bench)
        await other.close()
        for steps in range(30):
            reader = logs_beside(bench, B1, LogConfig()).reader(P, writer.entries.confirmed[-1])
            reading = bench.env.nursery.spawn(reader.read(500), name="read")
            for _ in range(steps):
                await asyncio.sleep(0)
            await reader.close()
            await bench.pass_time(3.0)
            assert not any(bench.bookies.at[B1].listeners.values())
            reading.cancel()

    run(case)


def test_entries_read_elsewhere_are_dropped() -> None:
    async def case(bench: Bench) -> None:
        config = LogConfig(quorum=Quorum(3, 2, 2), check_every_s=0.1)
        bench.bookies.own = B1
        writer = Writer(await opened(bench.logs(config)))
        reader = logs_beside(bench, B1, config).reader(P, None)
        taker = Taker()
        while len(taker.got) < 4 * ENTRIES_MAX:
            for _ in range(8):
                writer.log.append(b"x", Seq(writer.seq), writer.entries.done)
                writer.seq += 1
            taker.got += await reader.read(100, taker)
        while read := await reader.read(1_000, taker):
            taker.got += read
        assert [each.position.entry for each in taker.got] == list(range(writer.seq - 1))
        assert reader._end.fresh._packets == {}
        assert reader._end.fresh._bytes == 0
        await reader.close()

    run(case)


def test_unconfirmed_entries_are_kept_up_to_limits() -> None:
    fresh = FreshEntries(DigestType.CRC32C, e(5))
    for entry in range(ENTRIES_MAX + 20):
        fresh.keep(entry, b"p" * 100)
    assert fresh.take(e(4)) is None
    assert [entry for entry in range(5, 200) if fresh.take(e(entry)) is not None] == list(range(5, 5 + ENTRIES_MAX))
    fresh.keep(200, b"p" * BYTES_MAX)
    fresh.keep(201, b"p")
    fresh.forget_before(e(201))
    fresh.keep(202, b"p" * BYTES_MAX)
    assert [entry for entry in range(200, 203) if fresh.take(e(entry)) is not None] == [202]
    checked_by_nobody = FreshEntries(DigestType.DUMMY, e(0))
    checked_by_nobody.keep(0, b"p" * 100)
    assert checked_by_nobody.take(e(0)) is None


def test_lagging_bookie_is_polled_last() -> None:
    choice = PollChoice()
    assert choice.first((B1, B2, B3)) == B1
    assert choice.compare({B1: e(4), B2: e(7), B3: e(5)}, now=1.0) == 7
    assert choice.first((B1, B2, B3)) == B2
    choice.failed(B2, now=2.0)
    assert choice.first((B2, B1, B3)) == B1, "of the bookies behind, the one that has been behind for longest"
    assert choice.due(now=1.0 + CHECK_S) == [B1, B3]
    assert choice.due(now=1.0 + CHECK_S) == []
    choice.caught_up(B3)
    assert choice.first((B1, B2, B3)) == B3


def test_briefly_lagging_bookie_is_asked_again_after_growing_delays() -> None:
    choice = PollChoice()
    choice.compare({B1: e(3), B2: e(4)}, now=1.0)
    assert choice.first((B1, B2)) == B2
    assert choice.due(now=1.0 + FIRST_CHECK_S - 0.01) == []
    assert choice.due(now=1.0 + FIRST_CHECK_S) == [B1]
    assert choice.due(now=FIRST_CHECK_S + CHECK_S) == [], "the bookie had not caught up"
    assert choice.due(now=1.0 + FIRST_CHECK_S + CHECK_S) == [B1]
    choice.caught_up(B1)
    assert choice.first((B1, B2)) == B1


def test_tail_closed_while_opening_ledger_sends_no_more_requests() -> None:
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
