"""Pins are renewed while they are used, also by jobs whose tasks are short, and not more often than necessary."""

import threading
import time

import pytest

from kvstore.client.core.config import ClientConfig
from kvstore.client.pinned.pins import PinnedStore
from kvstore.errors import NoSuchPin, Unavailable
from kvstore.ring.hashing import MURMUR3
from kvstore.spark import pins
from kvstore.spark.options import read_options
from kvstore.spark.pins import kept_alive
from tests.waiting import PATIENCE_S

CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))
TTL_S = 0.2


class Renewals:
    """Replaces the servers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ids: list[str] = []
        self.happened = threading.Semaphore(0)
        self._error = error

    def __call__(self, config: ClientConfig, id: str, *, ttl_s: float, timeout_s: float) -> int:
        self.ids.append(id)
        self.happened.release()
        if self._error is not None:
            raise self._error
        return 0


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> Renewals:
    found = Renewals()
    monkeypatch.setattr(pins, "renew_pin", found)
    monkeypatch.setattr(pins, "_renewed_at", {})
    return found


def test_pin_is_renewed_while_it_is_used(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "a", TTL_S, pinned_at=time.time()):
        for _ in range(3):
            assert renewals.happened.acquire(timeout=PATIENCE_S)
    assert set(renewals.ids) == {"a"}


def test_short_task_renews_only_a_pin_that_is_due(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "old", 600, pinned_at=time.time() - 200):
        assert renewals.happened.acquire(timeout=PATIENCE_S)
    for _ in range(3):
        with kept_alive(CONFIG, "old", 600, pinned_at=time.time() - 200):
            pass
        with kept_alive(CONFIG, "new", 600, pinned_at=time.time()):
            pass
    assert renewals.ids == ["old"]


@pytest.mark.parametrize("error", [NoSuchPin("gone"), Unavailable("away")])
def test_pin_that_cannot_be_renewed_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A lost pin is reported where it is read."""
    found = Renewals(error)
    monkeypatch.setattr(pins, "renew_pin", found)
    with kept_alive(CONFIG, "b", TTL_S, pinned_at=time.time()):
        assert found.happened.acquire(timeout=PATIENCE_S)
        assert found.happened.acquire(timeout=PATIENCE_S)


def test_clock_that_is_set_back_delays_no_renewal(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "c", TTL_S, pinned_at=time.time() + 3600):
        assert renewals.happened.acquire(timeout=PATIENCE_S)


def test_pin_that_some_servers_may_hold_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is unknown to others: it remained for its full time, as one of 32."""
    taken: set[str] = set()

    def pin_store(_: ClientConfig, *, id: str, **__: object) -> None:
        taken.add(id)
        raise KeyboardInterrupt

    monkeypatch.setattr(pins, "pin_store", pin_store)
    monkeypatch.setattr(pins, "unpin", lambda _, id, **__: taken.discard(id))
    with pytest.raises(KeyboardInterrupt):
        pins.pin(CONFIG, ttl_s=600, split_bytes=1)
    assert taken == set()


@pytest.mark.parametrize(("ttl_s", "expected"), [(7200, "7200s"), (5, "10s")])
def test_process_that_shares_a_pin_renews_it_as_long_as_its_holder(
    monkeypatch: pytest.MonkeyPatch, renewals: Renewals, ttl_s: float, expected: str
) -> None:
    """For ten minutes only; after that it expired while it was held."""
    store = PinnedStore("a", 1, 1, (), MURMUR3)
    monkeypatch.setattr(pins, "find", lambda _: CONFIG)
    monkeypatch.setattr(pins, "pin_store", lambda *_, **__: store)
    monkeypatch.setattr(pins, "unpin", lambda *_, **__: [])
    with pins.hold({"servers": "127.0.0.1:1"}, ttl_s=ttl_s) as held:
        assert held.options["pinTtl"] == expected
        assert read_options(held.options, ("key",)).pin_ttl_s == max(10.0, ttl_s)
