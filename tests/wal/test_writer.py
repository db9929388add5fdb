"""The writer of one ledger."""

import pytest

from kvstore.errors import LedgerClosed, LedgerFenced
from kvstore.types import BookieId, EntryId, LedgerMetadata
from kvstore.wal import writer as machine
from kvstore.wal.writer import (
    AddFailed,
    AddStored,
    Append,
    ChangeFailed,
    Command,
    Confirm,
    EnsembleChanged,
    Fenced,
    Halt,
    ReplaceBookies,
    Returned,
    SlowBookiesFailed,
    Spares,
    StopWriting,
    Store,
    WriterState,
)
from tests.wal.ledgers import B1, B2, B3, B4, B5, B6, CheckedWriter, e, ledger, opened, pack

NOW = 100.0


def writer_with(*payloads: bytes, metadata: LedgerMetadata | None = None, spares: str = "") -> CheckedWriter:
    writer = CheckedWriter(metadata or ledger(), pack)
    if spares:
        writer.handle(Spares(frozenset(BookieId(f"b{i}-x") for i in spares)))
    for payload in payloads:
        writer.handle(Append(payload, NOW))
    return writer


def stored(writer: CheckedWriter, entry: int, *bookies: BookieId) -> list[Command]:
    return [command for bookie in bookies for command in writer.handle(AddStored(e(entry), bookie))]


def confirmed(commands: list[Command]) -> list[EntryId]:
    return [command.entry for command in commands if isinstance(command, Confirm)]


def sent(commands: list[Command]) -> list[tuple[EntryId, tuple[BookieId, ...]]]:
    return [(command.entry, command.bookies) for command in commands if isinstance(command, Store)]


def change(writer: CheckedWriter, *ensemble: BookieId, replaced: tuple[BookieId, ...]) -> list[Command]:
    metadata = writer.metadata.with_ensemble(writer.next_fragment, ensemble)
    return writer.handle(EnsembleChanged(metadata, frozenset(replaced)))


def test_writer_sends_an_entry_to_its_write_set() -> None:
    (store,) = writer_with().handle(Append(b"a", NOW))
    assert isinstance(store, Store)
    assert (store.entry, store.bookies) == (e(0), (B1, B2, B3))


def test_writer_packets_carry_lac_and_length() -> None:
    writer = writer_with(b"aaa")
    stored(writer, 0, B1, B2)
    (store,) = writer.handle(Append(b"bb", NOW))
    assert isinstance(store, Store)
    packet = opened(store.packet)
    assert (packet.entry, packet.lac, packet.length, packet.payload) == (e(1), e(0), 5, b"bb")


def test_writer_stripes_entries_over_the_ensemble() -> None:
    writer = writer_with(metadata=ledger(B1, B2, B3, B4, write=2))
    assert [set(sent(writer.handle(Append(b"", NOW)))[0][1]) for _ in range(4)] == [
        {B1, B2},
        {B2, B3},
        {B3, B4},
        {B4, B1},
    ]


def test_writer_confirms_at_an_ack_quorum() -> None:
    writer = writer_with(b"a")
    assert stored(writer, 0, B1) == []
    assert stored(writer, 0, B3) == [Confirm(e(0), NOW)]


def test_writer_counts_the_same_bookie_once() -> None:
    writer = writer_with(b"a")
    assert stored(writer, 0, B1, B1) == []


def test_writer_confirms_entries_in_order() -> None:
    writer = writer_with(b"a", b"b", b"c")
    assert stored(writer, 2, B1, B2, B3) == []
    assert stored(writer, 1, B1, B2) == []
    assert confirmed(stored(writer, 0, B1, B2)) == [0, 1, 2]


def test_writer_ignores_a_copy_outside_the_write_set() -> None:
    writer = writer_with(b"a", metadata=ledger(B1, B2, B3, B4, write=2))
    assert stored(writer, 0, B3, B4, B5) == []
    assert confirmed(stored(writer, 0, B1, B2)) == [0]


