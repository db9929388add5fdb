"""Cluster commands, and the assignment of slots to nodes.

Every node accepts every command and forwards it, so no client depends on the slots. The slots are divided among the
servers so that a client spreads its commands over all of them.
"""

from __future__ import annotations

import hashlib
from binascii import crc_hqx
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.partition.state.commands import Level
from kvstore.ring.hashing import hash_tag
from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import OPTIONS_MAX, Command, Family, in_turn, replying
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.backend import Endpoints
from kvstore.types import ServerId

SLOTS = 1 << 14


class SlotRange(NamedTuple):
    """A server and the contiguous slots that it serves, from `first` to `last`."""

    first: int
    last: int
    id: bytes
    """The node id that clients see: forty hexadecimal digits."""
    host: bytes
    port: int
    is_here: bool


def slot_ranges(servers: Mapping[ServerId, Endpoints], here: ServerId) -> list[SlotRange]:
    """Divide all slots among the servers and return the slots of each. Raises CommandError if no server is known."""
    if not servers:
        raise CommandError("CLUSTERDOWN no server is known yet")
    found = []
    for number, (server, endpoints) in enumerate(sorted(servers.items())):
        host, _, port = endpoints.resp.rpartition(":")
        first, last = SLOTS * number // len(servers), SLOTS * (number + 1) // len(servers) - 1
        found.append(SlotRange(first, last, _id_of(server), host.strip("[]").encode(), int(port), server == here))
    return found


def _cluster(performer: Performer, words: Words) -> bytes:
    servers, here = performer.server.backend.topology.servers, performer.server.id
    match words[1].upper(), len(words):
        case b"SLOTS", 2:
            return replies.array(map(_slots, slot_ranges(servers, here)))
        case b"SHARDS", 2:
            return replies.array(_shard(each, performer.session.protocol) for each in slot_ranges(servers, here))
        case b"NODES", 2:
            return replies.bulk(b"".join(map(_line, slot_ranges(servers, here))))
        case b"INFO", 2:
            return replies.bulk(_info(len(servers)))
        case b"MYID", 2:
            return replies.bulk(_id_of(here))
        case b"KEYSLOT", 3:
            return replies.number(crc_hqx(hash_tag(words[2]), 0) % SLOTS)
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong number of arguments. CLUSTER supports INFO, KEYSLOT, MYID, NODES, "
                "SHARDS and SLOTS here; `kvstore ring` shows the ring"
            )


def _id_of(server: ServerId) -> bytes:
    return hashlib.sha1(server.encode(), usedforsecurity=False).hexdigest().encode()


def _slots(server: SlotRange) -> bytes:
    node = [replies.bulk(server.host), replies.number(server.port), replies.bulk(server.id), replies.array([])]
    return replies.array([replies.number(server.first), replies.number(server.last), replies.array(node)])


def _shard(server: SlotRange, protocol: int) -> bytes:
    node = {
        b"id": replies.bulk(server.id),
        b"port": replies.number(server.port),
        b"ip": replies.bulk(server.host),
        b"endpoint": replies.bulk(server.host),
        b"role": replies.bulk(b"master"),
        b"replication-offset": replies.ZERO,
        b"health": replies.bulk(b"online"),
    }
    slots = replies.array([replies.number(server.first), replies.number(server.last)])
    return replies.mapping({b"slots": slots, b"nodes": replies.array([replies.mapping(node, protocol)])}, protocol)


def _line(server: SlotRange) -> bytes:
    flags = b"myself,master" if server.is_here else b"master"
    values = (server.id, server.host, server.port, server.port, flags, server.first, server.last)
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


def _read_at(level: Level) -> Callable[[Performer, Words], bytes]:
    def make(performer: Performer, words: Words) -> bytes:
        performer.session.choose_level(level)
        return replies.OK

    return make


FAMILY = Family(
    "Cluster",
    "cluster",
    (
        Command(
            *("CLUSTER", "Show the cluster and its slots.", in_turn(_cluster), 2, OPTIONS_MAX, Need.LOGIN),
            differs="Supports INFO, KEYSLOT, MYID, NODES, SHARDS, SLOTS. The slots are divided among the nodes, so "
            "that clients of Redis Cluster work and use all nodes. No reply is MOVED. Every node serves all keys, so "
            "a client that sends SCAN, KEYS or DBSIZE to every node gets every key from each of them.",
        ),
        Command(
            *("READONLY", "Allow stale reads on this connection.", replying(_read_at(Level.STALE)), 1, 1, Need.LOGIN),
            differs="The contacted node answers from its own replica, if it has one. While keys are watched, reads "
            "stay linearizable, because EXEC relies on them.",
        ),
        Command("READWRITE", "End READONLY.", replying(_read_at(Level.LINEARIZABLE)), 1, 1, Need.LOGIN),
    ),
)
