"""Ring ↔ bytes of its znode. Pure. JSON, so that an operator can read it; the same ring always makes the same bytes."""

from __future__ import annotations

import orjson
from sortedcontainers import SortedDict

from kvstore.errors import Corrupted
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId

FORMAT = 1


def encode(ring: Ring) -> bytes:
    """`{"format", "version", "partitions": [{"id", "state", "replicas"}], "tokens": [[token, index of partition]],
    "moves": []}`."""
    ids = sorted(ring.partitions)
    index = {partition: place for place, partition in enumerate(ids)}
    members = (ring.partitions[partition] for partition in ids)
    return orjson.dumps(
        {
            "format": FORMAT,
            "version": ring.version,
            "partitions": [{"id": m.id, "state": m.state.value, "replicas": list(m.replicas)} for m in members],
            "tokens": [[token, index[owner]] for token, owner in ring.tokens.items()],
            "moves": [],
        }
    )


def decode(data: bytes) -> Ring:
    """Raises Corrupted for an unknown format, by number, and for anything that is not a ring."""
    try:
        document = orjson.loads(data)
        if document["format"] != FORMAT:
            raise Corrupted(f"ring: want format {FORMAT}, got {document['format']}")
        members = [
            Member(PartitionId(p["id"]), tuple(ServerId(r) for r in p["replicas"]), PartitionState(p["state"]))
            for p in document["partitions"]
        ]
        tokens = SortedDict({token: members[owner].id for token, owner in document["tokens"]})
        return Ring(document["version"], {member.id: member for member in members}, tokens)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise Corrupted(f"ring: not a ring document: {error!r}") from error
