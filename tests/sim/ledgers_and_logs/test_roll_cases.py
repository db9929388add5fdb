"""Rolls, losses and repairs of a leader's log, case by case, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import (
    LedgerFenced,
    MetadataUnknown,
    NotEnoughBookies,
    OutcomeUnknown,
    StoreError,
)
from kvstore.types import BookieId, LedgerId, LedgerState, Quorum, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.copies import copier
from kvstore.wal.ensembles import in_recovery
from kvstore.wal.handle import LedgerHandle
from kvstore.wal.leading.leader_log import IN_FLIGHT_MAX
from kvstore.wal.leading.standstill import STALL_MAX_S
from kvstore.wal.ports import AppendDone
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Appended, Bench, FrozenStore, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, numbers, opened, read_all
from tests.sim.ledgers_and_logs.model_bookies import ModelBookie

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("rolls", [False, True])
def test_leader_with_too_many_entries_in_flight_loses_its_log(rolls: bool) -> None:
    """No bookie answers. The leader's bound is far below the log's. Exceeding it is an error, but an exception from
    the event loop would end the process with every other partition."""

    async def case(bench: Bench) -> None:
        log = await opened(bench.logs(SMALL if rolls else NEVER))
        lost: list[StoreError] = []
        log.on_lost(lost.append)
        for bookie in (B1, B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        entries = Appended()
        for number in range(IN_FLIGHT_MAX + 20):
            log.append(b"%d" % number, Seq(number + 1), entries.done)
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        assert [type(error) for error in lost] == [OutcomeUnknown]
        assert entries.confirmed == []
        assert len(entries.errors) == IN_FLIGHT_MAX + 20

    run(case)


# docs/protocol.md G10
def test_full_ledger_is_rolled_and_nothing_is_lost_or_reordered() -> None:
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


def test_entries_go_to_next_ledger_only_when_all_before_are_acknowledged() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(4)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(4, gap_s=0)
        await asyncio.sleep(1)  # the roll has begun; nothing of n+1 may be sent
        await writer.append(2, gap_s=0)
        first = writer.log.listed.ledgers[0].id
        assert len(writer.log.listed.ledgers) == 2
        assert {ledger for model in bench.bookies.at.values() for ledger, _ in model.entries} == {first}
        for bookie in (B2, B3):
            bench.bookies.release_adds(bookie)
        await asyncio.sleep(1)
        await writer.append(2)
        assert len(writer.entries.confirmed) == 12
        assert await read_all(bench.logs(), 12) == numbers(1, 12)

    run(case)


def test_log_lost_at_first_entry_of_next_ledger_stops_former_ledger_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would look for other bookies at their next change, and raise, because its log's tasks are gone."""
    append = LedgerHandle.append

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        former = writer.log.handle

        def fenced_at_once(self: LedgerHandle, payload: bytes, done: AppendDone) -> None:
            if self is not former:
                monkeypatch.setattr(LedgerHandle, "append", append)
                self.stop(LedgerFenced("it has another writer"))
            append(self, payload, done)

        monkeypatch.setattr(LedgerHandle, "append", fenced_at_once)
        await writer.append(4)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(4, gap_s=0)
        await asyncio.sleep(1)  # the roll has begun
        await writer.append(2, gap_s=0)
        for bookie in (B2, B3):
            bench.bookies.release_adds(bookie)
        await asyncio.sleep(1)
        assert isinstance(writer.log.lost, LedgerFenced)
        assert former.is_halted

    run(case)


def test_log_lost_during_close_of_former_ledger_leaves_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = LedgerHandle.close

    async def taken_over(self: LedgerHandle) -> None:
        await self._ports.ledgers.update(self.ledger, in_recovery)
        await close(self)

    async def case(bench: Bench) -> None:
        logs = bench.logs(SMALL)
        writer = Writer(await opened(logs))
        listeners = writer.log._ports.choice._listeners
        monkeypatch.setattr(LedgerHandle, "close", taken_over)
        assert list(listeners) == [writer.log.handle]
        await writer.append(8)
        assert isinstance(writer.log.lost, LedgerFenced)
        assert list(listeners) == []

    run(case)


def test_leader_without_ack_quorum_during_roll_loses_its_log_too() -> None:
    """The leader waits for the last entries of the former ledger. As long as it waits, no other node would lead."""

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(4)
        for bookie in (B2, B3):
            bench.bookies.at[bookie].holds_adds = True
        await writer.append(4, gap_s=0)
        await asyncio.sleep(1)
        assert len(writer.log.listed.ledgers) == 2, "the roll has begun"
        assert writer.log.lost is None
        await asyncio.sleep(STALL_MAX_S + 0.5)
        assert isinstance(writer.log.lost, NotEnoughBookies)
        assert len(writer.entries.errors) == 4

    run(case)


# docs/protocol.md G13
def test_appends_continue_without_roll_while_metadata_store_is_away() -> None:
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


def test_roll_of_unknown_outcome_continues_in_old_ledger_until_it_is_known() -> None:
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


def test_takeover_in_middle_of_roll_keeps_everything() -> None:
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


def test_leader_that_lost_its_list_stops_rolling_trimming_and_appending() -> None:
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


def test_ledger_on_two_bookies_is_rolled_when_third_is_present() -> None:
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


