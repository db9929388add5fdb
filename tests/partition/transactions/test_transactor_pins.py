"""Records of transactions that must be behind a pin (docs/protocol.md Tx13)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.partition.state.commands import Prepare, Put, Resolve
from kvstore.partition.state.entry import Entry, EntryKind, decode
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import decode as decode_record
from kvstore.partition.transactions.outcomes import END_S
from tests.partition.several_partitions import Member, Several, transact


def pin(at: Member, number: int) -> Any:
    """Log the MARK of a pin."""
    task = at.loop.create_task(at.leader.append_record(MarkRecord(f"pin{number}", 1 << 50, takes=True, number=number)))
    at.settle()
    at.acknowledge(len(at.log.in_flight))
    return task


def entries(at: Member) -> list[Entry]:
    return [decode(logged.payload) for logged in at.log.acknowledged]


def marks(at: Member) -> list[tuple[int, bool]]:
    """Return the numbers of the MARKs in the log, and whether each keeps the state."""
    found = [entry for entry in entries(at) if entry.kinds == bytes((EntryKind.MARK,))]
    records = [decode_record(EntryKind.MARK, entry.control) for entry in found]
    return [(each.number, each.takes) for each in records if isinstance(each, MarkRecord)]


def test_decide_waits_for_the_pin_that_a_participant_has_taken() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    pin(participant, 7)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    assert result() == "waits"
    assert s.value(a) is None
    pin(home, 7)
    s.run()
    assert result()[0]
    assert marks(home) == [(7, True)]
    kinds = [entry.kinds for entry in entries(home)]
    assert kinds.index(bytes((EntryKind.MARK,))) < next(
        place for place, entry in enumerate(entries(home)) if a in entry.keys
    )


def test_resolve_waits_for_the_pin_that_home_has_taken() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    s.holds = lambda op: op.__class__ is Prepare
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.run()
    pin(home, 7)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    assert result()[0]
    assert s.value(b) is None
    pin(participant, 7)
    s.run()
    assert s.value(b) == b"2"
    assert s.is_clean()


def test_end_waits_for_the_pin_that_a_participant_has_taken() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    s.holds = lambda op: op.__class__ is Resolve
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    pin(participant, 7)
    s.holds = lambda op: False
    s.deliver_held()
    s.run()
    s.wait(END_S + 0.1)
    assert s.value(b) == b"2"
    assert len(home.state.decisions) == 1
    pin(home, 7)
    s.run()
    assert s.is_clean()


def test_mark_that_keeps_nothing_is_logged_after_a_second() -> None:
    """The pinner may be dead."""
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    pin(participant, 7)
    result = s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.wait(0.9)
    assert result() == "waits"
    s.wait(0.2)
    assert result()[0]
    assert marks(home) == [(7, False)]
    assert home.state.mark == 7
    with pytest.raises(Unavailable):
        pin(home, 7).result()
    assert pin(home, 8).done()
    assert s.is_clean()


def test_no_mark_is_logged_if_the_pin_comes() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    pin(participant, 7)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.wait(0.5)
    pin(home, 7)
    s.wait(2.0)
    assert marks(home) == [(7, True)]


def test_each_record_waits_a_second_for_its_pin() -> None:
    """A MARK that keeps nothing makes its pin fail, so it is not logged for a pin that others have just taken."""
    s = Several()
    a, b = s.key(0), s.key(1)
    home, participant = s.partitions
    pin(participant, 7)
    s.submit(transact(Put(a, b"1"), Put(b, b"2")))
    s.wait(0.8)
    pin(home, 7)
    s.run()
    pin(participant, 8)
    result = s.submit(transact(Put(a, b"3"), Put(b, b"4")))
    s.wait(0.5)
    assert (result(), marks(home)) == ("waits", [(7, True)])
    pin(home, 8)
    s.run()
    assert result()[0]
    assert marks(home) == [(7, True), (8, True)]
