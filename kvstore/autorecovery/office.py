"""The auditor's office: who has it, and what holds for all that is done in it."""

from __future__ import annotations

from kvstore.env.ports import Clock
from kvstore.errors import MetadataUnavailable, NoSuchLedger
from kvstore.meta.auditor_votes import AuditorVotes
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerId
from kvstore.wal.repair import bookies_of


class Office:
    """The office as one candidate sees it. Calls raise MetadataError."""

    def __init__(self, store: MetadataStore, candidate: str, clock: Clock) -> None:
        self.votes = AuditorVotes(store, candidate)
        self.marks = Underreplication(store)
        self.ledgers = LedgerStore(store)
        self._clock = clock
        self.is_enabled = False
        """What the switch said when it was last looked at."""
        self.marked: dict[str, int] = {"lost": 0, "entries": 0, "placement": 0}
        """Marks made or grown, by reason."""

    @property
    def may_act(self) -> bool:
        """Whether this candidate is the auditor, and auto-recovery is on."""
        return self.is_enabled and self.votes.is_auditor

    # docs/protocol.md A4
    def go_on(self) -> None:
        """Raise MetadataUnavailable unless it may act: whatever is under way ends here."""
        if not self.may_act:
            raise MetadataUnavailable("this node is not the auditor any more, or auto-recovery is off")

    async def mark(self, ledger: LedgerId, missing: list[BookieId], why: str) -> None:
        """Mark a ledger if it is still there and names them still: since it was looked at it may have been repaired, or
        deleted by its owner."""
        try:
            metadata, _ = await self.ledgers.read_latest(ledger)
        except NoSuchLedger:
            return
        named = [bookie for bookie in missing if bookie in bookies_of(metadata)]
        self.go_on()
        if named and await self.marks.mark(ledger, named, self._clock.wall_ms(), rewrite=why == "entries"):
            self.marked[why] += 1
