"""Items of a queue belong to one session at a time, and none is lost (docs/protocol.md, Q6)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.client.coordination.lease import SessionLease
from kvstore.client.coordination.steps import AwaitStep, FindStep, Recipe, SessionEnded, WriteStep
from kvstore.client.coordination.work_queue import (
    CANDIDATES_FIRST,
    CANDIDATES_MAX,
    Taken,
    done,
    free_ones,
    give_back,
    put,
    take,
)
from kvstore.client.core.operation import CHECK, DELETE, GET, PUT
from kvstore.client.core.values import Item
from kvstore.client.core.watching import Change
from kvstore.errors import ConditionFailed, OutcomeUnknown, StoreError, Unavailable
from kvstore.proto import kv_pb2

PREFIX = b"{t}/queue/q/"
TAKEN = Taken(b"01", b"v", 9)


def queue(*names: bytes) -> dict[bytes, Item]:
    return {PREFIX + name: Item(b"", 1, 1, 0, 0) for name in names}


def asked(write: object) -> list[tuple[int, bytes]]:
    assert isinstance(write, WriteStep)
    return [(each.code, each.key.removeprefix(PREFIX)) for each in write.more]


def test_claimed_item_is_not_free() -> None:
    assert free_ones(queue(b"claim-01", b"item-01", b"item-02", b"tickets"), PREFIX) == [b"02"]


def test_item_is_claimed_if_it_exists_and_is_free() -> None:
    recipe = take(PREFIX)
    assert next(recipe) == FindStep(PREFIX, CANDIDATES_FIRST, keys_only=True)
    waited = recipe.send(queue(b"claim-01", b"item-01"))
    assert isinstance(waited, AwaitStep)
    assert not waited.is_met(queue(b"claim-01", b"item-01"))
    write = recipe.send(queue(b"item-01", b"item-02"))
    assert asked(write) == [
        (CHECK, b"claim-01"),
        (CHECK, b"item-01"),
        (GET, b"item-01"),
        (kv_pb2.INCREMENT, b"times-01"),
    ]
    assert isinstance(write, WriteStep)
    flags = [each.options.flags for each in write.more if each.options is not None]
    assert flags[:2] == [kv_pb2.IF_ABSENT, kv_pb2.IF_PRESENT]
    assert list(write.puts) == [PREFIX + b"claim-01"]
    write = recipe.throw(ConditionFailed(5))
    assert asked(write)[0] == (CHECK, b"claim-02"), "the next, another one was first"
    with pytest.raises(StopIteration) as end:
        recipe.send([0, 3, Item(b"v", 3, 3, 0, 0), 4, 9])
    assert end.value.value == Taken(b"02", b"v", 9, 4)


def test_taker_waits_again_when_all_items_were_claimed_meanwhile() -> None:
    recipe = take(PREFIX)
    next(recipe)
    recipe.send(queue(b"item-01"))
    assert isinstance(recipe.throw(ConditionFailed(5)), FindStep)
    assert isinstance(recipe.send(queue(b"claim-01", b"item-01")), AwaitStep)


def test_taker_reads_few_keys_unless_all_are_claims() -> None:
    recipe = take(PREFIX)
    looked_at = CANDIDATES_FIRST
    step = next(recipe)
    while isinstance(step, FindStep):
        assert step.limit == looked_at
        step = recipe.send(queue(*(b"claim-%02d" % number for number in range(looked_at))))
        looked_at *= 4
    assert isinstance(step, AwaitStep)
    assert step.find.limit == CANDIDATES_MAX


def test_finished_item_is_deleted_with_its_claim_by_its_holder_only() -> None:
    lease = SessionLease(b"t", b"id")
    with pytest.raises(SessionEnded):
        next(done(lease, PREFIX, TAKEN))
    assert list(give_back(lease, PREFIX, TAKEN)) == []
    lease.keys[PREFIX + b"claim-01"] = 1
    write = next(done(lease, PREFIX, TAKEN))
    assert asked(write) == [(DELETE, b"item-01"), (DELETE, b"times-01")]
    assert isinstance(write, WriteStep)
    assert write.drops == (PREFIX + b"claim-01",)
    lease.keys[PREFIX + b"claim-01"] = 1
    assert next(give_back(lease, PREFIX, TAKEN)) == WriteStep(drops=(PREFIX + b"claim-01",))


# docs/protocol.md Q6
@pytest.mark.parametrize("let_go", [give_back, done])
@pytest.mark.parametrize(("error", "is_kept"), [(OutcomeUnknown("lost"), False), (Unavailable("away"), True)])
def test_claim_of_unknown_outcome_is_neither_kept_nor_deleted(
    let_go: Callable[[SessionLease, bytes, Taken], Recipe[None]], error: StoreError, is_kept: bool
) -> None:
    """By then the claim may belong to another session, because its name is the item's."""
    lease = SessionLease(b"t", b"id")
    lease.keys[PREFIX + b"claim-01"] = 1
    recipe = let_go(lease, PREFIX, TAKEN)
    next(recipe)
    with pytest.raises(type(error)):
        recipe.throw(error)
    assert (PREFIX + b"claim-01" in lease.keys) is is_kept
    named = {each.key for each in lease.closing().operations}
    assert (PREFIX + b"claim-01" in named) is is_kept


