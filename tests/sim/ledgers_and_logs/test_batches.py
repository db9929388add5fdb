"""Batched reads of entries (docs/protocol.md, T12): a returned entry counts, a missing entry proves nothing."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, Quorum
from kvstore.wal import recovery
from kvstore.wal.config import LogConfig
from kvstore.wal.copies.copying import AT_ONCE_MAX, CopyFault, Copying
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.read_ahead import ENTRIES_MAX
from kvstore.wal.recovery import READ_AHEAD
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, LEDGER, Bench, appended, run
from tests.sim.ledgers_and_logs.logs import Writer, numbers, opened, read_all

pytestmark = pytest.mark.sim

COUNT = 500
FAST = 1 << 30


async def written(bench: Bench, config: LogConfig) -> LedgerId:
    """Write a log's first ledger, of COUNT entries."""
    writer = Writer(await opened(bench.logs(config)))
    await writer.append(COUNT, gap_s=0.001)
    assert len(writer.entries.confirmed) == COUNT
    return writer.log.handle.ledger


def asked(bench: Bench) -> tuple[int, int]:
    """Return the numbers of single reads and batches that all bookies have answered."""
    models = bench.bookies.at.values()
    return sum(each.reads for each in models), sum(each.batches for each in models)


def lose(bench: Bench, bookie: BookieId, ledger: LedgerId, entries: Collection[int]) -> None:
    for entry in entries:
        bench.bookies.at[bookie].entries.pop((ledger, EntryId(entry)), None)


def damage(bench: Bench, bookie: BookieId, ledger: LedgerId, entries: Collection[int]) -> None:
    held = bench.bookies.at[bookie].entries
    for entry in entries:
        if packet := held.get((ledger, EntryId(entry))):
            held[ledger, EntryId(entry)] = packet[:-1] + bytes([packet[-1] ^ 1])


def test_tail_that_is_behind_sends_a_hundredth_of_the_requests() -> None:
    async def case(bench: Bench) -> None:
        await written(bench, LogConfig(check_every_s=0.1))
        before = asked(bench)
        assert await read_all(bench.logs(), COUNT) == numbers(1, COUNT)
        reads, batches = asked(bench)
        assert reads - before[0] <= 2
        assert batches - before[1] <= COUNT // ENTRIES_MAX + 2

    run(case)


def test_striped_ledger_is_read_from_fewest_bookies_that_cover_it() -> None:
    async def case(bench: Bench) -> None:
        await written(bench, LogConfig(quorum=Quorum(5, 3, 2), check_every_s=0.1))
        assert await read_all(bench.logs(), COUNT) == numbers(1, COUNT)
        reads, batches = asked(bench)
        assert batches <= 3 * (COUNT // ENTRIES_MAX + 2)
        assert reads <= 8 * 5

    run(case, bookies=5)


def test_entry_missing_from_batch_is_read_alone() -> None:
    async def case(bench: Bench) -> None:
        ledger = await written(bench, LogConfig(check_every_s=0.1))
        for place, bookie in enumerate((B1, B2, B3)):
            lose(bench, bookie, ledger, range(100 * place, 100 * place + 70))
            damage(bench, bookie, ledger, range(100 * place + 70, 100 * place + 90))
        damage(bench, B1, ledger, range(300, COUNT, 7))
        lose(bench, B2, ledger, range(300, COUNT, 5))
        assert await read_all(bench.logs(), COUNT) == numbers(1, COUNT)

    run(case)


def test_bookies_without_batches_or_with_short_ones_are_still_read() -> None:
    async def case(bench: Bench) -> None:
        await written(bench, LogConfig(check_every_s=0.1))
        bench.bookies.at[B1].is_old = True
        bench.bookies.at[B2].batch_max = 3
        assert await read_all(bench.logs(), COUNT) == numbers(1, COUNT)
        bench.bookies.at[B3].is_old = bench.bookies.at[B2].is_old = True
        assert await read_all(bench.logs(), COUNT) == numbers(1, COUNT)

    run(case)


def test_reader_does_not_take_entry_missing_from_batch_for_absent() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger())
        await appended(bench, handle, 20)
        lose(bench, B1, LEDGER, {0, 5})
        reader = EntryReader(await bench.recorded(), bench.bookies, bench.env.nursery)
        entries = [EntryId(entry) for entry in range(20)]
        assert await reader.read_batch(entries) == {}, "the first entry is missing: all are read alone, or elsewhere"
        found = await reader.read_batch(entries)
        assert [found[entry].payload for entry in entries] == [b"entry %d" % entry for entry in entries]
        again = EntryReader(await bench.recorded(), bench.bookies, bench.env.nursery)
        assert sorted(await again.read_batch(entries[1:])) == [1, 2, 3, 4, *range(6, 20)]
        assert (await again.read(EntryId(5))).payload == b"entry 5"

    run(case)


async def left_open(bench: Bench, count: int, *ensemble: BookieId, write: int = 0) -> LedgerMetadata:
    """Return a ledger whose writer is gone and whose last confirmed entry no process knows."""
    metadata = await bench.ledger(*ensemble, write=write)
    handle = bench.handle(metadata)
    await appended(bench, handle, count)
    for bookie in metadata.fragments[0].ensemble:
        bench.bookies.at[bookie].lacs.clear()
    return metadata


