"""Locks, times to live and pins hold in every order of events of the date model, and need each of its rules
(docs/protocol.md, P28 to P31, Q2, Q3)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.models.dates import AHEAD, LONG_CUT, ONE_WAY, Model, Rules, State
from tests.models.search import search

RESTARTS, CUT, BOTH, PIN = "restarts", "a cut", "restarts and a cut", "a pin"
SILENT, DEAF = "a long cut and restarts", "a long cut in one direction"
CASES = {
    RESTARTS: (State(cuts=0, may_sleep=True), 59_752),
    CUT: (State(starts=0), 43_050),
    BOTH: (State(jumps=1), 105_350),
    PIN: (State(jumps=1, grants="pin"), 65_100),
    SILENT: (LONG_CUT, 90_108),
    DEAF: (ONE_WAY, 3_081),
    "a log that is ahead": (AHEAD, 91),
}
"""A first state, and the number of states that follow, treating states that differ only in server names as equal. In
the first two, a majority of wall clocks may jump. If the number differs, the model has changed, and with it what the
search shows."""
NEEDED_FOR = {
    "elapsed_time_decides": CUT,
    "is_slow": CUT,
    "stays_near_silent": SILENT,
    "stays_near_apart": DEAF,
    "new_date_stays": SILENT,
    "first_from_dated": RESTARTS,
    "doubtful_does_not_lead": RESTARTS,
    "owner_counts_less": CUT,
    "survives_restarts": BOTH,
    "waits_for_silent": BOTH,
    "goes_on_ahead": "a log that is ahead",
}
"""The case in which a promise breaks without the rule; the case "pin" if none is named."""


@pytest.mark.parametrize("case", CASES)
def test_dates_keep_locks_and_pins_with_all_rules(case: str) -> None:
    first, states = CASES[case]
    found = search(first, Model(Rules()).steps, states_max=states)
    assert found.way == []
    assert found.states == states


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_dates_break_a_promise_without_this_rule(rule: str) -> None:
    without = Model(replace(Rules(), **{rule: False}))
    first, states = CASES[NEEDED_FOR.get(rule, PIN)]
    assert search(first, without.steps, states_max=2 * states).way


def test_lock_is_held_twice_with_dates_of_a_majority() -> None:
    """The former rule: a server takes over the date of a majority of wall clocks."""
    model = Model(replace(Rules(), elapsed_time_decides=False))
    found = search(State(starts=0, cuts=0), model.steps, states_max=100_000)
    assert [label for label in found.way if "jumps by 10" in label] != []
    assert "held twice" in found.way[-1]
