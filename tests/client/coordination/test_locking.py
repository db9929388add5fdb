"""The order of a line, and what recipes do in it (docs/protocol.md, Q4 and Q5)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.locking import (
    EXCLUSIVE,
    SHARED,
    LockKey,
    acquire,
    first_of,
    in_front,
    release,
    release_note_of,
)
from kvstore.client.coordination.steps import AwaitStep, FindStep, NotInTime, SessionEnded, WriteStep
from kvstore.client.core.operation import CHECK
from kvstore.client.core.values import Item
from kvstore.errors import ConditionFailed, OutcomeUnknown

PREFIX, TURN = b"{t}/lock/l/", b"{t}/turn/lock/l/"


def line(*places: tuple[bytes, int, bytes]) -> dict[bytes, Item]:
    """Keys with the versions of their creation and their modes. All have been renewed since."""
    return {key: Item(mode, 90 + created, created, 0, 0) for key, created, mode in places}


def test_line_is_in_the_order_of_key_creation() -> None:
    found = line((b"a", 3, EXCLUSIVE), (b"b", 1, EXCLUSIVE), (b"c", 2, EXCLUSIVE))
    assert in_front(found, b"b", EXCLUSIVE) is None
    assert in_front(found, b"c", EXCLUSIVE) == b"b"
    assert in_front(found, b"a", EXCLUSIVE) == b"c", "the key directly in front: an end wakes one waiter"
    assert first_of(found) == LockKey(b"b", 1)


def test_readers_wait_for_the_last_writer_and_writers_for_all() -> None:
    found = line((b"a", 1, SHARED), (b"b", 2, EXCLUSIVE), (b"c", 3, SHARED), (b"d", 4, SHARED), (b"e", 5, EXCLUSIVE))
    assert [in_front(found, key, item.value) for key, item in found.items()] == [None, b"a", b"b", b"b", b"d"]


def test_key_that_is_not_in_the_line_holds_nothing() -> None:
    with pytest.raises(SessionEnded):
        in_front(line((b"a", 1, EXCLUSIVE)), b"b", EXCLUSIVE)


def begun() -> tuple[SessionLease, Any, bytes]:
    """A session that has requested the lock."""
    lease = SessionLease(b"t", b"id")
    lease.opened([1, Item(b"", 1, 1, 0, 0)], 0.0)
    recipe = acquire(lease, PREFIX, EXCLUSIVE, b"")
    step = next(recipe)
    assert isinstance(step, WriteStep)
    (key,) = step.puts
    return lease, recipe, key


def test_line_is_read_again_after_the_key_in_front_has_gone() -> None:
    _, recipe, key = begun()
    assert recipe.send([5]) == FindStep(PREFIX)
    waited = recipe.send(line((b"holder", 1, EXCLUSIVE), (b"waiter", 2, EXCLUSIVE), (key, 5, EXCLUSIVE)))
    assert isinstance(waited, AwaitStep)
    assert (waited.find, waited.is_key) == (FindStep(b"waiter", keys_only=True), True)
    assert not waited.is_met(line((b"waiter", 2, EXCLUSIVE)))
    assert waited.is_met({})
    assert recipe.send({}) == FindStep(TURN)
    assert recipe.send(line((TURN, 1, b"1"))) == FindStep(PREFIX), "the former holder's, not the waiter's"
    waited = recipe.send(line((b"holder", 1, EXCLUSIVE), (key, 5, EXCLUSIVE)))
    assert waited.find == FindStep(b"holder", keys_only=True)
    assert recipe.send({}) == FindStep(TURN)
    assert recipe.send({}) == FindStep(PREFIX)
    with pytest.raises(StopIteration) as end:
        recipe.send(line((key, 5, EXCLUSIVE)))
    assert end.value.value == LockKey(key, 5)


# docs/protocol.md Q4
@pytest.mark.parametrize("is_there", [True, False])
def test_line_is_not_read_after_a_release_of_the_key_in_front(is_there: bool) -> None:
    """Behind ten thousand keys, reading the line would take half a second. The own key must still exist."""
    _, recipe, key = begun()
    recipe.send([5])
    recipe.send(line((b"holder", 3, EXCLUSIVE), (key, 5, EXCLUSIVE)))
    assert recipe.send({}) == FindStep(TURN)
    assert recipe.send(line((TURN, 4, b"3"))) == FindStep(key, keys_only=True)
    if is_there:
        with pytest.raises(StopIteration) as end:
            recipe.send(line((key, 5, EXCLUSIVE)))
        assert end.value.value == LockKey(key, 5)
    else:
        assert recipe.send({}) == FindStep(PREFIX)


@pytest.mark.parametrize("error", [NotInTime("late"), OutcomeUnknown("lost")])
def test_caller_that_times_out_leaves_no_key_in_the_line(error: Exception) -> None:
    lease, recipe, key = begun()
    recipe.send([5])
    with pytest.raises(type(error)):
        recipe.throw(error)
    assert key in lease._discarded


def test_cancelled_caller_leaves_no_key_in_the_line() -> None:
    lease, recipe, key = begun()
    recipe.close()
    assert key in lease._discarded


def test_release_returns_whether_the_lock_was_held() -> None:
    lease = SessionLease(b"t", b"id")
    lease.opened([1, Item(b"", 1, 1, 0, 0)], 0.0)
    assert list(release(lease, PREFIX, LockKey(b"k", 1), EXCLUSIVE)) == [], "lost before: nothing is asked"
    for error in (None, ConditionFailed(0), SessionEnded("over")):
        lease.keys[b"k"] = 1
        recipe = release(lease, PREFIX, LockKey(b"k", 1), EXCLUSIVE)
        step = next(recipe)
        assert isinstance(step, WriteStep)
        assert step.drops == (b"k",)
        with pytest.raises(StopIteration) as end:
            recipe.throw(error) if error else recipe.send([1, 2, 3])
        assert end.value.value is (error is None)


def test_exclusive_holder_leaves_a_release_note_and_readers_do_not() -> None:
    """Other readers may still hold the lock."""
    lease = SessionLease(b"t", b"id")
    for mode, told in ((EXCLUSIVE, [(b"k", b""), (TURN, b"7")]), (SHARED, [(b"k", b"")])):
        lease.keys[b"k"] = 1
        recipe = release(lease, PREFIX, LockKey(b"k", 7), mode)
        step = next(recipe)
        assert isinstance(step, WriteStep)
        assert [(each.key, each.value) for each in step.more] == told
        assert step.more[0].code == CHECK
        recipe.close()


def test_release_note_is_beside_the_line() -> None:
    """Otherwise the note would count as a place in the line."""
    assert release_note_of(PREFIX) == TURN
    assert not TURN.startswith(PREFIX)
