"""Asks the partition's other replicas, and interprets their answers and missing answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import orjson

from kvstore.env import Env
from kvstore.errors import InvalidRequest, PeerRefused, StoreError
from kvstore.partition.election.handover import PREPARE, PREPARE_S, TAKE, TAKE_S, Prepare, Take
from kvstore.partition.election.ranking import RANK_DELAY_S, Incumbent
from kvstore.partition.ports import Peers
from kvstore.types import EntryId, LedgerId, PartitionId, Position, ServerId
from kvstore.wal.leading.leader_log import LeaderLog

SERVING = "serving"
"""Method: returns whether a replica serves."""
HOLD = "hold"
"""Method: each follower of each partition keeps one such request open at its leader."""
HOLD_S = 4.0
"""Seconds for which a leader holds a follower's request before it answers. The follower learns of the leader's death
from the link."""


UNREACHED = b"unreached"
"""Follows the answer to "serving" if the answering replica does not reach the asking one. Earlier releases read only
the first byte and answer nothing else."""
UNREACHED_S = 2.0
"""Seconds for which the attempts to reach the replica must have failed."""


@dataclass(frozen=True, slots=True)
class CandidateSurvey:
    """The other replicas' answers to a candidate."""

    incumbent: Incumbent
    is_reached: bool
    """False if most of the replicas that answered cannot reach the candidate at its address."""


APPLIED = "applied"
"""Method: returns the position of the last entry that a replica has applied."""
APPLIED_S = 0.5
"""Seconds for which a candidate waits for the others' positions while it recovers the log. A silent replica is
ignored."""
FURTHER = "further"
"""Method: a replica reports that it has applied an entry of a ledger that its log's list does not have."""
FURTHER_S = 2.0


def encode_position(position: Position | None) -> bytes:
    return orjson.dumps(None if position is None else [position.ledger, position.entry])


def decode_position(data: bytes) -> Position | None:
    """Decode a position. Raises InvalidRequest."""
    try:
        found = orjson.loads(data)
        return None if found is None else Position(LedgerId(int(found[0])), EntryId(int(found[1])))
    except (orjson.JSONDecodeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise InvalidRequest(f"expected a position in a log, got {data[:64]!r}") from error


# docs/protocol.md G26
def answer_further(log: LeaderLog | None, body: bytes) -> bytes:
    """Answer a replica that is further than its list. `log` is the log that is led here. Raises InvalidRequest."""
    position = decode_position(body)
    is_older = position is not None and log is not None and log.report_applied(position)
    return b"1" if is_older else b"0"


class _PeerAnswer(Enum):
    """The answer of a replica to the question whether it serves."""

    SERVES = auto()
    SERVES_NOT = auto()
    REFUSED = auto()
    """Its process is gone."""
    SILENT = auto()


class PeerReplicas:
    """Asks a partition's other replicas. Every method raises StoreError (PeerRefused if the replica's process is gone),
    unless its description says otherwise."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        server: ServerId,
        peers: Peers,
        replicas: Callable[[], tuple[ServerId, ...]],
    ) -> None:
        self._env, self._partition, self._server, self._peers, self._replicas = env, partition, server, peers, replicas
        self.last_leader: ServerId | None = None
        """The last known leader."""

    @property
    def servers(self) -> list[ServerId]:
        return [server for server in self._replicas() if server != self._server]

    # docs/protocol.md P25
    async def survey(self) -> CandidateSurvey:
        """Ask all other replicas whether they serve and whether they reach this replica. Never raises an error."""
        asked = {server: self._env.nursery.spawn(self._ask(server), name="ask serving") for server in self.servers}
        found = {server: await answer for server, answer in asked.items()}
        unreached = sum(is_unreached for _, is_unreached in found.values())
        answered = sum(peer_answer in (_PeerAnswer.SERVES, _PeerAnswer.SERVES_NOT) for peer_answer, _ in found.values())
        is_reached = 2 * unreached <= answered
        return CandidateSurvey(
            self._incumbent({server: peer_answer for server, (peer_answer, _) in found.items()}), is_reached
        )

    def _incumbent(self, found: dict[ServerId, _PeerAnswer]) -> Incumbent:
        """Return whether one of them still serves, or may serve."""
        if _PeerAnswer.SERVES in found.values():
            return Incumbent.SERVES
        is_gone = self.last_leader is not None and found.get(self.last_leader) is _PeerAnswer.REFUSED
        if _PeerAnswer.SILENT in found.values() and not is_gone:
            return Incumbent.SILENT  # the last known leader, or one that followed it unnoticed
        return Incumbent.GONE

    def says_unreached(self, asker: ServerId) -> bytes:
        """Return what follows the answer to "serving"."""
        silent_s = self._peers.silent_s(asker)
        return UNREACHED if silent_s is not None and silent_s >= UNREACHED_S else b""

    # docs/protocol.md P25, G24
    async def furthest(self) -> Position | None:
        """Return the furthest position that any other replica has applied. Returns None if no replica answers in time.
        Never raises an error."""
        asked = [self._env.nursery.spawn(self._applied(server), name="ask applied") for server in self.servers]
        found = [await answer for answer in asked]
        return max((each for each in found if each is not None), default=None)

    async def _applied(self, server: ServerId) -> Position | None:
        """Return None if the replica's release does not know the method."""
        try:
            return decode_position(await self._peers.call(server, self._partition, APPLIED, b"", APPLIED_S))
        except StoreError:
            return None

    # docs/protocol.md G26
    def report_further(self, leader: ServerId | None, position: Position) -> None:
        """Notify the leader, in the background, that this replica has applied entries that the leader's list of ledgers
        does not explain."""
        if leader is not None and leader != self._server:
            self._env.nursery.spawn(self._report_further(leader, position), name=f"{self._partition} tell further")

    async def _report_further(self, leader: ServerId, position: Position) -> None:
        with suppress(StoreError):
            await self._peers.call(leader, self._partition, FURTHER, encode_position(position), FURTHER_S)

    async def prepare(self, successor: ServerId, what: Prepare) -> None:
        """Ask the successor to get ready to lead."""
        await self._peers.call(successor, self._partition, PREPARE, what.encode(), PREPARE_S)

    async def take(self, successor: ServerId, what: Take) -> None:
        """Ask the successor to take over the lead now."""
        await self._peers.call(successor, self._partition, TAKE, what.encode(), TAKE_S)

    async def _ask(self, server: ServerId) -> tuple[_PeerAnswer, bool]:
        """Return the replica's answer, and True if it does not reach this replica."""
        try:
            answer = await self._peers.call(server, self._partition, SERVING, b"", RANK_DELAY_S)
        except PeerRefused:
            return _PeerAnswer.REFUSED, False
        except StoreError:
            return _PeerAnswer.SILENT, False
        peer_answer = _PeerAnswer.SERVES if answer[:1] == b"1" else _PeerAnswer.SERVES_NOT
        return peer_answer, answer[1:].startswith(UNREACHED)
