"""Barring keeps its promises in every order of events of the model, and needs each of its rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.barring import Model, Rules, firsts
from tests.models.search import search

STATES = (5_828, 3_608)
"""If the numbers differ, the model has changed, and with it what the search shows."""


# docs/protocol.md P35
def test_barring_keeps_promises_in_every_order_of_events() -> None:
    found = [search(first, Model(Rules()).steps, states_max=100_000) for first in firsts()]
    assert [each.way for each in found] == [[], []]
    assert tuple(each.states for each in found) == STATES


# docs/protocol.md P35
@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_barring_breaks_a_promise_without_one_of_its_rules(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    assert any(search(first, without.steps, states_max=100_000).way for first in firsts())
