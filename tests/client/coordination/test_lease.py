"""The batches of a session, and until when its owner relies on its keys (docs/protocol.md, Q1 to Q3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from kvstore.client.coordination.lease import (
    CALL_S_MIN,
    DISCARDED_MAX,
    KEPT_BYTES_MAX,
    KEYS_MAX,
    TTL_S_MAX,
    SessionLease,
)
from kvstore.client.coordination.steps import SessionEnded, SessionFull, WriteStep
from kvstore.client.core import operations
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import CHECK, DELETE, GET, PUT
from kvstore.client.core.values import Item
from kvstore.errors import InvalidRequest
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.proto import kv_pb2

EXPIRE = kv_pb2.EXPIRE
A, B = b"{t}/a", b"{t}/b"
LATE = 16_100_000
"""Expiry of the keys by the store's clock, as the opening sets it."""


def opened(**options: Any) -> SessionLease:
    lease = SessionLease(b"t", b"id", 10.0, 6.0, **options)
    lease.opening(b"")
    lease.opened([5, Item(b"", 5, 5, 0, LATE)], 100.0)
    return lease


def asked(batch: Batch) -> list[tuple[int, bytes]]:
    return [(each.code, each.key) for each in batch.operations]


def answer(batch: Batch, *gone: bytes, expires_ms: int = LATE + 1) -> list[Any]:
    """Carry out the batch, except for keys in `gone`."""
    found: dict[int, Any] = {EXPIRE: True, GET: Item(b"", 5, 5, 0, expires_ms)}
    return [each.key not in gone and found.get(each.code, 7) for each in batch.operations]


def write(lease: SessionLease, sent: float, *gone: bytes, renews: bool = False, **what: Any) -> list[Any]:
    step = WriteStep(renews=renews, **what)
    batch = lease.batch(step, sent)
    return lease.wrote(step, batch, answer(batch, *gone), sent)


def expiries(batch: Batch) -> dict[bytes, tuple[int, bool]]:
    """Return the expiry of each key, and whether it is relative or a time."""
    given = [(each.key, each.options) for each in batch.operations if each.code in (EXPIRE, PUT)]
    return {key: (of.expires_ms, bool(of.flags & kv_pb2.RELATIVE_TTL)) for key, of in given if of is not None}


def test_batch_checks_the_session_and_renews_all_keys_when_due() -> None:
    lease = opened()
    assert write(lease, 101.0, puts={A: b"1"}) == [7]
    batch = lease.batch(WriteStep(puts={B: b"2"}), 102.0)
    assert asked(batch) == [(CHECK, lease.key), (EXPIRE, lease.key), (GET, lease.key), (EXPIRE, A), (PUT, B)]
    assert set(expiries(batch).values()) == {(16_000, True)}, "ttl and grace, for all of them"


# docs/protocol.md Q1
def test_key_written_between_renewals_expires_with_the_others() -> None:
    """Nothing is written again, so watches of the session's keys are not called."""
    lease = opened()
    batch = lease.batch(WriteStep(puts={A: b"1"}), 101.0)
    assert asked(batch) == [(CHECK, lease.key), (PUT, A)]
    assert expiries(batch) == {A: (LATE, False)}
    write(lease, 103.0, renews=True)
    assert expiries(lease.batch(WriteStep(puts={B: b""}), 103.1)) == {B: (LATE + 1, False)}
    assert lease.deadline == pytest.approx(112.875)
    write(lease, 104.0, puts={B: b""})
    assert lease.deadline == pytest.approx(112.875), "it was no renewal"


def test_new_key_must_be_absent_and_session_key_need_not() -> None:
    lease = opened()

    def flags(now: float) -> int:
        options = lease.batch(WriteStep(puts={A: b""}), now).operations[-1].options
        return options.flags if options is not None else 0

    assert flags(100.0) & flags(105.0) & kv_pb2.IF_ABSENT
    write(lease, 101.0, puts={A: b""})
    assert not (flags(101.0) | flags(105.0)) & kv_pb2.IF_ABSENT


