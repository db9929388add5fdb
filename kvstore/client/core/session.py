"""One client's knowledge of the cluster, and the request ids that it has assigned. Decides only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.client.core.operation import SEEN_STEP_MS, Numbering
from kvstore.client.core.routing import Routing
from kvstore.client.core.values import RING, Token
from kvstore.client.core.watching import checked_positions
from kvstore.limits import CLIENT_BYTES
from kvstore.proto import compact, kv_pb2

if TYPE_CHECKING:
    from random import Random


class Numberings(dict[str, Numbering]):
    """Request ids by partition, created on first access, so that a lookup is no call."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def __missing__(self, partition: str) -> Numbering:
        found = self[partition] = Numbering(self._random.randbytes(CLIENT_BYTES))
        return found


class ClientState:
    """Facts from servers besides results: progress and time of partitions, and topology."""

    def __init__(self, random: Random, cluster: str = "") -> None:
        """`random` draws client ids, which must be unique among clients. `cluster`: the configured cluster."""
        self.routing = Routing(cluster=cluster)
        self.tokens: dict[str, int] = {}
        """Highest sequence seen of each partition."""
        self.numberings = Numberings(random)
        """Request ids of each partition."""

    @property
    def token(self) -> dict[str, int]:
        """Progress of this client, for use by another client."""
        return self.routing.token(self.tokens)

    def absorb(self, token: Token) -> None:
        """Read at least as far as the client whose `token` this is."""
        for partition, sequence in sorted(checked_positions("token", token).items()):
            if partition == RING:
                self.routing.note_ring_version(sequence)
            else:
                self._reach(partition, sequence)

    @property
    def time_ms(self) -> int:
        """The cluster's time in milliseconds since 1970, as servers last reported it: the earliest of its partitions,
        because one may be ahead. Keys expire by it. 0: not known."""
        known = [self.numberings[each].seen_ms for each in sorted(self.routing.partitions)]
        return min((each for each in known if each), default=0)

    def absorb_answers(self, answers: kv_pb2.Answers | compact.CompactAnswers[Any]) -> bool:
        """Use the progress and the ring version of a message of answers. Returns True if its ring is not known here."""
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
        """Use a topology. Returns True if an address to ask may have changed."""
        for partition in message.partitions:
            if partition.progress.time_ms:
                self.numberings[partition.id].see(partition.progress.time_ms)
        return self.routing.learn(message)

    def _reach(self, partition: str, sequence: int) -> None:
        self.tokens[partition] = max(sequence, self.tokens.get(partition, 0))
