"""When a leader hands its lead to the replica that the ring prefers, and how the two speak about it. Decides only.

    leader                      successor
      │ prepare(nonce, seq) ─────► it applies up to seq, makes its next ledger; refuses if it cannot
      │ drains, RELEASE, seals
      │ take(record, term) ──────► puts its own znode in the place of the leader's, opens the log, serves
      │ ◄──────────────────── yes

Until RELEASE is sent nothing has happened, and the leader goes on if anything fails. After it the leader goes on in a
new epoch unless its successor answers. `take` comes behind the seal: a successor that found the last ledger open would
fence, recover and close it, so the write of its end would not be saved, and bookies be asked besides. Safety does not
hang on any of this: whoever opens the log fences it (docs/protocol.md, Election).
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
"""Mutations: applied in well under a second."""
PREPARE_S = 1.0
"""How long a successor may take to catch up and to make its ledger, while the leader goes on."""
DRAIN_S = 0.25
"""A leader that cannot answer all that it was asked in this time goes on."""
TAKE_S = 2.0
"""When a successor has not answered by then, the former leader claims the lead again."""
APART_S = 3.0
"""Between two hand-overs in which a server has a part: each costs its partition a moment, so never several at once."""
AGAIN_S = 2.0
"""After a hand-over that did not come about."""
STEADY_MIN_S, STEADY_MAX_S = 1.0, 600.0


# docs/protocol.md P26
@dataclass(frozen=True, slots=True)
class Prepare:
    """The leader's first word: be ready to take the lead over."""

    leader: ServerId
    nonce: str
    """Of the process that is meant: another one of the same server has only just started."""
    seq: Seq
    """The leader's last sequence: what the successor must have applied."""
    is_planned: bool
    """False if the leader has to go: it does not wait for a better time then."""

    def encode(self) -> bytes:
        return orjson.dumps([self.leader, self.nonce, self.seq, self.is_planned])

    @staticmethod
    def decode(body: bytes) -> Prepare:
        """Raises InvalidRequest."""
        try:
            leader, nonce, seq, is_planned = orjson.loads(body)
            return Prepare(ServerId(leader), str(nonce), Seq(int(seq)), bool(is_planned))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"want [leader, nonce, seq, is planned], got {body!r}") from error


@dataclass(frozen=True, slots=True)
class Take:
    """The leader's last word: it answers nothing any more, and `record` may be replaced while `term` stands."""

    record: LeaderRecord
    term: int
    """Version of the partition's term. It rises with each claim, so a word that comes too late changes nothing."""

    def encode(self) -> bytes:
        return orjson.dumps([self.record.encode().decode(), self.term])

    @staticmethod
    def decode(body: bytes) -> Take:
        """Raises InvalidRequest."""
        try:
            record, term = orjson.loads(body)
            return Take(LeaderRecord.decode(record.encode()), int(term))
        except (ValueError, TypeError, AttributeError, Corrupted) as error:
            raise InvalidRequest(f"want [record, term], got {body!r}") from error


class Steady:
    """Whether the preferred replica has been up and close behind for long enough: the same process all the time.

    The time doubles with each hand-over, so that a replica which cannot keep the lead does not get it again and again.
    """

    def __init__(self, steady_s: float) -> None:
        self._wanted_s = steady_s
        self._nonce = ""
        self._since = inf
        self._not_before = 0.0

    def look(self, said: Published | None, leader_seq: Seq, now: float, *, spread: float) -> bool:
        """Whether to hand over now. `said` is what the preferred replica publishes, `spread` a number from 0 to 1
        that tells partitions apart: those whose time began together do not end together."""
        if said is None or said.is_stopped or said.seq + CLOSE_BEHIND < leader_seq:
            self.reset()
            return False
        if said.nonce != self._nonce:
            self._nonce, self._since = said.nonce, now
        return now - self._since >= self._wanted_s * (1 + spread / 2) and now >= self._not_before

    @property
    def nonce(self) -> str:
        """Of the process that has been seen all the time."""
        return self._nonce

    def reset(self) -> None:
        """It is not up, or applies nothing, or nobody can tell: begin again."""
        self._nonce, self._since = "", inf

    def tried(self, now: float, *, released: bool) -> None:
        """A hand-over was begun; `released` if this leader stopped for it."""
        self._not_before = now + AGAIN_S
        if released:
            self._wanted_s = min(max(self._wanted_s, STEADY_MIN_S) * 2, STEADY_MAX_S)
            self.reset()


class Turns:
    """One server's share in hand-overs, all its partitions together."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def take(self, now: float) -> bool:
        """Whether this server may take part in a hand-over now."""
        if now < self._free_at:
            return False
        self._free_at = now + APART_S
        return True
