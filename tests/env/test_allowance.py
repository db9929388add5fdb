"""Steps of networks that have not authenticated: bounded in a second, and given back once they have."""

from __future__ import annotations

import pytest

from kvstore.env import allowance as module
from kvstore.env.allowance import Allowance
from kvstore.env.networks import KnownNetworks


def taken(allowance: Allowance, networks: list[str], now: float) -> int:
    """Take steps for these networks while any are left. Return how many were."""
    count = 0
    while count < len(networks) and allowance.is_left(now):
        allowance.take(networks[count], now)
        count += 1
    return count


def strangers(count: int, first: int = 0) -> list[str]:
    return [f"ipv4:10.0.{number // 256}.{number % 256}" for number in range(first, first + count)]


@pytest.mark.parametrize(("after_s", "more"), [(0.0, 0), (0.5, 5), (1.0, 10), (1e6, 20)])
def test_unknown_networks_take_saved_steps_and_then_few_each_second(after_s: float, more: int) -> None:
    allowance = Allowance(KnownNetworks(), 10, 20)
    assert taken(allowance, strangers(100), 100.0) == 20
    assert taken(allowance, strangers(100, 100), 100.0 + after_s) == more


def test_networks_that_authenticate_give_their_steps_back() -> None:
    known = KnownNetworks()
    allowance = Allowance(known, 10, 20)
    for turn in range(50):
        some = strangers(20, 20 * turn)
        assert taken(allowance, some, 0.0) == 20, "a thousand clients authenticate one after the other"
        for each in some:
            known.note(each)
    assert taken(allowance, strangers(20, 1000), 0.0) == 20
    assert not allowance.is_left(0.0), "none is given back twice"


def test_known_network_takes_no_step() -> None:
    known = KnownNetworks()
    known.note("ipv4:10.0.0.1")
    allowance = Allowance(known, 10, 20)
    for _ in range(100):
        allowance.take("ipv4:10.0.0.1", 0.0)
    assert taken(allowance, strangers(100, 2), 0.0) == 20


def test_steps_are_unbounded_while_access_control_is_off() -> None:
    known = KnownNetworks()
    known.clients_authenticate = False
    allowance = Allowance(known, 10, 20)
    assert taken(allowance, strangers(1000), 0.0) == 1000
    known.clients_authenticate = True
    assert taken(allowance, strangers(1000), 0.0) == 20


def test_clock_that_stands_still_or_steps_back_gives_no_steps() -> None:
    allowance = Allowance(KnownNetworks(), 10, 20)
    assert taken(allowance, strangers(20), 100.0) == 20
    assert not allowance.is_left(100.0)
    assert not allowance.is_left(50.0)
    assert not allowance.is_left(100.0)


def test_latest_steps_of_a_bounded_number_of_networks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NETWORKS_MAX", 2)
    allowance = Allowance(KnownNetworks(), 10, 20)
    for now, each in enumerate(("a", "b", "a", "c")):
        allowance.take(each, float(now))
    assert [allowance.last(each) for each in ("a", "c")] == [2.0, 3.0]
    assert allowance.last("b") < 0, "which was the longest ago"
