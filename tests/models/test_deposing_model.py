"""Deposing keeps its promises in every order of events of the model, and needs each of its rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models import refusing
from tests.models.deposing import Model, Rules, State
from tests.models.search import search

STATES = 4_958
REFUSING_STATES = 66
"""If the numbers differ, a model has changed, and with it what the search shows."""


# docs/protocol.md P40
def test_deposing_keeps_promises_in_every_order_of_events() -> None:
    found = search(State(), Model(Rules()).steps, states_max=1_000_000)
    assert found.way == []
    assert found.states == STATES


# docs/protocol.md P40
@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_deposing_breaks_a_promise_without_one_of_its_rules(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    assert search(State(), without.steps, states_max=1_000_000).way


# docs/protocol.md P40
def test_refusals_change_leader_once_and_replace_dead_leader_at_once() -> None:
    found = search(refusing.State(), refusing.Model(refusing.Rules()).steps, states_max=1_000)
    assert found.way == []
    assert found.states == REFUSING_STATES


# docs/protocol.md P40
@pytest.mark.parametrize("rule", [field.name for field in fields(refusing.Rules)])
def test_refusals_break_a_promise_without_one_of_their_rules(rule: str) -> None:
    without = refusing.Model(replace(refusing.Rules(), **{rule: False}))
    assert search(refusing.State(), without.steps, states_max=1_000).way
