"""Takeovers of a log, case by case, in virtual time, on model bookies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from kvstore.env.death.port import CERTIFICATE_BYTES, UNPROVEN, DeathWatch
from kvstore.errors import (
    LedgerFenced,
    MetadataUnknown,
    NotEnoughBookies,
    NotRecoverable,
    OutcomeUnknown,
    StoreError,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.types import BookieId, EntryId, LedgerId, LedgerState, Position, Quorum, Seq
from kvstore.wal.deaths import ProvenDeaths
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.lists import LedgerLists
from kvstore.wal.opener import LedgerTakeover
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Appended, Bench, FrozenStore, P, first_seq, run
from tests.sim.ledgers_and_logs.ledgers import RELEASE
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, numbers, opened, read_all

pytestmark = pytest.mark.sim


def test_first_leader_of_log_does_not_wait() -> None:
    async def case(bench: Bench) -> None:
        began = bench.env.clock.now()
        log = await opened(bench.logs())
        assert (log.epoch, log.recovered_end, log.waited) == (1, BEGINNING, False)
        assert bench.env.clock.now() - began < 0.1

    run(case)


def test_takeover_waits_out_lease_named_by_list() -> None:
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


# docs/protocol.md G8
def test_nothing_is_closed_or_listed_before_wait_ends() -> None:
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


# docs/protocol.md G9
def test_release_record_at_end_saves_wait() -> None:
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


class _Certified(DeathWatch):
    """The death watch of a process with this certificate."""

    def __init__(self, number: int) -> None:
        self.certificate = number.to_bytes(CERTIFICATE_BYTES)


# docs/protocol.md G28
def test_takeover_does_not_wait_once_end_of_leader_is_proven() -> None:
    async def case(bench: Bench) -> None:
        death, deaths = _Certified(1), ProvenDeaths()
        await Writer(await opened(bench.logs(death=death), lease_ms=5000)).append(3)
        deaths.note(death.certificate)
        began = bench.env.clock.now()
        taken = await opened(bench.logs(deaths=deaths))
        assert bench.env.clock.now() - began < 0.2
        assert not taken.waited

    run(case)


# docs/protocol.md G28
def test_proof_that_arrives_during_wait_ends_it() -> None:
    async def case(bench: Bench) -> None:
        death, deaths = _Certified(1), ProvenDeaths()
        await Writer(await opened(bench.logs(death=death), lease_ms=5000)).append(3)
        began = bench.env.clock.now()
        taking = bench.env.nursery.spawn(opened(bench.logs(deaths=deaths)), name="takeover")
        await asyncio.sleep(0.5)
        deaths.note(_Certified(2).certificate)
        await asyncio.sleep(0.5)
        assert not taking.done()
        deaths.note(death.certificate)
        await taking
        assert 1.0 <= bench.env.clock.now() - began < 1.2

    run(case)


# docs/protocol.md G28
def test_proof_about_another_process_or_unknown_maker_saves_no_wait() -> None:
    async def case(bench: Bench) -> None:
        deaths = ProvenDeaths()
        deaths.note(_Certified(2).certificate)
        for death in (_Certified(1), UNPROVEN):
            log = await opened(bench.logs(death=death), lease_ms=1000)
            await Writer(log).append(3)
            began = bench.env.clock.now()
            assert (await opened(bench.logs(deaths=deaths), lease_ms=0)).waited
            assert bench.env.clock.now() - began >= 1.1

    run(case)


# docs/protocol.md G28
def test_proof_about_leader_before_last_saves_no_wait() -> None:
    """The last ledger's leader may have a lease. The leader before it had none left when that ledger was listed."""

    async def case(bench: Bench) -> None:
        former, last, deaths = _Certified(1), _Certified(2), ProvenDeaths()
        await Writer(await opened(bench.logs(death=former), lease_ms=100)).append(3)
        await Writer(await opened(bench.logs(death=last), lease_ms=1000)).append(3)
        deaths.note(former.certificate)
        began = bench.env.clock.now()
        assert (await opened(bench.logs(deaths=deaths))).waited
        assert bench.env.clock.now() - began >= 1.1

    run(case)


