"""Sentences about where a ledger ends that its writer did not close."""

from functools import partial

import pytest

from kvstore.types import BookieId, EntryId, LedgerMetadata
from kvstore.wal.recovery import (
    READ_AHEAD,
    AskEntry,
    AskLast,
    Command,
    EndFound,
    EntryAnswer,
    Event,
    LastAnswer,
    Phase,
    Recovery,
    TailEntry,
    Undecided,
    Unknown,
)
from tests.wal.ledgers import B1, B2, B3, B4, B5, DIGEST, LEDGER, e, ledger, pack

ALL = (B1, B2, B3)


class CheckedRecovery(Recovery):
    """Checks the invariants after each event."""

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.check()
        return commands


def recovery_of(metadata: LedgerMetadata | None = None) -> CheckedRecovery:
    metadata = (metadata or ledger()).recovering()
    recovery = CheckedRecovery(metadata, partial(DIGEST.open, LEDGER))
    assert recovery.start() == [AskLast(metadata.fragments[-1].ensemble)]
    return recovery


def entry(number: int, lac: int = -1) -> bytes:
    """The packet of an entry with a payload of ten bytes."""
    return pack(e(number), e(lac), 10 * (number + 1), b"payload %02d" % number)


def reading(lac: int = -1, metadata: LedgerMetadata | None = None) -> CheckedRecovery:
    """A recovery past its fence, that has seen `lac`."""
    recovery = recovery_of(metadata)
    packet = entry(lac + 1, lac) if lac >= 0 else None
    for bookie in recovery.metadata.fragments[-1].ensemble:
        recovery.handle(LastAnswer(bookie, packet))
    assert recovery.phase is Phase.READING
    return recovery


def absent(recovery: Recovery, number: int, *bookies: BookieId) -> list[Command]:
    return [each for bookie in bookies for each in recovery.handle(EntryAnswer(bookie, e(number), None))]


def asked(commands: list[Command]) -> list[EntryId]:
    return [command.entry for command in commands if isinstance(command, AskEntry)]


# docs/protocol.md R2
def test_recovery_reads_once_the_fence_is_covered() -> None:
    recovery = recovery_of()
    assert recovery.handle(LastAnswer(B1, None)) == []
    assert asked(recovery.handle(LastAnswer(B3, None))) == list(range(READ_AHEAD))


def test_recovery_fence_needs_one_bookie_if_the_ack_quorum_needs_all() -> None:
    assert asked(recovery_of(ledger(B1, B2)).handle(LastAnswer(B2, None))) == list(range(READ_AHEAD))


# docs/protocol.md R2
def test_recovery_covers_every_window_of_a_striped_ensemble() -> None:
    recovery = recovery_of(ledger(B1, B2, B3, B4, B5, write=2))
    for bookie in (B1, B2, B3):
        assert recovery.handle(LastAnswer(bookie, None)) == []
    assert asked(recovery.handle(LastAnswer(B4, None))) == list(range(READ_AHEAD))


# docs/protocol.md R2
def test_recovery_ignores_an_answer_with_a_wrong_digest() -> None:
    recovery = recovery_of()
    recovery.handle(LastAnswer(B1, None))
    assert recovery.handle(LastAnswer(B2, entry(4)[:-1] + b"?")) == []
    assert recovery.phase is Phase.FENCING


def test_recovery_is_undecided_when_too_many_are_silent() -> None:
    recovery = recovery_of()
    recovery.handle(LastAnswer(B1, None))
    recovery.handle(Unknown(B2, None))
    (undecided,) = recovery.handle(Unknown(B3, None))
    assert isinstance(undecided, Undecided)
    assert recovery.phase is Phase.UNDECIDED


def test_recovery_tolerates_a_silent_bookie_if_others_cover() -> None:
    recovery = recovery_of()
    recovery.handle(Unknown(B1, None))
    recovery.handle(LastAnswer(B2, None))
    assert recovery.handle(LastAnswer(B3, None)) != []


# docs/protocol.md L8
def test_recovery_reads_from_the_highest_confirmed_entry() -> None:
    recovery = recovery_of()
    recovery.handle(LastAnswer(B1, entry(3, lac=1)))
    assert asked(recovery.handle(LastAnswer(B2, entry(5, lac=4))))[0] == 5


def test_recovery_of_an_empty_fragment_does_not_start_at_entry_zero() -> None:
    metadata = ledger().with_ensemble(e(7), (B1, B2, B4))
    recovery = recovery_of(metadata)
    recovery.handle(LastAnswer(B1, None))
    commands = recovery.handle(LastAnswer(B4, None))
    assert asked(commands)[0] == 7
    assert absent(recovery, 7, B1, B4) == [EndFound(e(6), None)]


