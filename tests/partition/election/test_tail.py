"""A replica's tail over a log that cannot be read further."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import LedgerDeleted, NoSuchEntry, StoreError, UndecodableNode
from kvstore.partition.election import tail
from kvstore.partition.election.tail import Tail
from kvstore.types import EntryId, LedgerId, Position, Seq
from kvstore.wal.ports import LogEntry
from tests.partition.one_partition import P1
from tests.partition.state.engine_memory import MemoryEngine
from tests.waiting import wait_until

AT_ONE = Position(LedgerId(1), EntryId(0))
SEQ = Seq(7)


class Torn:
    """A log whose ledgers cannot be read, one after the other."""

    def __init__(self, error: type[StoreError]) -> None:
        self.error = error
        self.reads = 0

    def reader(self, _partition: str, after: Position | None) -> Torn:
        return self

    async def read(self, _timeout_ms: int, taker: object = None) -> Sequence[LogEntry]:
        self.reads += 1
        raise self.error(f"ledger {self.reads // 10} is gone")

    async def close(self) -> None: ...


async def installs(error: type[StoreError], position: Position | None, caplog: pytest.LogCaptureFixture) -> int:
    """Return how often a replica at `position` installs another's state during its first 20 reads, which fail. Each
    ledger's error is logged once."""
    installed = 0

    async def install(least: Seq) -> None:
        nonlocal installed
        installed += 1
        assert least == (SEQ + 1 if error is NoSuchEntry else 0), "another replica may stop at the same lost entry"

    fields = {"is_complete": True, "position": position, "seq": SEQ, "engine": MemoryEngine()}
    logs, state = Torn(error), cast(Any, SimpleNamespace(**fields))
    following = asyncio.create_task(Tail(P1, state, cast(Any, logs), install).run())

    async def is_tried_often() -> bool:
        return logs.reads >= 20

    with caplog.at_level(logging.ERROR):
        await wait_until(is_tried_often, what="it tries again")
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert told[:2] == ["ledger 0 is gone", "ledger 1 is gone"]
    return installed


@pytest.mark.parametrize(
    ("error", "position", "is_installed"),
    [
        (LedgerDeleted, None, False),
        (LedgerDeleted, AT_ONE, False),
        (UndecodableNode, AT_ONE, False),
        (UndecodableNode, None, True),
        (NoSuchEntry, AT_ONE, True),
    ],
)
async def test_replica_keeps_its_state_when_a_ledger_is_lost(
    error: type[StoreError],
    position: Position | None,
    is_installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A replica without a state installs another's, so that an undecodable ledger does not keep it from joining
    forever. A replica whose next entry is marked as lost can continue only from the state of a replica that has applied
    the entry."""
    monkeypatch.setattr(tail, "DELETED_S", 0.0)
    assert (await installs(error, position, caplog) > 0) is is_installed
