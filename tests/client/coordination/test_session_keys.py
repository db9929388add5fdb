"""Keys of sessions by name: no session takes another one's key; barriers count parties (docs/protocol.md, Q1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.session_keys import changed, delete, join, pass_barrier, put
from kvstore.client.coordination.steps import AwaitStep, FindStep, NameTaken, NotInTime, Recipe, WriteStep
from kvstore.client.core.values import Item
from kvstore.errors import ConditionFailed, InvalidRequest, OutcomeUnknown, Unavailable

KEY = b"{t}/worker"
BARRIER = b"{t}/barrier/b/"


@pytest.fixture
def lease() -> SessionLease:
    lease = SessionLease(b"t", b"id")
    lease.opened([1, Item(b"", 1, 1, 0, 0)], 0.0)
    return lease


def found(**values: bytes) -> dict[bytes, Item]:
    return {BARRIER + name.replace("_", "-").encode(): Item(value, 1, 1, 0, 0) for name, value in values.items()}


def result(recipe: Recipe[Any], answer: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        recipe.send(answer)
    return end.value.value


def test_name_of_another_session_is_not_taken(lease: SessionLease) -> None:
    recipe = put(lease, b"worker", b"mine", waits=False)
    assert next(recipe) == WriteStep(puts={KEY: b"mine"})
    with pytest.raises(NameTaken, match=r"worker.*does not belong to this session"):
        recipe.throw(ConditionFailed(7))
    assert not lease.has_discarded, "else the other one's would be deleted"


def test_waiter_gets_the_name_when_it_is_free(lease: SessionLease) -> None:
    recipe = put(lease, b"worker", b"mine", waits=True)
    next(recipe)
    waited = recipe.throw(ConditionFailed(7))
    assert isinstance(waited, AwaitStep)
    assert (waited.find, waited.is_key) == (FindStep(KEY, keys_only=True), True)
    assert not waited.is_met({KEY: Item(b"", 7, 7, 0, 0)})
    assert waited.is_met({KEY + b"2": Item(b"", 7, 7, 0, 0)})
    assert recipe.send({}) == WriteStep(puts={KEY: b"mine"})
    assert result(recipe, [9]) == 9


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), NotInTime("late")])
def test_name_of_unknown_outcome_is_neither_kept_nor_deleted(lease: SessionLease, error: Exception) -> None:
    """The key may belong to another session, now or later."""
    recipe = put(lease, b"worker", b"mine", waits=False)
    next(recipe)
    with pytest.raises(type(error)):
        recipe.throw(error)
    assert not lease.has_discarded
    assert KEY not in lease.keys


def test_session_does_not_delete_keys_of_others(lease: SessionLease) -> None:
    assert list(delete(lease, KEY)) == []
    for error, is_kept in ((Unavailable("away"), True), (OutcomeUnknown("lost"), False)):
        lease.keys[KEY] = 1
        recipe = delete(lease, KEY)
        assert next(recipe) == WriteStep(drops=(KEY,))
        with pytest.raises(type(error)):
            recipe.throw(error)
        assert (KEY in lease.keys) is is_kept
        assert not lease.has_discarded, "by then it may be another session's"


def test_membership_of_unknown_outcome_is_discarded(lease: SessionLease) -> None:
    """The key has the session's id, so it belongs to no other session."""
    recipe = join(lease, b"{t}/member/g/", b"1")
    next(recipe)
    with pytest.raises(OutcomeUnknown):
        recipe.throw(OutcomeUnknown("lost"))
    assert lease.has_discarded


def test_restarted_party_counts_once(lease: SessionLease) -> None:
    recipe = pass_barrier(lease, BARRIER, 2, b"worker-7")
    assert next(recipe) == WriteStep(puts={BARRIER + b"at-id": b"worker-7"}, is_given_up=True)
    waited = recipe.send([5])
    assert isinstance(waited, AwaitStep)
    assert not waited.is_met(found(at_former=b"worker-7", at_id=b"worker-7"))
    both = found(at_former=b"worker-7", at_id=b"worker-7", at_other=b"worker-8")
    assert waited.is_met(both)
    assert waited.is_met(found(open=b""))
    step = recipe.send(both)
    assert isinstance(step, WriteStep)
    assert [each.key for each in step.more] == [BARRIER + b"open"]
    result(recipe, [6])
    assert lease.has_discarded, "who has passed is not waited for"


@pytest.mark.parametrize(("parties", "party"), [(0, b"a"), (1, b"")])
def test_barrier_needs_a_count_and_a_party_name(lease: SessionLease, parties: int, party: bytes) -> None:
    with pytest.raises(InvalidRequest, match="1 party or more and the name"):
        next(pass_barrier(lease, BARRIER, parties, party))


def test_members_change_when_a_value_changes() -> None:
    waited = next(changed(BARRIER, {b"a": b"1"}))
    assert isinstance(waited, AwaitStep)
    assert not waited.is_met(found(a=b"1"))
    assert waited.is_met(found(a=b"2"))
    assert waited.is_met(found(a=b"1", b=b"1"))