def test_owner_counts_from_before_the_send_and_less_than_the_ttl() -> None:
    lease = opened()
    write(lease, 105.0, puts={A: b""})
    assert lease.holds(A, 114.87)
    assert not lease.holds(A, 114.88)
    with pytest.raises(SessionEnded):
        lease.batch(WriteStep(), 114.88)


# docs/protocol.md Q3
def test_owner_subtracts_more_than_its_clock_can_be_slow_in_a_day() -> None:
    lease = SessionLease(b"t", b"id", TTL_S_MAX)
    lease.opened([5, Item(b"", 5, 5, 0, LATE)], 0.0)
    slewed = 0.0005  # the most by which adjtime and NTP change a clock's rate
    assert lease.deadline * (1 + slewed) < TTL_S_MAX, "by true time"


def test_late_answer_does_not_shorten_the_lease() -> None:
    lease = opened()
    step = WriteStep(renews=True)
    first, second = lease.batch(step, 101.0), lease.batch(step, 103.0)
    lease.wrote(step, second, answer(second, expires_ms=LATE + 9), 103.0)
    lease.wrote(step, first, answer(first), 101.0)
    assert lease.deadline == pytest.approx(112.875)
    assert expiries(lease.batch(WriteStep(puts={A: b""}), 103.0)) == {A: (LATE + 9, False)}


def test_key_deleted_by_another_client_is_not_held() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b"", B: b""})
    write(lease, 102.0, A, renews=True)
    assert not lease.holds(A, 102.0)
    assert lease.holds(B, 102.0)


def test_discarded_key_is_deleted_and_not_renewed() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b""})
    lease.discard(A)
    assert asked(lease.batch(WriteStep(), 101.1))[1:] == [(DELETE, A)]
    assert asked(lease.batch(WriteStep(renews=True), 101.2))[3:] == [(DELETE, A)], "the first was not answered"
    write(lease, 101.3)
    assert not lease.has_discarded


def test_discarded_key_can_be_written_again_at_once() -> None:
    lease = opened()
    lease.discard(*(b"{t}/%04d" % number + bytes(300) for number in range(1000)), A)
    batch = lease.batch(WriteStep(puts={A: b""}), 101.0)
    assert asked(batch)[1] == (DELETE, A), "at first, though not all have room"
    assert asked(batch)[-1] == (PUT, A)
    lease.wrote(WriteStep(puts={A: b""}), batch, answer(batch), 101.0)
    assert lease.holds(A, 102.0)
    assert lease.has_discarded, "the others come later"


def test_ended_session_holds_no_key() -> None:
    lease = opened()
    write(lease, 101.0, puts={A: b""})
    assert asked(lease.closing()) == [(CHECK, lease.key), (DELETE, lease.key), (DELETE, A)]
    lease.end()
    assert not lease.is_alive(101.0)
    assert not lease.holds(A, 101.0)


def test_session_is_opened_only_once() -> None:
    lease = SessionLease(b"t", b"id")
    with pytest.raises(SessionEnded, match="was not opened"):
        lease.batch(WriteStep(), 0.0)
    lease.opening(b"")
    with pytest.raises(InvalidRequest, match="opened before"):
        lease.opening(b"")
    lease.not_opened()
    lease.opening(b"")
    lease.end()
    with pytest.raises(SessionEnded, match="has ended"):
        lease.opening(b"")


def test_session_bounds_its_keys_and_bytes() -> None:
    lease = opened()
    write(lease, 101.0, puts={b"{t}/%d" % number: b"" for number in range(KEYS_MAX)})
    with pytest.raises(SessionFull, match="at most 256 keys in a session, got 257"):
        lease.batch(WriteStep(puts={A: b""}), 101.0)
    lease.discard(*(b"{t}/x%d" % number for number in range(2 * DISCARDED_MAX)))
    assert len(lease._discarded) == DISCARDED_MAX


def test_key_deleted_by_another_thread_is_discarded() -> None:
    """The renewing thread, between reading the oldest of too many keys and deleting it."""

    class Racing(dict[bytes, None]):
        def __iter__(self) -> Iterator[bytes]:
            keys = list(super().__iter__())
            if len(keys) > DISCARDED_MAX:
                super().__delitem__(keys[0])
            return iter(keys)

    lease = opened()
    lease._discarded = Racing()
    lease.discard(*(b"{t}/x%d" % number for number in range(2 * DISCARDED_MAX)))
    assert len(lease._discarded) == DISCARDED_MAX


