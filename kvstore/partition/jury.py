"""Which of a partition's replicas are right, once the states of two differ. Decides only (docs/protocol.md, P35).

Each replica remembers what its checksum was at the last checked sequences. The checksums roll on, so those whose states
have once differed differ at every later check; any check behind the first difference tells who is of one mind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvstore.types import Seq, ServerId

PATIENCE_S = 10.0
"""How long a replica that does not itself differ from its log waits for those that have not said what they have."""
AGREEING_MIN = 2
"""Nobody is right alone: of two replicas that differ either may be damaged."""


class Verdict(Enum):
    RIGHT = auto()
    """A majority has what this replica has."""
    OUTVOTED = auto()
    """A majority has something else: this replica's copy is damaged."""
    SPLIT = auto()
    """All have said what they have, and nothing has a majority."""
    OPEN = auto()
    """Those who have not said what they have decide."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """What an operator has declared right: whoever has another checksum there is damaged."""

    server: ServerId
    seq: Seq
    crc: int


Checks = Mapping[Seq, int]
"""Sequence → checksum there."""


def judge(
    me: ServerId,
    since: Seq,
    replicas: Sequence[ServerId],
    checks: Mapping[ServerId, Checks],
    trusted: Trusted | None = None,
) -> Verdict:
    """What is to be thought of `me`, from what each replica has said of the checks from `since` on, where a difference
    was seen first. Whoever said nothing may be of either mind."""
    mine = checks[me]
    if trusted is not None and trusted.seq >= since and trusted.seq in mine:
        return Verdict.RIGHT if mine[trusted.seq] == trusted.crc else Verdict.OUTVOTED
    needed = max(AGREEING_MIN, len(replicas) // 2 + 1)
    for seq in sorted((each for each in mine if each >= since), reverse=True):
        votes = {server: checks[server][seq] for server in replicas if seq in checks.get(server, {})}
        (crc, count), *_ = Counter(votes.values()).most_common(1) or [(0, 0)]
        if count >= needed:
            return Verdict.RIGHT if mine[seq] == crc else Verdict.OUTVOTED
        if len(votes) == len(replicas):
            return Verdict.SPLIT
    return Verdict.OPEN


class Trial:
    """Of one replica, as long as something is in doubt. `is_barred`: it must not lead, nor answer."""

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

    def decide(self, verdict: Verdict, now: float, *, differs: bool) -> None:
        """`differs`: from the log's check, itself."""
        if verdict is Verdict.RIGHT:
            self.is_barred, self.since = False, Seq(0)
        elif verdict is Verdict.OPEN and not differs:
            self.is_barred |= now >= self._heard_at + PATIENCE_S
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
