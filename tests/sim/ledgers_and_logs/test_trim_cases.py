"""Trims, pins and orphans, case by case, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import LedgerDeleted, MetadataUnavailable, NoSuchLedger
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Change, Stat, ensure_path
from kvstore.types import EntryId, LedgerId, LedgerState, Position, Seq
from kvstore.wal.creator import OWNER_KEY, owner_of
from kvstore.wal.leading import trim
from kvstore.wal.leading.trim import TRIMMED_MAX
from kvstore.wal.ledger_list import Listed, LogEnd
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from kvstore.wal.tailing.tail import TailReader
from tests.sim.ledgers_and_logs.bench import Bench, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, numbers, opened, read_all

pytestmark = pytest.mark.sim


async def four_ledgers(bench: Bench, seq: int = 1) -> Writer:
    """Write a log of at least four ledgers, from the sequence `seq` on."""
    writer = Writer(await opened(bench.logs(SMALL)), seq)
    await writer.append(30, gap_s=0.03)
    await asyncio.sleep(5)  # longer than clocks may differ
    assert len(writer.log.listed.ledgers) >= 4
    return writer


def test_trimming_removes_ledgers_synced_everywhere_from_list_and_store() -> None:
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


def test_ledgers_not_synced_everywhere_stay() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        assert await writer.log.trim(Seq(lines[1].first_seq - 1), 0) == 0

    run(case)


def test_ledgers_younger_than_retention_stay() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        assert await writer.log.trim(Seq(1000), 3_600_000) == 0
        await asyncio.sleep(100)
        assert await writer.log.trim(Seq(1000), 60_000) >= 2

    run(case)


def test_ledger_without_first_sequence_is_trimmed_with_its_neighbours() -> None:
    """Otherwise nothing would ever be trimmed again."""

    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(SMALL))).append(2)
        await opened(bench.logs(SMALL))  # has nothing to append
        await asyncio.sleep(100)
        writer = await four_ledgers(bench, seq=3)
        lines = writer.log.listed.ledgers
        assert [each.exact for each in lines[:3]] == [True, False, True]
        assert await writer.log.trim(Seq(2), 0) == 0
        assert await writer.log.trim(Seq(1000), 60_000) == 0, "the start of the next ledger is unknown"
        assert await writer.log.trim(lines[2].first_seq, 0) == 2
        assert (await bench.listed()).trimmed_seq == lines[2].first_seq == 3

    run(case)


def test_thousands_of_ledgers_are_trimmed_in_batches() -> None:
    """A large number of round trips keeps a leader from its other duties, and one failure would repeat all of them."""

    async def case(bench: Bench) -> None:
        log = (await four_ledgers(bench)).log
        first = log.listed.ledgers[0].id
        closed, _ = await bench.ledgers.read(first)
        old = [replace(closed, ledger=LedgerId(number), token=number) for number in range(10_000, 10_600)]
        for metadata in old:
            await bench.ledgers.create(metadata)
        names = [Listed(each.ledger, Seq(1), True, 1, 0) for each in old]
        await log.change_list(lambda listed: replace(listed, ledgers=(*names, *listed.ledgers)))
        await asyncio.sleep(5)
        get, asked = bench.store.get, 0

        async def counted(path: str) -> tuple[bytes, Stat]:
            nonlocal asked
            asked += 1
            return await get(path)

        log.trimmer._store.get = counted  # type: ignore[method-assign]
        assert await log.trim(Seq(1000), 0) == TRIMMED_MAX
        assert asked < 2 * TRIMMED_MAX + 10
        await bench.ledgers.read(old[TRIMMED_MAX].ledger)
        assert await log.trim(Seq(1000), 0) == TRIMMED_MAX
        assert await log.trim(Seq(1000), 0) >= 600 - 2 * TRIMMED_MAX
        assert log.listed.ledgers[0].id not in {each.ledger for each in old}

    run(case)


def test_ledgers_without_first_sequence_are_trimmed_in_one_oversized_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trim, "TRIMMED_MAX", 1)

    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(SMALL))).append(2)
        for _ in range(3):
            await opened(bench.logs(SMALL))  # has nothing to append
        writer = await four_ledgers(bench, seq=3)
        assert [each.exact for each in writer.log.listed.ledgers[:5]] == [True, False, False, False, True]
        assert await writer.log.trim(Seq(1000), 0) == 4
        assert await writer.log.trim(Seq(1000), 0) == 1

    run(case)


# docs/protocol.md P34
def test_ledgers_before_unreadable_one_are_trimmed() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        assert len(lines) >= 5
        await bench.store.set(paths.ledger(lines[2].id), b"garbage", -1)
        assert await writer.log.trim(Seq(1000), 0) == 1
        assert (await bench.listed()).ledgers[0].id == lines[1].id
        assert writer.log.trimmer.undecodable == {lines[2].id}

    run(case)


# docs/protocol.md G6
def test_deleted_ledger_is_trimmed_with_its_neighbours() -> None:
    """Its line would keep everything after it forever."""

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        await bench.ledgers.remove(lines[1].id, -1)
        assert await writer.log.trim(Seq(1000), 0) == len(lines) - 2
        assert [each.id for each in (await bench.listed()).ledgers] == [each.id for each in lines[-2:]]
        assert writer.log.trimmer.deleted == {lines[1].id}
        last = max(position for position in writer.entries.confirmed if position.ledger == lines[-3].id)
        assert (await bench.listed()).trimmed_end == LogEnd(last.ledger, last.entry), "a reader at the end continues"

    run(case)


# docs/protocol.md G6
@pytest.mark.parametrize("entries", [0, 2])
def test_deleted_ledger_is_not_last_with_entries_to_be_trimmed(entries: int) -> None:
    """The end of the deleted ledger is unknown: a reader before its end would be treated as being at the end of the
    trimmed ledgers."""

    async def case(bench: Bench) -> None:
        first = Writer(await opened(bench.logs(NEVER)))
        await first.append(2)
        deleted = Writer(await opened(bench.logs(NEVER)), seq=3)
        await deleted.append(2)
        third = Writer(await opened(bench.logs(NEVER)), seq=5)
        await third.append(entries)
        writer = await four_ledgers(bench, seq=5 + entries)
        lines = writer.log.listed.ledgers
        await bench.ledgers.remove(lines[1].id, -1)
        assert await writer.log.trim(lines[3].first_seq, 0) == (3 if entries else 1)
        assert await writer.log.trim(Seq(1000), 0) > 0
        assert lines[3].id not in {each.id for each in (await bench.listed()).ledgers}

    run(case)


def test_replaced_leader_does_not_take_trimmed_ledger_for_deleted() -> None:
    async def case(bench: Bench) -> None:
        old = (await four_ledgers(bench)).log
        new = await opened(bench.logs(NEVER))
        await asyncio.sleep(5)
        assert await new.trim(Seq(1000), 0) >= 1
        with pytest.raises(NoSuchLedger):
            await old.trim(Seq(1000), 0)
        assert old.trimmer.deleted == set()

    run(case)


# docs/protocol.md P31
@pytest.mark.parametrize("whose", ["the metadata store's", "the leader's"])
def test_future_date_keeps_nothing_that_later_dates_would_release(whose: str) -> None:
    """The clock of the metadata store's machine, or the clocks of most servers, were a year ahead for some minutes."""
    year_ms = 365 * 86_400_000

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        metadata, version = await bench.ledgers.read(lines[1].id)
        date_ms = bench.tree._wall_ms
        if whose == "the leader's":
            metadata = replace(metadata, ctime_ms=metadata.ctime_ms + year_ms)
        else:
            bench.tree._wall_ms = lambda: date_ms() + year_ms
        await bench.ledgers.write(metadata, version)
        bench.tree._wall_ms = date_ms
        assert await writer.log.trim(Seq(1000), 60_000) == 0
        await asyncio.sleep(100)
        assert await writer.log.trim(Seq(1000), 60_000) == len(lines) - 2

    run(case)


