"""What a session's batches ask, and until when its owner counts on its keys (docs/protocol.md, Q1 to Q3)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.client.coordination.lease import DISCARDED_MAX, KEYS_MAX, Lease
from kvstore.client.coordination.steps import SessionEnded, Write
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import CHECK, DELETE, PUT
from kvstore.errors import InvalidRequest
from kvstore.proto import kv_pb2

EXPIRE = kv_pb2.EXPIRE
A, B = b"{t}/a", b"{t}/b"


def opened(**options: Any) -> Lease:
    lease = Lease(b"t", b"id", 10.0, 6.0, **options)
    lease.opened(100.0)
    return lease


def asked(batch: Batch) -> list[tuple[int, bytes]]:
    return [(each.code, each.key) for each in batch.operations]


def write(lease: Lease, sent: float, *gone: bytes, **what: Any) -> list[Any]:
    """Write, and have all of it done but to what is `gone`."""
    step = Write(**what)
    batch = lease.batch(step, sent)
    results = [each.key not in gone if each.code == EXPIRE else 7 for each in batch.operations]
    return lease.wrote(step, batch, results, sent)


def test_every_batch_asks_for_the_session_and_renews_all_its_keys() -> None:
    lease = opened()
    assert write(lease, 101.0, puts={A: b"1"}) == [7]
    batch = lease.batch(Write(puts={B: b"2"}), 102.0)
    assert asked(batch) == [(CHECK, lease.key), (EXPIRE, lease.key), (EXPIRE, A), (PUT, B)]
    lives = {each.options.expires_ms for each in batch.operations[1:] if each.options is not None}
    assert lives == {16_000}, "ttl and grace, for all of them"


def test_the_owner_counts_from_before_it_sent() -> None:
    lease = opened()
    write(lease, 105.0, puts={A: b""})
    assert lease.holds(A, 114.9)
    assert not lease.holds(A, 115.0)
    with pytest.raises(SessionEnded):
        lease.batch(Write(), 115.0)


def test_an_answer_that_comes_late_takes_no_time_away() -> None:
    lease = opened()
    step = Write()
    first, second = lease.batch(step, 101.0), lease.batch(step, 103.0)
    lease.wrote(step, second, [7, True], 103.0)
    lease.wrote(step, first, [7, True], 101.0)
    assert lease.deadline == 113.0


def test_a_key_that_somebody_has_deleted_is_not_held() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b"", B: b""})
    write(lease, 102.0, A)
    assert not lease.holds(A, 102.0)
    assert lease.holds(B, 102.0)


def test_what_is_discarded_is_not_renewed_and_deleted_until_that_is_done() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b""})
    lease.discard(A)
    assert asked(lease.batch(Write(), 102.0))[2:] == [(DELETE, A)]
    assert asked(lease.batch(Write(), 103.0))[2:] == [(DELETE, A)], "the first was not answered"
    write(lease, 104.0)
    assert not lease.has_discarded


def test_a_key_that_was_discarded_may_be_written_again_at_once() -> None:
    lease = opened()
    lease.discard(A)
    write(lease, 101.0, puts={A: b""})
    assert asked(lease.batch(Write(), 102.0))[2:] == [(EXPIRE, A)]


def test_a_session_that_was_ended_holds_nothing() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b""})
    assert asked(lease.closing()) == [(CHECK, lease.key), (DELETE, lease.key), (DELETE, A)]
    lease.end()
    assert not lease.is_alive(101.0)
    assert not lease.holds(A, 101.0)


def test_what_a_session_keeps_is_bounded() -> None:
    lease = opened()
    write(lease, 101.0, puts={b"{t}/%d" % number: b"" for number in range(KEYS_MAX)})
    with pytest.raises(InvalidRequest, match="at most 256 keys"):
        lease.batch(Write(puts={A: b""}), 102.0)
    lease.discard(*(b"{t}/x%d" % number for number in range(2 * DISCARDED_MAX)))
    assert len(lease._discarded) == DISCARDED_MAX


def test_no_name_begins_with_another() -> None:
    lease = opened()
    names = [lease.new_name() for _ in range(100)]
    assert [(a, b) for a in names for b in names if a != b and b.startswith(a)] == []


@pytest.mark.parametrize("tag", [b"", b"a{b", b"a}"])
def test_a_tag_is_one(tag: bytes) -> None:
    with pytest.raises(InvalidRequest, match="without braces"):
        Lease(tag, b"id")


@pytest.mark.parametrize(("ttl_s", "grace_s"), [(0.0, 1.0), (float("nan"), 1.0), (10.0, -1.0)])
def test_times_are_possible(ttl_s: float, grace_s: float) -> None:
    with pytest.raises(InvalidRequest, match="want a ttl"):
        Lease(b"t", b"id", ttl_s, grace_s)


def test_a_name_has_no_slash() -> None:
    with pytest.raises(InvalidRequest, match="without a slash"):
        opened().path(b"lock", b"a/b", b"")
