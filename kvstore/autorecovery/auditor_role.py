"""The auditor role: which node holds it, and the checks that every action of the auditor shares."""

from __future__ import annotations

import logging

from kvstore.env.ports import Clock
from kvstore.errors import MetadataUnavailable, NoSuchLedger, UndecodableNode
from kvstore.meta.auditor_votes import AuditorVotes
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerId
from kvstore.wal.repair import bookies_of

log = logging.getLogger(__name__)


class AuditorRole:
    """The auditor role as one candidate sees it. Calls raise MetadataError."""

    def __init__(self, store: MetadataStore, candidate: str, clock: Clock) -> None:
        self.votes = AuditorVotes(store, candidate)
        self.marks = Underreplication(store)
        self.ledgers = LedgerStore(store)
        self._clock = clock
        self.is_enabled = False
        """The last known state of the auto-recovery switch."""
        self.marked: dict[str, int] = {"lost": 0, "entries": 0, "placement": 0}
        """Number of marks created or extended, by reason."""

    @property
    def may_act(self) -> bool:
        """True if this candidate is the auditor and auto-recovery is on."""
        return self.is_enabled and self.votes.is_auditor

    # docs/protocol.md A4
    def ensure_may_act(self) -> None:
        """Raise MetadataUnavailable, which aborts the current work, unless this candidate may act."""
        if not self.may_act:
            raise MetadataUnavailable("this node is no longer the auditor, or auto-recovery is off")

    async def mark(self, ledger: LedgerId, missing: list[BookieId], why: str) -> None:
        """Mark the ledger as under-replicated at the `missing` bookies. `why` is a key of `marked`. Does nothing if the
        ledger was deleted or no longer names these bookies, because it may have changed since the caller read it. Logs
        a mark that another user of the store has closed, because the other ledgers must still be marked."""
        try:
            metadata, _ = await self.ledgers.read_latest(ledger)
            named = [bookie for bookie in missing if bookie in bookies_of(metadata)]
            self.ensure_may_act()
            if named and await self.marks.mark(ledger, named, self._clock.wall_ms(), rewrite=why == "entries"):
                self.marked[why] += 1
        except NoSuchLedger:
            return
        except UndecodableNode as error:
            log.warning("ledger not marked ledger=%d missing=%s error=%s", ledger, missing, error)