def test_reader_of_trimmed_entries_fails_and_reader_at_end_continues() -> None:
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


def test_pin_holds_its_ledger_and_later_ones() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        lines = writer.log.listed.ledgers
        pins = Pins(bench.store, LedgerLists(bench.store))
        await pins.hold(P, "snapshot-1", lines[1].id)
        assert await writer.log.trim(Seq(1000), 0) == 1
        await pins.release(P, "snapshot-1")
        assert await writer.log.trim(Seq(1000), 0) == len(lines) - 3

    run(case)


def test_pin_on_trimmed_ledger_fails() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first = writer.log.listed.ledgers[0].id
        await writer.log.trim(Seq(1000), 0)
        with pytest.raises(NoSuchLedger):
            await Pins(bench.store, LedgerLists(bench.store)).hold(P, "late", first)
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(first)

    run(case)


# docs/protocol.md G14
def test_pin_created_between_list_and_delete_keeps_ledger() -> None:
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


def test_expired_pin_holds_nothing() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first = writer.log.listed.ledgers[0].id
        deadline_ms = bench.env.clock.wall_ms() + 5_000
        await Pins(bench.store, LedgerLists(bench.store)).hold(P, "feed", first, deadline_ms=deadline_ms)
        assert await writer.log.trim(Seq(1000), 0) == 0
        await asyncio.sleep(6)
        assert await writer.log.trim(Seq(1000), 0) >= 1

    run(case)


