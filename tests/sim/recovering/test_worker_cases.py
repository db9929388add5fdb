"""Single cases of the worker that repairs marked ledgers (docs/protocol.md, A10): one process, model bookies, its
own sessions."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.autorecovery import repair_machine
from kvstore.autorecovery.repairer import LedgerRepairer
from kvstore.autorecovery.worker import Worker
from kvstore.errors import BookieError
from kvstore.meta import paths
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata
from tests.sim.ledgers_and_logs.bench import (
    B1,
    B2,
    B3,
    B4,
    B5,
    LEDGER,
    Bench,
    FrozenStore,
    appended,
    holders,
    run,
)
from tests.sim.recovering.cases import COUNT, Copies, closed, locks, recorded, until, until_begun, until_unmarked

pytestmark = pytest.mark.sim
OTHERS = tuple(LedgerId(101 + number) for number in range(20))


def test_copies_of_lost_bookie_are_remade_and_mark_and_lock_removed() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        worker = bench.worker()
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT))
        await bench.pass_time()
        assert locks(bench) == []
        said = worker.statistics()
        assert (said["ledgers_repaired"], said["copies_made"], said["ledgers_repairing"]) == (1, COUNT, 0)
        assert said["copied_bytes"] > COUNT

    run(case, bookies=4)


def test_several_workers_repair_many_ledgers_and_copy_nothing_twice() -> None:
    async def case(bench: Bench) -> None:
        for ledger in OTHERS:
            await closed(bench, ledger)
        bench.bookies.stop(B3)
        copies = Copies(bench)
        for ledger in OTHERS:
            await bench.mark(B3, ledger=ledger)
        workers = [bench.worker(f"w{number}") for number in range(3)]
        await until_unmarked(bench, *OTHERS)
        assert len(copies.made) == COUNT * len(OTHERS)
        assert set(copies.made.values()) == {1}
        assert all(worker.statistics()["ledgers_repaired"] for worker in workers), "each worker copied a part"
        for ledger in OTHERS:
            assert B3 not in await recorded(bench, ledger)

    run(case, bookies=5)


def test_lock_of_dead_worker_passes_to_another() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        store = FrozenStore(bench.tree)
        await until_locked(bench, bench.worker("dies", store=store, bytes_per_s=200), store)
        had = len(bench.bookies.at[B4].of(LEDGER))
        assert 0 < had < COUNT
        copies = Copies(bench)
        bench.worker("goes on")
        await bench.pass_time(20)
        assert not copies.made, "another worker holds the lock"
        store.expire()
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B4)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT))
        assert len(copies.made) < COUNT, "the copies of the first worker are there"

    run(case, bookies=4)


def test_mark_stays_when_marked_bookie_returned_and_left_again_before_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/protocol.md, A3: the auditor writes nothing if the mark already names the bookie, and no other process
    would."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        monkeypatch.setattr(repair_machine, "is_incarnation", lambda _: True)  # entries that they list are not read
        bench.bookies.stop(B2)
        await bench.mark(B2, B3)
        bench.worker(bytes_per_s=200)
        await until_begun(bench)
        bench.bookies.stop(B3)
        await until_unmarked(bench)
        assert sorted(await recorded(bench)) == [B1, B4, B5]
        assert all(bench.bookies.at[each].of(LEDGER) == list(range(COUNT)) for each in (B4, B5))

    run(case, bookies=5)


async def until_locked(bench: Bench, worker: Worker, store: FrozenStore) -> None:
    """Wait until the worker has copied a part. Then its process dies, and its session lasts."""
    await until_begun(bench)
    await worker._nursery.close()


def test_two_workers_that_both_believe_to_hold_lock_do_no_harm() -> None:
    """A session ends while its worker copies: the worker records nothing more."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        store = FrozenStore(bench.tree)
        bench.worker("slow", store=store, bytes_per_s=200)
        await until_begun(bench)
        store.expire()
        bench.worker("quick")
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B4)
        await bench.pass_time(60)
        assert paths.ledger(LEDGER) not in store.writes
        assert locks(bench) == []

    run(case, bookies=4)


