"""The repair of a ledger that is marked as under-replicated."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kvstore.autorecovery.repair_machine import (
    AGAIN_S_MAX,
    CHECKS_MAX,
    DOUBTFUL,
    FIRST_S,
    IN_GRACE,
    IS_LED,
    NO_SPARE,
    PATIENCE,
    READ_ONLY,
    UNCOVERED,
    AttemptFailed,
    AttemptHistory,
    Command,
    End,
    Event,
    Fill,
    Filled,
    Gone,
    MetadataRead,
    MetadataWritten,
    Overtaken,
    ProbeWriter,
    ReadMetadata,
    Recover,
    Recovered,
    RegisteredBookies,
    RepairMachine,
    WriteMetadata,
    Writer,
    WriterProbed,
)
from kvstore.types import BookieId, EntryId, Fragment, LedgerMetadata, LedgerState
from kvstore.wal.creator import OWNER_KEY
from tests.wal.ledgers import LEDGER, e, ledger

B1, B2, B3, B4, B5 = (BookieId(f"n{i}-{i:012x}") for i in range(1, 6))
FOREIGN = BookieId("host:3181")
GRACE_S = 30.0
NOW = 1000.0


class CheckedMachine(RepairMachine):
    """Checks the invariants after each event."""

    def handle(self, event: Event, now: float = NOW) -> Command:
        command = super().handle(event, now)
        self.check()
        return command


def machine(*marked: BookieId, past: AttemptHistory | None = None) -> CheckedMachine:
    found = CheckedMachine(LEDGER, marked, past or AttemptHistory(), grace_s=GRACE_S, luck=lambda: Random(LEDGER))
    assert found.start() == ReadMetadata()
    return found


def standing(*writable: BookieId, readonly: tuple[BookieId, ...] = (), **zones: str) -> RegisteredBookies:
    of = {bookie: zones.get(bookie.partition("-")[0], "") for bookie in (B1, B2, B3, B4, B5)}
    return RegisteredBookies(frozenset(writable), frozenset(readonly), of)


CLOSED = ledger(B1, B2, B3).closed(e(9), 100)
OPEN = ledger(B1, B2, B3)
OURS = replace(OPEN, custom=((OWNER_KEY, b"p1"),))


def filling(of: RepairMachine, metadata: LedgerMetadata, who: RegisteredBookies) -> Fill:
    command = of.handle(MetadataRead(metadata, 4, who), NOW)
    assert isinstance(command, Fill)
    return command


# ── closed ledgers ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_repair_replaces_a_lost_bookie_after_filling_the_new_one() -> None:
    work = machine(B3)
    fill = filling(work, CLOSED, standing(B1, B2, B4))
    assert fill.wanted.fragments[0].ensemble == (B1, B2, B4)
    assert (fill.must, fill.may, fill.last) == ({B4}, {B1, B2}, e(9))
    assert work.handle(Filled()) == WriteMetadata(fill.wanted, 4)
    assert work.handle(MetadataWritten()) == End(is_complete=True)


def test_repair_keeps_the_place_of_a_returned_bookie() -> None:
    work = machine(B3)
    fill = filling(work, CLOSED, standing(B1, B2, B3, B4))
    assert fill.wanted == CLOSED
    assert B3 in fill.must, "entries that it may lack are copied"
    assert work.handle(Filled()) == End(is_complete=True)


def test_repair_keeps_the_place_of_an_unmarked_absent_bookie() -> None:
    fill = filling(machine(B3), CLOSED, standing(B1, B4))
    assert fill.wanted.fragments[0].ensemble == (B1, B2, B4)


def test_repair_checks_all_bookies_when_the_mark_names_none() -> None:
    fill = filling(machine(), CLOSED, standing(B1, B3, B4))
    assert fill.wanted.fragments[0].ensemble == (B1, B4, B3)


def test_repair_draws_the_same_newcomers_in_every_worker() -> None:
    first, second = (filling(machine(B3), CLOSED, standing(B1, B2, B4, B5)) for _ in range(2))
    assert first.wanted == second.wanted


def test_repair_names_no_bookie_for_entries_that_it_lacks() -> None:
    metadata = replace(CLOSED, fragments=(Fragment(e(0), (B1, B2, B3)), Fragment(e(5), (B1, B3, B2))))
    work = machine(B3)
    filling(work, metadata, standing(B1, B2, B4))
    command = work.handle(Filled(unreadable=frozenset({e(7)})))
    assert isinstance(command, WriteMetadata)
    assert [each.ensemble for each in command.wanted.fragments] == [(B1, B2, B4), (B1, B3, B2)]
    end = work.handle(MetadataWritten())
    assert isinstance(end, End)
    assert not end.is_complete
    assert "the first is 7" in end.reason


def test_repair_keeps_the_mark_without_a_spare_bookie() -> None:
    work = machine(B3)
    filling(work, CLOSED, standing(B1, B2))
    assert work.handle(Filled()) == End(is_complete=False, reason=NO_SPARE, again_s=FIRST_S)


def test_repair_keeps_the_mark_while_a_marked_bookie_is_full() -> None:
    work = machine(B2)
    fill = filling(work, CLOSED, standing(B1, B3, readonly=(B2,)))
    assert B2 not in fill.takers
    assert work.handle(Filled(has_capacity=False)) == End(is_complete=False, reason=READ_ONLY, again_s=FIRST_S)


def test_repair_keeps_the_mark_but_replaces_lost_when_a_bookie_refuses() -> None:
    work = machine(B2, B3)
    fill = filling(work, CLOSED, standing(B1, B2, B4))
    assert (fill.newcomers, fill.must) == ({B4}, {B2, B4})
    assert work.handle(Filled(refused=frozenset({B2}))) == WriteMetadata(fill.wanted, 4)
    end = work.handle(MetadataWritten())
    assert isinstance(end, End)
    assert not end.is_complete
    assert end.reason == f"has bookies that do not answer or take no copies: {B2}"


def test_repair_spreads_copies_that_share_a_zone() -> None:
    fill = filling(machine(), CLOSED, standing(B1, B2, B3, B4, n1="a", n2="a", n3="b", n4="c"))
    assert sorted(fill.wanted.fragments[0].ensemble) in ([B1, B3, B4], [B2, B3, B4])


def test_repair_reads_copies_only_of_bookies_that_list_unreadable_ones() -> None:
    metadata = ledger(B1, B2, FOREIGN).closed(e(9), 100)
    assert filling(machine(B2, FOREIGN), metadata, standing(B1, B2, FOREIGN)).read_at == {FOREIGN}


def test_repair_ends_when_the_ledger_is_gone() -> None:
    assert machine(B3).handle(Gone()) == End(is_complete=True)


def test_repair_restarts_after_a_conflict_a_limited_number_of_times() -> None:
    work = machine(B3)
    for _ in range(CHECKS_MAX - 1):
        filling(work, CLOSED, standing(B1, B2, B4))
        work.handle(Filled())
        assert work.handle(Overtaken()) == ReadMetadata()
    filling(work, CLOSED, standing(B1, B2, B4))
    end = work.handle(Overtaken())
    assert isinstance(end, End)
    assert not end.is_complete


def test_repair_backs_off_after_failed_attempts() -> None:
    past, waits = AttemptHistory(), []
    for _ in range(9):
        work = machine(B3, past=past)
        filling(work, CLOSED, standing(B1, B2, B4))
        end = work.handle(AttemptFailed("no answer"))
        assert isinstance(end, End)
        waits.append(end.again_s)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, AGAIN_S_MAX]


def test_repair_waits_at_most_half_a_minute_for_a_leader() -> None:
    past, waits = AttemptHistory(), []
    for _ in range(5):
        work = machine(B3, past=past)
        work.handle(MetadataRead(OURS, 4, standing(B1, B2, B4)))
        end = work.handle(WriterProbed(Writer(is_led=True, lac=e(3))))
        assert isinstance(end, End)
        waits.append(end.again_s)
    assert waits == [5, 10, 20, 30, 30]


def assert_draws_another_after_patience(past: AttemptHistory) -> None:
    """Count attempts while two spare bookies both take no copies."""
    drawn = []
    for _ in range(PATIENCE + 1):
        work = machine(B3, past=past)
        (newcomer,) = filling(work, CLOSED, standing(B1, B2, B4, B5)).must
        drawn.append(newcomer)
        work.handle(AttemptFailed("no answer", frozenset({newcomer})))
    assert len(set(drawn[:PATIENCE])) == 1
    assert drawn[-1] not in drawn[:PATIENCE]


def test_repair_draws_another_newcomer_only_after_several_attempts() -> None:
    assert_draws_another_after_patience(AttemptHistory())


# docs/protocol.md W11
@pytest.mark.parametrize("failed", [2, 16])
def test_repair_counts_only_refusals_before_drawing_another_newcomer(failed: int) -> None:
    """There was no spare bookie for an hour; then two were added, one of which is useless."""
    past = AttemptHistory()
    for _ in range(failed):
        work = machine(B3, past=past)
        filling(work, CLOSED, standing(B1, B2))
        work.handle(Filled())
    assert_draws_another_after_patience(past)


# docs/protocol.md W11
@pytest.mark.parametrize("spares", [(B4,), (B4, B5)], ids=("one", "two"))
def test_repair_draws_refused_newcomers_again_when_there_is_no_other(spares: tuple[BookieId, ...]) -> None:
    """They may be healthy by now. Meanwhile entries that the others lack are copied, for which no newcomer must
    answer."""
    past, drawn = AttemptHistory(), []
    for _ in range(2):
        for _ in range(PATIENCE * len(spares)):
            work = machine(B3, past=past)
            fill = filling(work, CLOSED, standing(B1, B2, *spares))
            drawn.extend(fill.newcomers)
            work.handle(AttemptFailed("no answer", fill.newcomers))
        work = machine(B3, past=past)
        assert not filling(work, CLOSED, standing(B1, B2, *spares)).newcomers
        end = work.handle(Filled())
        assert isinstance(end, End)
        assert end.reason == NO_SPARE
    assert {bookie: drawn.count(bookie) for bookie in spares} == dict.fromkeys(spares, 2 * PATIENCE)


# ── ledgers that are not closed ───────────────────────────────────────────────────────────────────────────────────────


def judged(
    work: RepairMachine, metadata: LedgerMetadata, who: RegisteredBookies, writer: Writer, now: float = NOW
) -> Command:
    assert isinstance(work.handle(MetadataRead(metadata, 4, who), now), ProbeWriter)
    return work.handle(WriterProbed(writer), now)


def after_grace(
    metadata: LedgerMetadata, who: RegisteredBookies, doubtful: frozenset[BookieId] = frozenset()
) -> Command:
    past, writer = AttemptHistory(), Writer(is_led=False, lac=e(3), doubtful=doubtful)
    first = judged(machine(B3, past=past), metadata, who, writer)
    assert first == End(is_complete=False, reason=IN_GRACE, again_s=GRACE_S)
    return judged(machine(B3, past=past), metadata, who, writer, NOW + GRACE_S)


@pytest.mark.parametrize("metadata", [OPEN, OURS, OPEN.recovering()], ids=("foreign", "ours", "in recovery"))
def test_repair_recovers_an_open_ledger_without_leader_after_a_grace(metadata: LedgerMetadata) -> None:
    assert after_grace(metadata, standing(B1, B2, B4)) == Recover()


def test_repair_treats_a_recovered_ledger_like_any_closed_one() -> None:
    past, writer = AttemptHistory(), Writer(is_led=False, lac=e(3))
    judged(machine(B3, past=past), OPEN, standing(B1, B2, B4), writer)
    work = machine(B3, past=past)
    assert judged(work, OPEN, standing(B1, B2, B4), writer, NOW + GRACE_S) == Recover()
    assert work.handle(Recovered()) == ReadMetadata()
    assert filling(work, CLOSED, standing(B1, B2, B4)).wanted.fragments[0].ensemble == (B1, B2, B4)


def test_repair_leaves_a_ledger_with_a_leader_alone() -> None:
    past = AttemptHistory()
    for at in range(100):
        end = judged(machine(B3, past=past), OURS, standing(B1, B2, B4), Writer(True, e(-1)), NOW + 10 * at)
        assert isinstance(end, End)
        assert end.reason == IS_LED


@pytest.mark.parametrize("change", ["entry", "ensemble", "leader"])
def test_repair_restarts_the_grace_after_any_change(change: str) -> None:
    past, who = AttemptHistory(), standing(B1, B2, B4)
    quiet = Writer(is_led=False, lac=e(3))
    judged(machine(B3, past=past), OURS, who, quiet)
    later = {
        "entry": (OURS, Writer(False, e(4))),
        "ensemble": (OURS.with_ensemble(e(4), (B1, B3, B2)), quiet),
        "leader": (OURS, Writer(True, e(3))),
    }
    judged(machine(B3, past=past), later[change][0], who, later[change][1], NOW + GRACE_S - 1)
    end = judged(machine(B3, past=past), later[change][0], who, Writer(False, later[change][1].lac), NOW + GRACE_S)
    assert isinstance(end, End)
    assert end.reason == IN_GRACE


def test_repair_does_not_fence_a_ledger_whose_end_cannot_be_found() -> None:
    """The ensemble of an idle writer has lost its disks: its bookies are gone, and may come back."""
    end = after_grace(OPEN, standing(B1, B4, B5))
    assert isinstance(end, End)
    assert end.reason == UNCOVERED


def test_repair_does_not_trust_a_bookie_set_up_after_the_ledger() -> None:
    end = after_grace(OPEN, standing(B1, B2, B4), frozenset({B2}))
    assert isinstance(end, End)
    assert end.reason == DOUBTFUL


def test_repair_fixes_finished_fragments_of_a_foreign_open_ledger() -> None:
    metadata = OPEN.with_ensemble(e(4), (B1, B2, B4))
    work = machine(B3)
    fill = judged(work, metadata, standing(B1, B2, B4, B5), Writer(False, e(6)))
    assert isinstance(fill, Fill)
    assert set(fill.wanted.fragments[0].ensemble) <= {B1, B2, B4, B5}
    assert fill.wanted.fragments[1] == metadata.fragments[1]
    assert fill.last == e(6)
    assert fill.wanted.state is LedgerState.OPEN
    assert work.handle(Filled()) == WriteMetadata(fill.wanted, 4)


def test_repair_changes_no_fragment_of_our_own_open_ledger() -> None:
    metadata = OURS.with_ensemble(e(4), (B1, B2, B4))
    end = judged(machine(B3), metadata, standing(B1, B2, B4, B5), Writer(False, e(6)))
    assert isinstance(end, End)
    assert end.reason == IN_GRACE


def test_repair_does_not_recover_our_open_ledger_for_a_present_bookie() -> None:
    metadata = OURS.with_ensemble(e(4), (B1, B3, B4))
    fill = judged(machine(B1), metadata, standing(B1, B2, B3, B4), Writer(False, e(6)))
    assert isinstance(fill, Fill)
    assert (fill.wanted, fill.last) == (metadata, e(6))


def test_repair_fills_a_present_bookie_of_a_foreign_open_ledger() -> None:
    fill = judged(machine(B2), OPEN, standing(B1, B2, B3), Writer(False, e(6)))
    assert isinstance(fill, Fill)
    assert (fill.wanted, fill.last, fill.must) == (OPEN, e(6), {B2})


def test_repair_copies_nothing_of_an_open_ledger_without_confirmed_entry() -> None:
    fill = judged(machine(B2), OPEN, standing(B1, B2, B3), Writer(False, EntryId(-1)))
    assert isinstance(fill, Fill)
    assert fill.last == -1
