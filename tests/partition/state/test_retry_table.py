"""A retried mutation is applied once, and a retry that cannot be recognised is refused."""

import pytest

from kvstore.errors import Overloaded, RequestExpired
from kvstore.partition.state.commands import RequestId
from kvstore.partition.state.entry import Requests
from kvstore.partition.state.retry_table import BYTES_PER_CLIENT, BYTES_PER_RESULT, RetryTable, decode_row, key_hash
from kvstore.ring.hashing import MURMUR3
from tests.partition.effects import CONFIG, Writer, state_over
from tests.partition.state.engine_memory import MemoryEngine

WINDOW_MS = 1000
X, Y = b"x" * 16, b"y" * 16
KEY = key_hash(MURMUR3, b"k")


def table(**limits: int) -> RetryTable:
    return RetryTable(**{"window_ms": WINDOW_MS, "bytes_max": 1 << 20, "results_max": 1024} | limits)


def one(client: bytes, sequence: int, first_unacked: int, seen_ms: int, result: bytes = b"") -> Requests:
    results = [result] if result else []
    return Requests([client], [first_unacked], [seen_ms], [0], [sequence], [KEY], [0], results, [])


def outcome(retries: RetryTable, request: RequestId, hash_of_key: int, now_ms: int) -> object:
    try:
        return retries.find(request, hash_of_key, now_ms)
    except RequestExpired:
        return RequestExpired


def test_applied_request_is_found_with_its_result() -> None:
    retries = table()
    retries.apply(70, 5000, one(X, 1, 1, 5000))
    retries.apply(71, 5000, one(X, 2, 1, 5000, b"r"))
    assert retries.find(RequestId(X, 1, 1, 5000), KEY, 5000) == 70
    assert retries.find(RequestId(X, 2, 1, 5000), KEY, 5000) == b"r"
    assert retries.find(RequestId(X, 3, 1, 5000), KEY, 5000) is None
    assert retries.find(RequestId(Y, 1, 1, 5000), KEY, 5000) is None


def test_batch_costs_its_tokens_with_a_plain_result() -> None:
    retries, requests = table(), one(X, 1, 1, 5000)
    requests.touched = [b"tokens"]
    retries.apply(70, 5000, requests)
    assert retries.bytes == BYTES_PER_CLIENT + BYTES_PER_RESULT + len(b"tokens")
    retries.check()


def test_sequence_may_belong_to_several_keys() -> None:
    retries, other = table(), key_hash(MURMUR3, b"other")
    retries.apply(70, 5000, one(X, 1, 1, 5000))
    assert retries.find(RequestId(X, 1, 1, 5000), other, 5000) is None
    requests = one(X, 1, 1, 5000)
    requests.hashes = [other]
    retries.apply(71, 5000, requests)
    assert retries.find(RequestId(X, 1, 1, 5000), KEY, 5000) == 70
    assert retries.find(RequestId(X, 1, 1, 5000), other, 5000) == 71
    retries.check()


# docs/protocol.md P14
def test_acknowledged_results_are_dropped_and_their_duplicates_refused() -> None:
    retries = table()
    for sequence in range(1, 6):
        retries.apply(69 + sequence, 5000, one(X, sequence, 1, 5000))
    assert retries.apply(75, 5000, one(X, 6, 5, 5000)) == [70, 71, 72, 73]
    assert outcome(retries, RequestId(X, 4, 1, 5000), KEY, 5000) is RequestExpired
    assert outcome(retries, RequestId(X, 5, 1, 5000), KEY, 5000) == 74
    retries.check()


# docs/protocol.md P15
def test_request_older_than_the_window_is_refused() -> None:
    retries = table()
    assert outcome(retries, RequestId(X, 1, 1, 4000), KEY, 5000) is None
    assert outcome(retries, RequestId(X, 1, 1, 3999), KEY, 5000) is RequestExpired
    assert outcome(retries, RequestId(X, 1, 1, 0), KEY, 5000) is RequestExpired


def test_idle_client_is_forgotten_with_its_rows() -> None:
    retries = table()
    retries.apply(70, 5000, one(X, 1, 1, 5000))
    assert retries.forget(6000) == []
    assert retries.forget(6001) == [70]
    assert (len(retries), retries.bytes) == (0, 0)


def test_client_with_a_later_time_is_remembered_for_its_duplicates() -> None:
    """The time comes from another partition whose clock is ahead."""
    retries = table()
    retries.apply(70, 5000, one(X, 1, 1, 9000))
    now = 5000
    while len(retries):
        assert outcome(retries, RequestId(X, 1, 1, 9000), KEY, now) == (70 if now <= 10_000 else RequestExpired)
        now += 500
        retries.forget(now)
    assert now > 10_000


