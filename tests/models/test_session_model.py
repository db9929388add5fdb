"""Sessions keep their promise over flips in every order of events of the model, and need each of the model's rules."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.search import search
from tests.models.sessions import Model, Rules, State

RETURNS, GOES_ON = (0, 1, 0), (0, 1, 2)
STATES = {(RETURNS, 1): 19_224, (GOES_ON, 1): 27_371, (RETURNS, 2): 101_630}
"""By the owners of the key and the number of writes. If a number differs, the model has changed, and with it what
the search shows."""


@pytest.mark.parametrize(
    ("path", "writes"), [(RETURNS, 1), (GOES_ON, 1), pytest.param(RETURNS, 2, marks=pytest.mark.slow)]
)
def test_session_never_goes_back_with_all_rules(path: tuple[int, ...], writes: int) -> None:
    states = STATES[path, writes]
    found = search(State(path, writes=writes), Model(Rules()).steps, states_max=states)
    assert found.way == []
    assert found.states == states


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_session_goes_back_without_this_rule(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    assert search(State(RETURNS, writes=1), without.steps, states_max=STATES[RETURNS, 1]).way
