"""Finds out which of a partition's replicas are right, once the states of two differ. Decides only (docs/protocol.md,
P35).

Each replica remembers what its checksum was at the last checked sequences. The checksums roll on, so those whose states
have once differed differ at every later check; any check behind the first difference tells who is of one mind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from kvstore.types import Seq, ServerId

PATIENCE_S = 10.0
"""How long a replica that does not itself differ from its log waits for those that have not said what they have."""
AGREEING_MIN = 2
"""Nobody is right alone: of two replicas that differ either may be damaged."""


class Verdict(Enum):
    RIGHT = auto()
    """A majority has what this replica has, or all have: then nothing differs any more, whosever copies they are."""
    OUTVOTED = auto()
    """A majority has something else: this replica's copy is damaged."""
    SPLIT = auto()
    """All have said what they have, and nothing has a majority."""
    OPEN = auto()
    """Those who have not said what they have decide."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """A checksum that an operator has declared right: a replica with another one there is damaged."""

    server: ServerId
    seq: Seq
    crc: int


Checks = Mapping[Seq, int]
"""Sequence → checksum there."""
Origins = Mapping[ServerId, frozenset[ServerId]]
"""Replica → all those through whom its state came to it as a copy."""
NO_ORIGINS: Origins = MappingProxyType({})


def judge(
    me: ServerId,
    since: Seq,
    replicas: Sequence[ServerId],
    checks: Mapping[ServerId, Checks],
    trusted: Trusted | None = None,
    origins: Origins = NO_ORIGINS,
) -> Verdict:
    """Judge `me` by the checks that each replica has told from `since` on, where a difference was seen first. A
    replica that said nothing may be of either mind. Those whose states come through one replica, by
    `origins`, are one witness."""
    mine = checks[me]
    if trusted is not None and trusted.seq >= since and trusted.seq in mine:
        return Verdict.RIGHT if mine[trusted.seq] == trusted.crc else Verdict.OUTVOTED
    needed = _majority(replicas)
    for seq in sorted((each for each in mine if each >= since), reverse=True):
        votes = {server: checks[server][seq] for server in replicas if seq in checks.get(server, {})}
        known = NO_ORIGINS if _agreed_before(seq, replicas, checks) else origins
        for crc in sorted(set(votes.values())):
            if _witnesses([server for server in votes if votes[server] == crc], known) >= needed:
                return Verdict.RIGHT if mine[seq] == crc else Verdict.OUTVOTED
        if len(votes) == len(replicas):
            are_one = len(replicas) >= AGREEING_MIN and len(set(votes.values())) == 1
            return Verdict.RIGHT if are_one else Verdict.SPLIT
    return Verdict.OPEN


def is_borne_out(
    me: ServerId,
    replicas: Sequence[ServerId],
    checks: Mapping[ServerId, Checks],
    origins: Origins,
) -> bool:
    """Whether a majority, copies of one another counted once, has had what `me` has at one check, and nobody had
    anything else there: what differs later has come to differ by itself. Checks are never copied, so each of `me` is
    later than its copy."""
    for seq, crc in checks[me].items():
        said = {server: checks[server][seq] for server in replicas if seq in checks.get(server, {})}
        if set(said.values()) == {crc} and _witnesses(said, origins) >= _majority(replicas):
            return True
    return False


def _witnesses(servers: Iterable[ServerId], origins: Origins) -> int:
    """How many of them there are, those that may have one state of one another counted once. A donor that is borne out
    after it was copied is still among its copy's origins: the two stay one."""
    groups: list[frozenset[ServerId]] = []
    for server in servers:
        mine = origins.get(server, frozenset()) | {server}
        groups = [each for each in groups if not each & mine] + [mine.union(*(each for each in groups if each & mine))]
    return len(groups)


def _majority(replicas: Sequence[ServerId]) -> int:
    return max(AGREEING_MIN, len(replicas) // 2 + 1)


def _agreed_before(seq: Seq, replicas: Sequence[ServerId], checks: Mapping[ServerId, Checks]) -> bool:
    """Whether all replicas had the same at an earlier check, and all have said what they have at `seq`: they differ by
    what each of them has applied since, not by what was copied."""
    known = [checks.get(server, {}) for server in replicas]
    if not all(seq in each for each in known):
        return False
    return any(before < seq and all(each.get(before) == crc for each in known) for before, crc in known[0].items())


class Trial:
    """The trial of one replica, as long as something is in doubt. `is_barred`: it must not lead, nor answer."""

    def __init__(self) -> None:
        self.is_barred = False
        self.since = Seq(0)
        """Where a difference was seen first; 0: nothing is in doubt."""
        self._heard_at = 0.0

    def doubt(self, since: Seq, now: float) -> None:
        """This replica's state differs from its log's check at `since`."""
        self._note(since, now)
        self.is_barred = True

    def hear(self, since: Seq, now: float) -> None:
        """Another's does."""
        self._note(since, now)

    def resume(self, since: Seq, now: float, *, is_barred: bool) -> None:
        """As it was before a restart: 0 if nothing was in doubt."""
        if since:
            self._note(since, now)
            self.is_barred |= is_barred

    def decide(self, verdict: Verdict, now: float, *, differs: bool, has_met: bool) -> None:
        """`differs`: from the log's check, itself. `has_met`: this replica has applied the log's check of the
        difference, or a later one."""
        if verdict is Verdict.RIGHT:
            self.is_barred, self.since = False, Seq(0)
        elif verdict is Verdict.OPEN and not differs:
            # A replica that has not met the log's check of the difference meets it before it serves. If all that could
            # read the log to its end were barred for it, nobody would ever meet it.
            self.is_barred = has_met and (self.is_barred or now >= self._heard_at + PATIENCE_S)
        else:
            self.is_barred = True

    def end(self) -> None:
        """The log's own later check has agreed."""
        self.is_barred, self.since = False, Seq(0)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert not self.is_barred or self.since, "barred without a reason"

    def _note(self, since: Seq, now: float) -> None:
        if not self.since:
            self._heard_at = now
        self.since = min(self.since or since, since)
