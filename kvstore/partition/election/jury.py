"""Decides which of a partition's replicas are right if the states of two differ. Decides only (docs/protocol.md, P35).

Each replica remembers its checksums at the latest checked sequences. Each checksum builds on the previous one, so
states that have once differed also differ at every later check. Any check after the first difference therefore shows
which replicas agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from kvstore.types import Seq, ServerId

PATIENCE_S = 10.0
"""Seconds for which a replica that agrees with its log waits for replicas that have not reported their checksums."""
AGREEING_MIN = 2
"""A replica needs another one that agrees: of two replicas that differ either may be damaged."""


class StateVerdict(Enum):
    """The result of an investigation of one replica's state."""

    RIGHT = auto()
    """A majority agrees with this replica. Or all replicas agree, so that nothing differs anymore, whichever replicas
    are copies."""
    OUTVOTED = auto()
    """A majority has a different checksum, so this replica's copy is damaged."""
    SPLIT = auto()
    """All replicas have reported, and there is no majority."""
    OPEN = auto()
    """The outcome depends on replicas that have not reported."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """A checksum that an operator has declared right. A replica with a different checksum at that sequence is
    damaged."""

    server: ServerId
    seq: Seq
    crc: int


Checks = Mapping[Seq, int]
"""Sequence → checksum there."""
Origins = Mapping[ServerId, frozenset[ServerId]]
"""Replica → the replicas through which its state came to it as a copy."""
NO_ORIGINS: Origins = MappingProxyType({})


def judge(
    me: ServerId,
    since: Seq,
    replicas: Sequence[ServerId],
    checks: Mapping[ServerId, Checks],
    trusted: Trusted | None = None,
    origins: Origins = NO_ORIGINS,
) -> StateVerdict:
    """Judge replica `me` by the checks that all replicas have reported from sequence `since` on, where the first
    difference was seen. A replica that has reported nothing may agree with either side. Replicas whose states were
    copied through the same replica, according to `origins`, count once."""
    mine = checks[me]
    if trusted is not None and trusted.seq >= since and trusted.seq in mine:
        return StateVerdict.RIGHT if mine[trusted.seq] == trusted.crc else StateVerdict.OUTVOTED
    needed = _majority(replicas)
    for seq in sorted((each for each in mine if each >= since), reverse=True):
        votes = {server: checks[server][seq] for server in replicas if seq in checks.get(server, {})}
        known = NO_ORIGINS if _agreed_before(seq, replicas, checks) else origins
        for crc in sorted(set(votes.values())):
            if _count_independent([server for server in votes if votes[server] == crc], known) >= needed:
                return StateVerdict.RIGHT if mine[seq] == crc else StateVerdict.OUTVOTED
        if len(votes) == len(replicas):
            are_one = len(replicas) >= AGREEING_MIN and len(set(votes.values())) == 1
            return StateVerdict.RIGHT if are_one else StateVerdict.SPLIT
    return StateVerdict.OPEN


def is_copy_confirmed(
    me: ServerId,
    replicas: Sequence[ServerId],
    checks: Mapping[ServerId, Checks],
    origins: Origins,
) -> bool:
    """Return True if a majority, with copies of one another counted once, agreed with `me` at one check, and no replica
    had anything else there: a later difference then arose on its own. Checks are never copied, so each check of `me` is
    later than its copy."""
    for seq, crc in checks[me].items():
        checksums = {server: checks[server][seq] for server in replicas if seq in checks.get(server, {})}
        if set(checksums.values()) == {crc} and _count_independent(checksums, origins) >= _majority(replicas):
            return True
    return False


def _count_independent(servers: Iterable[ServerId], origins: Origins) -> int:
    """Count the servers, with those that may have a state of one another counted once. A donor that was confirmed after
    it was copied is still among the origins of its copy, so the two count once."""
    groups: list[frozenset[ServerId]] = []
    for server in servers:
        mine = origins.get(server, frozenset()) | {server}
        groups = [each for each in groups if not each & mine] + [mine.union(*(each for each in groups if each & mine))]
    return len(groups)


def _majority(replicas: Sequence[ServerId]) -> int:
    return max(AGREEING_MIN, len(replicas) // 2 + 1)


def _agreed_before(seq: Seq, replicas: Sequence[ServerId], checks: Mapping[ServerId, Checks]) -> bool:
    """Return True if all replicas agreed at an earlier check, and all have reported at `seq`: they differ by what each
    has applied since, not by what was copied."""
    known = [checks.get(server, {}) for server in replicas]
    if not all(seq in each for each in known):
        return False
    return any(before < seq and all(each.get(before) == crc for each in known) for before, crc in known[0].items())


class Investigation:
    """The investigation of one replica while its state is in doubt. While `is_barred` is True, the replica must neither
    lead nor answer."""

    def __init__(self) -> None:
        self.is_barred = False
        self.since = Seq(0)
        """Sequence of the first difference seen; 0 if nothing is in doubt."""
        self._doubted_at = 0.0

    def doubt(self, since: Seq, now: float) -> None:
        """Record that this replica's state differs from its log's check at `since`."""
        self._note(since, now)
        self.is_barred = True

    def note_report(self, since: Seq, now: float) -> None:
        """Record that another replica's state differs from its log's check at `since`."""
        self._note(since, now)

    def resume(self, since: Seq, now: float, *, is_barred: bool) -> None:
        """Continue an investigation from before a restart. A `since` of 0 means that nothing was in doubt."""
        if since:
            self._note(since, now)
            self.is_barred |= is_barred

    def decide(self, verdict: StateVerdict, now: float, *, differs: bool, has_met: bool) -> None:
        """Apply a verdict. `differs` is True if this replica differs from its log's check. `has_met` is True if this
        replica has applied the log's check of the difference, or a later one."""
        if verdict is StateVerdict.RIGHT:
            self.is_barred, self.since = False, Seq(0)
        elif verdict is StateVerdict.OPEN and not differs:
            # A replica that has not reached the log's check of the difference reaches it before it serves. If all
            # replicas that can read the log to its end were barred for it, no replica would ever reach it.
            self.is_barred = has_met and (self.is_barred or now >= self._doubted_at + PATIENCE_S)
        else:
            self.is_barred = True

    def end(self) -> None:
        """End the investigation, because a later check of the log agrees."""
        self.is_barred, self.since = False, Seq(0)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert not self.is_barred or self.since, "barred without a reason"

    def _note(self, since: Seq, now: float) -> None:
        if not self.since:
            self._doubted_at = now
        self.since = min(self.since or since, since)