def test_release_record_not_at_end_saves_nothing() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=1000)
        log.append(RELEASE, Seq(1), Appended().done)
        await Writer(log, seq=2).append(1)
        began = bench.env.clock.now()
        assert (await opened(bench.logs())).waited
        assert bench.env.clock.now() - began >= 1.1

    run(case)


def test_release_record_before_empty_ledger_is_still_the_end() -> None:
    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(), lease_ms=1000)
        log.append(RELEASE, Seq(1), Appended().done)
        await asyncio.sleep(0.1)
        await opened(bench.logs())  # skips its wait, lists its ledger and dies before its first record
        assert not (await opened(bench.logs())).waited

    run(case)


def test_ledger_closed_by_another_process_is_waited_for_too() -> None:
    """A recovery by an operator closes the ledger without a wait, while the old leader's lease lasts."""

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


async def _half_written(bench: Bench) -> LedgerId:
    """Create a log of three confirmed entries, and a fourth entry from a dead leader that only B3 has."""
    log = await opened(bench.logs(), lease_ms=1000)
    await Writer(log).append(3)
    bench.bookies.at[B1].holds_adds = bench.bookies.at[B2].holds_adds = True
    log.append(b"4", Seq(4), Appended().done)
    await bench.pass_time()
    return log.handle.ledger


async def _recovering_elsewhere(bench: Bench, ledger: LedgerId, *, without: BookieId) -> LedgerTakeover:
    """Return another process's recovery that has found the ledger's end with one bookie away and has yet to record
    it."""
    bench.bookies.stop(without)
    other = LedgerTakeover(ledger, bench.ports_on(MemoryStore(bench.tree)), bench.env.nursery)
    await other.take_over()
    bench.bookies.start(without)
    return other


async def _recovered_elsewhere(bench: Bench, ledger: LedgerId, *, without: BookieId) -> Position:
    other = await _recovering_elsewhere(bench, ledger, without=without)
    return Position(ledger, (await other.close()).last_entry)


# docs/protocol.md R6, G8
def test_leader_continues_after_entry_found_only_by_another_recovery() -> None:
    """Another process (a worker, a command, another candidate) records its end while the leader waits out the lease."""

    async def case(bench: Bench) -> None:
        ledger = await _half_written(bench)
        bench.bookies.stop(B3)
        taking = bench.env.nursery.spawn(opened(bench.logs()), name="takeover")
        await asyncio.sleep(0.5)
        bench.bookies.start(B3)
        recorded = await _recovered_elsewhere(bench, ledger, without=B2)
        log = await taking
        assert log.waited
        assert log.recovered_end == recorded == Position(ledger, EntryId(3))

    run(case)


# docs/protocol.md R6, G8
def test_leader_continues_before_entry_that_another_recovery_excluded() -> None:
    async def case(bench: Bench) -> None:
        ledger = await _half_written(bench)
        other = await _recovering_elsewhere(bench, ledger, without=B3)
        bench.bookies.stop(B2)
        taking = bench.env.nursery.spawn(opened(bench.logs()), name="takeover")
        await asyncio.sleep(0.5)
        assert (await other.close()).last_entry == EntryId(2)
        log = await taking
        assert log.waited
        assert log.recovered_end == Position(ledger, EntryId(2))

    run(case)


