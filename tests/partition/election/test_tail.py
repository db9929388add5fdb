"""A replica's tail over a log that cannot be read on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import LedgerDeleted
from kvstore.partition.election import tail
from kvstore.partition.election.tail import Tail
from kvstore.partition.state.engine_memory import MemoryEngine
from kvstore.types import Position
from kvstore.wal.ports import LogEntry
from tests.partition.one_partition import P1
from tests.waiting import wait_until


class Torn:
    """A log of which somebody has deleted one ledger after another."""

    def __init__(self) -> None:
        self.reads = 0

    def reader(self, _partition: str, after: Position | None) -> Torn:
        return self

    async def read(self, _timeout_ms: int, taker: object = None) -> Sequence[LogEntry]:
        self.reads += 1
        raise LedgerDeleted(f"ledger {self.reads // 10} is gone")

    async def close(self) -> None: ...


async def test_a_ledger_that_somebody_has_deleted_is_told_once_and_no_state_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lasts until somebody does something, and is looked at again and again."""
    monkeypatch.setattr(tail, "DELETED_S", 0.0)

    async def install() -> None:
        raise AssertionError("another's state is installed")

    logs, state = Torn(), cast(Any, SimpleNamespace(is_whole=True, position=None, engine=MemoryEngine()))
    following = asyncio.create_task(Tail(P1, state, cast(Any, logs), install).run())

    async def is_tried_often() -> bool:
        return logs.reads >= 20

    with caplog.at_level(logging.ERROR):
        await wait_until(is_tried_often, what="it tries again")
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    told = [record.getMessage() for record in caplog.records]
    assert told[:2] == ["ledger 0 is gone", "ledger 1 is gone"]
    assert len(told) == len(set(told))
