"""A takeover of a log of any shape needs only its list and its last two ledgers (docs/protocol.md P34, G25).

For every shape, every leaf node of the metadata store is struck: it is filled with garbage, or deleted. A replica that
has applied the whole log must take it over and continue to read, unless the takeover needs the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from kvstore.errors import StoreError
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Change
from kvstore.types import Position, Seq
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.opener import LedgerTakeover
from kvstore.wal.tailing.tail import TailReader
from tests.sim.ledgers_and_logs.bench import B1, B2, B3, Bench, FrozenStore, P, run
from tests.sim.ledgers_and_logs.logs import NEVER, SMALL, Writer, opened

pytestmark = pytest.mark.sim

GARBAGE = b"\xff\x00 not what anybody wrote {"
OPEN_S, READ_S = 60.0, 30.0
Shape = Callable[[Bench], Awaitable[list[Position]]]
"""Creates a log and leaves it without a leader. Returns the confirmed positions."""


async def written(bench: Bench, count: int, *, seq: int = 1) -> Writer:
    """Return the writer of a led log with `count` more entries and small ledgers."""
    writer = Writer(await opened(bench.logs(SMALL)), seq=seq)
    await writer.append(count)
    return writer


async def taken_over(bench: Bench, times: int) -> None:
    """Let leaders that append nothing take over."""
    for _ in range(times):
        (await opened(bench.logs(NEVER))).close_for_good()


async def nothing(bench: Bench) -> list[Position]:
    return []


async def one_empty_ledger(bench: Bench) -> list[Position]:
    await taken_over(bench, 1)
    return []


async def only_empty_ledgers(bench: Bench) -> list[Position]:
    await taken_over(bench, 4)
    return []


async def one_ledger(bench: Bench) -> list[Position]:
    writer = await written(bench, 3)
    writer.log.close_for_good()
    return writer.entries.confirmed


async def rolled(bench: Bench) -> list[Position]:
    writer = await written(bench, 23)
    writer.log.close_for_good()
    return writer.entries.confirmed


async def rolled_with_empty_ones_at_the_end(bench: Bench) -> list[Position]:
    confirmed = await rolled(bench)
    await taken_over(bench, 3)
    return confirmed


async def one_with_entries_and_two_empty(bench: Bench) -> list[Position]:
    """The shape of the original report: two unsuccessful takeovers."""
    confirmed = await one_ledger(bench)
    await taken_over(bench, 2)
    return confirmed


async def empty_ones_between(bench: Bench) -> list[Position]:
    """The first sequences of the empty ledgers stay bounds permanently."""
    confirmed = await one_ledger(bench)
    await taken_over(bench, 3)
    writer = await written(bench, 7, seq=4)
    writer.log.close_for_good()
    return confirmed + writer.entries.confirmed


async def trimmed(bench: Bench) -> list[Position]:
    writer = await written(bench, 23)
    assert await writer.log.trim(Seq(1000), 0) >= 2
    writer.log.close_for_good()
    return writer.entries.confirmed


async def trimmed_with_empty_ones_at_the_end(bench: Bench) -> list[Position]:
    confirmed = await trimmed(bench)
    await taken_over(bench, 3)
    return confirmed


async def trimmed_to_the_last_two_and_empty_ones(bench: Bench) -> list[Position]:
    confirmed = await trimmed_with_empty_ones_at_the_end(bench)
    for seq in (24, 25):
        writer = await written(bench, 1, seq=seq)
        confirmed = confirmed + writer.entries.confirmed
        assert await writer.log.trim(Seq(1000), 0) >= 1
        writer.log.close_for_good()
    assert len((await bench.listed()).ledgers) == 2
    await taken_over(bench, 2)
    return confirmed


async def sealed(bench: Bench) -> list[Position]:
    writer = await written(bench, 12)
    await writer.log.seal()
    return writer.entries.confirmed


async def in_recovery(bench: Bench) -> list[Position]:
    """A takeover that ended after its fence."""
    confirmed = await rolled_with_empty_ones_at_the_end(bench)
    for line in (await bench.listed()).ledgers[-2:]:
        await LedgerTakeover(line.id, bench.ports, bench.env.nursery).take_over()
    return confirmed


class LastChange(FrozenStore):
    """A session whose next transaction is its last write."""

    is_armed = False

    async def multi(self, changes: Sequence[Change]) -> None:
        await super().multi(changes)
        if self.is_armed:
            self.freeze()


async def roll_broken_off(bench: Bench) -> list[Position]:
    """The next ledger is listed, and the leader dies before the former one is drained."""
    return await roll_listed(bench, holds_adds=True)


async def roll_not_closed(bench: Bench) -> list[Position]:
    """The next ledger is listed and has entries, and the leader dies before it closes the former one."""
    return await roll_listed(bench, holds_adds=False)


async def roll_listed(bench: Bench, *, holds_adds: bool) -> list[Position]:
    store = LastChange(bench.tree)
    writer = Writer(await opened(bench.logs(SMALL, store=store)))
    await writer.append(14)  # the third ledger's first sequence is exact
    lines, store.is_armed = len(writer.log.listed.ledgers), True
    for bookie in (B1, B2, B3):
        bench.bookies.at[bookie].holds_adds = holds_adds
    await writer.append(8)
    assert len((await bench.listed()).ledgers) == lines + 1
    writer.log.close_for_good()
    for bookie in (B1, B2, B3):
        bench.bookies.at[bookie].holds_adds = False
    return writer.entries.confirmed


async def roll_broken_off_and_empty_ones(bench: Bench) -> list[Position]:
    confirmed = await roll_broken_off(bench)
    await taken_over(bench, 2)
    return confirmed


SHAPES: list[Shape] = [
    nothing,
    one_empty_ledger,
    only_empty_ledgers,
    one_ledger,
    rolled,
    rolled_with_empty_ones_at_the_end,
    one_with_entries_and_two_empty,
    empty_ones_between,
    trimmed,
    trimmed_with_empty_ones_at_the_end,
    trimmed_to_the_last_two_and_empty_ones,
    sealed,
    in_recovery,
    roll_broken_off,
    roll_not_closed,
    roll_broken_off_and_empty_ones,
]


def leaves(bench: Bench) -> list[str]:
    """Return every node without children."""
    tree = set(bench.tree.paths()) - {"/"}
    return sorted(path for path in tree if not any(each.startswith(f"{path}/") for each in tree))


def needed(listed: LedgerList) -> set[str]:
    """Return the paths of nodes without which a takeover may fail."""
    last_two = {paths.ledger(each.id) for each in listed.ledgers[-2:]}
    return {paths.INSTANCE_ID, paths.partition_log(P), *last_two}


async def take_over(bench: Bench, applied: Position | None) -> LeaderLog:
    async with asyncio.timeout(OPEN_S):
        return await bench.logs(NEVER).open_as_leader(P, 500, lambda: Seq(1), lambda: applied)


async def read_until(reader: TailReader, payload: bytes) -> None:
    async with asyncio.timeout(READ_S):
        while payload not in [entry.payload for entry in await reader.read(1000)]:
            pass


async def lead_and_read_on(bench: Bench, end: Position, running: TailReader) -> None:
    """A replica that has applied the log up to `end` takes it over. The replica and a restarted one read the
    appended entries."""
    log = await take_over(bench, None if end == BEGINNING else end)
    reader = bench.logs().reader(P, None if end == BEGINNING else end)
    found = end
    async with asyncio.timeout(READ_S):
        while found < log.recovered_end:  # entries that the former leader sent without an acknowledgement may be there
            found = max([found, *(entry.position for entry in await reader.read(1000))])
    writer = Writer(log, seq=100)
    await writer.append(1)
    await read_until(reader, b"100")
    await read_until(running, b"100")
    log.close_for_good()
    await reader.close()


async def strike(bench: Bench, shape: Shape, at: int, *, is_deleted: bool) -> bool:
    """Strike one node of the log's metadata. Returns False if there are no more nodes."""
    confirmed = await shape(bench)
    end = max(confirmed, default=BEGINNING)
    running = bench.logs().reader(P, None if end == BEGINNING else end)
    while await running.read(0):
        pass
    if at >= len(nodes := leaves(bench)):
        return False
    path, listed = nodes[at], await bench.listed()
    node = bench.tree._nodes[path]
    before, store = node.data, MemoryStore(bench.tree)
    if is_deleted:
        await store.delete(path, -1)
    else:
        node.data = GARBAGE
    if path in needed(listed):
        with suppress(StoreError):
            await take_over(bench, end)
        if is_deleted:
            return True
        bench.tree._nodes[path].data = before
    await lead_and_read_on(bench, end, running)
    return True