# docs/protocol.md W6
def test_writer_keeps_the_first_send_time_when_resending() -> None:
    writer = writer_with(spares="4")
    writer.handle(Append(b"a", 1.0))
    writer.handle(AddFailed(B3))
    change(writer, B1, B2, B4, replaced=(B3,))
    assert stored(writer, 0, B1, B4) == [Confirm(e(0), 1.0)]


def test_writer_replaces_a_failed_bookie_with_a_spare() -> None:
    writer = writer_with(b"a", spares="4")
    assert writer.handle(AddFailed(B3)) == [ReplaceBookies()]
    assert (writer.state, writer.next_fragment, writer.failed) == (WriterState.CHANGING, e(0), frozenset({B3}))


def test_writer_confirms_nothing_during_an_ensemble_change() -> None:
    writer = writer_with(b"a", spares="4")
    writer.handle(AddFailed(B3))
    assert stored(writer, 0, B1, B2) == []
    commands = change(writer, B1, B2, B4, replaced=(B3,))
    assert sent(commands) == [(e(0), (B4,))]
    assert confirmed(commands) == [0]


def test_writer_ignores_copies_on_a_replaced_bookie() -> None:
    writer = writer_with(b"a", spares="4")
    stored(writer, 0, B3)
    writer.handle(AddFailed(B3))
    assert confirmed(change(writer, B1, B2, B4, replaced=(B3,))) == []
    assert stored(writer, 0, B3) == []
    assert stored(writer, 0, B1) == []
    assert confirmed(stored(writer, 0, B4)) == [0]


def test_writer_starts_a_fragment_after_the_last_confirmed_entry() -> None:
    writer = writer_with(b"a", b"b", spares="4")
    stored(writer, 0, B1, B2)
    stored(writer, 1, B1)
    writer.handle(AddFailed(B3))
    assert writer.next_fragment == 1
    assert sent(change(writer, B1, B2, B4, replaced=(B3,))) == [(e(1), (B4,))]


def test_writer_handles_failures_during_a_change_after_it() -> None:
    writer = writer_with(b"a", spares="45")
    assert writer.handle(AddFailed(B3)) == [ReplaceBookies()]
    assert writer.handle(AddFailed(B2)) == []
    commands = change(writer, B1, B2, B4, replaced=(B3,))
    assert ReplaceBookies() in commands
    assert writer.state is WriterState.CHANGING
    assert sent(change(writer, B1, B5, B4, replaced=(B2,))) == [(e(0), (B5,))]


# docs/protocol.md W3
def test_writer_combines_several_failures_in_one_change() -> None:
    writer = writer_with(b"a", spares="45")
    writer.handle(AddFailed(B3))
    writer.handle(AddFailed(B2))
    assert writer.failed == {B2, B3}
    commands = change(writer, B1, B5, B4, replaced=(B2, B3))
    assert sent(commands) == [(e(0), (B5, B4))]
    assert writer.state is WriterState.OPEN


def test_writer_counts_a_failure_of_a_bookie_once() -> None:
    writer = writer_with(b"a", spares="45")
    writer.handle(AddFailed(B3))
    assert writer.handle(AddFailed(B3)) == []


def test_writer_ignores_a_failure_outside_the_ensemble() -> None:
    writer = writer_with(b"a", spares="45")
    assert writer.handle(AddFailed(B6)) == []
    assert writer.state is WriterState.OPEN


def test_writer_resends_after_a_change_to_an_equal_ensemble() -> None:
    writer = writer_with(b"a", spares="4")
    stored(writer, 0, B3)
    writer.handle(AddFailed(B3))
    commands = change(writer, B1, B2, B3, replaced=(B3,))
    assert sent(commands) == [(e(0), (B3,))]
    assert confirmed(commands) == []
    assert confirmed(stored(writer, 0, B1, B3)) == [0]


def test_writer_sends_unconfirmed_entries_to_a_bookie_of_another_change() -> None:
    writer = writer_with(b"a", spares="4")
    writer.handle(AddFailed(B3))
    assert sent(change(writer, B1, B5, B4, replaced=(B3,))) == [(e(0), (B5, B4))]