def test_large_write_is_accepted_at_any_time_between_renewals() -> None:
    """The value of a queue's item, written by a session with many keys."""
    lease = opened()
    write(lease, 100.0, puts={b"{t}/%d" % number + bytes(1000): b"" for number in range(KEYS_MAX)})
    item = operations.put(b"{t}/queue/q/item", bytes(BATCH_BYTES_MAX - 1000))
    for now in (101.0, 103.0):
        batch = lease.batch(WriteStep(more=(item,)), now)
        assert sum(len(each.key) + len(each.value) for each in batch.operations) <= BATCH_BYTES_MAX
    assert (EXPIRE, lease.key) in asked(lease.batch(WriteStep(more=(operations.put(A, b""),)), 103.0))


def test_full_session_reports_its_size_and_the_limit() -> None:
    """Each renewal writes all keys again. Keys that do not fit into one batch and one log entry are refused before they
    are written; otherwise the session would end at its next renewal."""
    lease = opened()
    write(lease, 101.0, puts={A: bytes(KEPT_BYTES_MAX - 100)})
    with pytest.raises(SessionFull, match=f"at most {KEPT_BYTES_MAX} bytes of keys and values in a session, got"):
        lease.batch(WriteStep(puts={B: bytes(101)}), 101.0)
    write(lease, 101.0, puts={A: b""})
    write(lease, 101.0, puts={B: bytes(KEPT_BYTES_MAX - 100)})
    lease.discard(*(b"{t}/%04d" % number + bytes(4000) for number in range(DISCARDED_MAX)))
    for batch in (lease.batch(WriteStep(renews=True), 101.0), lease.closing()):
        assert sum(len(each.key) + len(each.value) for each in batch.operations) <= BATCH_BYTES_MAX


def test_write_leaves_time_for_a_renewal() -> None:
    lease = opened()
    young, due = lease.batch(WriteStep(drops=(A,)), 101.0), lease.batch(WriteStep(drops=(A,)), 102.0)
    assert lease.call_s(young, 101.0, inf) == 4.0
    assert lease.call_s(due, 102.0, inf) == pytest.approx(7.875)
    assert lease.call_s(due, 102.0, 102.5) == 0.5, "no longer than its caller has time"
    assert lease.call_s(due, 102.0, 90.0) == CALL_S_MIN


def test_no_name_is_a_prefix_of_another() -> None:
    lease = opened()
    names = [lease.new_name() for _ in range(100)]
    assert [(a, b) for a in names for b in names if a != b and b.startswith(a)] == []


@pytest.mark.parametrize("tag", [b"", b"a{b", b"a}"])
def test_tag_without_braces_is_required(tag: bytes) -> None:
    with pytest.raises(InvalidRequest, match="without braces"):
        SessionLease(tag, b"id")


@pytest.mark.parametrize(
    ("ttl_s", "grace_s"),
    [
        (0.0, 1.0),
        (float("nan"), 1.0),
        (inf, 1.0),
        (TTL_S_MAX + 1, 1.0),
        (10.0, -1.0),
        (10.0, inf),
        (10.0, float("nan")),
    ],
)
def test_times_out_of_range_are_refused(ttl_s: float, grace_s: float) -> None:
    with pytest.raises(InvalidRequest, match="expected ttl_s"):
        SessionLease(b"t", b"id", ttl_s, grace_s)


def test_text_as_tag_or_name_is_refused() -> None:
    text: Any = "reports"
    with pytest.raises(InvalidRequest, match="as bytes, got str 'reports'; encode it"):
        SessionLease(text, b"id")
    with pytest.raises(InvalidRequest, match="as bytes, got str 'reports'; encode it"):
        SessionLease(b"t", b"id").path(b"lock", text)


def test_name_with_a_slash_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without a slash"):
        opened().path(b"lock", b"a/b", b"")
