"""The load of the ring drill detects each kind of wrong answer: each kind of faulty store is identified by its own
finding."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client import Item
from kvstore.errors import ConditionFailed, Overloaded
from kvstore.ring import TOKENS
from kvstore.ring.hashing import MURMUR3
from loadtest.drills.ring_load import RingLoad, Wait, rate
from tests.sim.world.env import SimWorld
from tests.waiting import wait_until

STATICS = {b"static%d" % number: b"value %d" % number for number in range(300)}
HALF = (0, TOKENS // 2)
ENOUGH = 4_000


def item_of(row: tuple[bytes, int]) -> Item:
    return Item(row[0], row[1], row[1], 0, 0)


class Store:
    """A dictionary that answers as a client would; `lie` names its error."""

    def __init__(self, lie: str = "") -> None:
        self.rows: dict[bytes, tuple[bytes, int]] = {}
        self.old: dict[bytes, tuple[bytes, int]] = {}
        self.lie, self.version, self.count = lie, 0, 0
        self.cluster = SimpleNamespace(token_of=MURMUR3.token_of)

    def _says(self, lie: str) -> bool:
        self.count += 1
        return self.lie == lie and self.count % 7 == 0

    async def _answer(self, key: bytes) -> None:
        await asyncio.sleep(0)
        if self.lie == "steady keys fail" and key.startswith(b"s1-"):
            raise Overloaded("later")

    async def get(self, key: bytes, *, timeout_s: float = 0) -> Item | None:
        await self._answer(key)
        if self._says("not found"):
            return None
        row = self.old.get(key) if key[:1] in b"rs" and self._says("stale") else self.rows.get(key)
        return None if row is None else item_of(row)

    async def put(self, key: bytes, value: bytes, *, if_absent: bool = False) -> int:
        await self._answer(key)
        if if_absent and key in self.rows:
            raise ConditionFailed(self.rows[key][1])
        self.version += 1
        if key in self.rows:
            self.old[key] = self.rows[key]
        if not (key[:1] == b"u" and self._says("lost")):
            self.rows[key] = (value, self.version)
        return self.version

    async def delete(self, key: bytes) -> int:
        await asyncio.sleep(0)
        self.version += 1
        if key not in self.rows:
            return 0
        if not (key[:1] == b"u" and self._says("resurrected")):
            del self.rows[key]
        return self.version

    async def increment(self, key: bytes) -> int:
        before = int(self.rows.get(key, (b"0", 0))[0])
        self.version += 1
        self.rows[key] = (b"%d" % (before + 1 + self._says("doubled")), self.version)
        return before + 1

    async def put_many(self, items: Mapping[bytes, bytes], *, timeout_s: float) -> None:
        for key, value in items.items():
            await self.put(key, value)

    async def get_many(self, keys: Sequence[bytes], *, timeout_s: float) -> dict[bytes, Item]:
        return {key: item_of(self.rows[key]) for key in keys if key in self.rows}

    async def scan(self, *, prefix: bytes, keys_only: bool) -> AsyncIterator[tuple[bytes, Item]]:
        for key in sorted(key for key in self.rows if key.startswith(prefix)):
            yield key, item_of(self.rows[key])
            if self.lie == "scanned twice" and key.endswith(b"-7"):
                yield key, item_of(self.rows[key])


async def loaded(lie: str) -> RingLoad:
    store: Any = Store(lie)
    await store.put_many(STATICS, timeout_s=1)
    load = RingLoad(store, STATICS, 1)
    load.aim([HALF])
    await load.start()
    await wait_until(lambda: has_done_enough(load), what="enough was asked")
    await load.stop()
    await load.verify()
    return load


async def has_done_enough(load: RingLoad) -> bool:
    return min(len(load.history), len(load.waits), len(load.steady)) > ENOUGH and load.scans > 0


@pytest.fixture(autouse=True)
def keys_of_no_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load names its keys by the time, and the name decides whether a key is in the range: here the names are
    constant."""
    monkeypatch.setattr("loadtest.drills.ring_load.time", SimpleNamespace(**vars(time) | {"time_ns": lambda: 1}))


def load_on(lie: str) -> RingLoad:
    """In virtual time: the drawn operations and their order do not depend on the machine."""
    with SimWorld(1) as world:
        return world.run(loaded(lie))


def problems_of(lie: str) -> Counter[str]:
    return load_on(lie).problems


def test_correct_store_gives_no_findings() -> None:
    assert problems_of("") == {}


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        ("not found", "not found"),
        ("stale", "stale"),
        ("stale", "not linearizable"),
        ("lost", "lost"),
        ("resurrected", "resurrected"),
        ("doubled", "doubled"),
        ("scanned twice", "doubled"),
    ],
)
def test_wrong_answer_is_detected(lie: str, found: str) -> None:
    assert problems_of(lie)[found] > 0


def test_calls_that_fail_are_waits_and_no_throughput() -> None:
    load, ever = load_on("steady keys fail"), (0.0, time.time() + 1)
    assert load.errors["Overloaded"] == len(load.steady) > 0
    assert rate(load.steady, *ever) == 0 < rate(load.waits, *ever)


def test_throughput_is_what_was_done_within_the_time() -> None:
    waits = [Wait(ended, 0.1, True, 0, is_done) for ended, is_done in ((1, True), (2, True), (3, False), (4, True))]
    assert rate(waits, 2, 4) == 0.5
