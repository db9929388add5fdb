"""Writes are done in order in every order of events of the model, and need each of the model's rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.order import Model, Rules, State
from tests.models.search import search

STATES = {2: 1_106, 3: 4_888, 4: 17_977}
"""By the number of writes. If a number differs, the model has changed, and with it what the search shows."""


@pytest.mark.parametrize("writes", STATES)
def test_writes_are_done_in_order_with_all_rules(writes: int) -> None:
    found = search(State(), Model(Rules(), writes).steps, states_max=STATES[writes])
    assert found.way == []
    assert found.states == STATES[writes]


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_write_overtakes_another_or_never_arrives_without_this_rule(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}), 3)
    assert search(State(), without.steps, states_max=STATES[3]).way
