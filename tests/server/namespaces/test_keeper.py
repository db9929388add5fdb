"""The keeper works in the background: no operation waits for a count, and a late table is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.env.nursery import TaskNursery
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.tables.namespaces import NamespaceStore
from kvstore.namespaces import Add, Namespace, NamespaceTable, Remove, UsageReport
from kvstore.namespaces.book import Amount, Amounts, UsageAnswer, encode
from kvstore.server.namespaces.follow import NamespaceFollower
from kvstore.server.namespaces.keeper import Keeper
from kvstore.types import PartitionId, ServerId
from tests.client.serving import env_of

TABLE = NamespaceTable(namespaces=(Namespace(name="n", prefix=b"n/", keys_max=10, ops_per_s=100),))
P1, P2, P3 = map(PartitionId, ("p1", "p2", "p3"))
HERE, THERE = ServerId("n1"), ServerId("n2")


class Counted:
    """A leader whose count takes so many steps."""

    def __init__(self, steps: int, failing: bool = False) -> None:
        self.left, self.amounts, self.failing = steps, cast(Amounts, {}), failing

    @property
    def is_counted(self) -> bool:
        return self.left == 0

    def count_some(self) -> bool:
        if self.failing:
            raise OSError("no disk")
        self.left = max(0, self.left - 1)
        return self.left == 0

    def report(self) -> UsageReport:
        return UsageReport(P1, 1, self.amounts, self.is_counted)

    def forget(self, names: Iterable[str]) -> None: ...


class Links:
    """Links to one other server, which answers at once."""

    def __init__(self) -> None:
        self.asked = 0
        self.refused: dict[str, dict[str, int]] = {}

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        self.asked += 1
        return encode(
            UsageAnswer([UsageReport(P3, 1, {"n": Amount(self.asked, 0)})], wanted={"n": 50.0}, refused=self.refused)
        )


def keeper_of(links: Links) -> tuple[Keeper, TaskNursery]:
    nursery = TaskNursery("test")
    env = SimpleNamespace(nursery=nursery, clock=SimpleNamespace(now=asyncio.get_running_loop().time))
    rated: Any = SimpleNamespace(rates=None)
    keeper = Keeper(cast(Any, env), HERE, rated, links, lambda: [HERE, THERE], lambda: [P1, P2, P3])
    keeper.take(TABLE)
    return keeper, nursery


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# docs/protocol.md N2
async def test_reports_and_rates_do_not_wait_for_a_count() -> None:
    links = Links()
    keeper, nursery = keeper_of(links)
    large, small = Counted(1_000_000), Counted(3)
    keeper.book.lead(P1, large)
    keeper.book.lead(P2, small)
    for look in range(1, 4):
        keeper.poll()
        await turns(10)
        assert links.asked == look
        assert keeper.book.used("n").keys == look, "what is heard counts at once"
    assert small.is_counted, "a large partition does not keep the others waiting"
    assert large.left > 0
    assert keeper._wanted == {"n": 0.0}
    await nursery.close()


async def test_failed_count_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    keeper, nursery = keeper_of(Links())
    broken, well = Counted(2, failing=True), Counted(2)
    keeper.book.lead(P1, broken)
    keeper.book.lead(P2, well)
    keeper.poll()
    await turns(20)
    assert well.is_counted
    assert [record.message for record in caplog.records] == [
        "partition=p1 cannot count the usage of namespaces now: no disk"
    ]
    broken.failing = False
    keeper.poll()
    await turns(20)
    assert broken.is_counted
    await nursery.close()


async def test_table_written_here_is_read_again() -> None:
    keeper, nursery = keeper_of(Links())
    later = NamespaceTable()
    keeper.reread = lambda: keeper.take(later)
    keeper.take(later)  # a change by another server, which this server's own answer did not include
    keeper.take_own(TABLE)
    assert keeper.book.table == later
    await nursery.close()


async def test_refusal_is_recent_when_a_count_rises() -> None:
    links = Links()
    keeper, nursery = keeper_of(links)
    links.refused = {"n": {"keys": 40}}  # from before the start of this server
    keeper.poll()
    await turns(10)
    assert keeper.refused_ago_s() == {}
    keeper.poll()
    await turns(10)
    assert keeper.refused_ago_s() == {}
    links.refused = {"n": {"keys": 41}}
    keeper.poll()
    await turns(10)
    keeper.book.refused["n", "bytes"] += 1
    assert set(keeper.refused_ago_s()["n"]) == {"keys", "bytes"}
    keeper.take(NamespaceTable())
    assert keeper.refused_ago_s() == {}
    await nursery.close()


async def test_lost_table_keeps_quotas_and_empty_table_ends_them() -> None:
    nursery, store, taken = TaskNursery("test"), MemoryStore(), list[NamespaceTable]()
    follower = NamespaceFollower(env_of(nursery), store, taken.append)
    await NamespaceStore(store).change(Add(TABLE.namespaces[0]))
    await follower.open()
    await store.delete(paths.NAMESPACES, -1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert taken == [TABLE], "the last one holds"
    await NamespaceStore(store).change(Add(TABLE.namespaces[0]))
    await NamespaceStore(store).change(Remove("n"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert taken[-1] == NamespaceTable()
    await follower.close()
    await nursery.close()
