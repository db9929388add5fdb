"""Transactions that wait for keys never deadlock, in every order of events of the model, and need each of its rules."""

from __future__ import annotations

import pytest

from tests.models.search import search
from tests.models.txn_waits import Model, ReadRules, Rules, State, scopes, scopes_with_reads

ALONE = (frozenset[int](), frozenset({0}), frozenset({0, 1, 2}))
"""The transactions that name versions."""
STATES = 304_985
"""If the number differs, the model has changed, and with it what the search shows."""

STATES_WITH_READS = 30_593


# docs/protocol.md Tx16
def test_waiting_transactions_end_in_every_order_of_events() -> None:
    found = [
        search(State(), Model(work, Rules(), alone).steps, states_max=10_000) for work in scopes() for alone in ALONE
    ]
    assert not any(each.way for each in found)
    assert sum(each.states for each in found) == STATES


# docs/protocol.md Tx16
@pytest.mark.parametrize("rule", Rules._fields)
def test_waiting_transactions_deadlock_without_one_of_the_rules(rule: str) -> None:
    rules = Rules(**{rule: False})
    assert any(
        search(State(), Model(work, rules, alone).steps, states_max=10_000).way for work in scopes() for alone in ALONE
    )


# docs/protocol.md Tx9, Tx16
def test_withheld_prepared_never_deadlocks() -> None:
    """A read may wait for a transaction, which waits in a line for another one, whose PREPARED the read withholds. The
    limit of time ends this, and nothing else needs it."""
    found = [search(State(), Model(work, Rules()).steps, states_max=10_000) for work in scopes_with_reads()]
    assert not any(each.way for each in found)
    assert sum(each.states for each in found) == STATES_WITH_READS


# docs/protocol.md Tx9, Tx16
@pytest.mark.parametrize("rule", ReadRules._fields)
def test_withheld_prepared_deadlocks_without_one_of_the_rules(rule: str) -> None:
    reads = ReadRules(**{rule: False})
    assert any(
        search(State(), Model(work, Rules(), reads=reads).steps, states_max=10_000).way for work in scopes_with_reads()
    )