def test_machine_registered_twice_is_no_reason_to_roll() -> None:
    """The machine has lost its disk, and the session of the former bookie has not ended yet: no ensemble gets both
    (W10)."""

    async def case(bench: Bench) -> None:
        for name in ("b9-aaaaaaaaaaaa", "b9-bbbbbbbbbbbb"):
            bench.bookies.at[BookieId(name)] = ModelBookie()
        bench.bookies.view.changed()
        writer = Writer(await opened(bench.logs(LogConfig(check_every_s=0.1))))
        for _ in range(10):
            await writer.append(1)
            await asyncio.sleep(1)
        assert len((await bench.listed()).ledgers) == 1
        assert writer.log.handle.writer.metadata.quorum == Quorum(2, 2, 2)

    run(case, bookies=1)


def test_processes_of_one_machine_get_one_copy_of_an_entry() -> None:
    """Two machines have four bookies: an ensemble of three would keep two copies on one machine (W10, H15)."""

    async def case(bench: Bench) -> None:
        for name in ("b9-aaaaaaaaaaaa", "b9.2-bbbbbbbbbbbb", "b9.3-cccccccccccc"):
            bench.bookies.at[BookieId(name)] = ModelBookie()
        bench.bookies.view.changed()
        writer = Writer(await opened(bench.logs(LogConfig(check_every_s=0.1))))
        for _ in range(10):
            await writer.append(1)
            await asyncio.sleep(1)
        assert len((await bench.listed()).ledgers) == 1
        assert writer.log.handle.writer.metadata.quorum == Quorum(2, 2, 2)

    run(case, bookies=1)


def test_narrower_ledger_follows_striped_one_and_survives_next_loss() -> None:
    async def case(bench: Bench) -> None:
        config = LogConfig(quorum=Quorum(5, 3, 2), check_every_s=0.1)
        writer = Writer(await opened(bench.logs(config)))

        def quorum() -> Quorum:
            return writer.log.handle.writer.metadata.quorum

        await writer.append(7)
        assert quorum() == Quorum(5, 3, 2)
        for gone, left in ((B2, Quorum(4, 3, 2)), (B3, Quorum(3, 3, 2))):
            bench.bookies.stop(gone)
            await writer.append(7)
            await asyncio.sleep(10)
            assert quorum() == left
            await writer.append(7)
        bench.bookies.start(B2, B3)
        await asyncio.sleep(10)
        assert quorum() == Quorum(5, 3, 2)
        await writer.append(1)
        assert writer.log.lost is None
        assert writer.entries.errors == []
        assert await read_all(bench.logs(), 36) == numbers(1, 36)

    run(case, bookies=5)


def test_leader_long_without_ack_quorum_abandons_its_log() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(2)
        bench.bookies.stop(B2, B3)
        await writer.append(3)
        await asyncio.sleep(STALL_MAX_S - 1)
        assert writer.log.lost is None
        await asyncio.sleep(2)
        assert isinstance(writer.log.lost, NotEnoughBookies)
        assert [type(error) for error in writer.entries.errors] == [OutcomeUnknown] * 3

    run(case)


# docs/protocol.md W8
def test_missing_copies_are_remade_when_bookie_is_back() -> None:
    async def case(bench: Bench) -> None:
        bench.worker()
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


def test_copies_lost_from_complete_ledgers_are_remade_when_bookie_is_back() -> None:
    async def case(bench: Bench) -> None:
        bench.worker()
        writer = Writer(await opened(bench.logs(LogConfig(roll_entries=10, check_every_s=0.1))))
        await writer.append(25)
        await asyncio.sleep(20)
        bench.bookies.stop(B3)
        oldest = writer.entries.confirmed[0].ledger
        lost = bench.bookies.at[B3].of(oldest)
        assert lost
        for entry in lost:
            del bench.bookies.at[B3].entries[oldest, entry]
        bench.bookies.start(B3)
        await asyncio.sleep(20)
        assert bench.bookies.at[B3].of(oldest) == lost

    run(case)


# docs/protocol.md B14
def test_entries_no_longer_listed_by_bookie_are_copied_there_unprompted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier, "ROUND_S", 60.0)

    async def case(bench: Bench) -> None:
        bench.worker()
        writer = Writer(await opened(bench.logs(LogConfig(roll_entries=10, check_every_s=0.1))))
        await writer.append(25)
        await asyncio.sleep(20)
        oldest = writer.entries.confirmed[0].ledger
        had = bench.bookies.at[B3].of(oldest)
        del bench.bookies.at[B3].entries[oldest, sorted(had)[0]]
        await asyncio.sleep(20)
        assert bench.bookies.at[B3].of(oldest) != had
        await asyncio.sleep(60)
        assert bench.bookies.at[B3].of(oldest) == had

    run(case)


def test_new_leader_makes_missing_copies_of_former_leader() -> None:
    async def case(bench: Bench) -> None:
        bench.worker()
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


def test_sealed_log_has_nothing_to_recover() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs()))
        await writer.append(3)
        await writer.log.seal()
        metadata, _ = await bench.ledgers.read(writer.log.handle.ledger)
        assert (metadata.state, metadata.last_entry) == (LedgerState.CLOSED, 2)
        await writer.append(1)
        assert [type(error) for error in writer.entries.errors] == [NotEnoughBookies]

    run(case)
