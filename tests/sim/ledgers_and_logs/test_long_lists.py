"""Untrimmed lists of ledgers, and takeovers that fail (docs/protocol.md, G21, G22)."""

from __future__ import annotations

import pytest

from kvstore.errors import MetadataError, MetadataUnavailable, StoreError, VersionConflict
from kvstore.meta import codec, paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Change, SetData, ensure_path
from kvstore.types import LedgerId, Seq
from kvstore.wal import ledger_list, lists, takeover
from kvstore.wal.config import LogConfig
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.list_codec import encode
from kvstore.wal.lists import LONG_LIST_BYTES, LedgerLists
from tests.sim.ledgers_and_logs.bench import Bench, FrozenStore, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, opened

pytestmark = pytest.mark.sim


class Failing(FrozenStore):
    """A session that fails on request."""

    fails: StoreError | None = None
    """The error of the next listing."""

    async def multi(self, changes: list[Change]) -> None:  # type: ignore[override]
        if self.fails is not None and any(isinstance(change, SetData) for change in changes):
            raise self.fails
        await super().multi(changes)


async def grown(bench: Bench, count: int) -> None:
    """Create a log of `count` closed ledgers, as a release before packed lists left it."""
    for path in (paths.parent(paths.IDGEN_LONG), paths.IDGEN_LONG):
        await ensure_path(bench.store, path)  # ids begin far above
    writer = Writer(await opened(bench.logs(NEVER)))
    await writer.append(3)
    await writer.log.seal()
    await (await opened(bench.logs(NEVER))).seal()
    first, second = (await bench.listed()).ledgers
    before = tuple(Listed(LedgerId(first.id + 2 + n - count), Seq(1), True, 1, 0) for n in range(count - 2))
    listed = LedgerList(2, (*before, first, second))
    path = paths.partition_log(P)
    _, stat = await MemoryStore(bench.tree).get(path)
    await MemoryStore(bench.tree).set(path, codec.encode(listed) if count < 13_000 else encode(listed), stat.version)


@pytest.mark.parametrize("count", [12_000, 20_000])
def test_log_of_thousands_of_ledgers_is_led_again(count: int) -> None:
    async def case(bench: Bench) -> None:
        await grown(bench, count)
        began = bench.env.clock.now()
        writer = Writer(await opened(bench.logs(SMALL, Failing(bench.tree))), seq=4)
        assert bench.env.clock.now() - began < 5, "the packed list is not nearly full"
        await writer.append(20)
        assert len(writer.entries.confirmed) == 20
        listed = await bench.listed()
        assert len(listed.ledgers) == count + 1, "the ledger is too large to be rolled after five entries"
        assert writer.log.statistics()["list_bytes"] < LONG_LIST_BYTES
        data, _ = await MemoryStore(bench.tree).get(paths.partition_log(P))
        assert len(data) == writer.log.statistics()["list_bytes"]

    run(case)


def test_untrimmed_log_gets_ever_larger_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_list, "GROW_FROM", 10)
    monkeypatch.setattr(ledger_list, "GROW_STEP", 5)

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        for _ in range(160):
            await writer.append(10, gap_s=0.02)
        assert 25 < len((await bench.listed()).ledgers) < 45, "1600 entries with 5 per ledger would be 320 ledgers"

    run(case)


def test_too_long_list_is_not_rolled_and_its_leader_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(SMALL)))
        await writer.append(20)
        count = len((await bench.listed()).ledgers)
        monkeypatch.setattr(lists, "LONG_LIST_BYTES", 100)
        await writer.append(10)
        assert len((await bench.listed()).ledgers) <= count + 1
        count = len((await bench.listed()).ledgers)
        await writer.append(100)
        assert len(writer.entries.confirmed) == 130
        assert len((await bench.listed()).ledgers) == count

    run(case)


def test_takeover_of_nearly_full_list_waits_and_of_full_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(NEVER))).append(3)
        monkeypatch.setattr(lists, "LONG_LIST_BYTES", 100)
        began = bench.env.clock.now()
        await opened(bench.logs(NEVER))
        assert takeover.LONG_LIST_WAIT_S <= bench.env.clock.now() - began < takeover.LONG_LIST_WAIT_S + 5
        monkeypatch.setattr(lists, "LIST_BYTES_MAX", 200)
        before = await bench.ledgers.list_ids()
        with pytest.raises(MetadataError, match="expected at most 200"):
            await opened(bench.logs(NEVER))
        assert await bench.ledgers.list_ids() == before

    run(case)


@pytest.mark.parametrize("error", [VersionConflict("another was first"), MetadataUnavailable("away")], ids=str)
def test_thousand_failed_takeovers_leave_nothing_behind(error: StoreError) -> None:
    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(3)
        await writer.log.seal()
        store = Failing(bench.tree)
        store.fails = error
        logs = bench.logs(NEVER, store)
        before = await bench.ledgers.list_ids()
        for attempt in range(250 if isinstance(error, VersionConflict) else 1_000):
            if attempt % 3 == 0:
                await logs.prepare(P)
            with pytest.raises(type(error)):
                await opened(logs)
        assert len(await bench.ledgers.list_ids()) - len(before) <= 1
        store.fails = None
        await opened(logs)
        assert len((await bench.listed()).ledgers) == 2

    run(case)


def test_old_ledger_created_ahead_is_deleted() -> None:
    async def case(bench: Bench) -> None:
        logs = bench.logs(NEVER)
        for _ in range(10):
            await logs.prepare(P)
            await bench.pass_time(30)
        assert len(await bench.ledgers.list_ids()) == 1

    run(case)


def test_failed_roll_leaves_nothing_behind() -> None:
    async def case(bench: Bench) -> None:
        store = Failing(bench.tree)
        writer = Writer(await opened(bench.logs(LogConfig(roll_entries=5, check_every_s=0.1), store)))
        store.fails = MetadataUnavailable("away")
        await writer.append(20)
        await bench.pass_time(10)
        assert len(await bench.ledgers.list_ids()) == 1
        store.fails = None
        await bench.pass_time(1)
        listed = (await LedgerLists(MemoryStore(bench.tree)).read(P))[0].ledgers
        assert [each.id for each in listed] == await bench.ledgers.list_ids()
        assert len(listed) == 2
        assert len(writer.entries.confirmed) == 20

    run(case)
