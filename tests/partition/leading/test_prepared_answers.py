"""Reads under steady transactions: participants withhold PREPARED while reads wait."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.partition.leading.prepared_answers import WITHHELD_S
from kvstore.partition.state.commands import (
    Code,
    Count,
    Get,
    Inquire,
    Op,
    Prepare,
    Put,
    Range,
    Resolve,
    Scan,
    ScanTokens,
)
from kvstore.partition.state.tokens import TokenSpan
from tests.partition.one_partition import Caller
from tests.partition.several_partitions import Message, Several, transact
from tests.ring import rings

ALL = Scan(b"", b"", 100)


def values(page: Any) -> dict[bytes, bytes]:
    return {key: record.value for key, record in page[0]}


def deliver(s: Several, *messages: Message) -> None:
    """Deliver held messages, and nothing else."""
    for message in messages:
        s.held.remove(message)
        s.deliver(message)
    s.run()


class Waiting:
    """A read that waits in the second partition for a transaction, which is committed."""

    def __init__(self, read: Op = ALL, partitions: int = 2) -> None:
        self.s = s = Several(partitions)
        self.first, self.later = s.key(1), s.key(1, 1)
        for key in (self.first, self.later):
            s.do(Put(key, b"old"))
        s.holds = lambda op: isinstance(op, Resolve | Inquire)
        assert s.do(transact(Put(s.key(0), b"1"), Put(self.first, b"new")))[0]
        self.read = s.submit(read, 1)
        s.run()
        assert self.read() == "waits"

    def begin(self) -> Any:
        """Begin another transaction in the range."""
        done = self.s.submit(transact(Put(self.s.key(0, 1), b"1"), Put(self.later, b"new")))
        self.s.run()
        return done


# docs/protocol.md Tx9
@pytest.mark.parametrize(
    "read", [ALL, Range(b"", b"", 100), ScanTokens(0, 100), Count()], ids=lambda op: Code(op.code).name
)
def test_range_read_waits_only_for_the_transactions_that_it_met(read: Op) -> None:
    """Before, it waited for later ones as well, and was refused after five seconds."""
    w = Waiting(read)
    done = w.begin()
    assert done() == "waits", "PREPARED is withheld, so it cannot be committed"
    assert len(w.s.partitions[1].state.intents) == 2
    deliver(w.s, w.s.held[0])
    page = w.read()
    assert page != "waits"
    if not isinstance(read, Count):
        assert values(page) == {w.first: b"new", w.later: b"old"}
    w.s.run()
    assert done()[0], "nothing is withheld any more"
    w.s.holds = lambda op: False
    w.s.deliver_held()
    w.s.run()
    assert w.s.is_clean()


def test_transaction_beyond_the_range_is_not_withheld() -> None:
    w = Waiting()
    s = w.s
    s.wait(WITHHELD_S)  # the read of everything withholds nothing more
    key = w.first
    narrow = s.submit(Scan(key, key + b"\0", 100), 1)
    s.run()
    assert narrow() == "waits"
    assert w.begin()()[0]


def test_prepared_is_withheld_for_a_limited_time() -> None:
    w = Waiting()
    done = w.begin()
    w.s.wait(WITHHELD_S - 0.1)
    assert done() == "waits"
    w.s.wait(0.2)
    assert done()[0]
    assert w.read() == "waits", "now it waits for both"


def test_nothing_is_withheld_for_an_old_intent() -> None:
    """Its home may have no leader. Others must not wait for that again and again."""
    w = Waiting()
    w.s.wait(1.1)
    again = w.s.submit(ALL, 1)
    w.s.run()
    assert again() == "waits"
    assert w.begin()()[0]


def test_repeated_prepare_is_withheld_only_before_its_first_answer() -> None:
    w = Waiting()
    done = w.begin()
    prepare = next(op for op in reversed(w.s.sent) if isinstance(op, Prepare))
    participant, caller = w.s.partitions[1], Caller()
    participant.leader.submit((prepare,), caller, (0,))
    w.s.run()
    assert caller.results == {}
    assert done() == "waits"
    w.s.wait(WITHHELD_S + 0.1)
    assert caller.results.keys() == {0}
    second = w.s.submit(ALL, 1)
    participant.leader.submit((prepare,), caller, (1,))
    w.s.run()
    assert second() == "waits", "PREPARED has been said, so it may be committed"
    assert caller.results.keys() == {0, 1}


def test_next_leader_withholds_nothing_that_may_have_been_said() -> None:
    w = Waiting()
    w.s.partitions[1].fail_over()
    read = w.s.submit(ALL, 1)
    w.s.run()
    assert read() == "waits"


# docs/protocol.md Tx9, Tx14
def test_leader_forgets_what_is_unsent_when_the_range_moves_away() -> None:
    """The next owner sends PREPARED, and the range comes back while the first owner withholds it."""
    w = Waiting(partitions=3)
    s = w.s
    s.holds = lambda op: isinstance(op, Prepare | Resolve | Inquire)
    done = w.begin()
    (prepare,) = (each for each in s.held if isinstance(each.op, Prepare))
    deliver(s, prepare)
    assert done() == "waits"
    span = TokenSpan(rings.key_hash.token_of(w.later), rings.key_hash.token_of(w.later))
    s.move(1, 2, 1, span)
    assert w.read() == done() == "waits"
    s.deliver(prepare)
    s.run()
    assert done()[0]
    s.move(2, 1, 2, span)
    read = s.submit(Get(w.later), 1)
    s.run()
    assert read() == "waits", "the transaction is committed"


def test_withheld_answer_is_given_by_the_next_leader() -> None:
    w = Waiting()
    done = w.begin()
    w.s.partitions[1].fail_over()
    w.s.wait(0.2)
    assert done()[0]


# docs/protocol.md Tx9, Tx16
def test_withheld_prepared_waits_for_a_line_for_a_limited_time() -> None:
    """The read waits for the first transaction. That one waits in a line for the second one, whose PREPARED the read
    withholds."""
    s = Several(3)
    s.holds = lambda op: isinstance(op, Prepare)
    done = []
    for number in range(2):
        keys = s.key(0, number), s.key(1, number), s.key(2)
        done.append(s.submit(transact(*(Put(key, b"%d" % number) for key in keys))))
        s.run()
    first, in_line, withheld, second = s.held
    deliver(s, first, second, in_line)
    done.append(s.submit(ALL, 1))
    s.run()
    deliver(s, withheld)
    assert [each() for each in done] == ["waits"] * 3
    s.wait(WITHHELD_S + 0.1)
    assert done[0]()[0]
    assert done[1]()[0]
    assert done[2]() != "waits"
    assert s.value(s.key(2)) == b"0"


def test_reads_in_two_partitions_do_not_wait_for_each_other() -> None:
    """Each of two attempts is prepared in one partition before the reads come, and in the other one behind them."""
    s = Several(3)
    s.holds = lambda op: isinstance(op, Prepare)
    done = []
    for number in range(2):
        done.append(s.submit(transact(Put(s.key(0, number), b"1"), *(Put(s.key(at, number), b"2") for at in (1, 2)))))
        s.run()
    (one_1, one_2), (two_1, two_2) = s.held[:2], s.held[2:]
    deliver(s, one_1, two_2)
    reads = [s.submit(ALL, place) for place in (1, 2)]
    s.run()
    assert [each() for each in reads] == ["waits", "waits"]
    deliver(s, one_2, two_1)
    s.run()
    assert [each() != "waits" for each in (*reads, *done)] == [True] * 4
