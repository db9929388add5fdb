"""Request ids, and conclusions from the outcomes of attempts."""

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstore.client.core import operations, retries
from kvstore.client.core.operation import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_MAX, SEEN_STEP_MS, ClientOperation, Numbering
from kvstore.client.core.retries import NoServerReachable, deadline_error, final_error_or_none, is_hint, lost, pauses
from kvstore.client.core.scanning import Bounds
from kvstore.client.core.values import Level
from kvstore.errors import (
    ConditionFailed,
    Corrupted,
    InvalidRequest,
    Moved,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Refused,
    RequestExpired,
    StoreError,
    Unavailable,
)

CLIENT = b"c" * 16


def begun(numbering: Numbering, operation: ClientOperation) -> ClientOperation:
    numbering.begin(operation)
    operation.is_sent = True
    return operation


def a_put(numbering: Numbering | None = None) -> ClientOperation:
    return begun(numbering or Numbering(CLIENT), operations.put(b"k", b"v"))


def a_get() -> ClientOperation:
    return begun(Numbering(CLIENT), operations.get(b"k"))


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 1e300, "5", b"5"])
def test_impossible_time_to_live_is_refused(ttl_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected ttl_s"):
        operations.put(b"k", b"v", ttl_s=ttl_s)


def test_contradicting_arguments_are_refused_by_their_names() -> None:
    with pytest.raises(InvalidRequest, match="one of if_absent, if_present, if_version, got if_absent and if_version"):
        operations.put(b"k", b"v", if_absent=True, if_version=3)
    with pytest.raises(InvalidRequest, match="one of keep_ttl, ttl_s, got keep_ttl and ttl_s"):
        operations.put(b"k", b"v", keep_ttl=True, ttl_s=5)


@pytest.mark.parametrize("delta", [1.5, "1", 1 << 63])
def test_delta_that_is_no_64_bit_integer_is_refused(delta: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected delta to be an integer of 64 bits"):
        operations.increment(b"k", delta)


WRONG: Any = ["text", ["k"], 5, None]
BUILDERS: list[Callable[[Any, Any], ClientOperation]] = [
    lambda key, _: operations.get(key),
    lambda key, _: operations.meta(key),
    operations.put,
    lambda key, value: operations.put(key, value, ttl_s=5),
    lambda key, value: operations.put_until(key, value, 5, if_absent=True),
    lambda key, _: operations.delete(key),
    lambda key, _: operations.increment(key),
    operations.append,
    lambda key, _: operations.expire(key, 5),
    lambda key, _: operations.condition(key, version=1),
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("build", BUILDERS)
def test_value_that_is_not_bytes_is_refused_before_it_is_sent(
    build: Callable[[Any, Any], ClientOperation], wrong: Any
) -> None:
    with pytest.raises(InvalidRequest, match=f"as bytes, got {type(wrong).__name__}"):
        build(wrong, b"v")
    if build(b"k", b"v").value:
        with pytest.raises(InvalidRequest, match=f"as bytes, got {type(wrong).__name__}"):
            build(b"k", wrong)


@pytest.mark.parametrize("build", BUILDERS)
def test_mutable_bytes_are_copied(build: Callable[[Any, Any], ClientOperation]) -> None:
    key, value = bytearray(b"k"), bytearray(b"v")
    built = build(key, memoryview(value))
    key[0] = value[0] = 0
    assert built.key.__class__ is bytes
    assert (built.key, built.value) in ((b"k", b"v"), (b"k", b""))


@pytest.mark.parametrize("level", ["stale", 9, -1])
def test_unknown_level_is_refused(level: Any) -> None:
    for build in (operations.get, operations.meta, operations.count):
        with pytest.raises(InvalidRequest, match="expected a Level"):
            build(b"k", level)
    with pytest.raises(InvalidRequest, match="expected a Level"):
        operations.scan("p1", b"", b"", 0, level)
    assert operations.get(b"k", Level.STALE).level == operations.get(b"k", 3).level == Level.STALE


@pytest.mark.parametrize("bounds", [("a", b"", b""), (b"", "a", b""), (b"", b"", "a")])
def test_bounds_that_are_not_bytes_are_refused(bounds: Any) -> None:
    with pytest.raises(InvalidRequest, match="as bytes, got str"):
        Bounds.of(*bounds)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), "5", 0, -1, 0.0])