def test_writer_confirms_entries_of_other_places_after_the_change() -> None:
    writer = writer_with(b"a", metadata=ledger(B1, B2, B3, B4, write=2), spares="5")
    writer.handle(AddFailed(B4))
    assert stored(writer, 0, B1, B2) == []
    commands = change(writer, B1, B2, B3, B5, replaced=(B4,))
    assert (sent(commands), confirmed(commands)) == ([], [0])


# docs/protocol.md W1
def test_writer_continues_with_an_ack_quorum_without_a_spare() -> None:
    writer = writer_with(b"a")
    assert writer.handle(AddFailed(B3)) == []
    assert confirmed(stored(writer, 0, B1, B2)) == [0]
    assert sent(writer.handle(Append(b"b", NOW))) == [(e(1), (B1, B2))]


def test_writer_confirms_nothing_without_spare_and_ack_quorum() -> None:
    writer = writer_with(b"a")
    writer.handle(AddFailed(B3))
    writer.handle(AddFailed(B2))
    assert stored(writer, 0, B1) == []
    assert writer.unconfirmed == 1


def test_writer_uses_a_new_spare_for_an_earlier_failure() -> None:
    writer = writer_with(b"a")
    writer.handle(AddFailed(B3))
    assert writer.handle(Spares(frozenset({B1, B2, B4}))) == [ReplaceBookies()]


def test_writer_takes_no_member_of_the_ensemble_for_a_spare() -> None:
    writer = writer_with(b"a", spares="123")
    assert writer.handle(AddFailed(B3)) == []
    assert writer.state is WriterState.OPEN


def test_writer_sends_a_returned_bookie_unconfirmed_and_new_entries() -> None:
    writer = writer_with()
    writer.handle(AddFailed(B3))
    writer.handle(AddFailed(B2))
    writer.handle(Append(b"a", NOW))
    assert sent(writer.handle(Returned(B3))) == [(e(0), (B3,))]
    assert sent(writer.handle(Append(b"b", NOW))) == [(e(1), (B1, B3))]
    assert confirmed(stored(writer, 0, B1, B3)) == [0]


# docs/protocol.md W8
def test_writer_expects_no_old_entries_of_a_returned_bookie() -> None:
    """It counted as silent because of entries that nobody had sent to it. Two bookies can lack a confirmed entry if Qw
    is Qa + 2."""
    writer = writer_with(b"a", metadata=ledger(ack=1))
    writer.handle(AddFailed(B3))
    assert confirmed(stored(writer, 0, B1)) == [0]
    assert sent(writer.handle(Returned(B3))) == []
    assert writer.oldest_outstanding() == {B2: e(0)}
    stored(writer, 0, B2)
    assert (writer.oldest_outstanding(), writer.unconfirmed) == ({}, 0)
    assert not writer._sent, "nor is it kept for it"


def test_writer_ignores_the_return_of_a_bookie_that_never_failed() -> None:
    assert writer_with(b"a").handle(Returned(B3)) == []


def test_writer_keeps_the_recorded_ensemble_after_a_failed_change() -> None:
    writer = writer_with(b"a", spares="4")
    writer.handle(AddFailed(B3))
    stored(writer, 0, B1, B2)
    assert confirmed(writer.handle(ChangeFailed())) == [0]
    assert writer.state is WriterState.OPEN
    assert sent(writer.handle(Append(b"b", NOW))) == [(e(1), (B1, B2))]


def test_writer_counts_an_error_after_completion() -> None:
    writer = writer_with(b"a", spares="4")
    assert confirmed(stored(writer, 0, B1, B2)) == [0]
    assert writer.handle(AddFailed(B3)) == [ReplaceBookies()]
    assert writer.next_fragment == 1