def test_unreadable_pin_holds_everything() -> None:
    """The extent of the pin is unknown, and its leader ended with it."""

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        path = paths.partition_pin(P, "of-tomorrow")
        await ensure_path(bench.store, paths.parent(path))
        await bench.store.create(path, b'{"format": 2}')
        assert await writer.log.trim(Seq(1000), 0) == 0
        await bench.store.delete(path, -1)
        assert await writer.log.trim(Seq(1000), 0) >= 1

    run(case)


def test_pin_with_moved_deadline_holds_from_same_position() -> None:
    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first, _, third = (each.id for each in writer.log.listed.ledgers[:3])
        pins, now_ms = Pins(bench.store, LedgerLists(bench.store)), bench.env.clock.wall_ms()
        await pins.hold_until(P, "job", first, now_ms + 5_000)
        await pins.hold_until(P, "job", third, now_ms + 20_000)
        assert await pins.extend(P, "job", now_ms + 30_000)
        await asyncio.sleep(25)
        assert await writer.log.trim(Seq(1000), 0) == 0
        assert [(name, pin.ledger) for name, pin in await pins.all(P)] == [("job", first)]
        await asyncio.sleep(6)
        assert await writer.log.trim(Seq(1000), 0) >= 1
        assert await pins.all(P) == []
        assert not await pins.extend(P, "job", now_ms + 90_000)

    run(case)


# docs/protocol.md K3
@pytest.mark.parametrize("anew", [False, True], ids=("renewed", "made anew"))
def test_pin_renewed_while_trimmer_finds_it_expired_stays(anew: bool) -> None:
    """This also holds for a pin that was released and created again under its name, when a node has the version of
    the former pin."""

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        first, now_ms = writer.log.listed.ledgers[0].id, bench.env.clock.wall_ms()
        pins = Pins(bench.store, LedgerLists(bench.store))
        await pins.hold_until(P, "job", first, now_ms + 1_000)
        delete, multi = bench.store.delete, bench.store.multi

        async def renew() -> None:
            bench.store.delete, bench.store.multi = delete, multi  # type: ignore[method-assign]
            if anew:
                await pins.release(P, "job")
                await pins.hold_until(P, "job", first, now_ms + 60_000)
            else:
                assert await pins.extend(P, "job", now_ms + 60_000)

        async def delete_after_renewal(path: str, version: int) -> None:
            await renew()
            await delete(path, version)

        async def multi_after_renewal(changes: Sequence[Change]) -> None:
            await renew()
            await multi(changes)

        bench.store.delete = delete_after_renewal  # type: ignore[method-assign]
        bench.store.multi = multi_after_renewal  # type: ignore[method-assign]
        assert await pins.oldest(P, now_ms + 2_000) == first, "it holds the same position"
        assert [pin.deadline_ms for _, pin in await pins.all(P)] == [now_ms + 60_000]

    run(case)


# docs/protocol.md G15
def test_only_orphans_are_swept_by_owner_and_age() -> None:
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


def test_log_whose_leader_changes_often_is_swept() -> None:
    """Each leader used to sweep for the first time after half an orphan's age. Unlisted ledgers stayed, and bookies
    that had lost their copies counted as missing them."""

    async def case(bench: Bench) -> None:
        orphan = await bench.logs()._creator.create(P, after=LedgerId(-1))
        half_s = SMALL.orphan_age_s / 2
        await asyncio.sleep(3 * half_s)
        for _ in range(20):
            await opened(bench.logs(SMALL))
            await asyncio.sleep(0.3 * half_s)
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(orphan.ledger)

    run(case)


