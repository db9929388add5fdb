"""Takeovers after a proven death keep their promise in every order of events of the model, and need each rule."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.deaths import Model, Rules, State
from tests.models.search import search

STATES = 29_628
"""If the number differs, the model has changed, and with it what the search shows."""


# docs/protocol.md G28
def test_reads_never_lie_in_any_order_of_events() -> None:
    found = search(State(), Model(Rules()).steps, states_max=100_000)
    assert found.way == []
    assert found.states == STATES


# docs/protocol.md G28, P17, P32
@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_read_lies_without_one_of_the_rules(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    assert search(State(), without.steps, states_max=100_000).way