def test_writer_fails_a_bookie_with_too_many_outstanding_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OUTSTANDING_ENTRIES_MAX", 3)
    writer = writer_with()
    for entry in range(3):
        writer.handle(Append(b"a", NOW))
        stored(writer, entry, B1, B2)
    assert writer.failed == frozenset()
    assert SlowBookiesFailed((B3,)) in writer.handle(Append(b"a", NOW))
    assert writer.failed == {B3}
    assert sent(writer.handle(Append(b"a", NOW))) == [(e(4), (B1, B2))]


def test_writer_fails_a_bookie_with_too_many_outstanding_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OUTSTANDING_BYTES_MAX", 1000)
    writer = writer_with()
    for entry in range(3):
        writer.handle(Append(b"a" * 400, NOW))
        stored(writer, entry, B1, B2)
    assert writer.failed == {B3}
    assert writer.held_bytes == 0


# docs/protocol.md W2
def test_writer_fails_no_slow_bookie_while_no_ack_quorum_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery reads faster than disks sync. If all bookies that lack the oldest entry failed, none would be left."""
    monkeypatch.setattr(machine, "OUTSTANDING_ENTRIES_MAX", 3)
    writer = writer_with(*[b"a"] * 10)
    stored(writer, 0, B1)
    assert writer.failed == frozenset()
    for entry in range(10):
        stored(writer, entry, B1, B2)
    assert writer.last_confirmed == 9
    writer.handle(Append(b"a", NOW))
    assert writer.failed == {B3}


def test_writer_reports_the_oldest_outstanding_entry_of_each_bookie() -> None:
    writer = writer_with(b"a", b"b", b"c")
    assert writer.oldest_outstanding() == {B1: 0, B2: 0, B3: 0}
    stored(writer, 0, B1, B2)
    stored(writer, 1, B1)
    assert writer.oldest_outstanding() == {B1: 2, B2: 1, B3: 0}
    writer.handle(AddFailed(B3))
    stored(writer, 2, B1)
    assert writer.oldest_outstanding() == {B2: 1}


def test_writer_drops_entries_that_all_bookies_have() -> None:
    writer = writer_with(b"a", b"b")
    stored(writer, 0, B1, B2, B3)
    stored(writer, 1, B1, B2)
    assert writer.held_bytes == len(pack(e(1), e(0), 2, b"b"))
    stored(writer, 1, B3)
    assert writer.held_bytes == 0


# docs/protocol.md W5
@pytest.mark.parametrize(
    ("event", "error"), [(Fenced(), LedgerFenced), (StopWriting(LedgerClosed("by a recovery")), LedgerClosed)]
)
def test_writer_halts_and_confirms_nothing_when_it_loses_its_ledger(event: Fenced | StopWriting, error: type) -> None:
    writer = writer_with(b"a", b"b", spares="4")
    (halt,) = writer.handle(event)
    assert isinstance(halt, Halt)
    assert isinstance(halt.error, error)
    assert stored(writer, 0, B1, B2, B3) == []
    assert writer.handle(Append(b"c", NOW)) == []
    assert writer.handle(AddFailed(B3)) == []


def test_writer_halts_when_fenced_during_a_change() -> None:
    writer = writer_with(b"a", spares="4")
    writer.handle(AddFailed(B3))
    assert [type(command) for command in writer.handle(Fenced())] == [Halt]


def test_writer_keeps_the_lac_of_recovery_packets() -> None:
    writer = CheckedWriter(ledger(), pack, after=e(4), length=100, frozen_lac=e(2))
    for payload in (b"a", b"b"):
        writer.handle(Append(payload, NOW))
        stored(writer, writer.last_added, B1, B2)
    (store,) = writer.handle(Append(b"c", NOW))
    assert isinstance(store, Store)
    packet = opened(store.packet)
    assert (packet.entry, packet.lac, packet.length) == (e(7), e(2), 103)
    assert writer.last_confirmed == 6


def test_writer_confirmed_length_follows_confirmed_entries() -> None:
    writer = writer_with(b"aaa", b"bb")
    stored(writer, 0, B1, B2)
    assert (writer.confirmed_length, writer.length) == (3, 5)
