"""Pins are renewed while they are used, also by jobs whose tasks are short, and not more often than they need it."""

import threading
import time

import pytest

from kvstore.client.config import ClientConfig
from kvstore.errors import NoSuchPin, Unavailable
from kvstore.spark import pins
from kvstore.spark.pins import kept_alive

CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))
TTL_S = 0.2


class Renewals:
    """Stands for the servers."""

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


def test_a_pin_is_renewed_while_it_is_used(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "a", TTL_S, pinned_at=time.time()):
        for _ in range(3):
            assert renewals.happened.acquire(timeout=10)
    assert set(renewals.ids) == {"a"}


def test_a_short_task_renews_a_pin_that_is_due_and_no_other(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "old", 600, pinned_at=time.time() - 200):
        assert renewals.happened.acquire(timeout=10)
    for _ in range(3):
        with kept_alive(CONFIG, "old", 600, pinned_at=time.time() - 200):
            pass
        with kept_alive(CONFIG, "new", 600, pinned_at=time.time()):
            pass
    assert renewals.ids == ["old"]


@pytest.mark.parametrize("error", [NoSuchPin("gone"), Unavailable("away")])
def test_a_pin_that_cannot_be_renewed_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whether it is lost shows where it is read."""
    found = Renewals(error)
    monkeypatch.setattr(pins, "renew_pin", found)
    with kept_alive(CONFIG, "b", TTL_S, pinned_at=time.time()):
        assert found.happened.acquire(timeout=10)
        assert found.happened.acquire(timeout=10)


def test_a_clock_that_is_set_back_delays_no_renewal(renewals: Renewals) -> None:
    with kept_alive(CONFIG, "c", TTL_S, pinned_at=time.time() + 3600):
        assert renewals.happened.acquire(timeout=10)