def _unknown_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the last packets tell recoveries nothing about confirmed entries, so that they read from the first entry
    on."""
    original = recovery.Recovery._last

    def last(self: recovery.Recovery, bookie: BookieId, _packet: bytes | None) -> list[recovery.Command]:
        return original(self, bookie, None)

    monkeypatch.setattr(recovery.Recovery, "_last", last)


def test_recovery_with_distant_end_reads_in_batches_and_finds_end() -> None:
    async def case(bench: Bench) -> None:
        await left_open(bench, COUNT)
        before = asked(bench)
        closed = await bench.recover()
        assert closed.last_entry == COUNT - 1
        reads, batches = asked(bench)
        assert 3 <= batches - before[1] <= 3 * (COUNT // ENTRIES_MAX + 4)
        assert reads - before[0] <= 3 * (3 * READ_AHEAD + 4)
        assert all(LEDGER in bench.bookies.at[bookie].fenced for bookie in (B1, B2, B3))

    with pytest.MonkeyPatch.context() as monkeypatch:
        _unknown_end(monkeypatch)
        run(case)


@pytest.mark.parametrize("is_striped", [False, True], ids=["plain", "striped"])
def test_recovery_does_not_take_entries_missing_from_batches_for_absent(is_striped: bool) -> None:
    _recover_with_holes(is_striped=is_striped)


def test_recovery_reads_alone_what_no_batch_returns() -> None:
    _recover_with_holes(is_striped=False)


def _recover_with_holes(*, is_striped: bool) -> None:
    """Damage two of the three copies of every third entry: no bookie denies having it."""

    async def case(bench: Bench) -> None:
        names = list(bench.bookies.at)
        metadata = await left_open(bench, 200, *names, write=3)
        for entry in range(60, 200, 3):
            for bookie in sorted(metadata.write_set(EntryId(entry)))[:2]:
                damage(bench, bookie, LEDGER, [entry])
        closed = await bench.recover()
        assert closed.last_entry == 199

    with pytest.MonkeyPatch.context() as monkeypatch:
        _unknown_end(monkeypatch)
        run(case, bookies=5 if is_striped else 3)


async def copying(bench: Bench, count: int) -> Copying:
    """Copy a closed ledger whose entries are on B1, B2 and B3."""
    handle = bench.handle(await bench.ledger())
    await appended(bench, handle, count)
    await handle.close()
    return Copying(await bench.recorded(), bench.bookies, bench.env.nursery, CopyPace(bench.env.clock, FAST))


def test_copies_are_made_from_batches() -> None:
    async def case(bench: Bench) -> None:
        work = await copying(bench, COUNT)
        bench.bookies.at[B3].entries.clear()
        lose(bench, B1, LEDGER, range(100, 130))
        before = asked(bench)
        held = await work.held([B3])
        assert await work.fill(work.reader.metadata, EntryId(COUNT - 1), held, [B3]) == COUNT
        assert bench.bookies.at[B3].of(LEDGER) == list(range(COUNT))
        reads, batches = asked(bench)
        assert batches - before[1] <= COUNT // ENTRIES_MAX + 4
        assert reads - before[0] <= 2 * ENTRIES_MAX

    run(case)


def test_copies_of_distant_entries_read_little_else() -> None:
    async def case(bench: Bench) -> None:
        work = await copying(bench, 2 * COUNT)
        far = [*range(0, COUNT, 50), *range(COUNT, 2 * COUNT, 7)]
        lose(bench, B3, LEDGER, far)
        held, before = await work.held([B3]), asked(bench)[0]
        assert await work.fill(work.reader.metadata, EntryId(2 * COUNT - 1), held, [B3]) == len(far)
        packets = sum(each.batched for each in bench.bookies.at.values())
        assert packets + asked(bench)[0] - before <= 2 * len(far)

    run(case)


def test_copies_of_striped_ledger_are_made_from_batches() -> None:
    async def case(bench: Bench) -> None:
        handle = bench.handle(await bench.ledger(*list(bench.bookies.at)[:5], write=3))
        await appended(bench, handle, COUNT)
        await handle.close()
        work = Copying(await bench.recorded(), bench.bookies, bench.env.nursery, CopyPace(bench.env.clock, FAST))
        lost = len(bench.bookies.at[B3].of(LEDGER))
        bench.bookies.at[B3].entries.clear()
        held, before = await work.held([B3]), asked(bench)
        assert await work.fill(work.reader.metadata, EntryId(COUNT - 1), held, [B3]) == lost
        reads, batches = asked(bench)
        packets = sum(each.batched for each in bench.bookies.at.values())
        assert reads - before[0] <= ENTRIES_MAX
        assert batches - before[1] <= 3 * (lost // ENTRIES_MAX + 2)
        assert packets <= 3 * lost

    run(case, bookies=5)


def test_check_of_every_copy_finds_each_missing_or_damaged_one() -> None:
    async def case(bench: Bench) -> None:
        work = await copying(bench, COUNT)
        lose(bench, B2, LEDGER, {0, 77, 78})
        damage(bench, B2, LEDGER, {5, 250, COUNT - 1})
        before = asked(bench)
        found: list[CopyFault] = [fault async for fault in work.faults(B2, EntryId(COUNT - 1))]
        assert sorted((fault.entry, fault.what) for fault in found) == [
            (0, "missing"),
            (5, "damaged"),
            (77, "missing"),
            (78, "missing"),
            (250, "damaged"),
            (COUNT - 1, "damaged"),
        ]
        assert all(fault.is_certain for fault in found)
        reads, _ = asked(bench)
        assert reads - before[0] <= ENTRIES_MAX + AT_ONCE_MAX  # the first entries, because entry 0 is missing

    run(case)
