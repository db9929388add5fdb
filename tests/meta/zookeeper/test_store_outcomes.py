"""The meaning of kazoo's errors for a call: refused, not sent, or possibly done. No server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kazoo import exceptions as kazoo

from kvstore.errors import MetadataError, MetadataUnavailable, MetadataUnknown, NoSuchNode, VersionConflict
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Change, SetData
from kvstore.meta.zookeeper.session import NotSent
from kvstore.meta.zookeeper.store import ZooKeeperStore, _error
from kvstore.types import PartitionId
from kvstore.wal.lists import LedgerLists


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotSent("the connection is CONNECTING"), MetadataUnavailable),
        (kazoo.BadVersionError(), VersionConflict),
        (kazoo.NoNodeError(), NoSuchNode),
        (kazoo.NoChildrenForEphemeralsError(), MetadataError),
        (kazoo.QuotaExceededError(), MetadataError),
        (kazoo.ConnectionLoss(), MetadataUnknown),
        (kazoo.MarshallingError(), MetadataUnknown),  # of any error of the server's after the change
        (kazoo.SystemZookeeperError(), MetadataUnknown),
        (kazoo.RequestTimeoutError(), MetadataUnknown),
        (RuntimeError("xids do not match"), MetadataUnknown),
        (ValueError("an answer that cannot be decoded"), MetadataUnknown),
    ],
)
def test_call_is_reported_as_refused_only_when_that_is_certain(error: Exception, said: type[MetadataError]) -> None:
    assert type(_error("/a", error)) is said
    assert str(_error("/a", error)).startswith("/a")


async def test_transaction_with_missing_results_may_have_been_done() -> None:
    store: Any = object.__new__(ZooKeeperStore)
    store._chroot = ""

    async def answered(*_: object) -> list[object]:
        return []

    store._call = answered
    with pytest.raises(MetadataUnknown, match="expected 1 results, got 0"):
        await store.multi([SetData("/a", b"", 0)])


# docs/protocol.md G12
async def test_written_list_is_found_although_its_answer_was_unreadable() -> None:
    """The write was reported as refused, and the ledger that had just been listed was deleted."""

    class Store(MemoryStore):
        is_choking = True

        async def multi(self, changes: Sequence[Change]) -> None:
            await super().multi(changes)
            if self.is_choking:
                self.is_choking = False
                raise _error(changes[0].path, kazoo.MarshallingError())

    lists, partition = LedgerLists(Store()), PartitionId("p1")
    listed, version = await lists.make(partition)
    assert await lists.write(partition, listed, version) == version + 1
