"""Explicit last-add-confirmed packets, with which a writer reports its last confirmed entry while it adds no
entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.facts import Facts
from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, RecordKind
from kvstore.bookie.journal.room import JournalFull, Use
from kvstore.bookie.keys import KEY_MAX, KeyChecks
from kvstore.bookie.ledger import lac_of
from kvstore.bookie.refusals import BookieRefusals
from kvstore.proto.bookkeeper import Status

Done = Callable[[Status], Any]


class ExplicitLacs:
    """Keeps the last explicit LAC packet of each ledger. The digests of the packets must be verified already."""

    def __init__(
        self,
        inventory: Inventory,
        journal: Journal,
        *,
        facts: Facts,
        keys: KeyChecks,
        admission: LedgerAdmission,
        refusals: BookieRefusals,
    ) -> None:
        self._inventory = inventory
        self._journal = journal
        self._facts = facts
        self._keys = keys
        self._admission = admission
        self._refusals = refusals

    def keep(self, ledger: int, body: bytes, key: bytes, done: Done) -> None:
        """Show the packet to readers if the sender's key is right. `done` gets OK once the packet is on disk, otherwise
        the reason of the refusal."""
        if ledger in self._inventory.tombstones or not 0 < len(key) <= KEY_MAX:
            done(Status.FENCED if key else Status.BAD_REQUEST)
        else:
            self._keys.when_right(ledger, key, partial(self._note, ledger, body, key, done))

    def _note(self, ledger: int, body: bytes, key: bytes, done: Done, status: Status, may_add: bool) -> None:
        if status is not Status.OK or ledger in self._inventory.tombstones:
            done(Status.FENCED if status is Status.OK else status)
            return
        if self._journal.is_full:
            done(self._refusals.no_space())
            return
        is_new = may_add and self._keys.judge_add(ledger, key, recovery=False) is WriteVerdict.ASK
        try:
            found = self._facts.first_contact(ledger, key, flags=ADMITTED if is_new else 0)
            self._facts.note(RecordKind.LAC, 0, found, lac_of(body), body, urgent=False, use=Use.ADD)
        except JournalFull:
            done(self._refusals.no_space())
            return
        found.set_explicit_lac(body)
        self._journal.after(found.last_group, lambda: done(Status.OK), urgent=False)
        if not (found.is_admitted or found.is_fenced):
            self._admit_ahead(ledger, key)

    def _admit_ahead(self, ledger: int, key: bytes) -> None:
        """Admit a writer that sends a LAC before its first add, so that the add does not have to wait for the metadata
        store."""

        def resume(_: WriteVerdict, of_add: WriteVerdict) -> None:
            if of_add is WriteVerdict.ADMIT and self._keys.judge_add(ledger, key, recovery=False) is WriteVerdict.ASK:
                try:
                    self._facts.first_contact(ledger, key, flags=ADMITTED)
                except JournalFull:
                    self._refusals.no_space()

        self._admission.ask(ledger, key, len(key), resume)