# docs/protocol.md P34, G25
@pytest.mark.parametrize("is_deleted", [False, True], ids=["garbage", "deleted"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_takeover_needs_list_and_its_last_two_ledgers(shape: Shape, is_deleted: bool) -> None:
    is_more = True

    for at in range(40):

        async def case(bench: Bench, at: int = at) -> None:
            nonlocal is_more
            is_more = await strike(bench, shape, at, is_deleted=is_deleted)

        run(case)
        if not is_more:
            break
    assert at > 1, "nothing was struck"
    assert not is_more


# docs/protocol.md P34, G25
@pytest.mark.parametrize("is_deleted", [False, True], ids=["garbage", "deleted"])
@pytest.mark.parametrize("at", [0, 1], ids=["the one it has read", "the next one"])
def test_running_reader_passes_lost_ledger_without_further_entries(at: int, is_deleted: bool) -> None:
    """It has read the ledger while the ledger was open, and receives no notice until the ledger is lost."""

    async def case(bench: Bench) -> None:
        writer = await written(bench, 3)
        running = bench.logs().reader(P, None)
        await read_until(running, b"3")
        writer.log.close_for_good()
        await taken_over(bench, 3)
        path, end = paths.ledger((await bench.listed()).ledgers[at].id), writer.entries.confirmed[-1]
        if is_deleted:
            await MemoryStore(bench.tree).delete(path, -1)
        else:
            bench.tree._nodes[path].data = GARBAGE
        await lead_and_read_on(bench, end, running)

    run(case)
