"""Which ledgers are marked, and who may mark them (docs/protocol.md, A4, A7)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvstore.autorecovery.auditor_role import AuditorRole
from kvstore.autorecovery.traversal import every_ledger
from kvstore.env.clock import SystemClock
from kvstore.errors import MetadataDenied, MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import Stat
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from tests.meta.drivers import ClosedStore

B1, B2, B9 = BookieId("b1-1"), BookieId("b2-1"), BookieId("b9-1")
SEVEN = LedgerId(7)


def ledger(number: int) -> LedgerMetadata:
    return LedgerMetadata(LedgerId(number), Quorum(2, 2, 2), (Fragment(EntryId(0), (B1, B2)),), token=1)


class LosingStore(ClosedStore):
    """Ends its session when a ledger is read, once that is requested."""

    is_to_end = False

    async def get(self, path: str) -> tuple[bytes, Stat]:
        found = await super().get(path)
        if self.is_to_end and paths.ledger_of(path) is not None:
            self.expire()
            self.resume()
        return found


@pytest.fixture
def store() -> LosingStore:
    return LosingStore()


@pytest.fixture
async def role(store: LosingStore) -> AuditorRole:
    """The role of the elected auditor of a cluster with ledgers 7, 8 and 9."""
    await LayoutStore(store).ensure("id")
    role = AuditorRole(store, "n1", SystemClock())
    for number in (7, 8, 9):
        await role.ledgers.create(ledger(number))
    role.is_enabled = True
    assert await role.votes.stand()
    return role


async def test_mark_names_only_bookies_that_the_ledger_still_names(role: AuditorRole) -> None:
    await role.mark(SEVEN, [B9], "lost")
    assert await role.marks.get(SEVEN) is None
    await role.mark(SEVEN, [B2, B9], "lost")
    found = await role.marks.get(SEVEN)
    assert found is not None
    assert found.replicas == (B2,)
    await role.mark(LedgerId(77), [B1], "lost")
    assert [mark.ledger async for mark in role.marks.marked()] == [7], "a deleted one is not marked"


async def test_candidate_may_not_act_unless_elected_and_enabled(role: AuditorRole, store: LosingStore) -> None:
    role.ensure_may_act()
    store.suspend()
    with pytest.raises(MetadataUnavailable):
        role.ensure_may_act()
    store.resume()
    role.ensure_may_act()
    role.is_enabled = False
    with pytest.raises(MetadataUnavailable):
        role.ensure_may_act()


async def test_session_end_before_a_mark_prevents_the_mark(role: AuditorRole, store: LosingStore) -> None:
    store.is_to_end = True
    with pytest.raises(MetadataUnavailable, match="no longer the auditor"):
        await role.mark(SEVEN, [B1], "lost")
    assert await role.marks.get(SEVEN) is None


async def test_traversal_ends_when_its_auditor_loses_the_role(role: AuditorRole, store: LosingStore) -> None:
    seen = []

    async def walk() -> None:
        async for metadata in every_ledger(role.ledgers, role.ensure_may_act):
            seen.append(metadata.ledger)
            store.is_to_end = metadata.ledger == 7

    with pytest.raises(MetadataUnavailable):
        await walk()
    assert seen == [7, 8]


async def test_traversal_skips_unreadable_and_deleted_ledgers(role: AuditorRole, store: LosingStore) -> None:
    await store.set(paths.ledger(LedgerId(8)), b"?", 0)
    seen = []
    async for metadata in every_ledger(role.ledgers, role.ensure_may_act):
        seen.append(metadata.ledger)
        if metadata.ledger == 7:
            await role.ledgers.remove(LedgerId(9), -1)
    assert seen == [7]


# docs/protocol.md P34
@pytest.mark.parametrize("all_are", [False, True])
async def test_traversal_skips_a_ledger_closed_to_our_user_unless_all_are(
    role: AuditorRole, store: LosingStore, *, all_are: bool
) -> None:
    store.closed = frozenset({paths.ledger(LedgerId(8)), *([paths.LAYOUT] if all_are else [])})
    seen = []
    with pytest.raises(MetadataDenied) if all_are else nullcontext():
        async for metadata in every_ledger(role.ledgers, role.ensure_may_act):
            seen.append(metadata.ledger)
    assert seen == ([7] if all_are else [7, 9])


# docs/protocol.md P34
@pytest.mark.parametrize("all_are", [False, True])
async def test_mark_closed_to_our_user_is_skipped_unless_all_nodes_are(
    role: AuditorRole, store: LosingStore, *, all_are: bool
) -> None:
    """Otherwise the audit would begin again at each attempt, and never mark the ledgers after it."""
    await role.mark(SEVEN, [B1], "lost")
    store.closed = frozenset({paths.mark(SEVEN), *([paths.LAYOUT] if all_are else [])})
    with pytest.raises(MetadataDenied) if all_are else nullcontext():
        await role.mark(SEVEN, [B2], "lost")
    assert role.marked["lost"] == 1
