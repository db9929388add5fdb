"""Admits adds for which no ledger's metadata stand, where the operator allows it: those of Apache's own benchmark of a
bookie, and of others who speak to bookies without a ledger of their own (docs/protocol.md, B28)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from kvstore.bookie.adds import Adds
from kvstore.bookie.admission import Admission
from kvstore.bookie.digests import Digests, proves_itself
from kvstore.bookie.facts import Facts
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.record import ADMITTED
from kvstore.bookie.journal.room import JournalFull
from kvstore.bookie.keys import KEY_MAX
from kvstore.bookie.refusals import Refusals
from kvstore.bookie.sparing import SparingLog
from kvstore.env.ports import Clock
from kvstore.proto.bookkeeper import PACKET_MAX, Status
from kvstore.proto.digest import HEADER
from kvstore.types import NO_ENTRY, LedgerMetadata, LedgerState

log = logging.getLogger(__name__)

Done = Callable[[Status], Any]
KEPT_S = 900.0
"""How long the entries of a ledger without metadata stay after the last add to it, and after a start of the bookie."""


class OrdinaryAdd(Protocol):
    """Takes an add as if nobody allowed raw ones: kvstore.bookie.storage.BookieStorage.add."""

    def __call__(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None: ...


def is_nobodys(metadata: LedgerMetadata | None) -> bool:
    """Whether no entry of the ledger was ever confirmed, nor can be: there is none, or it is closed without any."""
    return metadata is None or (metadata.state is LedgerState.CLOSED and metadata.last_entry == NO_ENTRY)


class RawAdds:
    """Of one bookie; off unless `is_on`."""

    def __init__(
        self,
        clock: Clock,
        *,
        is_on: bool,
        inventory: Inventory,
        facts: Facts,
        adds: Adds,
        digests: Digests,
        admission: Admission,
        refusals: Refusals,
        ordinary: OrdinaryAdd,
    ) -> None:
        self.is_on = is_on
        self._clock, self._started_at = clock, clock.now()
        self._inventory, self._facts, self._adds = inventory, facts, adds
        self._digests, self._admission, self._refusals = digests, admission, refusals
        self._ordinary = ordinary
        self._heard_at: dict[int, float] = {}
        """Of each ledger that was admitted raw since the start: when its last add came. Those that are gone are left
        out when `keeps` is asked about them."""
        self._log = SparingLog(log)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Store the packet of an ordinary add. If it is raw neither its key nor its digest is known to anybody."""
        if not self._may_be_raw(ledger, entry, body, key):
            self._ordinary(ledger, entry, body, key, recovery=False, done=done)
        elif ledger in self._heard_at and ledger in self._inventory.ledgers:
            self._take(ledger, entry, body, key, done)
        elif not self._admission.ask_metadata(
            ledger, len(body), lambda answer: self._answered(ledger, entry, body, key, answer, done)
        ):
            done(self._refusals.overload())

    def _may_be_raw(self, ledger: int, entry: int, body: bytes, key: bytes) -> bool:
        if not HEADER.size <= len(body) <= PACKET_MAX or not 0 < len(key) <= KEY_MAX or ledger < 0 or entry < 0:
            return False
        if ledger in self._inventory.tombstones or HEADER.unpack_from(body)[:2] != (ledger, entry):
            return False
        found = self._inventory.ledgers.get(ledger)
        if found is None:
            return True
        if found.key and (found.key != key or found.is_fenced):
            return False
        return ledger in self._heard_at or not (
            found.is_admitted and (proves_itself(body) or self._digests.knows(ledger, key))
        )

    def _answered(
        self, ledger: int, entry: int, body: bytes, key: bytes, answer: LedgerMetadata | Exception | None, done: Done
    ) -> None:
        is_raw = not isinstance(answer, Exception) and is_nobodys(answer) and self._may_be_raw(ledger, entry, body, key)
        if not is_raw:
            self._ordinary(ledger, entry, body, key, recovery=False, done=done)
            return
        if ledger not in self._heard_at:
            self._log.say(logging.WARNING, "ledger=%d has no metadata of its own; raw adds to it are admitted", ledger)
        try:
            self._facts.first_contact(ledger, key, flags=ADMITTED, size=len(body))
        except JournalFull:
            done(self._refusals.no_room())
            return
        self._take(ledger, entry, body, key, done)

    def _take(self, ledger: int, entry: int, body: bytes, key: bytes, done: Done) -> None:
        self._heard_at[ledger] = self._clock.now()
        self._adds.take(ledger, entry, body, key, False, HEADER.unpack_from(body)[2], done)

    def keeps(self, ledger: int) -> bool:
        """Whether the ledger stays though it has no metadata."""
        if not self.is_on:
            return False
        if self._clock.now() - max(self._started_at, self._heard_at.get(ledger, 0.0)) < KEPT_S:
            return True
        self._heard_at.pop(ledger, None)
        return False
