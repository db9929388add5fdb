"""Ranks the replicas that may run for election. Decides only.

Preferring the highest sequence only saves time for catching up. Fencing, not the ranking, makes a leader safe
(docs/protocol.md, Election). Each replica ranks itself among those that have published, waits RANK_DELAY_S times its
rank, and then becomes a candidate. No replica waits forever for a better one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
import orjson

from kvstore.meta import codec
from kvstore.types import Seq, ServerId

RANK_DELAY_S = 0.15
"""Seconds: long enough to see a better candidate's claim, short enough not to matter if there is none."""
INCUMBENT_GRACE_S = 3.0
"""Seconds for which a leader that serves without a znode may restore it, as long as it says that it serves."""
SILENT_GRACE_S = 1.0
"""Seconds granted to a leader that neither answers nor refuses, because it may only be busy. A stopped leader costs
this much."""
ASK_AGAIN_S = 0.4
"""Seconds until an incumbent in its grace period is asked again."""
UNFIT_GRACE_S = 10.0
"""Seconds for which a candidate that most others cannot reach, or whose disks cannot be written to, leaves the lead to
others. If no replica has taken it by then, a bad leader is better than none."""
OUT_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds for which a replica that failed as leader, or could not open the log, stays out of elections, by the number
of failures in a row."""
SETTLED_S = 60.0
"""After a leadership that lasted this many seconds, a failure counts as the first one."""


class Incumbent(Enum):
    """The fate of a leader whose znode is gone."""

    GONE = auto()
    """The former leader refuses connections, or answers that it does not serve."""
    SILENT = auto()
    """The former leader does not answer: either its link is up, or a connection attempt gets no reply."""
    SERVES = auto()
    """The former leader has lost its session but still leads."""


@dataclass(frozen=True, slots=True)
class Published:
    """The progress that a replica publishes in `/partitions/<id>/replicas/<server>`."""

    seq: Seq
    """The last sequence that the replica has applied."""
    durable_seq: Seq
    """The last sequence that the replica's engine has synced to disk."""
    epoch: int
    nonce: str
    doubt: tuple[Seq, Seq, int] | None = None
    """Set if the replica is barred because replicas differ: the sequence since which they differ, and the sequence and
    checksum of its last check."""
    is_stopped: bool = False
    """True if the replica has stopped applying entries. It then counts as away, not as a newcomer that has caught up
    (docs/protocol.md V4)."""
    taken: tuple[int, int] | None = None
    """Progress by what was applied: the position of the last entry, or 0 and the bytes received while another replica's
    state is being installed. None if the release does not report it (docs/protocol.md H6)."""

    def encode(self) -> bytes:
        fields: dict[str, object] = {
            "seq": self.seq,
            "durable_seq": self.durable_seq,
            "epoch": self.epoch,
            "nonce": self.nonce,
        }
        if self.doubt is not None:
            fields["doubt"] = self.doubt
        if self.is_stopped:
            fields["stopped"] = True
        if self.taken is not None:
            fields["taken"] = self.taken
        return orjson.dumps(fields)

    @staticmethod
    def decode(data: bytes) -> Published:
        """Decode the znode. Raises UndecodableNode."""
        fields = codec.decode_plain(_Fields, data, what="replica znode")
        doubt = fields.doubt if fields.doubt is not None and fields.doubt[0] else None
        return Published(
            fields.seq, fields.durable_seq, fields.epoch, fields.nonce, doubt, fields.stopped, fields.taken
        )


class _Fields(msgspec.Struct):
    """The fields of the znode."""

    seq: Seq
    durable_seq: Seq
    epoch: int
    nonce: str
    doubt: tuple[Seq, Seq, int] | None = None
    stopped: bool = False
    taken: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The content of `/partitions/<id>/leader`. `epoch` is the last epoch that the leader had seen when it claimed."""

    server: ServerId
    epoch: int
    nonce: str

    def encode(self) -> bytes:
        return orjson.dumps({"server": self.server, "epoch": self.epoch, "nonce": self.nonce})

    @staticmethod
    def decode(data: bytes) -> LeaderRecord:
        """Decode the znode. Raises UndecodableNode."""
        return codec.decode_plain(LeaderRecord, data, what="leader znode")


def furthest(published: Mapping[ServerId, Published], excluding: ServerId) -> list[ServerId]:
    """Return the replicas that have published and have not stopped, except `excluding`, in descending order of their
    sequence."""
    going = [server for server, replica in published.items() if server != excluding and not replica.is_stopped]
    return sorted(going, key=lambda server: (-published[server].seq, server))


def rank_of(me: ServerId, published: Mapping[ServerId, Published], preference: Sequence[ServerId]) -> int:
    """Return how many replicas should become candidates before `me`: those with a higher sequence, and those with an
    equal sequence that come earlier in `preference`, the ring's order. Replicas that have stopped do not count. A
    replica of rank 0 becomes a candidate at once."""
    place = {server: index for index, server in enumerate(preference)}

    def key(server: ServerId) -> tuple[int, int, str]:
        seq = published[server].seq if server in published else Seq(0)
        return (-seq, place.get(server, len(place)), server)

    others = [server for server in sorted(published) if server != me and not published[server].is_stopped]
    return sum(key(server) < key(me) for server in others)
