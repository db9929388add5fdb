"""How fsck classifies failures of a bookie."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.proto.bookkeeper import Status
from kvstore.server.fsck.check import SILENT_AFTER, LedgerCopies
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal import bookies
from kvstore.wal.bookies import BookieClients

B1, B2 = BookieId("b1"), BookieId("b2")


class Answering:
    """A bookie that gives the same answer to every read, or none."""

    def __init__(self, status: Status | None) -> None:
        self.status = status

    def read(self, ledger: int, entry: int, *, done: Any, **_: object) -> None:
        if self.status is not None:
            done(self.status, entry, None, None)


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE, None], ids=str)
async def test_bookie_with_damaged_entries_is_not_down(status: Status | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookies, "READ_TIMEOUT_S", 0.01)
    metadata = LedgerMetadata(LedgerId(1), Quorum(2, 2, 2), (Fragment(EntryId(0), (B1, B2)),))
    own = B1, cast(Any, Answering(status))
    copies = LedgerCopies(BookieClients(cast(Any, SimpleNamespace(nursery=None)), lambda _: None, own=own), metadata)
    found = await asyncio.gather(*(copies.read(B1, EntryId(entry)) for entry in range(SILENT_AFTER)))
    assert found == [None] * SILENT_AFTER
    assert copies.is_silent(B1) is (status is None)
