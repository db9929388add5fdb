"""The node's own bookie when it waits for its disk (docs/protocol.md T1, T12)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.errors import BookieError
from kvstore.types import BookieId, LedgerId
from kvstore.wal import bookies as module
from kvstore.wal.bookies import BookieClients
from tests.waiting import PATIENCE_S

OWN = BookieId("b1-1")


class Stuck:
    """A storage that answers no read."""

    def read(self, *_: object, **__: object) -> None:
        """Wait for a sync that does not end."""


async def test_own_bookie_batch_times_out_earlier_than_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TIMEOUT_S", 0.01)
    own = BookieClients(cast(Any, SimpleNamespace(nursery=None)), lambda _: None, own=(OWN, cast(Any, Stuck())))
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 2 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BookieError, match="gave no batch in time"):
            await own.read_batch(OWN, LedgerId(1), range(9), bytes_max=100)
