"""The retry table keeps its bounds whatever a client sends, and still applies nothing twice (docs/protocol.md, P16,
P33)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, Overloaded, RequestExpired, StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.commands import Batch, DeleteRange, Flag, Increment, Op, Put, RequestId
from kvstore.partition.state.entry import Requests
from kvstore.partition.state.retry_table import BYTES_PER_CLIENT, BYTES_PER_RESULT, RetryTable, key_hash
from kvstore.partition.state.state import ReplicaState
from kvstore.ring.hashing import MURMUR3
from tests.partition.one_partition import P1, TIME_MS, Partition

X = b"x" * 16
RESULTS_MAX, BYTES_MAX, WINDOW_MS = 16, 20_000, 5_000
CONFIG = PartitionConfig(
    expiry_sweep_s=0, retry_results_max=RESULTS_MAX, retry_bytes_max=BYTES_MAX, retry_window_ms=WINDOW_MS
)
U64 = (1 << 64) - 1


def remembered(state: ReplicaState) -> dict[bytes, int]:
    """Return the number of remembered results by client."""
    counts: dict[bytes, int] = {}
    for client, known in state.retries._clients.items():
        for first in known.results.values():
            link = first
            while link is not None:
                counts[client] = counts.get(client, 0) + 1
                link = link[4]
    return counts


def check(p: Partition) -> None:
    p.state.retries.check()
    assert all(count <= RESULTS_MAX for count in remembered(p.state).values())
    assert p.state.retries.bytes <= 2 * BYTES_MAX + len(p.state.retries) * BYTES_PER_CLIENT


def test_client_that_raises_its_acknowledgement_stays_within_bounds() -> None:
    """Each request acknowledges one more sequence, none of which was ever sent."""
    p = Partition(CONFIG).start()
    for number in range(300):
        p.do(Put(b"k%d" % number, b"v", request=RequestId(X, (1 << 40) + number, number + 1, TIME_MS)))
    check(p)


def test_sequence_on_many_keys_counts_as_many_results() -> None:
    p = Partition(CONFIG).start()
    for number in range(300):
        p.do(Put(b"k%d" % number, b"v", request=RequestId(X, 1, 1, TIME_MS)))
    check(p)


def test_results_in_flight_count_towards_the_bound() -> None:
    p = Partition(CONFIG).start()
    tokens = p.submit(*(Put(b"k%d" % n, b"v", request=RequestId(X, n + 1, 1, TIME_MS)) for n in range(300)))
    while p.log.in_flight:
        p.acknowledge()
    refused = [token for token in tokens if isinstance(p.result(token), Overloaded)]
    assert len(refused) == 300 - RESULTS_MAX
    check(p)


def test_range_deletes_that_end_together_keep_the_bound() -> None:
    """Regression: they were admitted while none of their results were remembered."""
    p = Partition(CONFIG).start()
    p.do(*(Put(b"k%05d" % n, b"v") for n in range(1_100)))
    p.submit(*(DeleteRange(b"k", b"k%d" % n, request=RequestId(X, n + 1, 1, TIME_MS)) for n in range(100)))
    while p.log.in_flight:
        p.acknowledge()
    check(p)


def test_acknowledging_client_continues_at_its_bound() -> None:
    p = Partition(CONFIG).start()
    for number in range(1, 100):
        first_unacked = max(1, number - RESULTS_MAX + 1)
        result = p.do(Increment(b"n", 1, request=RequestId(X, number, first_unacked, TIME_MS)))
        assert result == (number, number), "a correct client was refused"
    check(p)


def test_client_with_a_future_time_is_refused() -> None:
    p = Partition(CONFIG).start()
    result = p.do(Put(b"k", b"v", request=RequestId(X, 1, 1, TIME_MS + (1 << 50))))
    assert isinstance(result, InvalidRequest)
    for number in range(200):  # so they never fill the table for good
        p.do(Put(b"k", b"v", request=RequestId(b"%016d" % number, 1, 1, p.wall_ms() + WINDOW_MS)))
    p.wait(2 * WINDOW_MS / 1000 + 1)
    for _ in range(5):
        p.do(Put(b"k", b"v"))
    assert len(p.state.retries) == 0


def test_bounds_hold_for_any_log_and_dropped_requests_are_refused() -> None:
    """An import brings results of other partitions, which the leader cannot refuse; so may an older leader's entry."""
    table = RetryTable(window_ms=WINDOW_MS, bytes_max=BYTES_MAX, results_max=RESULTS_MAX)
    count = 100
    requests = Requests(
        [X], [1], [TIME_MS], [0] * count, list(range(1, count + 1)),
        [key_hash(MURMUR3, b"%d" % n) for n in range(count)], [0] * count, [b"r" * 2_000] * count, [],
    )  # fmt: skip
    table.apply(70, TIME_MS, requests)
    table.check()
    assert table.bytes <= 2 * BYTES_MAX
    with pytest.raises(RequestExpired):
        table.find(RequestId(X, 1, 1, TIME_MS), key_hash(MURMUR3, b"0"), TIME_MS)
    assert table.find(RequestId(X, count, 1, TIME_MS), key_hash(MURMUR3, b"%d" % (count - 1)), TIME_MS) == b"r" * 2_000
    refused = 0
    # none is taken for new and applied again, including the last one that was dropped
    for sequence in range(1, count + 1):
        try:
            assert (
                table.find(RequestId(X, sequence, 1, TIME_MS), key_hash(MURMUR3, b"%d" % (sequence - 1)), TIME_MS)
                is not None
            )
        except RequestExpired:
            refused += 1
    assert 0 < refused < count


