"""One client's view of the cluster, and the request ids that it has given out. Decides only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.client.core.operation import SEEN_STEP_MS, Numbering
from kvstore.client.core.routing import Routing
from kvstore.client.core.values import RING, Token
from kvstore.limits import CLIENT_BYTES
from kvstore.proto import brief, kv_pb2

if TYPE_CHECKING:
    from random import Random


class Numberings(dict[str, Numbering]):
    """Partition → the request ids there, made when it is asked for: a lookup is no call."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def __missing__(self, partition: str) -> Numbering:
        found = self[partition] = Numbering(self._random.randbytes(CLIENT_BYTES))
        return found


class ClientState:
    """Takes in all that servers say beside results: how far partitions are, what time it is there, where they are."""

    def __init__(self, random: Random, cluster: str = "") -> None:
        """`random` draws client ids: two clients must never draw the same. `cluster`: the one that is meant."""
        self.routing = Routing(cluster=cluster)
        self.tokens: dict[str, int] = {}
        """The highest sequence seen of each partition."""
        self.numberings = Numberings(random)
        """The request ids at each partition."""

    @property
    def token(self) -> dict[str, int]:
        """How far this client is, as it may be given to another one."""
        return self.routing.token(self.tokens)

    def absorb(self, token: Token) -> None:
        """From now on this client has seen at least as much as the one that gave `token`."""
        for partition, sequence in sorted(token.items()):
            if partition == RING:
                self.routing.note_ring_version(sequence)
            else:
                self._reach(partition, sequence)

    @property
    def time_ms(self) -> int:
        """The cluster's time, in milliseconds since 1970, as servers last told: the earliest of its
        partitions', since a log may be ahead. Expiries go by it. 0: nobody has told."""
        told = [self.numberings[each].seen_ms for each in sorted(self.routing.partitions)]
        return min((each for each in told if each), default=0)

    def absorb_answers(self, answers: kv_pb2.Answers | brief.Answers[Any]) -> bool:
        """Take in what stands beside answers. True if there is a ring that is not known here."""
        tokens, numberings = self.tokens, self.numberings
        for progress in answers.progress:
            partition, time_ms = progress.partition, progress.time_ms
            if progress.sequence > tokens.get(partition, 0):
                tokens[partition] = progress.sequence
            numbering = numberings[partition]
            if not 0 <= time_ms - numbering.seen_ms < SEEN_STEP_MS:
                numbering.see(time_ms)
        return self.routing.note_ring_version(answers.ring_version)

    def learn(self, message: kv_pb2.TopologyResponse) -> bool:
        """Take in a topology. True if an address to ask may have changed."""
        for partition in message.partitions:
            if partition.progress.time_ms:
                self.numberings[partition.id].see(partition.progress.time_ms)
        return self.routing.learn(message)

    def _reach(self, partition: str, sequence: int) -> None:
        self.tokens[partition] = max(sequence, self.tokens.get(partition, 0))
