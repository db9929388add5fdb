"""Ranks the replicas that may stand for leader. Decides only.

The highest sequence is only a preference, which saves catching up; what makes a leader safe is fencing
(docs/protocol.md, Election). So each replica ranks itself among those that have published, waits its rank times
RANK_DELAY_S, and then stands; nobody waits for a better one for ever.
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
"""Long enough for a better candidate's claim to be seen, short enough not to matter when there is none."""
INCUMBENT_GRACE_S = 3.0
"""What a leader that serves, but whose znode is gone, gets to put it back, for as long as it says that it serves."""
SILENT_GRACE_S = 1.0
"""What a leader gets that neither answers nor refuses: it may only be busy. One that is stopped costs this much."""
ASK_AGAIN_S = 0.4
"""Until an incumbent in its grace is asked again."""
UNFIT_GRACE_S = 10.0
"""How long a candidate that most others cannot reach, or whose disks cannot be written to, leaves the lead to others.
If nobody has taken it by then, a bad leader is better than none."""
OUT_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long a replica that failed as leader, or could not open the log, stays out, by the number of times in a row."""
SETTLED_S = 60.0
"""A lead that lasted for so long was no failure in a row with those before it."""


class Incumbent(Enum):
    """The fate of a leader whose znode is gone."""

    GONE = auto()
    """It refuses connections, or says that it does not serve."""
    SILENT = auto()
    """Its link stands, or cannot be made and is not refused; no answer."""
    SERVES = auto()
    """It lost its session, not its lead."""


@dataclass(frozen=True, slots=True)
class Published:
    """A replica's own account in `/partitions/<id>/replicas/<server>`."""

    seq: Seq
    """Last sequence applied."""
    durable_seq: Seq
    """Last sequence that its engine has synced to disk."""
    epoch: int
    nonce: str
    doubt: tuple[Seq, Seq, int] | None = None
    """That it is barred because replicas differ: since which sequence, and its checksum at its last check."""
    is_stopped: bool = False
    """It applies nothing any more: it counts as away, and for no newcomer that has caught up (docs/protocol.md V4)."""
    taken: tuple[int, int] | None = None
    """How far it is, by what it has applied: the position of its last entry; while it takes in another's state, 0 and
    the bytes that have come of it. None: of a release that does not say (docs/protocol.md H6)."""

    def encode(self) -> bytes:
        said: dict[str, object] = {
            "seq": self.seq,
            "durable_seq": self.durable_seq,
            "epoch": self.epoch,
            "nonce": self.nonce,
        }
        if self.doubt is not None:
            said["doubt"] = self.doubt
        if self.is_stopped:
            said["stopped"] = True
        if self.taken is not None:
            said["taken"] = self.taken
        return orjson.dumps(said)

    @staticmethod
    def decode(data: bytes) -> Published:
        """Raises UndecodableNode."""
        said = codec.decode_plain(_Said, data, what="replica znode")
        doubt = said.doubt if said.doubt is not None and said.doubt[0] else None
        return Published(said.seq, said.durable_seq, said.epoch, said.nonce, doubt, said.stopped, said.taken)


class _Said(msgspec.Struct):
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
    """The content of `/partitions/<id>/leader`. `epoch` is the last one that the leader had seen when it claimed."""

    server: ServerId
    epoch: int
    nonce: str

    def encode(self) -> bytes:
        return orjson.dumps({"server": self.server, "epoch": self.epoch, "nonce": self.nonce})

    @staticmethod
    def decode(data: bytes) -> LeaderRecord:
        """Raises UndecodableNode."""
        return codec.decode_plain(LeaderRecord, data, what="leader znode")


def furthest(published: Mapping[ServerId, Published], besides: ServerId) -> list[ServerId]:
    """The replicas that have published and have not stopped, the one with the highest sequence first."""
    going = [server for server, said in published.items() if server != besides and not said.is_stopped]
    return sorted(going, key=lambda server: (-published[server].seq, server))


def rank_of(me: ServerId, published: Mapping[ServerId, Published], preference: Sequence[ServerId]) -> int:
    """How many replicas should stand before `me`: those with a higher sequence, or with the same and an earlier place
    in the ring's order of preference. One that has stopped does not stand. 0 stands at once."""
    place = {server: index for index, server in enumerate(preference)}

    def key(server: ServerId) -> tuple[int, int, str]:
        seq = published[server].seq if server in published else Seq(0)
        return (-seq, place.get(server, len(place)), server)

    others = [server for server in sorted(published) if server != me and not published[server].is_stopped]
    return sum(key(server) < key(me) for server in others)
