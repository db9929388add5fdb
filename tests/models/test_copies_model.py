"""One damage does not outvote a healthy replica in any order of damage, copies and checks, and each rule is
necessary."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.copies import Model, Rules, State
from tests.models.search import search

STATES = 15_808
"""If the number differs, the model has changed, and with it what the search shows."""


def test_damaged_replica_and_its_copies_outvote_none_with_all_rules() -> None:
    found = search(State(), Model(Rules()).steps, states_max=200_000)
    assert (found.way, found.states) == ([], STATES)


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_healthy_replica_is_outvoted_without_this_rule(rule: str) -> None:
    assert search(State(), Model(replace(Rules(), **{rule: False})).steps, states_max=200_000).way
