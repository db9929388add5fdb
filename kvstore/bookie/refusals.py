"""The reasons why a bookie refuses requests, as the status that it answers; each refusal is counted."""

from __future__ import annotations

import logging

from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import Status

log = logging.getLogger(__name__)

STATUS_OF = {
    WriteVerdict.FENCED: Status.FENCED,
    WriteVerdict.WRONG_KEY: Status.UNAUTHORIZED,
    WriteVerdict.UNKNOWN: Status.UNKNOWN_LEDGER_STATE,
}


class BookieRefusals:
    """Chooses the status that answers a refused request. Each call counts one refusal."""

    def __init__(self, journal: Journal, statistics: Statistics) -> None:
        self._journal = journal
        self._statistics = statistics
        self._log = RateLimitedLog(log)

    def by(self, verdict: WriteVerdict) -> Status:
        """Refuse a sender whose verdict is not ADMIT."""
        self._statistics.refused_fenced += verdict is WriteVerdict.FENCED
        self._statistics.refused_key += verdict is WriteVerdict.WRONG_KEY
        self._statistics.refused_unknown += verdict is WriteVerdict.UNKNOWN
        return STATUS_OF[verdict]

    # docs/protocol.md B36
    def other_entry(self, ledger: int, entry: int) -> Status:
        """Refuse a packet because the ledger already has another payload for this entry, which means that the ledger
        has another writer."""
        self._statistics.refused_other_entry += 1
        self._log.emit(
            logging.ERROR,
            "refused another payload of a stored entry; two writers had this ledger id ledger=%d entry=%d",
            ledger,
            entry,
        )
        return Status.FENCED

    def unreadable(self) -> Status:
        """Refuse a packet because the stored copy of its entry cannot be compared with it. The bookie neither stores
        the packet nor blames another writer."""
        self._statistics.refused_unknown += 1
        return Status.IO_ERROR

    def no_space(self) -> Status:
        """Refuse a request because the disk is full or too many bytes wait for a sync."""
        if self._journal.is_full:
            self._statistics.refused_readonly += 1
            return Status.READ_ONLY
        return self.overload()

    def overload(self) -> Status:
        """Refuse a request because too many requests wait already."""
        self._statistics.refused_overload += 1
        return Status.TOO_MANY_REQUESTS
