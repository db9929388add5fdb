"""Why a bookie refuses, as the status that it answers; each refusal is counted."""

from __future__ import annotations

from kvstore.bookie.fencing import Verdict
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import Status

STATUS_OF = {
    Verdict.FENCED: Status.FENCED,
    Verdict.WRONG_KEY: Status.UNAUTHORIZED,
    Verdict.UNKNOWN: Status.UNKNOWN_LEDGER_STATE,
}


class Refusals:
    """The answers to requests that are refused. Each call counts one refusal."""

    def __init__(self, journal: Journal, statistics: Statistics) -> None:
        self._journal = journal
        self._statistics = statistics

    def by(self, verdict: Verdict) -> Status:
        """The sender may not do this, or it is not known whether it may."""
        self._statistics.refused_fenced += verdict is Verdict.FENCED
        self._statistics.refused_key += verdict is Verdict.WRONG_KEY
        self._statistics.refused_unknown += verdict is Verdict.UNKNOWN
        return STATUS_OF[verdict]

    def no_room(self) -> Status:
        """The disk is full, or too much waits for a sync."""
        if self._journal.is_full:
            self._statistics.refused_readonly += 1
            return Status.READ_ONLY
        return self.overload()

    def overload(self) -> Status:
        """Too much waits already."""
        self._statistics.refused_overload += 1
        return Status.TOO_MANY_REQUESTS
