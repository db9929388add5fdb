"""A summary of all bookies of one metadata store, with the fields of Apache BookKeeper's ClusterInfoService."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.meta.auditor_votes import auditor_or_none
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.recovery_settings import RecoverySettings
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication


class BookieSummary(NamedTuple):
    """The bookies and the state of auto-recovery at one moment."""

    auditor: str | None
    """Name of the elected auditor; None if there is none."""
    is_under_replicated: bool
    """True if any ledger is marked as under-replicated. A marked ledger may be fully replicated already."""
    is_replication_enabled: bool
    """False while an operator has disabled auto-recovery."""
    bookies: int
    """Number of bookies that have a cookie, whether they run or not."""
    writable: int
    readonly: int


async def read_summary(store: MetadataStore) -> BookieSummary:
    """Read the summary of all bookies. Costs about ten requests to the metadata store, however many ledgers are marked.

    Raises MetadataUnavailable or MetadataUnknown.
    """
    writable, readonly = await RegistrationClient(store).names_by_state()
    known = frozenset(await CookieStore(store).bookies())
    return BookieSummary(
        auditor=await auditor_or_none(store),
        is_under_replicated=await _has_mark(Underreplication(store)),
        is_replication_enabled=await RecoverySettings(store).is_enabled(),
        bookies=len(known | writable | readonly),
        writable=len(writable),
        readonly=len(readonly),
    )


async def _has_mark(marks: Underreplication) -> bool:
    async for _ in marks.marked_ledgers():
        return True
    return False