def test_tokens_of_a_batch_count_towards_the_bound() -> None:
    table = RetryTable(window_ms=WINDOW_MS, bytes_max=BYTES_MAX, results_max=RESULTS_MAX)
    tokens = b"1234" * 100
    table.apply(70, TIME_MS, Requests([X], [1], [TIME_MS], [0], [1], [key_hash(MURMUR3, b"k")], [0], [], [tokens]))
    assert table.bytes == BYTES_PER_CLIENT + BYTES_PER_RESULT + len(tokens)


KEYS = st.integers(0, 200).map(b"k%d".__mod__)
NUMBERS = st.one_of(
    st.integers(1, 40), st.integers(1, 1 << 40), st.sampled_from([1, 2, 1 << 31, 1 << 40, 1 << 63, U64 - 2, U64 - 1])
)


def _request(client: int, sequence: int, first: int, huge: int, late_ms: int) -> RequestId:
    return RequestId(bytes((client,)) * 16, sequence, huge if client == 9 else first, TIME_MS + late_ms)


REQUESTS = st.builds(
    _request,
    st.sampled_from([0] * 10 + [1, 2, 9]),
    NUMBERS,
    st.integers(0, 30),
    NUMBERS,
    st.sampled_from([0] * 20 + [-WINDOW_MS - 1, WINDOW_MS, 1 << 50]),
)


def _op(kind: int, key: bytes, request: RequestId) -> Op:
    match kind:
        case 0:
            return Put(key, b"v" * 600, flags=Flag.RETURN_OLD, request=request)
        case 1:
            return Increment(b"n", 1, request=request)
        case 2:
            return Batch(key, (Put(key, b"1"), Put(b"other", b"2"), Put(key + b"2", b"3")), request=request)
        case 3:
            return DeleteRange(b"k", b"k2", request=request)
    return Put(key, b"v", request=request)


OPS = st.builds(_op, st.integers(0, 5), KEYS, REQUESTS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(OPS, min_size=5, max_size=60), min_size=2, max_size=8))
def test_bounds_hold_for_any_requests_and_nothing_is_applied_twice(turns: list[list[Op]]) -> None:
    p = Partition(CONFIG).start()
    p.do(Put(b"n", b"0"))
    counted: set[tuple[bytes, int]] = set()
    for ops in turns:
        tokens = p.submit(*ops)
        while p.log.in_flight:
            p.acknowledge()
            check(p)
        for op, token in zip(ops, tokens, strict=True):
            result = p.result(token)
            assert result != "waits"
            if isinstance(op, Increment) and not isinstance(result, StoreError):
                counted.add((op.request.client, op.request.sequence))
    rebuilt = ReplicaState(P1, p.engine, CONFIG, MURMUR3)
    rebuilt.retries.check()
    assert rebuilt.retries.bytes == p.state.retries.bytes
    found = p.state.get(b"n")
    assert found is not None
    assert int(found.value) == len(counted), "a request was applied twice"