def test_timeout_without_time_or_without_a_timer_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected timeout_s to be more than 0 and at most 1e\\+09, got "):
        operations.as_seconds(timeout_s)


@pytest.mark.parametrize("version", [-1, 1 << 63])
def test_impossible_version_is_refused(version: int) -> None:
    with pytest.raises(InvalidRequest, match="expected a version"):
        operations.delete(b"k", if_version=version)


@pytest.mark.parametrize("limit", [-1, 1.5, "1", None])
def test_limit_that_is_no_count_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a limit"):
        operations.as_limit(limit)


@pytest.mark.parametrize("name", ["if_absent", "if_present", "keep_ttl"])
@pytest.mark.parametrize("wrong", ["yes", 2, 1.0, [True]])
def test_flag_that_is_no_bool_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"expected {name} to be True or False, got {type(wrong).__name__} "):
        operations.put(b"k", b"v", **{name: wrong})


def test_sequences_rise_from_one_and_reads_have_none() -> None:
    numbering = Numbering(CLIENT)
    wanted = [operations.put(b"k", b"v"), operations.get(b"k"), operations.delete(b"k")]
    for operation in wanted:
        numbering.begin(operation)
    assert [operation.sequence for operation in wanted] == [1, 0, 2]


def test_first_unacknowledged_is_the_earliest_awaited_sequence() -> None:
    numbering = Numbering(CLIENT)
    first, second, third = (a_put(numbering) for _ in range(3))
    assert numbering.first_unacknowledged == 1
    numbering.end(second)
    assert numbering.first_unacknowledged == 1
    numbering.end(first)
    assert numbering.first_unacknowledged == 3
    numbering.end(third)
    assert numbering.first_unacknowledged == 4


def test_stalled_operation_bounds_the_span_the_store_must_remember() -> None:
    numbering = Numbering(CLIENT)
    stuck = a_put(numbering)
    for _ in range(IN_FLIGHT_MAX - 1):
        assert numbering.has_capacity()
        numbering.end(a_put(numbering))
    assert not numbering.has_capacity()
    numbering.end(stuck)
    assert numbering.has_capacity()


def test_reads_and_bytes_in_flight_are_bounded() -> None:
    numbering = Numbering(CLIENT)
    for _ in range(IN_FLIGHT_MAX):
        begun(numbering, operations.get(b"k"))
    assert not numbering.has_capacity()
    large = Numbering(CLIENT)
    while large.has_capacity():
        begun(large, operations.put(b"k", bytes(1 << 20)))
    assert large.first_unacknowledged == 1
    assert IN_FLIGHT_BYTES_MAX >> 20 >= 31


def test_future_time_from_a_server_is_not_kept() -> None:
    """Leaders refuse requests with a future time until it is reached."""
    numbering = Numbering(CLIENT)
    numbering.see(3_600_000 + 10_000)
    numbering.see(0)
    assert a_put(numbering).seen_ms == 3_610_000, "a server that does not know the time reports nothing"
    numbering.see(10_000)
    assert a_put(numbering).seen_ms == 10_000


def test_leader_time_moves_in_steps_and_not_back() -> None:
    numbering = Numbering(CLIENT)
    numbering.see(10_000)
    numbering.see(10_000 + SEEN_STEP_MS - 1)
    assert a_put(numbering).seen_ms == 10_000
    numbering.see(9_000)
    numbering.see(20_000)
    assert a_put(numbering).seen_ms == 20_000


def test_client_id_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Numbering(b"short")


@pytest.mark.parametrize(
    "error", [Overloaded(""), NotLeader("p1"), Moved("p1", 2), Unavailable(""), OutcomeUnknown("")]
)
def test_retryable_error_is_retried_with_the_same_id(error: StoreError) -> None:
    operation = a_put()
    assert final_error_or_none(operation, error) is None
    assert operation.sequence == 1


