"""Numbers about transactions for operators, and the end of transactions whose home is lost (docs/protocol.md Tx6)."""

from __future__ import annotations

from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.state.commands import Get, Inquire, Put, Resolve, Result, Sink
from tests.partition.several_partitions import Several, transact


class Results(Sink):
    """Keeps the results of operations, by token."""

    def __init__(self) -> None:
        self.by_token: dict[int, Result | StoreError] = {}

    def complete(self, token: int, result: Result | StoreError) -> None:
        self.by_token[token] = result

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""


def without_home() -> tuple[Several, bytes]:
    """Return partitions of which the second holds an intent on a key, and the first, its home, answers nobody."""
    s = Several(3)
    a, b = s.key(0), s.key(1)
    s.do(Put(b, b"old"))
    s.holds = lambda op: op.__class__ in (Resolve, Inquire)
    s.do(transact(Put(a, b"1"), Put(b, b"2")))
    return s, b


def numbers(s: Several, place: int) -> dict[str, Any]:
    return s.partitions[place].leader.statistics()


def test_abandoned_intent_frees_its_key_without_the_home() -> None:
    s, b = without_home()
    read = s.submit(Get(b))
    s.wait(2.0)
    assert read() == "waits", "home alone knows if the transaction is committed"
    done = Results()
    member = s.partitions[1]
    assert member.leader.transactor is not None
    member.leader.transactor.abandon([*member.state.intents], done)
    s.run()
    assert done.by_token == {0: 0}
    assert not len(member.state.intents)
    assert read().value == b"old"


def test_statistics_count_attempts_conflicts_and_resolved_intents() -> None:
    s, b = without_home()
    s.do(transact(Put(s.key(0, 1), b"3"), Put(b, b"3"), Put(s.key(2), b"3")))
    at_home = numbers(s, 0)["transactions"]
    assert (at_home["attempts"], at_home["committed"]) == (2, 1)
    assert (at_home["dropped"], at_home["conflicts"]) == (1, 1)
    s.wait(31)
    assert numbers(s, 1)["intents"] == numbers(s, 0)["decisions"] == 1
    assert numbers(s, 1)["oldest_intent_s"] > 30 > numbers(s, 1)["oldest_decision_s"] == 0.0
    assert numbers(s, 0)["oldest_decision_s"] > 30
    s.holds = lambda op: False
    s.deliver_held()
    s.wait(2.0)
    assert s.is_clean()
    assert (numbers(s, 1)["transactions"]["resolved"], numbers(s, 1)["oldest_intent_s"]) == (1, 0.0)
