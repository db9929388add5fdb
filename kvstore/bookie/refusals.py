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
    """The answers to refused requests. Each call counts one refusal."""

    def __init__(self, journal: Journal, statistics: Statistics) -> None:
        self._journal = journal
        self._statistics = statistics
        self._log = RateLimitedLog(log)

    def by(self, verdict: WriteVerdict) -> Status:
        """Refuse a sender that has no permission, or whose permission is unknown."""
        self._statistics.refused_fenced += verdict is WriteVerdict.FENCED
        self._statistics.refused_key += verdict is WriteVerdict.WRONG_KEY
        self._statistics.refused_unknown += verdict is WriteVerdict.UNKNOWN
        return STATUS_OF[verdict]

    # docs/protocol.md B36
    def other_entry(self, ledger: int, entry: int) -> Status:
        """Refuse a packet because the ledger has another payload of its entry: another writer has this ledger."""
        self._statistics.refused_other_entry += 1
        self._log.say(
            logging.ERROR,
            "refused another payload of a stored entry; two writers had this ledger id ledger=%d entry=%d",
            ledger,
            entry,
        )
        return Status.FENCED

    def unreadable(self) -> Status:
        """Refuse a packet because the stored copy of its entry cannot be compared with it. It is neither stored nor
        known to be another writer's."""
        self._statistics.refused_unknown += 1
        return Status.IO_ERROR

    def no_room(self) -> Status:
        """Refuse because the disk is full, or too much waits for a sync."""
        if self._journal.is_full:
            self._statistics.refused_readonly += 1
            return Status.READ_ONLY
        return self.overload()

    def overload(self) -> Status:
        """Refuse because too much waits already."""
        self._statistics.refused_overload += 1
        return Status.TOO_MANY_REQUESTS