@pytest.mark.parametrize("error", [ConditionFailed(3), InvalidRequest(""), Corrupted("")])
def test_final_error_is_raised_unchanged(error: StoreError) -> None:
    assert final_error_or_none(a_put(), error) is error
    assert final_error_or_none(a_get(), error) is error


@pytest.mark.parametrize("error", [ConditionFailed(3), InvalidRequest(""), RequestExpired(""), Corrupted("")])
def test_refused_retry_of_an_unknown_attempt_is_unknown(error: StoreError) -> None:
    operation = a_put()
    final_error_or_none(operation, OutcomeUnknown("lost"))
    assert isinstance(final_error_or_none(operation, error), OutcomeUnknown)


@pytest.mark.parametrize("error", [ConditionFailed(3), InvalidRequest("")])
def test_refused_retry_of_a_refused_attempt_is_refused(error: StoreError) -> None:
    operation = a_put()
    final_error_or_none(operation, Overloaded("full"))
    assert final_error_or_none(operation, error) is error


def test_expired_first_attempt_gets_another_id_and_time() -> None:
    numbering = Numbering(CLIENT)
    operation = a_put(numbering)
    numbering.see(50_000)
    assert final_error_or_none(operation, RequestExpired("old")) is None
    assert (operation.sequence, operation.seen_ms) == (2, 50_000)
    assert numbering.first_unacknowledged == 2


def test_number_of_new_ids_is_bounded() -> None:
    operation = a_put()
    for _ in range(2 * retries.RENUMBER_MAX):
        assert final_error_or_none(operation, Unavailable("no leader")) is None, "that takes no id"
    for _ in range(retries.RENUMBER_MAX):
        assert final_error_or_none(operation, RequestExpired("old")) is None
    assert isinstance(final_error_or_none(operation, RequestExpired("old")), RequestExpired)


def test_read_is_never_unknown() -> None:
    operation = a_get()
    assert final_error_or_none(operation, OutcomeUnknown("lost")) is None
    assert isinstance(deadline_error(operation, None, 1), Unavailable)


def test_sent_write_without_an_answer_is_unknown_at_its_deadline() -> None:
    assert isinstance(deadline_error(a_put(), None, 1), OutcomeUnknown)


def test_unsent_write_is_refused_at_its_deadline() -> None:
    operation = a_put()
    operation.is_sent = False
    assert isinstance(deadline_error(operation, None, 1), Refused)


def test_always_refused_write_is_refused_at_its_deadline() -> None:
    operation = a_put()
    error = Overloaded("full")
    final_error_or_none(operation, error)
    assert deadline_error(operation, error, 1) is error


def test_write_refused_after_an_unknown_attempt_is_unknown_at_its_deadline() -> None:
    operation = a_put()
    final_error_or_none(operation, OutcomeUnknown("lost"))
    final_error_or_none(operation, Overloaded("full"))
    assert isinstance(deadline_error(operation, Overloaded("full"), 1), OutcomeUnknown)


def test_operation_without_a_server_is_unavailable_at_its_deadline() -> None:
    operation = a_put()
    final_error_or_none(operation, NoServerReachable())
    assert type(deadline_error(operation, NoServerReachable(), 1)) is Unavailable


def test_lost_connection_leaves_only_sent_operations_unknown() -> None:
    sent, unsent = a_put(), a_put()
    unsent.is_sent = False
    assert isinstance(lost(sent, "reset"), OutcomeUnknown)
    assert isinstance(lost(unsent, "reset"), Unavailable)
    assert isinstance(lost(a_get(), "reset"), Unavailable)


def test_first_retry_is_immediate_and_later_ones_wait_within_a_bound() -> None:
    waits = list(itertools.islice(pauses(Random(1)), 20))
    assert waits[0] == 0
    assert all(0 <= each <= 0.25 for each in waits)
    assert max(waits) > 0.1


def test_only_a_named_leader_needs_no_pause() -> None:
    assert is_hint(NotLeader("p1", "n2", "host2:1"))
    assert not is_hint(NotLeader("p1"))
    assert not is_hint(Overloaded(""))
