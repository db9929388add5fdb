"""Admits adds that do not come from a ledger's writer, if the operator allows it. Apache's bookie benchmark needs
this. It creates a ledger, closes it, and then adds entries with a key of zeros and without digests
(docs/protocol.md, B28)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from kvstore.bookie.adds import Adds
from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.digests import Digests, proves_itself
from kvstore.bookie.facts import Facts
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.record import ADMITTED
from kvstore.bookie.journal.room import JournalFull
from kvstore.bookie.keys import KEY_MAX
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.refusals import BookieRefusals
from kvstore.env.ports import Clock
from kvstore.proto.bookkeeper import PACKET_MAX, Status
from kvstore.proto.digest import HEADER, master_key
from kvstore.types import NO_ENTRY, LedgerMetadata, LedgerState

log = logging.getLogger(__name__)

Done = Callable[[Status], Any]
BELIEVED_S = 5.0
"""Seconds for which an answer of the metadata store about a ledger is trusted."""
BELIEVED_MAX = 1024
"""Maximum number of ledgers with a trusted answer."""


class OrdinaryAdd(Protocol):
    """Handles an add as if raw adds were not allowed. Implemented by kvstore.bookie.storage.BookieStorage.add."""

    def __call__(self, ledger: int, entry: int, body: bytes, key: bytes, *, recovery: bool, done: Done) -> None: ...


def has_no_writer(metadata: LedgerMetadata | None, key: bytes) -> bool:
    """Return True if the ledger is closed and empty, so that no entry of it was or will be confirmed, and the sender of
    this key is not its writer. An id without a ledger does not qualify. A ledger may get this id later, and its
    readers, who present no key, would find foreign entries here."""
    if metadata is None or master_key(metadata.password) == key:
        return False
    return metadata.state is LedgerState.CLOSED and metadata.last_entry == NO_ENTRY


class RawAdds:
    """The raw adds of one bookie. They are refused unless `is_on`."""

    def __init__(
        self,
        clock: Clock,
        *,
        is_on: bool,
        inventory: Inventory,
        facts: Facts,
        adds: Adds,
        digests: Digests,
        admission: LedgerAdmission,
        refusals: BookieRefusals,
        ordinary: OrdinaryAdd,
    ) -> None:
        self.is_on = is_on
        self._clock = clock
        self._inventory, self._facts, self._adds = inventory, facts, adds
        self._digests, self._admission, self._refusals = digests, admission, refusals
        self._ordinary = ordinary
        self._confirmed_at: dict[int, float] = {}
        """Boot-time clock when the metadata store confirmed that a ledger has no writer, by ledger."""
        self._log = RateLimitedLog(log)

    def add(self, ledger: int, entry: int, body: bytes, key: bytes, *, done: Done) -> None:
        """Store the packet of an add that is not a recovery add. The digest of a raw add is not verified. An add that
        is not raw is handled as an ordinary one. `done` gets the same statuses as in BookieStorage.add."""
        if not self._may_be_raw(ledger, entry, body, key):
            self._ordinary(ledger, entry, body, key, recovery=False, done=done)
        elif ledger in self._inventory.ledgers and self._is_believed(ledger):
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
        return not (found.is_admitted and (proves_itself(body) or self._digests.knows(ledger, key)))

    def _is_believed(self, ledger: int) -> bool:
        confirmed_at = self._confirmed_at.get(ledger)
        return confirmed_at is not None and self._clock.now() - confirmed_at < BELIEVED_S

    def _answered(
        self, ledger: int, entry: int, body: bytes, key: bytes, answer: LedgerMetadata | Exception | None, done: Done
    ) -> None:
        is_raw = not isinstance(answer, Exception) and has_no_writer(answer, key)
        if not (is_raw and self._may_be_raw(ledger, entry, body, key)):
            self._ordinary(ledger, entry, body, key, recovery=False, done=done)
            return
        try:
            self._facts.first_contact(ledger, key, flags=ADMITTED, size=len(body))
        except JournalFull:
            done(self._refusals.no_space())
            return
        if not self._is_believed(ledger):
            self._believe(ledger)
        self._take(ledger, entry, body, key, done)

    def _believe(self, ledger: int) -> None:
        self._log.emit(logging.WARNING, "raw adds admitted to a closed and empty ledger ledger=%d", ledger)
        if len(self._confirmed_at) >= BELIEVED_MAX:
            self._confirmed_at.clear()
        self._confirmed_at[ledger] = self._clock.now()

    def _take(self, ledger: int, entry: int, body: bytes, key: bytes, done: Done) -> None:
        self._adds.take(ledger, entry, body, key, False, NO_ENTRY, done)