def test_client_with_a_later_time_is_forgotten_alike_after_restart() -> None:
    """Replicas stay equal however often each was restarted: a table is a function of its log (P12)."""
    live = table()
    live.apply(70, 5000, one(X, 1, 1, 5600))
    row = live.row(5000, one(X, 1, 1, 5600))
    for now in range(5000, 8000, 100):
        rebuilt = table()
        rebuilt.apply(70, *decode_row(row), is_reload=True)
        rebuilt.forget(now)
        live.forget(now)
        assert live.rows() == rebuilt.rows(), now


def test_client_ahead_of_time_does_not_block_forgetting() -> None:
    retries = table()
    retries.apply(70, 5000, one(X, 1, 1, 1 << 60))
    retries.apply(71, 5000, one(Y, 1, 1, 5000))
    retries.forget(7000)
    assert outcome(retries, RequestId(X, 1, 1, 1 << 60), KEY, 7000) == 70
    assert len(retries) == 1


# docs/protocol.md P16
def test_full_table_refuses_new_clients_and_serves_known_ones() -> None:
    retries = table(bytes_max=2 * BYTES_PER_CLIENT)
    retries.apply(70, 5000, one(X, 1, 1, 5000, b"r" * BYTES_PER_CLIENT))
    with pytest.raises(Overloaded):
        retries.admit(RequestId(Y, 1, 1, 5000), 5000, 0, 0)
    retries.admit(RequestId(X, 2, 1, 5000), 5000, 0, 0)


def test_client_without_acknowledgements_is_refused_at_its_bound() -> None:
    retries = table(results_max=2)
    for sequence in (1, 2):
        retries.apply(69 + sequence, 5000, one(X, sequence, 1, 5000))
    with pytest.raises(Overloaded, match="2 results"):
        retries.admit(RequestId(X, 3, 1, 5000), 5000, 0, 0)
    retries.admit(RequestId(X, 3, 2, 5000), 5000, 0, 0)
    with pytest.raises(Overloaded, match="2 results"):
        retries.admit(RequestId(X, 3, 2, 5000), 5000, 1, 0)
    assert retries.find(RequestId(X, 2, 1, 5000), KEY, 5000) == 71


@pytest.mark.parametrize("seed", range(30))
def test_logged_request_is_never_taken_for_new(seed: int) -> None:
    writer, state = Writer(seed), state_over(MemoryEngine())
    for _ in range(80):
        state.apply(writer.any())
        for request, hash_of_key, result in writer.requests:
            assert outcome(state.retries, request, hash_of_key, writer.time_ms) in (result, RequestExpired)


@pytest.mark.parametrize("seed", range(30))
def test_rebuilt_table_answers_like_the_original(seed: int) -> None:
    writer, engine = Writer(seed), MemoryEngine()
    live = state_over(engine)
    for _ in range(80):
        live.apply(writer.any())
        rebuilt = state_over(engine)
        rebuilt.retries.check()
        for request, hash_of_key, _ in writer.requests:
            for now_ms in (writer.time_ms, writer.time_ms + CONFIG.retry_window_ms // 2):
                expected = outcome(live.retries, request, hash_of_key, now_ms)
                assert outcome(rebuilt.retries, request, hash_of_key, now_ms) == expected


def test_row_carries_the_clients_largest_values() -> None:
    """Row 70 is gone when the table is rebuilt; the client's acknowledgement of everything below 9 is not."""
    retries = table()
    retries.apply(70, 5000, one(X, 5, 9, 5600))
    last = one(X, 9, 1, 5000)
    assert retries.apply(71, 5000, last) == [70]
    rebuilt = table()
    rebuilt.apply(71, *decode_row(retries.row(5000, last)))
    assert outcome(rebuilt, RequestId(X, 6, 1, 5600), KEY, 5000) is RequestExpired
    rebuilt.forget(6500)
    assert outcome(rebuilt, RequestId(X, 9, 1, 5600), KEY, 6500) == 71


def test_key_hash_begins_with_the_token() -> None:
    assert key_hash(MURMUR3, b"{a}b") >> 32 == MURMUR3.token_of(b"a") == key_hash(MURMUR3, b"{a}c") >> 32
    assert key_hash(MURMUR3, b"{a}b") != key_hash(MURMUR3, b"{a}c")
    assert key_hash(MURMUR3, b"k") == 0xCFBDA5D1D347A94A


def test_retry_row_has_golden_bytes() -> None:
    retries = table()
    requests = one(X, 3, 2, 5001, b"r")
    retries.apply(70, 5000, requests)
    row = retries.row(5000, requests)
    assert row.hex() == (
        "010000000000001388" + "0a10" + "78" * 16 + "120102" + "1a028927" + "2a0103" + "32084aa947d3d1a5bdcf" + "420172"
    )
    assert decode_row(row) == (5000, requests)
