"""Which changes wake a waiter, and which errors mean only that the time is over (docs/protocol.md, Q4)."""

from __future__ import annotations

import pytest

from kvstore.client.coordination.steps import AwaitStep, FindStep, Step, WriteStep, is_late, is_news
from kvstore.client.core.values import Item
from kvstore.client.core.watching import Change
from kvstore.errors import ConditionFailed, OutcomeUnknown, StoreError, Unavailable

KEYS, VALUES = FindStep(b"p/", keys_only=True), FindStep(b"p/")
HAD = {b"p/a": Item(b"1", 20, 10, 0, 0)}


def written(key: bytes, version: int, created: int, value: bytes = b"1") -> Change:
    return Change(key, Item(value, version, created, 0, 0), version, 0, "p1", False)


def deleted(key: bytes, sequence: int) -> Change:
    return Change(key, None, sequence, 0, "p1", False)


# docs/protocol.md Q4
@pytest.mark.parametrize("find", [KEYS, VALUES])
def test_renewal_wakes_nobody(find: FindStep) -> None:
    assert not is_news(find, HAD, written(b"p/a", 30, 10))


def test_renewal_of_a_key_beyond_the_limit_wakes_nobody() -> None:
    assert not is_news(KEYS, HAD, written(b"p/z", 30, 10))


@pytest.mark.parametrize("find", [KEYS, VALUES])
def test_created_and_deleted_keys_wake_the_waiter(find: FindStep) -> None:
    assert is_news(find, HAD, written(b"p/b", 30, 30))
    assert is_news(find, HAD, deleted(b"p/a", 30))
    assert is_news(find, HAD, written(b"p/a", 30, 30)), "it went and came again"


@pytest.mark.parametrize("find", [KEYS, VALUES])
def test_change_that_was_read_already_wakes_nobody(find: FindStep) -> None:
    assert not is_news(find, HAD, written(b"p/a", 10, 10))
    assert not is_news(find, HAD, deleted(b"p/a", 5)), "it has come again since"
    assert not is_news(find, HAD, deleted(b"p/b", 30))


def test_changed_value_wakes_readers_of_values() -> None:
    change = written(b"p/a", 30, 10, b"2")
    assert is_news(VALUES, HAD, change)
    assert not is_news(KEYS, HAD, change)


@pytest.mark.parametrize(
    ("error", "step", "late"),
    [
        (Unavailable("nobody"), WriteStep(), True),
        (Unavailable("nobody"), FindStep(b"p"), True),
        (OutcomeUnknown("lost"), FindStep(b"p"), True),
        (OutcomeUnknown("lost"), AwaitStep(FindStep(b"p"), bool), True),
        (OutcomeUnknown("lost"), WriteStep(is_given_up=True), True),
        (OutcomeUnknown("lost"), WriteStep(), False),
        (ConditionFailed(1), WriteStep(), False),
    ],
)
def test_unknown_outcome_is_not_late_when_something_is_kept(error: StoreError, step: Step, late: bool) -> None:
    assert is_late(error, step) is late