# docs/protocol.md P34
@pytest.mark.parametrize("tag", [b"\xff", b"", b"..", b"p1/log", b"p1\x00"])
def test_foreign_ledger_under_our_tag_is_ignored_and_sweep_continues(tag: bytes) -> None:
    """Every leader sweeps it a few minutes after it took over."""

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        foreign = replace(await bench.ledger(), ledger=LedgerId(50), custom=((OWNER_KEY, tag),))
        await bench.ledgers.create(foreign)
        orphan = await bench.logs()._creator.create(P, after=LedgerId(-1))
        await asyncio.sleep(1)
        assert await writer.log.trimmer.sweep(0) == 1
        assert owner_of(foreign) is None
        await bench.ledgers.read(foreign.ledger)
        with pytest.raises(NoSuchLedger):
            await bench.ledgers.read(orphan.ledger)

    run(case)


def test_replaced_leader_sweeps_nothing() -> None:
    async def case(bench: Bench) -> None:
        old = await opened(bench.logs(NEVER))
        orphan = await bench.logs()._creator.create(P, after=LedgerId(-1))
        await opened(bench.logs(NEVER))
        await asyncio.sleep(100)
        assert await old.trimmer.sweep(0) == 0
        await bench.ledgers.read(orphan.ledger)

    run(case)


def test_list_is_at_its_documented_path() -> None:
    async def case(bench: Bench) -> None:
        await opened(bench.logs())
        data, _ = await MemoryStore(bench.tree).get(paths.partition_log(P))
        assert data.startswith(b'{"format":1,"epoch":1,"ledgers":[{"id":')

    run(case)


async def read_on(reader: TailReader) -> None:
    while True:
        await reader.read(100)


def test_deleted_ledger_is_not_reported_as_trimmed() -> None:
    """A replica that took the ledger for trimmed would abandon its state, which may be the last copy of the ledger's
    content."""

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        begun, last = writer.log.listed.ledgers[1], writer.log.listed.ledgers[-1]
        for deleted in (last, begun):
            await bench.ledgers.remove(deleted.id, -1)
            reader = bench.logs().reader(P, Position(begun.id, EntryId(0)))
            with pytest.raises(LedgerDeleted, match=f"ledger {deleted.id} does not exist, but the log's list has it"):
                await read_on(reader)
            await reader.close()

    run(case)


def test_ledger_after_trimmed_ones_is_not_reported_as_trimmed() -> None:
    """A replica at the beginning of the list has everything before it, and would abandon that for another replica's
    state."""

    async def case(bench: Bench) -> None:
        writer = await four_ledgers(bench)
        assert await writer.log.trim(Seq(1000), 0) >= 1
        listed = await bench.listed()
        end, deleted = listed.trimmed_end, listed.ledgers[0].id
        assert end is not None
        await bench.ledgers.remove(deleted, -1)
        reader = bench.logs().reader(P, Position(end.ledger, end.entry))
        with pytest.raises(LedgerDeleted, match=f"ledger {deleted}"):
            await read_on(reader)
        await reader.close()
        newcomer = bench.logs().reader(P, None)
        with pytest.raises(NoSuchLedger):  # it has nothing to abandon, and gets another replica's state
            await read_on(newcomer)
        await newcomer.close()

    run(case)


# docs/protocol.md T2
def test_reader_of_an_undeleted_ledger_skips_no_trimmed_ledgers() -> None:
    """A leader that ends between the change of the list and the deletions leaves the trimmed ledgers until a sweep. A
    reader that knew only the first of them would continue at the beginning of the list, and a watch would miss
    changes without an error."""

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(7)
        reader = bench.logs().reader(P, None, batch_bytes=1)
        seen = [entry.payload for entry in await reader.read(1000)]
        known = (await bench.listed()).ledgers
        await writer.append(20, gap_s=0.03)
        await asyncio.sleep(5)  # longer than clocks may differ

        async def unavailable(ledger: LedgerId, version: int) -> None:
            raise MetadataUnavailable(f"ledger {ledger} is not deleted")

        writer.log.trimmer._ledgers.remove = unavailable  # type: ignore[method-assign]
        with pytest.raises(MetadataUnavailable):
            await writer.log.trim(Seq(1000), 0)
        assert len((await bench.listed()).ledgers) == 2

        async def read_to_the_end() -> None:
            while True:
                seen.extend([entry.payload for entry in await reader.read(1000)])
                assert seen == numbers(1, len(seen))

        with pytest.raises(NoSuchLedger):
            await read_to_the_end()
        assert len(seen) == sum(position.ledger <= known[-1].id for position in writer.entries.confirmed)
        await reader.close()

    run(case)
