"""Reads and writes that wait at a transaction's intents (docs/protocol.md Tx9)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import NotCaughtUp, Overloaded, StoreError, Unavailable
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading import prepared_answers
from kvstore.partition.leading.held import is_undecided
from kvstore.partition.partition import Partition
from kvstore.partition.state.commands import (
    NOT_NOW,
    Append,
    Batch,
    Check,
    Count,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Inquire,
    Level,
    Meta,
    Op,
    Prepare,
    Put,
    Range,
    Resolve,
    Scan,
    ScanTokens,
)
from kvstore.ring.moves import FIRST_MOVE
from kvstore.types import PartitionId
from tests.partition.one_partition import TIME_MS
from tests.partition.several_partitions import Several, transact
from tests.ring import rings


def prepared(s: Several, *ops: Op) -> Any:
    """Carry out a transaction up to its decision. Its outcome reaches nobody until `s.deliver_held`, and nobody gets
    an answer to a question."""
    s.holds = lambda op: op.__class__ is Resolve or op.__class__ is Inquire
    result = s.submit(transact(*ops))
    s.run()
    return result


def resolve(s: Several) -> None:
    s.holds = lambda op: False
    s.deliver_held()
    s.run()


READS = [
    lambda key: Get(key),
    lambda key: Meta(key),
    lambda key: Get(key, Level.STRICT),
    lambda key: Get(key, Level.SESSION, 1),
    lambda key: Scan(b"", b"", 100),
    lambda key: ScanTokens(0, 100),
    lambda key: Range(b"", b"", 100, int(Flag.KEYS_ONLY)),
    lambda key: Range(b"", b"", 100, int(Flag.BARE)),
    lambda key: Range(b"", b"", 100, int(Flag.COUNT_ONLY)),
    lambda key: Count(),
]


@pytest.mark.parametrize("read", READS)
def test_read_waits_at_an_exclusive_intent(read: Any) -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(b, b"old"))
    before = s.partitions[1].do(read(b))
    prepared(s, Put(a, b"1"), Put(b, b"new"), Put(s.key(1, 1), b"another"))
    result = s.submit(read(b), place=1)
    s.run()
    assert result() == "waits"
    resolve(s)
    assert not isinstance(result(), StoreError | str)
    assert result() != before, "the read does not show the transaction"


def test_stale_read_does_not_wait() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(b, b"old"))
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    assert s.partitions[1].do(Get(b, Level.STALE)).value == b"old"


def test_read_of_another_key_does_not_wait() -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(other, b"old"))
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    assert s.do(Get(other)).value == b"old"
    assert not isinstance(s.partitions[1].read_now(other), type(NOT_NOW))
    assert s.partitions[1].read_now(b) is NOT_NOW


def test_read_does_not_wait_at_a_shared_intent() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.do(Put(b, b"old"))
    prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)))
    assert len(s.partitions[1].state.intents) == 1
    assert s.do(Get(b)).value == b"old"
    assert s.partitions[1].do(Scan(b"", b"", 100)).items[0][0] == b


WRITES = [
    lambda key, other: Put(key, b"plain"),
    lambda key, other: Batch(other, (Put(other, b"plain"), Put(key, b"plain"))),
    lambda key, other: Batch(other, (Put(other, b"plain"), Get(key))),
    lambda key, other: transact(Put(other, b"plain"), Put(key, b"plain")),
    lambda key, other: Expire(key, TIME_MS + 1_000_000),
    lambda key, other: DeleteRange(b"", b""),
    lambda key, other: Check(key, int(Flag.IF_PRESENT)),
]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_write_waits_at_any_intent(write: Any, *, is_shared: bool) -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(b, b"old"))
    prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)) if is_shared else Put(b, b"new"))
    seq = s.partitions[1].state.seq
    result = s.submit(write(b, other), place=1)
    s.run()
    assert result() == "waits"
    assert s.partitions[1].state.seq == seq, "something was logged"
    resolve(s)
    assert not isinstance(result(), StoreError | str)


def test_many_puts_wait_only_where_they_must() -> None:
    """Puts that arrive together are evaluated in columns."""
    s = Several()
    a, keys = s.key(0), [s.key(1, number) for number in range(8)]
    prepared(s, Put(a, b"1"), Put(keys[3], b"new"))
    at = s.partitions[1]
    results = [s.submit(Put(key, b"plain")) for key in keys]
    sink_tokens = range(at.tokens, at.tokens + len(keys))
    at.tokens += len(keys)
    at.loop.call_soon(at.leader.submit, [Put(key, b"again") for key in keys], at.caller, list(sink_tokens))
    s.run()
    assert [each() == "waits" for each in results] == [key == keys[3] for key in keys]
    assert [at.result(token) == "waits" for token in sink_tokens] == [key == keys[3] for key in keys]
    resolve(s)
    assert [s.value(key) for key in keys] == [b"again"] * 8


def test_writes_on_a_key_keep_their_order_behind_a_waiting_batch() -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    batch = s.submit(Batch(other, (Put(other, b"first"), Put(b, b"first"))))
    later = s.submit(Put(other, b"second"))
    s.run()
    assert (batch(), later()) == ("waits", "waits")
    resolve(s)
    assert (s.value(b), s.value(other)) == (b"first", b"second")


# docs/protocol.md Tx9
def test_transactions_do_not_pass_writes_that_wait() -> None:
    s = Several(3)
    a, b, other, c = s.key(0), s.key(1), s.key(1, 1), s.key(2)
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    s.submit(Batch(other, (Put(other, b"batch"), Put(b, b"batch"))))
    s.run()
    as_participant, as_home = (
        s.submit(transact(Put(c, b"2"), Append(other, b"+"))),
        s.submit(transact(Append(other, b"-"), Put(s.key(2, 1), b"2"))),
    )
    s.run()
    assert (as_participant(), as_home()) == ("waits", "waits")
    resolve(s)
    assert as_participant()[0]
    assert as_home()[0]
    assert sorted(s.value(other) or b"") == sorted(b"batch+-")
    assert (s.value(other) or b"").startswith(b"batch")


# docs/protocol.md Tx9
@pytest.mark.parametrize("read", [lambda key: Get(key), lambda key: Scan(key, key + b"\0", 1)])
def test_reads_that_wait_at_a_key_leave_room_for_reads_of_other_keys(read: Any) -> None:
    s = Several(config=PartitionConfig(queue_items_max=4))
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(other, b"other"))
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    waiting = []
    for _ in range(6):
        waiting.append(s.submit(read(b), place=1))
        s.run()
    assert [isinstance(each(), Overloaded) for each in waiting] == [False] * 4 + [True] * 2
    assert s.do(Get(other)).value == b"other"
    resolve(s)
    assert not any(isinstance(each(), StoreError | str) for each in waiting[:4])


# docs/protocol.md P10
def test_waiting_ends_after_its_time() -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    waiting = [s.submit(each, place=1) for each in (Get(b), Scan(b"", b"", 10), Put(b, b"plain"))]
    s.wait(4.5)
    assert [each() for each in waiting] == ["waits"] * 3
    s.wait(2.5)
    assert all(isinstance(each(), Unavailable) for each in waiting)
    resolve(s)
    assert s.value(b) == b"new"
    assert s.do(Put(b, b"later"))


# docs/protocol.md P10, Tx9
@pytest.mark.parametrize("read", [lambda key: Scan(b"", b"", 10), lambda key: Get(key), lambda key: Count()])
@pytest.mark.parametrize("is_withheld", [False, True])
def test_read_waits_no_longer_if_one_transaction_follows_another(
    read: Any, monkeypatch: pytest.MonkeyPatch, *, is_withheld: bool
) -> None:
    """Each transaction resolves its intent in the entry in which the next one prepares. The read is answered, because
    PREPARED of the next one is withheld. Without that, it is refused in time."""
    if not is_withheld:
        monkeypatch.setattr(prepared_answers, "WITHHELD_S", 0)
    s = Several(3)
    b, at = s.key(1), s.partitions[1]
    s.holds = lambda op: op.__class__ in (Prepare, Resolve, Inquire)
    s.submit(transact(Put(s.key(0), b"first"), Put(b, b"first")))
    s.settle()
    s.deliver_held()
    s.run()
    result = s.submit(read(b), place=1)
    for turn in range(70):
        home = 2 if turn % 2 == 0 else 0
        s.submit(transact(Put(s.key(home, turn % 5), b"next"), Put(b, b"next")))
        s.settle()
        messages, s.held = [each for each in s.held if each.op.__class__ is not Inquire], []
        for message in sorted(messages, key=lambda each: each.op.__class__ is Prepare):
            s.deliver(message)
        s.wait(0.1)
        assert b in at.state.intents.exclusive, "there is a moment without an intent"
    assert isinstance(result(), Unavailable) is not is_withheld
    assert result() != "waits"


# docs/protocol.md Tx9
@pytest.mark.parametrize("is_full", [False, True])
def test_refused_batch_that_waited_unlocks_its_other_keys(*, is_full: bool) -> None:
    s = Several(config=PartitionConfig(queue_items_max=1) if is_full else None)
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    if is_full:
        s.submit(Put(b, b"plain"))
        s.run()
    batch = s.submit(Batch(other, (Put(other, b"batch"), Put(b, b"batch"))))
    s.run()
    behind = "none" if is_full else s.submit(Put(other, b"behind"))
    s.wait(0.0 if is_full else 4.0)
    later = s.submit(Put(other, b"later"))
    s.wait(0.1 if is_full else 2.5)
    assert isinstance(batch(), StoreError)
    assert is_full or isinstance(behind(), StoreError)
    assert not isinstance(later(), StoreError | str), "the refused batch still locks its keys"
    resolve(s)


# docs/protocol.md Tx6, Tx9
@pytest.mark.parametrize("read", [Get, lambda key: Scan(b"", b"", 10), lambda key: Put(key, b"plain")])
def test_waiting_asks_home_after_50_ms(read: Any) -> None:
    s = Several()
    a, b = s.key(0), s.key(1)
    s.holds = lambda op: op.__class__ is Resolve
    s.submit(transact(Put(a, b"1"), Put(b, b"new")))
    s.run()
    result = s.submit(read(b), place=1)
    s.wait(0.04)
    assert result() == "waits"
    s.wait(0.03)
    assert not isinstance(result(), StoreError | str)


# docs/protocol.md Tx9
def test_expiry_waits_at_any_intent() -> None:
    """A shared intent means that the key stays as the transaction has found it."""
    for is_shared in (False, True):
        s = Several()
        a, b = s.key(0), s.key(1)
        at = s.partitions[1]
        s.do(Put(b, b"old", at.wall_ms() + 100))
        prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)) if is_shared else Put(b, b"new"))
        s.wait(0.2)
        reads = [s.submit(each, place=1) for each in (Get(b), Scan(b"", b"", 10), ScanTokens(0, 10))]
        s.do(Put(s.key(1, 1), b"record time passes the expiry"))
        reads += [s.submit(each, place=1) for each in (Get(b), Scan(b"", b"", 10), ScanTokens(0, 10))]
        s.run()
        assert [each() for each in reads] == ["waits"] * 6
        assert b in {key for key, _ in _rows(at)}, "its delete was logged"
        resolve(s)
        assert not any(isinstance(each(), StoreError | str) for each in reads)
        assert (reads[0]() is None) == is_shared


def _rows(at: Any) -> list[tuple[bytes, bytes]]:
    return [(key[5:], row) for key, row in at.engine.iterate(b"d", b"e")]


def test_prepare_waits_at_an_expired_key_under_a_shared_intent() -> None:
    s = Several(3)
    a, b, c = s.key(0), s.key(1), s.key(2)
    s.do(Put(b, b"old", s.partitions[1].wall_ms() + 100))
    prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)))
    shared = s.do(transact(Put(c, b"2"), Check(b, int(Flag.IF_PRESENT))))
    assert shared[0]
    s.wait(0.2)
    absent = s.submit(transact(Put(c, b"2"), Expire(b, TIME_MS * 2)))
    s.run()
    assert absent() == "waits"
    resolve(s)
    assert absent()[0][1] == 0


# docs/protocol.md Tx9
def test_sweep_does_not_delete_an_expired_key_under_an_intent() -> None:
    s = Several(config=PartitionConfig(expiry_sweep_s=0.05, lease_ms=500))
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    at = s.partitions[1]
    s.do(Put(b, b"old", at.wall_ms() + 100))
    s.do(Put(other, b"old", at.wall_ms() + 100))
    prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)))
    s.wait(0.5)
    assert {key for key, _ in _rows(at)} == {b}
    resolve(s)
    s.wait(0.5)
    assert not _rows(at)


# docs/protocol.md Tx9
def test_sweep_deletes_a_key_that_a_transaction_has_held_for_long() -> None:
    s = Several(config=PartitionConfig(expiry_sweep_s=0.05, lease_ms=500))
    a, b, at = s.key(0), s.key(1), s.partitions[1]
    s.do(Put(b, b"old", at.wall_ms() + 100))
    prepared(s, Put(a, b"1"), Check(b, int(Flag.IF_PRESENT)))
    s.wait(12)
    assert _rows(at)
    resolve(s)
    s.wait(0.5)
    assert not _rows(at)


# docs/protocol.md Tx12
def test_replica_leaves_session_reads_under_an_intent_to_the_leader() -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(b, b"old"))
    s.do(Put(other, b"old"))
    prepared(s, Put(a, b"1"), Put(b, b"new"))
    replica: Any = SimpleNamespace(
        id=PartitionId("p2"),
        state=s.partitions[1].state,
        _tail=SimpleNamespace(catch_up=lambda: None),
        _replica=SimpleNamespace(following=SimpleNamespace(failure=None)),
        _is_behind_start=False,
        _rings=SimpleNamespace(ring=SimpleNamespace(next_move=FIRST_MOVE, partitions={})),
    )

    def answer(read: Op) -> Any:
        return Partition._answer_here(replica, read)

    assert isinstance(answer(Get(b, Level.SESSION, 1)), NotCaughtUp)
    assert isinstance(answer(Scan(b"", b"", 10, 0, Level.SESSION, 1)), NotCaughtUp)
    assert answer(Get(b, Level.STALE)).value == b"old"
    assert answer(Get(other, Level.SESSION, 1)).value == b"old"
    resolve(s)
    assert answer(Get(b, Level.SESSION, 1)).value == b"new"


# docs/protocol.md Tx12
def test_replica_does_not_know_the_outcome_under_an_exclusive_intent() -> None:
    s = Several()
    a, b, other = s.key(0), s.key(1), s.key(1, 1)
    s.do(Put(other, b"old"))
    prepared(s, Put(a, b"1"), Put(b, b"new"), Check(other, int(Flag.IF_PRESENT)))
    state = s.partitions[1].state
    assert [is_undecided(state, read(b)) for read in READS] == [True] * len(READS)
    assert not is_undecided(state, Get(other))
    assert not is_undecided(state, Scan(b + b"\0", b"", 10))
    assert not is_undecided(state, ScanTokens(rings.key_hash.token_of(b) + 1, 10))
    resolve(s)
    assert not any(is_undecided(state, read(b)) for read in READS)
