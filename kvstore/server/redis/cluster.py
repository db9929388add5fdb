"""Answers clients of Redis clusters: which node has which slots. Decides only.

Any node takes any command for any key and passes it on, so nothing of this has to be right: the slots are divided among
the servers that there are, so that a client's commands are too.
"""

from __future__ import annotations

import hashlib
from binascii import crc_hqx
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.ring.hashing import hash_tag
from kvstore.server.redis import replies
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.backend import Endpoints
from kvstore.types import ServerId

SLOTS = 1 << 14


class Share(NamedTuple):
    """A server and its slots, `first` to `last`."""

    first: int
    last: int
    id: bytes
    """Forty digits, as clients expect."""
    host: bytes
    port: int
    is_here: bool


def shares(servers: Mapping[ServerId, Endpoints], here: ServerId) -> list[Share]:
    """Every slot is in one of them. Raises CommandError if no server is known."""
    if not servers:
        raise CommandError("CLUSTERDOWN no server is known yet")
    found = []
    for number, (server, endpoints) in enumerate(sorted(servers.items())):
        host, _, port = endpoints.resp.rpartition(":")
        first, last = SLOTS * number // len(servers), SLOTS * (number + 1) // len(servers) - 1
        found.append(Share(first, last, _id_of(server), host.strip("[]").encode(), int(port), server == here))
    return found


def cluster(words: list[bytes], servers: Mapping[ServerId, Endpoints], here: ServerId, protocol: int) -> bytes:
    """CLUSTER and its subcommands. Raises CommandError."""
    match words[1].upper(), len(words):
        case b"SLOTS", 2:
            return replies.array(map(_slots, shares(servers, here)))
        case b"SHARDS", 2:
            return replies.array(_shard(each, protocol) for each in shares(servers, here))
        case b"NODES", 2:
            return replies.bulk(b"".join(map(_line, shares(servers, here))))
        case b"INFO", 2:
            return replies.bulk(_info(len(servers)))
        case b"MYID", 2:
            return replies.bulk(_id_of(here))
        case b"KEYSLOT", 3:
            return replies.number(crc_hqx(hash_tag(words[2]), 0) % SLOTS)
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong arguments. CLUSTER has INFO, KEYSLOT, MYID, NODES, SHARDS and SLOTS "
                "here; `kvstore ring` shows the ring"
            )


def _id_of(server: ServerId) -> bytes:
    return hashlib.sha1(server.encode(), usedforsecurity=False).hexdigest().encode()


def _slots(share: Share) -> bytes:
    node = [replies.bulk(share.host), replies.number(share.port), replies.bulk(share.id), replies.array([])]
    return replies.array([replies.number(share.first), replies.number(share.last), replies.array(node)])


def _shard(share: Share, protocol: int) -> bytes:
    node = {
        b"id": replies.bulk(share.id),
        b"port": replies.number(share.port),
        b"ip": replies.bulk(share.host),
        b"endpoint": replies.bulk(share.host),
        b"role": replies.bulk(b"master"),
        b"replication-offset": replies.ZERO,
        b"health": replies.bulk(b"online"),
    }
    slots = replies.array([replies.number(share.first), replies.number(share.last)])
    return replies.mapping({b"slots": slots, b"nodes": replies.array([replies.mapping(node, protocol)])}, protocol)


def _line(share: Share) -> bytes:
    flags = b"myself,master" if share.is_here else b"master"
    values = (share.id, share.host, share.port, share.port, flags, share.first, share.last)
    return b"%b %b:%d@%d %b - 0 0 0 connected %d-%d\n" % values


def _info(servers: int) -> bytes:
    facts: Sequence[tuple[str, object]] = (
        ("cluster_enabled", 1),
        ("cluster_state", "ok" if servers else "fail"),
        ("cluster_slots_assigned", SLOTS),
        ("cluster_slots_ok", SLOTS),
        ("cluster_slots_pfail", 0),
        ("cluster_slots_fail", 0),
        ("cluster_known_nodes", servers),
        ("cluster_size", servers),
    )
    return "".join(f"{name}:{value}\r\n" for name, value in facts).encode()
