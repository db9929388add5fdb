"""A comparison with the store keeps a pin while it works, and leaves none behind."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from kvstore.client.core.config import ClientConfig
from kvstore.client.pinned.pins import PinnedStore
from kvstore.ring.hashing import MURMUR3
from kvstore.spark import pins
from kvstore.spark.snapshots import compare

CONFIG = ClientConfig(endpoints=("127.0.0.1:1",))
WAIT_S = 30


class Servers:
    """The pins of the servers, and their durations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, during: type[BaseException] | None = None) -> None:
        self.pinned: dict[str, float] = {}
        self.renewed = threading.Semaphore(0)
        self._during = during
        monkeypatch.setattr(compare, "pin_store", self._pin)
        monkeypatch.setattr(pins, "renew_pin", self._renew)
        monkeypatch.setattr(pins, "unpin", lambda _, id, **__: self.pinned.pop(id))

    def _pin(self, _: ClientConfig, *, ttl_s: float, id: str, **__: Any) -> PinnedStore:
        self.pinned[id] = ttl_s
        if self._during is not None:
            raise self._during
        return PinnedStore(id, 1, 1, (), MURMUR3)

    def _renew(self, _: ClientConfig, id: str, *, ttl_s: float, **__: Any) -> int:
        assert id in self.pinned
        self.renewed.release()
        return 0


def test_killed_comparison_leaves_its_pin_for_some_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(monkeypatch)
    with compare._pinned(CONFIG, partial(compare._pin, CONFIG)) as store:
        assert servers.pinned[store.id] <= 600
    assert servers.pinned == {}


def test_pin_of_a_comparison_is_renewed_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(monkeypatch)
    monkeypatch.setattr(compare, "PIN_TTL_S", 0.2)
    with compare._pinned(CONFIG, partial(compare._pin, CONFIG)):
        for _ in range(3):
            assert servers.renewed.acquire(timeout=WAIT_S)


def test_comparison_that_is_interrupted_while_servers_pin_leaves_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), compare._pinned(CONFIG, partial(compare._pin, CONFIG)):
        pass
    assert servers.pinned == {}
