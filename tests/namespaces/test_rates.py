"""Limits on operations of a namespace per second, at one server and across all servers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvstore.errors import RateExceeded
from kvstore.namespaces import Namespace
from kvstore.namespaces.rates import Rates, share_of

RATE = 100
KEYS = [b"n/k"]


class Server:
    """Rates with a clock that advances only when the test says so."""

    def __init__(self, burst: int = 0, rate: int = RATE) -> None:
        self.time = 50.0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.rates = Rates(lambda: self.time, self.refused)
        self.rates.take([Namespace(name="n", prefix=b"n/", ops_per_s=rate, burst=burst)])

    def ask(self, times: int, keys: list[bytes] = KEYS) -> int:
        """Return how many out of so many operations are admitted."""
        return sum(self.rates.refusal_or_none(keys) is None for _ in range(times))


def test_burst_passes_and_then_the_rate() -> None:
    server = Server(burst=30)
    assert server.ask(50) == 30
    server.time += 0.1
    assert server.ask(50) == 10
    server.time += 60
    assert server.ask(50) == 30
    assert server.refused == {("n", "operations"): 80}


def test_refusal_states_when_to_retry() -> None:
    server = Server(burst=1)
    assert server.ask(1) == 1
    refusal = server.rates.refusal_or_none(KEYS)
    assert isinstance(refusal, RateExceeded)
    assert (refusal.namespace, refusal.ops_per_s, refusal.retry_after_ms) == ("n", RATE, 10)
    server.time += refusal.retry_after_ms / 1000
    assert server.ask(1) == 1


def test_keys_outside_rated_namespaces_pass() -> None:
    server = Server(burst=1)
    assert server.ask(1000, [b"other"]) == 1000


def test_batch_counts_each_operation_and_may_leave_a_debt() -> None:
    server = Server(burst=10)
    assert server.ask(1, KEYS * 50) == 1
    server.time += 0.39
    assert server.ask(1) == 0
    server.time += 0.03
    assert server.ask(1) == 1


def test_refused_operation_takes_no_tokens() -> None:
    server = Server(burst=10)
    assert server.ask(1, KEYS * 8) == 1
    assert server.ask(5, KEYS * 8) == 0
    assert server.ask(5) == 2


def test_paid_operation_is_not_counted_again() -> None:
    server = Server(burst=10)
    with server.rates.paid():
        assert server.ask(50) == 50
    assert (server.ask(50), server.rates.passed) == (10, {"n": 10})


def test_changed_rate_applies_at_once_and_unchanged_rate_keeps_its_level() -> None:
    server = Server(burst=5)
    assert server.ask(9) == 5
    server.rates.take([Namespace(name="n", prefix=b"n/", ops_per_s=RATE, burst=5)])
    assert server.ask(9) == 0
    server.rates.take([Namespace(name="n", prefix=b"n/", ops_per_s=RATE, burst=7)])
    assert server.ask(9) == 7


def test_changed_quota_does_not_refill_the_bucket() -> None:
    server = Server(burst=5)
    assert server.ask(9) == 5
    server.rates.take([Namespace(name="n", prefix=b"n/", ops_per_s=RATE, burst=5, keys_max=1, ttl_ms=5)])
    assert server.ask(9) == 0


def test_clock_that_steps_back_changes_nothing() -> None:
    server = Server(burst=10)
    assert server.ask(4) == 4
    server.time -= 40
    assert server.ask(9) == 6
    server.time += 0.02
    assert server.ask(9) == 2


# docs/protocol.md N5
@pytest.mark.parametrize("seed", range(50))
def test_shares_of_equal_knowledge_add_up_to_the_rate(seed: int) -> None:
    random = Random(seed)
    wanted = [random.choice([0.0, random.random() * 3 * RATE]) for _ in range(random.randint(1, 7))]
    shares = [share_of(RATE, wanted[each], wanted[:each] + wanted[each + 1 :]) for each in range(len(wanted))]
    assert sum(shares) == pytest.approx(RATE)
    assert all(0 < share <= RATE for share in shares)
    if sum(wanted) <= RATE:
        assert all(share >= want for share, want in zip(shares, wanted, strict=True))


def test_rate_follows_the_clients() -> None:
    assert share_of(RATE, 500, [0, 0]) > 0.9 * RATE
    assert share_of(RATE, 0, [500, 0]) > 0.03 * RATE


@pytest.mark.parametrize("wanted", [RATE - 0.001, RATE])
def test_server_without_share_tells_first_clients_to_retry_soon(wanted: float) -> None:
    """The other servers' clients use the whole rate. This server gets a share only after its clients have asked."""
    server = Server(burst=1)
    server.rates.deal({}, [{"n": float(wanted)}])
    assert server.ask(1) == 1
    refusal = server.rates.refusal_or_none(KEYS)
    assert isinstance(refusal, RateExceeded)
    assert 0 < refusal.retry_after_ms <= 1_000


def test_all_servers_together_pass_the_rate_after_exchange() -> None:
    """Clients move from one server to another, and then use all of them. Each second has one exchange."""
    servers = [Server(burst=10) for _ in range(3)]
    passed = []
    for second in range(16):
        busy = servers[second // 4 : second // 4 + 1] or servers
        passed.append(sum(_one_second(server, 300 if server in busy else 0) for server in servers))
        wanted = [server.rates.wanted() for server in servers]
        for here, server in enumerate(servers):
            server.rates.deal(wanted[here], wanted[:here] + wanted[here + 1 :])
    assert max(passed) <= RATE + 10 + 1
    settled = [count for second, count in enumerate(passed) if second % 4 >= 1]
    assert min(settled) >= 0.9 * RATE


def _one_second(server: Server, times: int) -> int:
    passed = 0
    for _ in range(100):
        server.time += 0.01
        passed += server.ask(times // 100)
    return passed