def test_recovery_asks_the_entrys_write_set() -> None:
    recovery = recovery_of(ledger(B1, B2, B3, B4, write=2))
    commands = [each for bookie in (B1, B2, B3) for each in recovery.handle(LastAnswer(bookie, None))]
    assert [set(each.bookies) for each in commands[:4] if isinstance(each, AskEntry)] == [
        {B1, B2},
        {B2, B3},
        {B3, B4},
        {B4, B1},
    ]


def test_recovery_needs_one_good_copy() -> None:
    recovery = reading()
    commands = recovery.handle(EntryAnswer(B2, e(0), entry(0)))
    assert isinstance(commands[0], TailEntry)
    assert commands[0].packet.payload == b"payload 00"
    assert asked(commands) == [READ_AHEAD]


def test_recovery_takes_an_entry_for_absent_when_its_write_set_is_covered() -> None:
    recovery = reading()
    assert absent(recovery, 0, B1) == []
    assert absent(recovery, 0, B2) == [EndFound(e(-1), None)]


def test_recovery_counts_two_negatives_of_a_bookie_once() -> None:
    assert absent(reading(), 0, B1, B1) == []


def test_recovery_prefers_a_copy_to_a_negative() -> None:
    recovery = reading()
    absent(recovery, 0, B1)
    assert isinstance(recovery.handle(EntryAnswer(B3, e(0), entry(0)))[0], TailEntry)


@pytest.mark.parametrize(
    "silent", [Unknown(B2, e(0)), EntryAnswer(B2, e(0), b"rubbish"), EntryAnswer(B2, e(0), entry(1))]
)
def test_recovery_never_takes_silence_or_damage_for_a_negative(silent: Event) -> None:
    recovery = reading()
    recovery.handle(silent)
    assert absent(recovery, 0, B1) == []
    assert absent(recovery, 0, B3) == [EndFound(e(-1), None)]


def test_recovery_does_not_end_at_an_undecidable_entry() -> None:
    recovery = reading()
    recovery.handle(Unknown(B1, e(0)))
    recovery.handle(Unknown(B2, e(0)))
    (undecided,) = absent(recovery, 0, B3)
    assert isinstance(undecided, Undecided)


def test_recovery_needs_all_negatives_if_one_copy_is_an_ack_quorum() -> None:
    recovery = reading(metadata=ledger(B1, B2, ack=1))
    assert absent(recovery, 0, B1) == []
    recovery.handle(Unknown(B2, e(0)))
    assert recovery.phase is Phase.UNDECIDED


def test_recovery_finds_entries_in_order() -> None:
    recovery = reading()
    assert recovery.handle(EntryAnswer(B1, e(1), entry(1))) == []
    commands = recovery.handle(EntryAnswer(B1, e(0), entry(0)))
    assert [each.packet.entry for each in commands if isinstance(each, TailEntry)] == [0, 1]


# docs/protocol.md R3
def test_recovery_ends_at_the_first_gap_despite_later_entries() -> None:
    recovery = reading()
    recovery.handle(EntryAnswer(B1, e(0), entry(0)))
    recovery.handle(EntryAnswer(B1, e(2), entry(2)))
    assert absent(recovery, 1, B2, B3) == [EndFound(e(0), 10)]


def test_recovery_ignores_an_undecided_entry_after_the_end() -> None:
    recovery = reading()
    for bookie in ALL:
        assert recovery.handle(Unknown(bookie, e(1))) == []
    assert absent(recovery, 0, B1, B2) == [EndFound(e(-1), None)]


def test_recovery_end_has_the_length_of_the_last_entry() -> None:
    recovery = reading()
    for number in range(3):
        recovery.handle(EntryAnswer(B3, e(number), entry(number)))
    assert absent(recovery, 3, B1, B2) == [EndFound(e(2), 30)]


def test_recovery_lac_is_fixed_once_reading_begins() -> None:
    recovery = reading(lac=2)
    recovery.handle(EntryAnswer(B1, e(3), entry(3, lac=2)))
    recovery.handle(EntryAnswer(B1, e(4), entry(4, lac=3)))
    recovery.handle(LastAnswer(B2, entry(5, lac=4)))
    assert recovery.lac == 2


def test_recovery_judges_a_striped_entry_by_its_own_write_set() -> None:
    recovery = reading(metadata=ledger(B1, B2, B3, B4, write=2))
    assert absent(recovery, 0, B2) == [EndFound(e(-1), None)]


def test_recovery_keeps_the_only_entry_of_a_ledger() -> None:
    recovery = reading()
    recovery.handle(EntryAnswer(B1, e(0), entry(0)))
    assert absent(recovery, 1, B2, B3) == [EndFound(e(0), 10)]


def test_recovery_ignores_events_after_the_end() -> None:
    recovery = reading()
    absent(recovery, 0, B1, B2)
    assert recovery.handle(EntryAnswer(B3, e(0), entry(0))) == []
    assert recovery.handle(Unknown(B3, e(1))) == []
