"""Lost answers of the metadata store during takeovers and rolls (docs/protocol.md, G12, G22)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

import pytest

from kvstore.errors import MetadataDenied, MetadataUnknown, StoreError
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Change, SetData
from kvstore.wal.config import LogConfig
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from tests.sim.ledgers_and_logs.bench import Bench, FrozenStore, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, Writer, opened

pytestmark = pytest.mark.sim


class Doubtful(FrozenStore):
    """A session that loses answers: a request is done at once, later, or never."""

    luck: Random
    later: list[asyncio.Task[None]]

    async def multi(self, changes: Sequence[Change]) -> None:
        await self._doubtful(lambda: super(Doubtful, self).multi(changes))

    async def delete(self, path: str, version: int) -> None:
        await self._doubtful(lambda: super(Doubtful, self).delete(path, version))

    async def _doubtful(self, call: Callable[[], Awaitable[None]]) -> None:
        fate = self.luck.random()
        if fate < 0.5:
            await call()
            return
        if fate < 0.65:
            await call()
        elif fate < 0.85:
            self.later.append(asyncio.create_task(self._late(call, self.luck.random())))
        raise MetadataUnknown("the answer was lost")

    async def _late(self, call: Callable[[], Awaitable[None]], after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(StoreError):
            await call()


@pytest.mark.parametrize("seed", range(1, 9))
def test_every_listed_ledger_exists_whatever_answers_are_lost(seed: int) -> None:
    """docs/protocol.md, G22: a deleted ledger was certainly not listed."""

    async def case(bench: Bench) -> None:
        luck = Random(seed)
        ended = 0

        async def lead() -> None:
            nonlocal ended
            store = Doubtful(bench.tree)
            store.luck, store.later = luck, []
            logs = bench.logs(LogConfig(roll_entries=3, check_every_s=0.05), store)
            for _ in range(6):
                with suppress(StoreError, TimeoutError):
                    async with asyncio.timeout(20):
                        if luck.random() < 0.5:
                            await logs.prepare(P)
                        writer = Writer(await opened(logs))
                        await writer.append(luck.randrange(12), gap_s=0.1)
                await asyncio.sleep(luck.random() * 3)
            ended += 1

        leads = [asyncio.create_task(lead()) for _ in range(3)]
        while ended < 3:
            await asyncio.sleep(0.05)
            listed = (await bench.listed()).ledgers
            there = set(await bench.ledgers.list_ids())
            assert {each.id for each in listed} <= there
        await asyncio.gather(*leads)
        assert len(listed) > 5

    run(case)


class Retired(FrozenStore):
    """The partition leaves the ring after its log was listed, and the answer to the listing is lost."""

    kept: LedgerList | None = None

    async def multi(self, changes: Sequence[Change]) -> None:
        await super().multi(changes)
        if self.kept is None and any(
            isinstance(each, SetData) and each.path == paths.partition_log(P) for each in changes
        ):
            lists = LedgerLists(MemoryStore(self.tree))
            self.kept, version = await lists.read(P)
            await lists.write(P, LedgerList(), version)
            raise MetadataUnknown("the answer was lost")


def test_retired_log_keeps_entries_named_by_its_kept_list() -> None:
    """docs/protocol.md, G22 and H5."""

    async def case(bench: Bench) -> None:
        writer = Writer(await opened(bench.logs(NEVER)))
        await writer.append(3)
        await writer.log.seal()
        store = Retired(bench.tree)
        with suppress(StoreError):
            await opened(bench.logs(NEVER, store))
        assert store.kept is not None
        assert {each.id for each in store.kept.ledgers} <= set(await bench.ledgers.list_ids())

    run(case)


class Refusing(FrozenStore):
    """The log is listed and the answer lost; then the store briefly refuses its user."""

    refusals = -1

    async def multi(self, changes: Sequence[Change]) -> None:
        await super().multi(changes)
        if self.refusals < 0:
            self.refusals = 1
            raise MetadataUnknown("the answer was lost")

    async def sync(self, path: str) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise MetadataDenied("not authenticated")
        await super().sync(path)


@pytest.mark.parametrize("seals", [False, True], ids=("takeover", "roll"))
def test_refusal_after_lost_answer_deletes_no_ledger(*, seals: bool) -> None:
    """docs/protocol.md, G22: a refusal makes nothing certain."""

    async def case(bench: Bench) -> None:
        store = Refusing(bench.tree)
        store.refusals = 0 if seals else -1
        with suppress(StoreError):
            writer = Writer(await opened(bench.logs(LogConfig(roll_entries=3, check_every_s=0.05), store)))
            store.refusals = -1 if seals else store.refusals
            await writer.append(7, gap_s=0.1)
        assert store.refusals == 0, "it refused once"
        listed = (await bench.listed()).ledgers
        assert len(listed) > 1 or not seals
        assert {each.id for each in listed} <= set(await bench.ledgers.list_ids())

    run(case)
