"""Asks the partition's other replicas, and judges answers that do not come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvstore.env import Env
from kvstore.errors import PeerRefused, StoreError
from kvstore.partition.election.handover import PREPARE, PREPARE_S, TAKE, TAKE_S, Prepare, Take
from kvstore.partition.election.ranking import RANK_DELAY_S, Incumbent
from kvstore.partition.ports import Peers
from kvstore.types import PartitionId, ServerId

SERVING = "serving"
"""The method: whether a replica serves."""
HOLD = "hold"
"""The method: each follower of each partition has one open at its leader all the time."""
HOLD_S = 4.0
"""How long a leader holds a follower's question before it answers it: the follower learns of its death from the
link."""


UNREACHED = b"unreached"
"""Follows the answer to "serving" if the replica that answers does not reach the one that asks. Earlier releases read
the first byte alone, as a replica of theirs answers nothing else."""
UNREACHED_S = 2.0
"""Seconds for which the attempts to reach it have failed by then."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The other replicas' answers to a candidate."""

    incumbent: Incumbent
    is_reached: bool
    """False if most of those that answered do not reach the candidate at its address."""


class _Heard(Enum):
    """The answer of one of them to the question whether it serves."""

    SERVES = auto()
    SERVES_NOT = auto()
    REFUSED = auto()
    """Its process is gone."""
    SILENT = auto()


class PeerReplicas:
    """Asks the other replicas; every call raises StoreError (PeerRefused: that process is gone) unless it says
    otherwise."""

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
        """The last one that is known to have led."""

    @property
    def servers(self) -> list[ServerId]:
        return [server for server in self._replicas() if server != self._server]

    # docs/protocol.md P25
    async def survey(self) -> Survey:
        """Ask all others whether they serve, and whether they reach this replica. Raises nothing."""
        asked = {server: self._env.nursery.spawn(self._ask(server), name="ask serving") for server in self.servers}
        found = {server: await answer for server, answer in asked.items()}
        unreached = sum(is_unreached for _, is_unreached in found.values())
        answered = sum(heard in (_Heard.SERVES, _Heard.SERVES_NOT) for heard, _ in found.values())
        is_reached = 2 * unreached <= answered
        return Survey(self._incumbent({server: heard for server, (heard, _) in found.items()}), is_reached)

    def _incumbent(self, found: dict[ServerId, _Heard]) -> Incumbent:
        """Return whether one of them still serves, or may do so."""
        if _Heard.SERVES in found.values():
            return Incumbent.SERVES
        is_gone = self.last_leader is not None and found.get(self.last_leader) is _Heard.REFUSED
        if _Heard.SILENT in found.values() and not is_gone:
            return Incumbent.SILENT  # the last known leader, or one that has followed it unheard of
        return Incumbent.GONE

    def says_unreached(self, asker: ServerId) -> bytes:
        """Return what follows the answer to "serving"."""
        unheard_s = self._peers.unheard_s(asker)
        return UNREACHED if unheard_s is not None and unheard_s >= UNREACHED_S else b""

    async def prepare(self, successor: ServerId, what: Prepare) -> None:
        await self._peers.call(successor, self._partition, PREPARE, what.encode(), PREPARE_S)

    async def take(self, successor: ServerId, what: Take) -> None:
        await self._peers.call(successor, self._partition, TAKE, what.encode(), TAKE_S)

    async def _ask(self, server: ServerId) -> tuple[_Heard, bool]:
        """Return its answer, and whether it does not reach this replica."""
        try:
            answer = await self._peers.call(server, self._partition, SERVING, b"", RANK_DELAY_S)
        except PeerRefused:
            return _Heard.REFUSED, False
        except StoreError:
            return _Heard.SILENT, False
        heard = _Heard.SERVES if answer[:1] == b"1" else _Heard.SERVES_NOT
        return heard, answer[1:].startswith(UNREACHED)
