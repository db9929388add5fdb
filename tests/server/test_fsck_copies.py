"""What fsck takes a bookie's failure for."""

import asyncio
from typing import Any, cast

import pytest

from kvstore.errors import BookieError, StoreError
from kvstore.server.fsck import SILENT_AFTER, LedgerCopies
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.connection import error_of

B1, B2 = BookieId("b1"), BookieId("b2")
IO_ERROR = 501


class Failing:
    """Bookies that all fail alike."""

    def __init__(self, error: StoreError) -> None:
        self.error = error

    async def read(self, bookie: BookieId, ledger: LedgerId, entry: EntryId) -> Any:
        raise self.error


@pytest.mark.parametrize("status", [IO_ERROR, None], ids=["answers with an error", "does not answer"])
async def test_a_bookie_of_damaged_entries_is_not_taken_for_one_that_is_away(status: int | None) -> None:
    error = error_of(B1, status) if status else BookieError("no answer")
    assert error is not None
    metadata = LedgerMetadata(LedgerId(1), Quorum(2, 2, 2), (Fragment(EntryId(0), (B1, B2)),))
    copies = LedgerCopies(cast(Any, Failing(error)), metadata)
    found = await asyncio.gather(*(copies.read(B1, EntryId(entry)) for entry in range(SILENT_AFTER)))
    assert found == [None] * SILENT_AFTER
    assert copies.is_silent(B1) is (status is None)