def test_worker_records_nothing_after_session_end_until_it_has_lock_again() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        store = FrozenStore(bench.tree)
        bench.worker(store=store, bytes_per_s=200)
        await until_begun(bench)
        store.expire()
        store.resume()
        another = await bench.marks.lock(LEDGER, "another")
        assert another is not None
        await bench.pass_time(60)
        assert bench.bookies.at[B4].of(LEDGER) == list(range(COUNT)), "additional copies do no harm"
        assert await recorded(bench) == (B1, B2, B3)
        await another.release()
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B4)

    run(case, bookies=4)


def test_switching_repair_off_stops_copying() -> None:
    """A large ledger may take minutes."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        worker = bench.worker(bytes_per_s=100)
        await until_begun(bench)
        await bench.settings.disable()
        await bench.pass_time(1)
        had = len(bench.bookies.at[B4].of(LEDGER))
        assert had < COUNT
        await bench.pass_time(60)
        assert len(bench.bookies.at[B4].of(LEDGER)) == had
        assert (locks(bench), worker.statistics()["ledgers_repairing"]) == ([], 0)
        await bench.settings.enable()
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B4)

    run(case, bookies=4)


def test_mark_that_grows_during_repair_stays_until_all_is_repaired() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        worker = bench.worker(bytes_per_s=200)
        await until_begun(bench)
        bench.bookies.stop(B2)
        await bench.mark(B2)
        await until_unmarked(bench)
        assert set(await recorded(bench)) == {B1, B4, B5}
        for bookie in (B4, B5):
            assert bench.bookies.at[bookie].of(LEDGER) == list(range(COUNT))
        assert worker.statistics()["ledgers_repaired"] == 1

    run(case, bookies=5)


def test_returned_bookie_has_its_mark_cleared_and_nothing_is_copied() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.bookies.start(B3)
        copies = Copies(bench)
        bench.worker()
        await until_unmarked(bench)
        assert not copies.made
        assert await recorded(bench) == (B1, B2, B3)

    run(case, bookies=4)


def test_absent_bookie_without_mark_is_not_replaced() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        del bench.bookies.at[B2].entries[LEDGER, EntryId(3)]
        await bench.mark(B2)
        bench.bookies.stop(B3)
        copies = Copies(bench)
        bench.worker()
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B3)
        assert list(copies.made) == [(B2, LEDGER, 3)]

    run(case, bookies=5)


def test_ledger_that_is_deleted_meanwhile_does_not_come_back() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker(bytes_per_s=200)
        await until_begun(bench)
        await bench.ledgers.remove(LEDGER, -1)
        await until_unmarked(bench)
        assert await bench.ledgers.list_ids() == []
        assert locks(bench) == []

    run(case, bookies=4)


def test_copying_of_deleted_ledger_stops_at_any_rate() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker(bytes_per_s=10)
        await until_begun(bench)
        await bench.ledgers.remove(LEDGER, -1)
        await until_unmarked(bench, within_s=3.0)
        await bench.pass_time(1)
        assert locks(bench) == []
        assert len(bench.bookies.at[B4].of(LEDGER)) < COUNT

    run(case, bookies=4)


def test_worker_rereads_metadata_when_its_update_conflicts() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.mark(B3)
        bench.worker(bytes_per_s=200)
        newcomer = await until_begun(bench)
        other = B4 if newcomer == B5 else B5
        for entry in range(COUNT):
            bench.bookies.at[other].entries[LEDGER, EntryId(entry)] = bench.bookies.at[B1].entries[
                LEDGER, EntryId(entry)
            ]
        others, version = await bench.ledgers.read(LEDGER)
        await bench.ledgers.write(others.with_ensemble(EntryId(0), (other, B2, B3)), version)
        await until_unmarked(bench)
        first, second, third = await recorded(bench)
        assert (first, second) == (other, B2)
        assert third in (B1, newcomer)
        assert bench.bookies.at[third].of(LEDGER) == list(range(COUNT))

    run(case, bookies=5)


def test_nothing_is_repaired_while_repair_is_off() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        await bench.settings.disable()
        await bench.mark(B3)
        worker = bench.worker()
        await bench.pass_time(60)
        assert await bench.is_marked()
        assert holders(bench, 0) == [B1, B2, B3]
        assert worker.statistics()["enabled"] == 0
        await bench.settings.enable()
        await until_unmarked(bench)
        assert worker.statistics()["enabled"] == 1

    run(case, bookies=4)


@pytest.mark.parametrize("setting", ["the switch", "the delay"])
def test_operator_who_changes_a_setting_is_not_kept_waiting(setting: str) -> None:
    """After many failed attempts the next one would come only after minutes."""

    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        copies = Copies(bench)
        copies.refusing.add(B4)
        await bench.mark(B3)
        worker = bench.worker()
        await bench.pass_time(1000)
        failed = worker.statistics()["attempts_failed"]
        if setting == "the switch":
            await bench.settings.disable()
            await bench.settings.enable()
        else:
            await bench.settings.set_lost_bookie_delay_s(1)
        await bench.pass_time(30)
        assert worker.statistics()["attempts_failed"] >= failed + 3, "at once, after 5 s and after 10 s more"
        copies.refusing.clear()
        await until_unmarked(bench, within_s=25)

    run(case, bookies=4, limit_s=2000)


def test_marks_added_during_a_repair_are_not_kept_waiting() -> None:
    """A watch reports only the first mark."""

    async def case(bench: Bench) -> None:
        for ledger in OTHERS[:3]:
            await closed(bench, ledger)
        bench.bookies.stop(B3)
        worker = bench.worker()
        await bench.pass_time(20)
        await bench.mark(B3, ledger=OTHERS[0])
        await until(lambda: worker.statistics()["ledgers_repaired"] == 1)
        for ledger in OTHERS[1:3]:
            await bench.mark(B3, ledger=ledger)
        await until_unmarked(bench, *OTHERS[1:3], within_s=3)
        await bench.pass_time(2)
        assert worker.statistics()["ledgers_marked"] == 0

    run(case, bookies=4)


def test_unreadable_fragment_keeps_mark_and_others_are_copied_once() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3)
        for bookie in (B1, B2):
            bench.bookies.at[bookie].entries[LEDGER, EntryId(5)] = b"?" * 60
        await bench.mark(B3)
        copies = Copies(bench)
        worker = bench.worker()
        await bench.pass_time(1000)
        assert await bench.is_marked()
        assert await recorded(bench) == (B1, B2, B3), "no bookie is named that lacks copies"
        assert bench.bookies.at[B4].of(LEDGER) == [each for each in range(COUNT) if each != 5]
        assert set(copies.made.values()) == {1}
        assert worker.statistics()["ledgers_unreadable"] == 1
        bench.bookies.start(B3)
        await until_unmarked(bench)
        assert await recorded(bench) == (B1, B2, B3), "the bookie was only away"

    run(case, bookies=4, limit_s=2000)


def test_unsupported_ledger_does_not_stop_others_from_being_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisoned, other = OTHERS[:2]
    original = LedgerRepairer.repair

    async def repair(self: LedgerRepairer, ledger: LedgerId, *arguments: Any, **named: Any) -> Any:
        if ledger == poisoned:
            raise ValueError("nobody thought of this")
        return await original(self, ledger, *arguments, **named)

    async def case(bench: Bench) -> None:
        monkeypatch.setattr(LedgerRepairer, "repair", repair)
        for ledger in (poisoned, other):
            await closed(bench, ledger)
        bench.bookies.stop(B3)
        for ledger in (poisoned, other):
            await bench.mark(B3, ledger=ledger)
        worker = bench.worker()
        await until_unmarked(bench, other)
        await bench.pass_time(10)
        assert await bench.is_marked(poisoned)
        assert worker.statistics()["attempts_failed"] == 1, "failed repairs are not repeated at once"
        assert locks(bench) == []
        monkeypatch.setattr(LedgerRepairer, "repair", original)
        await until_unmarked(bench, poisoned, within_s=400.0)

    run(case, bookies=4, limit_s=1000)


def test_damage_at_present_bookie_is_repaired_in_place() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        good = dict(bench.bookies.at[B2].entries)
        bench.bookies.at[B2].entries[LEDGER, EntryId(5)] = good[LEDGER, EntryId(5)][:-1] + b"?"
        del bench.bookies.at[B2].entries[LEDGER, EntryId(7)]
        await bench.mark(B2)
        copies = Copies(bench)
        bench.worker()
        await until_unmarked(bench)
        assert bench.bookies.at[B2].entries == good
        assert sorted(copies.made) == [(B2, LEDGER, 5), (B2, LEDGER, 7)]
        assert await recorded(bench) == (B1, B2, B3)

    run(case, bookies=4)


def test_new_bookie_is_used_as_soon_as_it_registers() -> None:
    async def case(bench: Bench) -> None:
        await closed(bench)
        bench.bookies.stop(B3, B4)
        await bench.mark(B3)
        bench.worker()
        await bench.pass_time(1000)
        assert await bench.is_marked()
        bench.bookies.start(B4)
        await until_unmarked(bench, within_s=5)
        assert await recorded(bench) == (B1, B2, B4)

    run(case, bookies=4, limit_s=2000)


def test_rate_is_shared_by_all_ledgers_of_a_worker() -> None:
    async def case(bench: Bench) -> None:
        for ledger in OTHERS[:6]:
            await closed(bench, ledger)
        size = sum(len(packet) for packet in bench.bookies.at[B3].entries.values())
        bench.bookies.stop(B3)
        for ledger in OTHERS[:6]:
            await bench.mark(B3, ledger=ledger)
        began = bench.env.clock.now()
        bench.worker(bytes_per_s=size // 20)
        await until_unmarked(bench, *OTHERS[:6])
        assert 18 < bench.env.clock.now() - began < 24

    run(case, bookies=4)


def test_bookie_in_new_place_is_listed_there_once_it_has_the_copies() -> None:
    """If an ensemble is wider than its write sets, each place has its own entries."""

    async def case(bench: Bench) -> None:
        for bookie, zone in zip((B1, B2, B3, B4, B5), "bbaac", strict=True):
            bench.bookies.at[bookie].zone = zone
        handle = bench.handle(await bench.ledger(B1, B2, B3, B4, write=2))
        await appended(bench, handle, COUNT)
        await handle.close()
        list_of, is_dumb = bench.bookies.entries, True

        async def entries(bookie: BookieId, ledger: LedgerId) -> HeldEntries:
            if bookie == B1 and is_dumb:
                raise BookieError(f"{bookie} does not say what it has")
            return await list_of(bookie, ledger)

        bench.bookies.entries = entries  # type: ignore[method-assign]
        await bench.marks.mark(LEDGER, [B4], 1)
        bench.worker()
        await bench.pass_time(60)
        assert lacking(bench, await bench.recorded()) == []
        is_dumb = False
        await until_unmarked(bench)
        assert await recorded(bench) == (B5, B2, B3, B1)
        assert lacking(bench, await bench.recorded()) == []

    run(case, bookies=5)


def lacking(bench: Bench, metadata: LedgerMetadata) -> list[tuple[BookieId, EntryId]]:
    return [
        (bookie, entry)
        for entry in map(EntryId, range(COUNT))
        for bookie in metadata.write_set(entry)
        if (LEDGER, entry) not in bench.bookies.at[bookie].entries
    ]
