"""A metadata store that has lost the anchors of a leader's log, case by case, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.bookie.authority import MetadataAuthority
from kvstore.errors import MetadataLost, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Stat
from kvstore.types import Seq
from kvstore.wal.leading.anchors import CHECK_S, PAUSE_S
from kvstore.wal.leading.leader_log import LeaderLog
from tests.sim.ledgers_and_logs.bench import Bench, FrozenStore, P, run
from tests.sim.ledgers_and_logs.logs import (
    LISTED,
    NEVER,
    SMALL,
    Writer,
    numbers,
    opened,
    read_all,
    set_list_back,
    with_older_list,
)

pytestmark = pytest.mark.sim


async def remove(bench: Bench, path: str) -> None:
    await MemoryStore(bench.tree).delete(path, -1)


def anchors(log: LeaderLog) -> tuple[str, ...]:
    return paths.INSTANCE_ID, LISTED, paths.ledger(log.handle.ledger)


# docs/protocol.md G23
@pytest.mark.parametrize("anchor", range(3))
@pytest.mark.parametrize("rolled", [False, True])
def test_leader_stops_when_anchor_of_its_log_is_gone(anchor: int, rolled: bool) -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL if rolled else NEVER)))
        await writer.append(12)
        await asyncio.sleep(1)
        assert writer.log.lost is None
        assert len(writer.log.listed.ledgers) > 1 or not rolled
        await remove(bench, anchors(writer.log)[anchor])
        await bench.pass_time(2 * PAUSE_S)
        assert isinstance(writer.log.lost, MetadataLost)
        assert anchors(writer.log)[anchor] in str(writer.log.lost)
        await writer.append(3)
        assert len(writer.entries.confirmed) == 12

    run(case)


# docs/protocol.md G23
@pytest.mark.parametrize(("anchor", "data"), [(0, b"another"), (1, b"")])
def test_leader_stops_when_another_cluster_replaces_its_own(anchor: int, data: bytes) -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(12)
        path = anchors(writer.log)[anchor]
        await remove(bench, path)
        await MemoryStore(bench.tree).create(path, data)
        await bench.pass_time(2 * PAUSE_S)
        assert isinstance(writer.log.lost, MetadataLost)

    run(case)


# docs/protocol.md G23
def test_next_poll_finds_change_that_no_watch_reported() -> None:
    class Deaf(FrozenStore):
        def watch(self, path: str, changed: object) -> object:  # type: ignore[override]
            return super().watch(path, lambda: None)

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER, store=Deaf(bench.tree))))
        await writer.append(1)
        await remove(bench, paths.INSTANCE_ID)
        await asyncio.sleep(CHECK_S + 1)
        assert isinstance(writer.log.lost, MetadataLost)

    run(case)


class Lagging(FrozenStore):
    """A session on a server that lags behind for some nodes until it is asked to catch up."""

    unheard: frozenset[str] = frozenset()
    syncs = 0

    async def get(self, path: str) -> tuple[bytes, Stat]:
        if path in self.unheard:
            raise NoSuchNode(path)
        return await super().get(path)

    async def sync(self, path: str) -> None:
        await super().sync(path)
        self.syncs, self.unheard = self.syncs + 1, frozenset()


# docs/protocol.md G23, G13
def test_lagging_server_ends_no_leadership() -> None:
    async def case(bench: Bench) -> None:
        store = Lagging(bench.tree)
        writer = Writer(await opened(bench.logs(NEVER, store=store)))
        await writer.append(1)
        for anchor in anchors(writer.log):
            syncs, store.unheard = store.syncs, frozenset([anchor])
            await asyncio.sleep(CHECK_S + 1)
            assert store.syncs == syncs + 1
            assert writer.log.lost is None
        syncs = store.syncs
        await asyncio.sleep(4 * CHECK_S)
        assert store.syncs == syncs, "a poll that finds nothing missing costs no sync"

    run(case)


# docs/protocol.md G23, G13
def test_unreachable_store_ends_no_leadership_and_is_checked_on_return() -> None:
    async def case(bench: Bench) -> None:
        store = FrozenStore(bench.tree)
        writer = Writer(await opened(bench.logs(NEVER, store=store)))
        await writer.append(1)
        store.suspend()
        await remove(bench, LISTED)
        await asyncio.sleep(3 * CHECK_S)
        await writer.append(3)
        assert writer.log.lost is None
        assert len(writer.entries.confirmed) == 4
        store.resume()
        await asyncio.sleep(1)
        assert isinstance(writer.log.lost, MetadataLost)

    run(case)


# docs/protocol.md G23
def test_log_of_another_cluster_is_not_taken_over() -> None:
    async def case(bench: Bench) -> None:
        logs = bench.logs(NEVER)
        writer = Writer(await opened(logs))
        await writer.append(3)
        await remove(bench, paths.INSTANCE_ID)
        with pytest.raises(MetadataLost):
            await opened(logs)
        store = MemoryStore(bench.tree)
        await store.create(paths.INSTANCE_ID, b"another")
        with pytest.raises(MetadataLost, match="another"):
            await opened(logs)
        await store.set(paths.INSTANCE_ID, b"simulated", 0)
        await opened(logs)
        assert await read_all(logs, 3) == numbers(1, 3)

    run(case)


# docs/protocol.md G23
def test_state_that_has_read_a_log_begins_no_empty_list() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(3)
        await remove(bench, LISTED)
        with pytest.raises(MetadataLost, match="the state here is at sequence 3"):
            await bench.logs(NEVER).open_as_leader(P, 500, lambda: Seq(4))

    run(case)


# docs/protocol.md G24
def test_log_that_ends_before_state_is_not_led_and_stays_unchanged() -> None:
    async def case(bench: Bench) -> None:
        writer, older = await with_older_list(bench)
        applied, store = writer.entries.confirmed[-1], MemoryStore(bench.tree)
        writer.log.close_for_good()
        await set_list_back(bench, older)
        before = await LedgerStore(store).list_ids()
        with pytest.raises(MetadataLost, match="older copy of itself"):
            await bench.logs(SMALL).open_as_leader(P, 500, lambda: Seq(16), lambda: applied)
        assert await LedgerStore(store).list_ids() == before
        assert (await store.get(LISTED))[0] == older

    run(case)


# docs/protocol.md G24
def test_log_that_ends_with_last_applied_entry_of_state_is_led() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(7)
        applied = writer.entries.confirmed[-1]
        writer.log.close_for_good()
        log = await bench.logs(SMALL).open_as_leader(P, 500, lambda: Seq(8), lambda: applied)
        assert log.recovered_end == applied

    run(case)


# docs/protocol.md B29
def test_older_copy_marked_by_bookie_is_not_used() -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(1)
        identity = ClusterIdentity(bench.store, "simulated")
        await identity.mark_older("b1 says so")
        await identity.mark_older("b2 says so too")
        await bench.pass_time(CHECK_S + 1)
        with pytest.raises(MetadataLost, match="b1 says so; restore a later one"):
            await opened(bench.logs(NEVER))
        with pytest.raises(MetadataLost, match="older copy"):
            await MetadataAuthority(bench.store, identity).ledgers()

    run(case)


# docs/protocol.md B10, G23
def test_bookie_rejects_list_of_another_cluster() -> None:
    async def case(bench: Bench) -> None:
        authority = MetadataAuthority(bench.store, ClusterIdentity(bench.store, "simulated"))
        writer = Writer(await opened(bench.logs(NEVER)))
        assert await authority.ledgers() == [writer.log.handle.ledger]
        await remove(bench, paths.INSTANCE_ID)
        with pytest.raises(MetadataLost):
            await authority.ledgers()
        await bench.store.create(paths.INSTANCE_ID, b"another")
        with pytest.raises(MetadataLost):
            await authority.ledgers()

    run(case)
