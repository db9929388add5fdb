"""Times to live and pins hold in every order of events that the model of dates has, and need each of its rules
(docs/protocol.md, P28 to P31)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.dates import AHEAD, Model, Rules, State
from tests.models.search import search

STATES = {1: 67_491, 2: 298_070}
"""By how many clocks go wrong. Another number: the model has changed, and with it what is shown."""
STATES_AHEAD = 44


@pytest.mark.parametrize("jumps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_with_all_rules_nothing_goes_before_its_time_or_stays(jumps: int) -> None:
    found = search(State(jumps=jumps), Model(Rules()).steps, states_max=STATES[jumps])
    assert found.way == []
    assert found.states == STATES[jumps]


def test_with_all_rules_a_log_that_is_ahead_keeps_times_to_live() -> None:
    found = search(AHEAD, Model(Rules()).steps, states_max=STATES_AHEAD)
    assert found.way == []
    assert found.states == STATES_AHEAD


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_without_this_rule_a_promise_is_broken(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    assert any(search(first, without.steps, states_max=STATES[2]).way for first in (AHEAD, State()))
