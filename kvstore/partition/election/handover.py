"""Decides when a leader hands its lead to the replica that the ring prefers, and defines their messages. Decides only.

    leader                      successor
      │ prepare(nonce, seq) ─────► applies up to seq, makes its next ledger; refuses if it cannot
      │ drains, RELEASE, seals
      │ take(record, term) ──────► replaces the leader's znode by its own, opens the log, serves
      │ ◄──────────────────── yes

Until RELEASE is sent, nothing has changed, and the leader continues if anything fails. After RELEASE the leader
continues in a new epoch unless its successor answers. `take` follows the seal: a successor that found the last ledger
open would fence, recover and close it, which costs a write and requests to bookies. Safety does not depend on any of
this: whichever replica opens the log fences it (docs/protocol.md, Election).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import orjson

from kvstore.errors import Corrupted, InvalidRequest
from kvstore.partition.election.ranking import LeaderRecord, Published
from kvstore.types import Seq, ServerId

PREPARE, TAKE = "prepare", "take"
"""Methods between replicas."""
CLOSE_BEHIND = 10_000
"""Number of mutations that a replica applies in well under a second."""
PREPARE_S = 1.0
"""Seconds that a successor may take to catch up and to make its ledger, while the leader continues."""
DRAIN_S = 0.25
"""A leader that cannot answer everything it was asked within this many seconds continues."""
TAKE_S = 2.0
"""If a successor has not answered within this many seconds, the former leader claims the lead again."""
HANDOVER_GAP_S = 3.0
"""Seconds between two handovers that involve one server: each costs its partition a moment, so there is never more than
one at once."""
RETRY_S = 2.0
"""Seconds until the next attempt after a handover that failed."""
STEADY_MIN_S, STEADY_MAX_S = 1.0, 600.0


# docs/protocol.md P26
@dataclass(frozen=True, slots=True)
class Prepare:
    """The leader's first message: the successor should get ready to take over the lead."""

    leader: ServerId
    nonce: str
    """Nonce of the intended process. It does not match another process of the same server, which has only just
    started."""
    seq: Seq
    """The leader's last sequence, which the successor must apply before it answers."""
    is_planned: bool
    """False if the leader has to go and does not wait for a better time."""

    def encode(self) -> bytes:
        return orjson.dumps([self.leader, self.nonce, self.seq, self.is_planned])

    @staticmethod
    def decode(body: bytes) -> Prepare:
        """Decode a message. Raises InvalidRequest."""
        try:
            leader, nonce, seq, is_planned = orjson.loads(body)
            return Prepare(ServerId(leader), str(nonce), Seq(int(seq)), bool(is_planned))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"expected [leader, nonce, seq, is planned], got {body!r}") from error


@dataclass(frozen=True, slots=True)
class Take:
    """The leader's last message: the leader has stopped answering, and the successor may replace `record` in the
    leader's znode while the version of the term is still `term`."""

    record: LeaderRecord
    term: int
    """Version of the partition's term. It increases with each claim, so a message that arrives late changes nothing."""

    def encode(self) -> bytes:
        return orjson.dumps([self.record.encode().decode(), self.term])

    @staticmethod
    def decode(body: bytes) -> Take:
        """Decode a message. Raises InvalidRequest."""
        try:
            record, term = orjson.loads(body)
            return Take(LeaderRecord.decode(record.encode()), int(term))
        except (ValueError, TypeError, AttributeError, Corrupted) as error:
            raise InvalidRequest(f"expected [record, term], got {body!r}") from error


class PreferredStability:
    """Tracks whether the preferred replica has been up and close behind the leader for long enough, as the same
    process.

    The required time doubles with each handover, so that a replica that cannot keep the lead does not receive it again
    and again.
    """

    def __init__(self, steady_s: float) -> None:
        self._wanted_s = steady_s
        self._nonce = ""
        self._since = inf
        self._not_before = 0.0

    def is_due(self, published: Published | None, leader_seq: Seq, now: float, *, spread: float) -> bool:
        """Return True if the leader should hand over now. `published` is what the preferred replica publishes, or None
        if it is not up. `spread`, a number from 0 to 1, differs between partitions, so that they do not all hand over
        at the same time."""
        if published is None or published.is_stopped or published.seq + CLOSE_BEHIND < leader_seq:
            self.reset()
            return False
        if published.nonce != self._nonce:
            self._nonce, self._since = published.nonce, now
        return now - self._since >= self._wanted_s * (1 + spread / 2) and now >= self._not_before

    @property
    def nonce(self) -> str:
        """Nonce of the process that has been up all the time."""
        return self._nonce

    def reset(self) -> None:
        """Start counting again, because the replica is not up, applies nothing, or cannot be checked."""
        self._nonce, self._since = "", inf

    def tried(self, now: float, *, released: bool) -> None:
        """Record that a handover was attempted. `released` is True if this leader stopped for it."""
        self._not_before = now + RETRY_S
        if released:
            self._wanted_s = min(max(self._wanted_s, STEADY_MIN_S) * 2, STEADY_MAX_S)
            self.reset()


class HandoverTurns:
    """Limits how often one server takes part in handovers. Shared by all its partitions."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def take(self, now: float) -> bool:
        """Return True if this server may take part in a handover now."""
        if now < self._free_at:
            return False
        self._free_at = now + HANDOVER_GAP_S
        return True
