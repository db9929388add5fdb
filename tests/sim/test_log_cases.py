"""Single cases of partitions' logs, in virtual time, on model bookies: takeovers, rolls, tails, trims, orphans."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from kvstore.errors import (
    LedgerFenced,
    MetadataUnknown,
    NoSuchLedger,
    NotEnoughBookies,
    OutcomeUnknown,
    StoreError,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.types import LedgerId, LedgerState, Position, Quorum, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.creator import owner_of
from kvstore.wal.leader_log import OpenLog
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.lists import LedgerLists
from kvstore.wal.log import PartitionLogs
from kvstore.wal.opener import LedgerTakeover
from kvstore.wal.pins import Pins
from tests.sim.bench import B1, B2, B3, Appended, Bench, FrozenStore, P, first_seq, run
from tests.sim.ledgers import RELEASE

pytestmark = pytest.mark.sim

SMALL = LogConfig(roll_entries=5, check_every_s=0.1, orphan_age_s=20.0)
NEVER = LogConfig(check_every_s=0.1)


class Writer:
    """Appends numbered entries to an open log."""

    def __init__(self, log: OpenLog, seq: int = 1) -> None:
        self.log = log
        self.entries = Appended()
        self.seq = seq

    async def append(self, count: int, gap_s: float = 0.01) -> None:
        for _ in range(count):
            self.log.append(b"%d" % self.seq, Seq(self.seq), self.entries.done)
            self.seq += 1
            await asyncio.sleep(gap_s)
        await asyncio.sleep(0.1)


async def opened(logs: PartitionLogs, lease_ms: int = 500) -> OpenLog:
    return await logs.open_as_leader(P, lease_ms, first_seq)


async def read_all(logs: PartitionLogs, count: int, after: Position | None = None) -> list[bytes]:
    """The next `count` payloads of the log."""
    reader = logs.reader(P, after)
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [entry.payload for entry in await reader.read(1000)]
    await reader.close()
    return found


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


# ── takeover ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_leader_of_a_log_waits_for_nobody() -> None:
    async def case(bench: Bench) -> None:
        began = bench.env.clock.now()
        log = await opened(bench.logs())
        assert (log.epoch, log.recovered_end, log.waited) == (1, BEGINNING, False)
        assert bench.env.clock.now() - began < 0.1

    run(case)


def test_a_takeover_waits_out_the_lease_that_the_list_names() -> None:
    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(), lease_ms=2000)).append(3)
        began = bench.env.clock.now()
        log = await opened(bench.logs(), lease_ms=100)
        assert 2.2 <= bench.env.clock.now() - began < 2.4
        assert log.waited
        began = bench.env.clock.now()
        await opened(bench.logs(), lease_ms=100)  # the last two name 2,000 and 100
        assert 2.2 <= bench.env.clock.now() - began < 2.4
        began = bench.env.clock.now()
        await opened(bench.logs(), lease_ms=100)
        assert 0.15 <= bench.env.clock.now() - began < 0.3

    run(case)


def test_nothing_is_closed_or_listed_before_the_wait_is_over() -> None:
    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(), lease_ms=1000)).append(3)
        before = await bench.listed()
        taking = bench.env.nursery.spawn(opened(bench.logs()), name="takeover")
        await asyncio.sleep(1.0)
        metadata, _ = await bench.ledgers.read(before.ledgers[0].id)
        assert metadata.state is LedgerState.IN_RECOVERY
        assert await bench.listed() == before
        await taking
        assert (await bench.listed()).epoch == 2

    run(case)


def test_a_release_record_at_the_end_saves_the_wait() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=5000)
        await Writer(log).append(3)
        log.append(RELEASE, Seq(4), Appended().done)
        await asyncio.sleep(0.1)
        began = bench.env.clock.now()
        taken = await opened(bench.logs())
        assert bench.env.clock.now() - began < 0.2
        assert not taken.waited

    run(case)


def test_a_release_record_that_is_not_the_end_saves_nothing() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=1000)
        log.append(RELEASE, Seq(1), Appended().done)
        await Writer(log, seq=2).append(1)
        began = bench.env.clock.now()
        assert (await opened(bench.logs())).waited
        assert bench.env.clock.now() - began >= 1.1

    run(case)


def test_a_release_record_before_an_empty_ledger_is_still_the_end() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=1000)
        log.append(RELEASE, Seq(1), Appended().done)
        await asyncio.sleep(0.1)
        await opened(bench.logs())  # saved its wait, lists its ledger and dies before its first record
        assert not (await opened(bench.logs())).waited

    run(case)


def test_a_ledger_that_somebody_else_closed_is_waited_for_too() -> None:
    """An operator's recovery closes without a wait; the old leader's lease runs on."""

    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=1000)
        await Writer(log).append(3)
        takeover = LedgerTakeover(log.handle.ledger, bench.ports, bench.env.nursery)
        await takeover.take_over()
        await takeover.close()
        began = bench.env.clock.now()
        assert (await opened(bench.logs())).waited
        assert bench.env.clock.now() - began >= 1.1

    run(case)


def test_a_former_leader_learns_of_its_loss_at_its_next_append() -> None:
    async def case(bench: Bench) -> None:
        old = Writer(await opened(bench.logs()))
        await old.append(3)
        lost: list[StoreError] = []
        old.log.on_lost(lost.append)
        new = Writer(await opened(bench.logs()), seq=4)
        await new.append(2)
        await old.append(2)
        assert len(old.entries.confirmed) == 3
        assert [type(error) for error in old.entries.errors] == [OutcomeUnknown, NotEnoughBookies]
        assert [type(error) for error in lost] == [LedgerFenced]
        assert await read_all(bench.logs(), 5) == numbers(1, 5)

    run(case)


def test_of_two_that_take_over_at_once_one_wins_and_the_other_begins_again() -> None:
    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs())).append(3)
        one = bench.env.nursery.spawn(opened(bench.logs()), name="one")
        two = bench.env.nursery.spawn(opened(bench.logs()), name="two")
        first, second = await one, await two
        assert {first.epoch, second.epoch} == {2, 3}
        winner = Writer(max(first, second, key=lambda log: log.epoch), seq=4)
        await winner.append(2)
        assert await read_all(bench.logs(), 5) == numbers(1, 5)

    run(case)


@pytest.mark.parametrize("step", range(14))
def test_a_candidate_that_dies_after_any_write_is_followed_by_another(step: int) -> None:
    """Crash points of a takeover: IN_RECOVERY, closes, the new ledger, the list, each before and after."""

    async def case(bench: Bench) -> None:
        old = Writer(await opened(bench.logs(SMALL)))
        await old.append(7)  # two ledgers
        store = FrozenStore(bench.tree)
        dying = bench.env.nursery.spawn(opened(bench.logs(store=store)), name="dies")
        await asyncio.sleep(0.05 * step)
        dying.cancel()
        with suppress(BaseException):
            await dying
        new = Writer(await opened(bench.logs()), seq=8)
        await new.append(2)
        assert await read_all(bench.logs(), 9) == numbers(1, 9)

    run(case)


def test_a_list_write_of_unknown_outcome_that_was_done_is_success() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        lists = LedgerLists(store)
        listed, version = await lists.make(P)
        store.fail_next = [MetadataUnknown("the connection broke")]
        wanted = listed.with_ledger(LedgerId(1), Seq(1), epoch=1, lease_ms=0)
        assert await lists.write(P, wanted, version) == version + 1
        assert await lists.read(P) == (wanted, version + 1)

    run(case)


def test_a_list_write_that_others_beat_is_lost_also_when_its_outcome_was_unknown() -> None:
    async def case(bench: Bench) -> None:
        mine, theirs = LedgerLists(FrozenStore(bench.tree)), LedgerLists(FrozenStore(bench.tree))
        listed, version = await mine.make(P)
        store: Any = mine._store
        multi = store.multi

        async def beaten(changes: Any) -> None:
            store.multi = multi
            await theirs.write(P, listed.with_ledger(LedgerId(2), Seq(1), epoch=1, lease_ms=0), version)
            raise MetadataUnknown("the connection broke before it was sent")

        store.multi = beaten
        with pytest.raises(VersionConflict):
            await mine.write(P, listed.with_ledger(LedgerId(1), Seq(1), epoch=1, lease_ms=0), version)

    run(case)


def test_a_ledger_that_was_swept_cannot_be_listed() -> None:
    """A leader that slept between create and list."""

    async def case(bench: Bench) -> None:
        logs = bench.logs(NEVER)
        creator = logs._creator
        create = creator.create

        async def create_and_sleep(*what: Any, **how: Any) -> Any:
            metadata = await create(*what, **how)
            creator.create = create  # type: ignore[method-assign]
            await bench.ledgers.remove(metadata.ledger, -1)
            return metadata

        creator.create = create_and_sleep  # type: ignore[method-assign]
        log = await opened(logs)
        assert [each.id for each in (await bench.listed()).ledgers] == [log.handle.ledger]
        await Writer(log).append(2)

    run(case)


def test_without_an_ack_quorum_of_bookies_nobody_opens_a_log() -> None:
    async def case(bench: Bench) -> None:
        bench.bookies.stop(B2, B3)
        with pytest.raises(NotEnoughBookies):
            await opened(bench.logs())
        bench.bookies.start(B2)
        log = await opened(bench.logs())
        assert log.handle.writer.metadata.quorum == Quorum(2, 2, 2)

    run(case)


# ── rolling ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_ledger_is_rolled_and_nothing_is_lost_or_reordered() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(23, gap_s=0.002)
        await asyncio.sleep(1)
        assert len(writer.entries.confirmed) == 23
        assert writer.entries.confirmed == sorted(writer.entries.confirmed)
        listed = await bench.listed()
        assert len(listed.ledgers) >= 2
        assert {each.epoch for each in listed.ledgers} == {1}
        assert await read_all(bench.logs(), 23) == numbers(1, 23)

    run(case)


def test_first_sequences_become_exact() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(12)
        await asyncio.sleep(1)
        listed = await bench.listed()
        firsts: dict[LedgerId, int] = {}
        for seq, position in enumerate(writer.entries.confirmed, start=1):
            firsts.setdefault(position.ledger, seq)
        assert {each.id: each.first_seq for each in listed.ledgers if each.exact} == firsts

    run(case)


def test_entries_go_to_the_next_ledger_only_when_all_before_are_acknowledged() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(4)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(4, gap_s=0)
        await asyncio.sleep(1)  # the roll has begun; nothing of n+1 may be sent
        first = writer.log.listed.ledgers[0].id
        assert len(writer.log.listed.ledgers) == 2
        assert {ledger for model in bench.bookies.at.values() for ledger, _ in model.entries} == {first}
        for bookie in (B2, B3):
            bench.bookies.release_adds(bookie)
        await asyncio.sleep(1)
        await writer.append(2)
        assert len(writer.entries.confirmed) == 10
        assert await read_all(bench.logs(), 10) == numbers(1, 10)

    run(case)


def test_while_the_metadata_store_is_away_nothing_is_rolled_and_appends_go_on() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        writer = Writer(await opened(bench.logs(SMALL, store=store)))
        store.suspend()
        await writer.append(50)
        assert len(writer.entries.confirmed) == 50
        assert {position.ledger for position in writer.entries.confirmed} == {writer.log.handle.ledger}
        store.resume()
        await asyncio.sleep(1)
        await writer.append(1)
        assert len(writer.entries.confirmed) == 51
        assert len((await bench.listed()).ledgers) >= 2
        assert writer.log.lost is None

    run(case)


def test_a_roll_whose_list_write_is_unknown_goes_on_in_the_old_ledger_until_it_is_known() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        writer = Writer(await opened(bench.logs(SMALL, store=store)))
        await writer.append(4)
        multi = store.multi

        async def break_off(changes: Any) -> None:
            await multi(changes)
            store.multi = multi  # type: ignore[method-assign]
            store.suspend()
            raise MetadataUnknown("the connection broke")

        store.multi = break_off  # type: ignore[method-assign]
        await writer.append(20)
        assert len(writer.entries.confirmed) == 24
        assert len({position.ledger for position in writer.entries.confirmed}) == 1
        assert len((await bench.listed()).ledgers) == 2
        store.resume()
        await asyncio.sleep(1)
        await writer.append(2)
        assert writer.log.lost is None
        assert await read_all(bench.logs(), 26) == numbers(1, 26)

    run(case)


def test_a_takeover_in_the_middle_of_a_roll_keeps_everything() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        old = Writer(await opened(bench.logs(SMALL, store=store)))
        await old.append(4)
        store.freeze()  # between create and list, or list and close
        await old.append(4)
        new = Writer(await opened(bench.logs()), seq=9)
        store.thaw()
        await asyncio.sleep(1)
        assert old.log.lost is not None
        await new.append(2)
        assert await read_all(bench.logs(), 10) == numbers(1, 10)

    run(case)


def test_a_leader_that_lost_its_list_stops_rolling_trimming_and_appending() -> None:
    async def case(bench: Bench) -> None:
        old = Writer(await opened(bench.logs(SMALL)))
        await old.append(12)
        await opened(bench.logs())
        before = await bench.listed()
        await old.append(3)
        with pytest.raises(StoreError):
            await old.log.trim(Seq(1000), 0)
        assert await bench.listed() == before
        assert len(old.entries.confirmed) == 12

    run(case)


def test_a_ledger_on_two_bookies_is_rolled_when_a_third_is_there() -> None:
    async def case(bench: Bench) -> None:
        bench.bookies.stop(B3)
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(2)
        assert writer.log.handle.writer.metadata.quorum == Quorum(2, 2, 2)
        bench.bookies.start(B3)
        await asyncio.sleep(10)
        assert writer.log.handle.writer.metadata.quorum == Quorum(3, 3, 2)
        await writer.append(2)
        assert await read_all(bench.logs(), 4) == numbers(1, 4)

    run(case)


def test_a_leader_without_an_ack_quorum_for_long_gives_its_log_up() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(2)
        bench.bookies.stop(B2, B3)
        await writer.append(3)
        await asyncio.sleep(9)
        assert writer.log.lost is None
        await asyncio.sleep(2)
        assert isinstance(writer.log.lost, NotEnoughBookies)
        assert [type(error) for error in writer.entries.errors] == [OutcomeUnknown] * 3

    run(case)


def test_missing_copies_are_made_again_when_a_bookie_is_back() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(LogConfig(roll_entries=10, check_every_s=0.1))))
        bench.bookies.stop(B3)
        await writer.append(25)
        bench.bookies.start(B3)
        await asyncio.sleep(20)
        await writer.append(1)
        named = 0
        for ledger in sorted({position.ledger for position in writer.entries.confirmed}):
            metadata, _ = await bench.ledgers.read(ledger)
            if B3 in metadata.fragments[0].ensemble:
                named += 1
                assert bench.bookies.at[B3].of(ledger) == bench.bookies.at[B1].of(ledger)
        assert named

    run(case)


def test_a_new_leader_makes_copies_again_that_the_former_one_left_missing() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        ledger = writer.log.handle.ledger
        await writer.append(3)
        bench.bookies.stop(B3)
        await writer.append(5)
        writer.log.close_for_good()
        await opened(bench.logs())
        bench.bookies.start(B3)
        await asyncio.sleep(10)
        assert bench.bookies.at[B3].of(ledger) == list(range(8))

    run(case)


def test_a_sealed_log_has_nothing_to_recover() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs()))
        await writer.append(3)
        await writer.log.seal()
        metadata, _ = await bench.ledgers.read(writer.log.handle.ledger)
        assert (metadata.state, metadata.last_entry) == (LedgerState.CLOSED, 2)
        await writer.append(1)
        assert [type(error) for error in writer.entries.errors] == [NotEnoughBookies]

    run(case)


# ── tailing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tail_is_never_behind_an_idle_leader() -> None:
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


def test_a_tail_waits_no_longer_than_it_was_told() -> None:
    async def case(bench: Bench) -> None:
        await opened(bench.logs(NEVER))
        reader = bench.logs().reader(P, None)
        began = bench.env.clock.now()
        assert list(await reader.read(700)) == []
        assert 0.6 < bench.env.clock.now() - began < 0.8
        assert list(await reader.read(0)) == []
        await reader.close()

    run(case)


def test_a_tail_goes_on_from_any_position() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(17)
        await asyncio.sleep(0.5)
        for count, position in enumerate(writer.entries.confirmed[:-1], start=1):
            assert (await read_all(bench.logs(), 1, after=position))[0] == b"%d" % (count + 1)

    run(case)


def test_a_tail_is_given_nothing_beyond_the_last_confirmed_entry() -> None:
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


def test_a_tail_crosses_to_the_next_ledger_exactly_at_the_closed_end() -> None:
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


def test_a_tail_reads_around_a_bookie_that_is_gone() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(5)
        for gone in (B1, B2, B3):
            bench.bookies.stop(gone)
            assert await read_all(bench.logs(), 5) == numbers(1, 5)
            bench.bookies.start(gone)

    run(case)


def test_a_tail_before_there_is_a_log_waits_for_it() -> None:
    async def case(bench: Bench) -> None:
        reader = bench.logs().reader(P, None)
        waiting = bench.env.nursery.spawn(reader.read(5000), name="waits")
        await asyncio.sleep(0.5)
        await Writer(await opened(bench.logs(NEVER))).append(1)
        assert [entry.payload for entry in await waiting] == [b"1"]
        await reader.close()

    run(case)


# ── trimming ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def four_ledgers(bench: Bench) -> Writer:
    """A log of at least four ledgers."""
    writer = Writer(await opened(bench.logs(SMALL)))
    await writer.append(30, gap_s=0.03)
    await asyncio.sleep(5)  # longer than clocks may differ
    assert len(writer.log.listed.ledgers) >= 4
    return writer


def test_trimming_takes_what_everybody_has_synced_from_list_and_store() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        assert await writer.log.trim(lines[2].first_seq, 0) == 2
        assert [each.id for each in (await bench.listed()).ledgers] == [each.id for each in lines[2:]]
        for gone in lines[:2]:
            with pytest.raises(NoSuchLedger):
                await bench.ledgers.read(gone.id)
        assert await writer.log.trim(lines[2].first_seq, 0) == 0

    run(case)


def test_what_is_not_synced_everywhere_stays() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        assert await writer.log.trim(Seq(lines[1].first_seq - 1), 0) == 0

    run(case)


def test_what_is_younger_than_the_retention_stays() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        assert await writer.log.trim(Seq(1000), 3_600_000) == 0
        await asyncio.sleep(100)
        assert await writer.log.trim(Seq(1000), 60_000) >= 2

    run(case)


def test_a_reader_of_what_was_trimmed_is_told_so_and_one_that_stands_at_the_end_goes_on() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        await writer.log.trim(lines[2].first_seq, 0)
        gone = [position for position in writer.entries.confirmed if position.ledger < lines[2].id]
        for position in (None, gone[0], gone[-2]):
            reader = bench.logs().reader(P, position)
            with pytest.raises(NoSuchLedger):
                await reader.read(100)
            await reader.close()
        seq = len(gone) + 1
        assert (await read_all(bench.logs(), 1, after=gone[-1]))[0] == b"%d" % seq

    run(case)


def test_a_pin_holds_its_ledger_and_what_follows() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        pins = Pins(bench.store, LedgerLists(bench.store))
        await pins.hold(P, "snapshot-1", lines[1].id)
        assert await writer.log.trim(Seq(1000), 0) == 1
        await pins.release(P, "snapshot-1")
        assert await writer.log.trim(Seq(1000), 0) == len(lines) - 3

    run(case)


def test_a_pin_on_a_ledger_that_was_trimmed_fails() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first = writer.log.listed.ledgers[0].id
        await writer.log.trim(Seq(1000), 0)
        with pytest.raises(NoSuchLedger):
            await Pins(bench.store, LedgerLists(bench.store)).hold(P, "late", first)
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(first)

    run(case)


def test_a_pin_that_comes_between_list_and_delete_keeps_the_ledger() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first = writer.log.listed.ledgers[0].id
        pins = Pins(bench.store, LedgerLists(bench.store))
        drop = writer.log.trimmer._owner.drop_first

        async def drop_after_pin(ends: Any) -> None:
            await pins.hold(P, "just in time", first)
            await drop(ends)

        writer.log.drop_first = drop_after_pin  # type: ignore[method-assign]
        assert await writer.log.trim(Seq(1000), 0) >= 1
        metadata, _ = await bench.ledgers.read(first)
        assert metadata.state is LedgerState.CLOSED
        await pins.release(P, "just in time")
        await asyncio.sleep(60)  # the sweep
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(first)

    run(case)


def test_a_pin_past_its_deadline_holds_nothing() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first = writer.log.listed.ledgers[0].id
        deadline_ms = bench.env.clock.wall_ms() + 5_000
        await Pins(bench.store, LedgerLists(bench.store)).hold(P, "feed", first, deadline_ms=deadline_ms)
        assert await writer.log.trim(Seq(1000), 0) == 0
        await asyncio.sleep(6)
        assert await writer.log.trim(Seq(1000), 0) >= 1

    run(case)


def test_orphans_are_swept_by_owner_and_age_and_nothing_else() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(2)
        orphan = await bench.logs()._creator.create(P, after=LedgerId(-1))
        others = await bench.logs()._creator.create(type(P)("p2"), after=LedgerId(-1))
        assert owner_of(orphan) == P
        await asyncio.sleep(15)
        await bench.ledgers.read(orphan.ledger)
        await asyncio.sleep(30)
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(orphan.ledger)
        await bench.ledgers.read(others.ledger)
        await bench.ledgers.read(writer.log.handle.ledger)
        await writer.append(1)
        assert await read_all(bench.logs(), 3) == numbers(1, 3)

    run(case)


def test_a_leader_that_was_replaced_sweeps_nothing() -> None:
    async def case(bench: Bench) -> None:
        old = await opened(bench.logs(NEVER))
        orphan = await bench.logs()._creator.create(P, after=LedgerId(-1))
        await opened(bench.logs(NEVER))
        await asyncio.sleep(100)
        assert await old.trimmer.sweep(0) == 0
        await bench.ledgers.read(orphan.ledger)

    run(case)


def test_the_list_is_where_it_is_documented() -> None:
    async def case(bench: Bench) -> None:
        await opened(bench.logs())
        data, _ = await MemoryStore(bench.tree).get(paths.partition_log(P))
        assert data.startswith(b'{"format":1,"epoch":1,"ledgers":[{"id":')

    run(case)
