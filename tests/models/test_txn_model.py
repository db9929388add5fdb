"""Transactions over partitions keep their promises in every order of events of the model, and need each of their rules
(docs/protocol.md, Tx1 to Tx15)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.search import Broken, search
from tests.models.txn import Model, State
from tests.models.txn_rules import Rules
from tests.models.txn_scopes import LARGE, NEEDED_FOR, SLOW_TO_BREAK, SMALL, Scope

SCOPES = SMALL | LARGE
STATES_MAX = 100_000
"""More states than any search needs to break a promise."""


def assert_kept(scope: Scope) -> None:
    model = Model(scope.txns, Rules(), **scope.bounds)
    found = search(model.first, model.steps, states_max=2 * scope.states, above=model.above)
    assert found.way == []
    assert found.states == scope.states


@pytest.mark.parametrize("name", SMALL)
def test_transactions_keep_promises_with_all_rules(name: str) -> None:
    assert_kept(SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_transactions_keep_promises_in_a_larger_scope(name: str) -> None:
    assert_kept(LARGE[name])


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(field.name, marks=pytest.mark.slow) if field.name in SLOW_TO_BREAK else field.name
        for field in fields(Rules)
    ],
)
def test_transactions_break_a_promise_without_this_rule(rule: str) -> None:
    scope = SCOPES[NEEDED_FOR.get(rule, "one attempt each")]
    model = Model(scope.txns, replace(Rules(), **{rule: False}), **scope.bounds)
    assert search(model.first, model.steps, states_max=STATES_MAX, above=model.above).way


@pytest.mark.parametrize("name", ["home is lost for good", "together, then apart", "two attempts"])
def test_search_leaves_out_only_states_whose_steps_it_finds_elsewhere(name: str) -> None:
    """A leader that is deposed and forgotten says nothing new, and a state with one more takeover to come has all
    steps of the state that is left out."""
    scope = SCOPES[name]
    full, model = (Model(scope.txns, Rules(), **scope.bounds) for _ in range(2))
    full.forgets = False
    found, waiting = {full.first}, [full.first]
    while waiting:
        state = waiting.pop()
        settled, after = model.settled(state), dict(full.steps(state))
        expected = {(label, _settled(model, each)) for label, each in after.items()}
        assert set(model.steps(settled)) == expected
        more = set(model.steps(model.above(settled)))
        assert {(label, _above(each)) for label, each in expected} <= more
        new = {each for each in after.values() if not isinstance(each, Broken)} - found
        found |= new
        waiting += new
    assert len(found) > scope.states


def _settled(model: Model, state: State | Broken) -> State | Broken:
    return state if isinstance(state, Broken) else model.settled(state)


def _above(state: State | Broken) -> State | Broken:
    return state if isinstance(state, Broken) else Model.above(state)