# docs/protocol.md G24
@pytest.mark.parametrize("is_first", [True, False], ids=["before it is compared", "while the lease is waited out"])
def test_state_with_entry_found_by_another_recovery_proves_no_older_store(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(bench: Bench) -> None:
        ledger = await _half_written(bench)
        applied = Position(ledger, EntryId(2))
        found = LedgerTakeover.take_over

        async def take_over_late(self: LedgerTakeover) -> None:
            nonlocal applied
            monkeypatch.setattr(LedgerTakeover, "take_over", found)
            await found(self)
            bench.bookies.start(B3)
            if is_first:
                applied = await _recovered_elsewhere(bench, ledger, without=B2)

        monkeypatch.setattr(LedgerTakeover, "take_over", take_over_late)
        bench.bookies.stop(B3)
        opening = bench.logs().open_as_leader(P, 500, first_seq, lambda: applied)
        taking = bench.env.nursery.spawn(opening, name="takeover")
        await asyncio.sleep(0.5)
        if not is_first:
            applied = await _recovered_elsewhere(bench, ledger, without=B2)
        assert (await taking).recovered_end == applied == Position(ledger, EntryId(3))

    run(case)


def test_former_leader_learns_of_its_loss_at_next_append() -> None:
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


def test_one_of_two_simultaneous_takeovers_wins_and_the_other_retries() -> None:
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
def test_candidate_that_dies_after_any_write_is_followed_by_another(step: int) -> None:
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


# docs/protocol.md G12
def test_list_write_of_unknown_outcome_that_was_done_succeeds() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        lists = LedgerLists(store)
        listed, version = await lists.make(P)
        store.fail_next = [MetadataUnknown("the connection broke")]
        wanted = listed.with_ledger(LedgerId(1), Seq(1), epoch=1, lease_ms=0)
        assert await lists.write(P, wanted, version) == version + 1
        assert await lists.read(P) == (wanted, version + 1)

    run(case)


def test_list_write_that_lost_a_race_fails_also_when_outcome_was_unknown() -> None:
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


def test_list_removed_during_its_creation_is_not_written() -> None:
    """Its version would match any node: the write would overwrite a node that another process recreates at that
    moment."""

    async def case(bench: Bench) -> None:
        store: Any = FrozenStore(bench.tree)
        create = store.create

        async def create_in_vain(path: str, data: bytes = b"", **how: Any) -> str:
            made: str = await create(path, data, **how)
            if path == paths.partition_log(P):
                await store.delete(path, -1)
            return made

        store.create = create_in_vain
        with pytest.raises(VersionConflict):
            await LedgerLists(store).make(P)

    run(case)


def test_swept_ledger_cannot_be_listed() -> None:
    """A leader that was paused between create and list."""

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


# docs/protocol.md A12
def test_bookie_set_up_again_under_its_id_ends_no_log() -> None:
    """The ids of Apache's bookies have no incarnation, so an empty disk denies the entries of the former one."""

    async def case(bench: Bench) -> None:
        await bench.set_up(B1, B2, B3)
        writer = Writer(await opened(bench.logs()))
        await writer.append(3)
        bench.bookies.at[B3].holds_adds = True
        await writer.append(1)
        assert writer.entries.confirmed[-1].entry == 3, "confirmed by B1 and B2"
        ledger = writer.log.handle.ledger
        writer.log.close_for_good()
        bench.bookies.stop(B1)
        bench.bookies.at[B2].entries.clear()
        bench.bookies.at[B2].lacs.clear()
        await MemoryStore(bench.tree).delete(paths.cookie(B2), -1)
        await bench.set_up(B2)
        with pytest.raises(NotRecoverable, match="entry 3: no definite answer from"):
            await opened(bench.logs())
        bench.bookies.start(B1)
        assert (await opened(bench.logs())).recovered_end == (ledger, 3)

    run(case)


# docs/protocol.md A12
@pytest.mark.parametrize("is_moved", [True, False])
def test_bookie_ends_log_whose_metadata_were_moved_with_its_cookie(*, is_moved: bool) -> None:
    """An import creates the cluster's id last. Otherwise no log of a moved cluster could be opened."""

    async def case(bench: Bench) -> None:
        store = MemoryStore(bench.tree)
        await Writer(await opened(bench.logs())).append(3)
        bench.bookies.stop(B1)
        await bench.set_up(B2, B3)
        if is_moved:
            data, _ = await store.get(paths.INSTANCE_ID)
            await store.delete(paths.INSTANCE_ID, -1)
            await store.create(paths.INSTANCE_ID, data)
            await opened(bench.logs())
        else:
            with pytest.raises(NotRecoverable):
                await opened(bench.logs())

    run(case)


def test_log_is_not_opened_without_ack_quorum_of_bookies() -> None:
    async def case(bench: Bench) -> None:
        bench.bookies.stop(B2, B3)
        with pytest.raises(NotEnoughBookies):
            await opened(bench.logs())
        bench.bookies.start(B2)
        log = await opened(bench.logs())
        assert log.handle.writer.metadata.quorum == Quorum(2, 2, 2)

    run(case)
