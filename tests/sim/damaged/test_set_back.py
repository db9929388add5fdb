"""A list of ledgers that is set back to an older list, as with a copy of the metadata, case by case, in virtual
time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvstore.errors import MetadataLost
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore
from kvstore.types import NO_ENTRY, EntryId, LedgerId, Position, Seq
from kvstore.wal.ledger_list import BEGINNING, LedgerList
from kvstore.wal.ports import LogEntry
from kvstore.wal.tailing.tail import TailReader
from tests.sim.ledgers_and_logs.bench import Bench, P, run
from tests.sim.ledgers_and_logs.logs import LISTED, SMALL, Writer, opened, set_list_back, with_older_list

pytestmark = pytest.mark.sim


async def set_back(bench: Bench) -> tuple[Position, Sequence[LedgerId]]:
    """Create a log of several ledgers with an older list, of the first ledger only. Returns the last written
    position and the existing ledgers."""
    writer, older = await with_older_list(bench)
    writer.log.close_for_good()
    await set_list_back(bench, older)
    return writer.entries.confirmed[-1], await LedgerStore(MemoryStore(bench.tree)).list_ids()


def said(position: Position) -> Callable[[], Coroutine[Any, Any, Position | None]]:
    async def others() -> Position | None:
        return position

    return others


# docs/protocol.md G24, P25
def test_log_that_ends_before_state_of_another_replica_is_not_led() -> None:
    """The candidate's own state is behind, because the candidate was down during the last writes."""

    async def case(bench: Bench) -> None:
        applied, ledgers = await set_back(bench)
        before = (await MemoryStore(bench.tree).get(LISTED))[1].version
        with pytest.raises(MetadataLost, match="another replica is at"):
            await bench.logs(SMALL).open_as_leader(P, 500, lambda: Seq(4), lambda: None, said(applied))
        assert await LedgerStore(MemoryStore(bench.tree)).list_ids() == ledgers
        assert (await MemoryStore(bench.tree).get(LISTED))[1].version == before

    run(case)


# docs/protocol.md G24
def test_replica_ahead_under_another_leader_is_no_sign_of_older_copy() -> None:
    async def case(bench: Bench) -> None:
        await Writer(await opened(bench.logs(SMALL))).append(7)
        asked = 0

        async def others() -> Position | None:
            nonlocal asked
            asked += 1
            if asked > 1:
                return None
            other = Writer(await opened(bench.logs(SMALL)), seq=8)
            await other.append(2)
            other.log.close_for_good()
            return other.entries.confirmed[-1]

        log = await bench.logs(SMALL).open_as_leader(P, 500, lambda: Seq(10), lambda: None, others)
        assert asked > 1, "the takeover was not repeated"
        assert log.epoch == 3

    run(case)


# docs/protocol.md G26
def test_tail_stops_when_list_lacks_what_it_has_read() -> None:
    async def case(bench: Bench) -> None:
        applied, _ = await set_back(bench)
        reader = bench.logs().reader(P, applied)
        with pytest.raises(MetadataLost, match="older copy of itself"):
            await reader.read(0)
        await reader.close()

    run(case)


# docs/protocol.md G26
def test_tail_at_end_stops_when_list_is_set_back_and_another_leads() -> None:
    """Otherwise it would continue in the other leader's ledger, which does not continue the entries that it has
    read."""

    async def case(bench: Bench) -> None:
        writer, older = await with_older_list(bench)
        await writer.log.seal()
        reader = bench.logs().reader(P, None)
        read: list[LogEntry] = []
        while len(read) < 15:
            read += await reader.read(1000)
        assert read[-1].position.ledger > read[0].position.ledger
        await set_list_back(bench, older)
        await opened(bench.logs(SMALL))
        with pytest.raises(MetadataLost, match="older copy of itself"):
            await read_on(reader)
        await reader.close()

    run(case)


async def read_on(reader: TailReader) -> None:
    while True:
        assert not await reader.read(1000), "entries of another history"


# docs/protocol.md G26
def test_leader_loses_its_log_when_it_learns_of_unknown_ledger() -> None:
    async def case(bench: Bench) -> None:
        applied, _ = await set_back(bench)
        log = await bench.logs(SMALL).open_as_leader(P, 0, lambda: Seq(4))
        own = log.known_ledgers()[0][-1].id
        assert not log.report_applied(Position(own, EntryId(0)))
        assert log.lost is None
        assert log.report_applied(applied)
        assert isinstance(log.lost, MetadataLost)

    run(case)


# docs/protocol.md G26
def test_list_explains_its_ledgers_and_trimmed_ledgers() -> None:
    begun = LedgerList()
    assert begun.explains(BEGINNING)
    assert not begun.explains(Position(LedgerId(1), EntryId(0)))
    for ledger in (1, 3, 5, 7):
        begun = begun.with_ledger(LedgerId(ledger), Seq(ledger), epoch=1, lease_ms=0)
        begun = begun.with_exact(LedgerId(ledger), Seq(ledger))
    listed = begun.without_first([EntryId(4), NO_ENTRY])
    explained = [(1, 0), (1, 4), (3, NO_ENTRY), (5, 0), (5, 99), (7, NO_ENTRY)]
    unexplained = [(1, 5), (3, 0), (4, 0), (6, 0), (8, 0), (8, NO_ENTRY)]
    for ledger, entry in explained:
        assert listed.explains(Position(LedgerId(ledger), EntryId(entry))), (ledger, entry)
    for ledger, entry in unexplained:
        assert not listed.explains(Position(LedgerId(ledger), EntryId(entry))), (ledger, entry)
