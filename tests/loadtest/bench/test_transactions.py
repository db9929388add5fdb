"""The benchmark of transactions, on a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from loadtest.bench.transacting import Lost, rewrite
from loadtest.bench.transactions import OURS, PUT, Round, measure, rows_of, works


class InMemory:
    """A store that counts its transactions and can fail some of them."""

    groups = 16

    def __init__(self, failing: int = 0) -> None:
        self._versions: dict[bytes, int] = {}
        self._failing = failing
        self.widths: list[tuple[int, int]] = []
        """Keys and groups of each transaction that was done."""

    def key(self, group: int, number: int) -> bytes:
        return b"%d-%d" % (group, number)

    async def put(self, keys: Sequence[bytes], value: bytes) -> None:
        await asyncio.sleep(0)
        if self._failing:
            self._failing -= 1
            raise Lost
        for key in keys:
            self._versions[key] = self._versions.get(key, 0) + 1
        self.widths.append((len(keys), len({key.partition(b"-")[0] for key in keys})))

    async def read(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        return [(b"", self._versions.get(key, 0)) for key in keys]

    async def put_if(self, versions: dict[bytes, int], value: bytes) -> None:
        if any(self._versions.get(key, 0) != version for key, version in versions.items()):
            raise Lost
        await self.put(list(versions), value)

    async def add(self, keys: Sequence[bytes]) -> None:
        await self.put(keys, b"1")

    async def close(self) -> None: ...


async def test_rewrite_reads_again_until_nothing_has_changed() -> None:
    store, slept = InMemory(failing=2), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    assert await rewrite(store, [b"1-1", b"2-2"], b"v", iter([0.1, 0.2, 0.3]), sleep) == 3
    assert slept == [0.1, 0.2]
    assert await store.read([b"1-1", b"3-3"]) == [(b"", 1), (b"", 0)]


async def test_lines_have_the_widths_that_they_name() -> None:
    for work in works():
        store = InMemory()
        await work.one(store, Random(1))
        words = work.name.partition(",")[0].split()
        width = int(words[-1]) if words[-1].isdecimal() else 1 if words[0] == PUT else 2
        assert [keys for keys, _ in store.widths] == [width], work.name
        if words[0] == "transaction":
            assert [groups for _, groups in store.widths] == [width]
        if words[0] == "batch":
            assert [groups for _, groups in store.widths] == [1]


async def test_every_line_has_figures_by_rounds() -> None:
    found = await measure({OURS: InMemory()}, 2, 0.01)
    rows = rows_of(found)
    assert [row["line"] for row in rows] == [work.name for work in works()]
    assert all(row["per_s"] > 0 and row["p50_ms"] <= row["p99_ms"] + 0.1 <= row["max_ms"] + 0.2 for row in rows)


def test_appends_are_the_latency_in_puts_of_the_same_round() -> None:
    calm, busy = Round(1.0, 4, [2.0, 2.0, 2.0, 8.0]), Round(1.0, 3, [10.0, 10.0, 10.0])
    twice, thrice = Round(1.0, 6, [4.0, 4.0, 4.0]), Round(1.0, 3, [30.0, 30.0, 30.0])
    rows = rows_of({(PUT, OURS): [calm, busy, busy], ("transaction over 2", OURS): [twice, thrice, thrice]})
    assert [(row["appends"], row["attempts"]) for row in rows] == [(1.0, 1.0), (3.0, 1.33)]
    assert rows[0]["p50_ms"] == 10.0