def test_items_are_in_the_order_of_their_tickets() -> None:
    names = []
    for ticket in (9, 10, 300):
        recipe = put(PREFIX, b"v")
        counted = next(recipe)
        assert asked(counted) == [(kv_pb2.INCREMENT, b"tickets"), (kv_pb2.EXPIRE, b"tickets")]
        assert isinstance(counted, WriteStep)
        assert counted.more[1].options is None, "it never expires: a counter that started again would overwrite items"
        ((code, name),) = asked(recipe.send([ticket, False]))
        assert code == PUT
        names.append(name)
    assert names == sorted(names)


def waiting(*names: bytes) -> Callable[..., bool]:
    """A waiter that has found only these keys: returns whether a change wakes it."""
    recipe = take(PREFIX)
    step = next(recipe)
    while isinstance(step, FindStep):
        step = recipe.send(queue(*names[: step.limit]))
    assert isinstance(step, AwaitStep)
    find, wakes, found = step.find, step.wakes, queue(*names)

    def woken(name: bytes, version: int, created: int = 0) -> bool:
        item = Item(b"", version, created, 0, 0) if created else None
        return wakes(find, found, Change(PREFIX + name, item, version, 0, "p1", False))

    return woken


# docs/protocol.md Q6
def test_waiter_wakes_once_for_an_item_that_another_takes_and_finishes() -> None:
    """Otherwise a hundred waiters would read the queue several times for each item that one of them takes."""
    woken = waiting(b"tickets")
    changes = [
        (b"tickets", 10, 2),
        (b"item-01", 11, 11),
        (b"times-01", 12, 12),
        (b"claim-01", 13, 13),
        (b"claim-01", 14, 13),  # renewed
        (b"item-01", 15),
        (b"times-01", 16),
        (b"claim-01", 17),
    ]
    assert [change[0] for change in changes if woken(*change)] == [b"item-01"]


def test_waiter_wakes_when_an_item_taken_after_its_read_is_given_back() -> None:
    woken = waiting(b"item-02", b"claim-02", b"tickets")
    assert not woken(b"item-02", 1, 1), "it was seen"
    assert not woken(b"claim-01", 13, 13)
    assert woken(b"claim-01", 14)
    assert woken(b"claim-02", 15)
    assert not woken(b"item-02", 16)
    assert not woken(b"claim-02", 17)
    assert woken(b"claim-01", 18), "a later item's end is unrelated"


# docs/protocol.md Q6
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_waiter_wakes_for_an_item_with_a_reused_ticket(*, is_taken_over: bool) -> None:
    """Tickets start again where an operator has emptied the queue. A waiter that saw that would sleep forever."""
    woken = waiting(b"claim-01", b"item-01", b"tickets")
    assert not woken(b"item-01", 10)
    assert not woken(b"claim-01", 11), "of one that is done"
    if is_taken_over:
        woken = waiting(b"tickets")
        woken(b"item-01", 12)
    assert woken(b"item-01", 13, 13)
    assert not woken(b"claim-01", 14, 14)
    assert woken(b"claim-01", 15), "its session has ended, and the item exists"


def test_waiter_that_saw_only_claims_wakes_for_each_deleted_one() -> None:
    """There may be free items behind the claims."""
    woken = waiting(*(b"claim-%04d" % number for number in range(CANDIDATES_MAX)))
    assert not woken(b"item-0001", 20)
    assert woken(b"claim-0001", 21)
