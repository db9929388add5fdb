"""Judges senders by the key that they present. If this bookie's own records are not enough, the answer waits for the
ledger's metadata. fencing.py makes the decisions."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.fencing import WriteVerdict, judge_add, judge_key
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.refusals import BookieRefusals
from kvstore.proto.bookkeeper import Status

KEY_MAX = 64


class KeyChecks:
    """Checks the keys that senders present to this bookie."""

    def __init__(self, inventory: Inventory, admission: LedgerAdmission, refusals: BookieRefusals) -> None:
        self._ledgers = inventory.ledgers
        self._tombstones = inventory.tombstones
        self._admission = admission
        self._refusals = refusals

    def judge_add(self, ledger: int, key: bytes, recovery: bool) -> WriteVerdict:
        """Judge an add from this bookie's own records. Returns ASK if they are not enough."""
        is_tombstoned = ledger in self._tombstones
        return judge_add(self._ledgers.get(ledger), key=key, recovery=recovery, is_tombstoned=is_tombstoned)

    # docs/protocol.md B12
    def may_ask(self, ledger: int, key: bytes, *, is_writers: bool) -> bool:
        """Return True if a request with this key may have to wait for the metadata store: a fence, a
        last-add-confirmed, or (`is_writers`) an ordinary add of the ledger's writer."""
        found = self._ledgers.get(ledger)
        if ledger in self._tombstones or (found is not None and found.is_fenced and is_writers):
            return False
        return judge_key(found, key) is WriteVerdict.ASK or (found is not None and is_writers and not found.is_admitted)

    # docs/protocol.md B13
    def when_right(self, ledger: int, key: bytes, answer: Callable[[Status, bool], None]) -> None:
        """Check the key, and call `answer` with OK or the reason of the refusal. The second argument is True if the
        metadata store has just confirmed that the ledger's writer may add here. `answer` is called at once unless the
        metadata must be read."""
        verdict = judge_key(self._ledgers.get(ledger), key)
        if verdict is not WriteVerdict.ASK:
            self._answer(verdict, False, answer)
            return

        def resume(of_key: WriteVerdict, of_add: WriteVerdict) -> None:
            known = judge_key(self._ledgers.get(ledger), key)
            self._answer(of_key if known is WriteVerdict.ASK else known, of_add is WriteVerdict.ADMIT, answer)

        if not self._admission.ask(ledger, key, len(key), resume):
            answer(self._refusals.overload(), False)

    def _answer(self, verdict: WriteVerdict, may_add: bool, answer: Callable[[Status, bool], None]) -> None:
        if verdict is WriteVerdict.ADMIT:
            answer(Status.OK, may_add)
        else:
            answer(self._refusals.by(verdict), False)
