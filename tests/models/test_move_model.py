"""The protocol of a move holds in every order of events of the model, and needs each of its rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.move import Model, Rules, State
from tests.models.search import search

STATES = 161_810
"""Number of states of the whole model. If it differs, the model has changed, and with it what the search shows."""

BOUNDS = {
    "tail_acknowledged": State(takeovers=1, crashes=0, late=0),
    "wiped": State(takeovers=0, crashes=1, late=0),
    "results_move": State(takeovers=0, crashes=0, late=1),
    "release_by_serving": State(takeovers=1, crashes=0, late=0),
    "silent_once_sent": State(takeovers=1, crashes=0, late=0),
}
"""The bounds under which a missing rule shows; none for the other rules."""


@pytest.mark.slow
def test_move_model_keeps_promises_in_every_order_of_events() -> None:
    found = search(State(), Model(Rules()).steps, states_max=STATES)
    assert found.way == []
    assert found.states == STATES


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_move_model_breaks_a_promise_without_this_rule(rule: str) -> None:
    first = BOUNDS.get(rule, State(takeovers=0, crashes=0, late=0))
    assert search(first, Model(replace(Rules(), **{rule: False})).steps, states_max=STATES).way
