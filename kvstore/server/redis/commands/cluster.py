"""Cluster commands: the table of slots for clients of Redis Cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.partition.state.commands import Level
from kvstore.ring.hashing import SLOTS, slot_of
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.redis import replies
from kvstore.server.redis.commands.performer import Performer
from kvstore.server.redis.commands.row import OPTIONS_MAX, Alone, Command, Family, in_turn, replying
from kvstore.server.redis.commands.scans import count_keys_in_slot, keys_in_slot, slot_reply_bytes
from kvstore.server.redis.gate import Need
from kvstore.server.redis.parser import Words
from kvstore.server.redis.plans import CommandError
from kvstore.server.redis.slot_table import (
    Shard,
    SlotNode,
    SlotRange,
    node_id,
    nodes_of,
    ranges_by_primary,
    shards,
    slot_ranges,
)
from kvstore.types import ServerId

_SCANS: dict[tuple[bytes, int], Callable[[Performer, Words], None]] = {
    (b"COUNTKEYSINSLOT", 3): count_keys_in_slot,
    (b"GETKEYSINSLOT", 4): keys_in_slot,
}
"""The subcommands that read keys, by name and number of words."""


def _scan_or_none(words: Words) -> Callable[[Performer, Words], None] | None:
    return _SCANS.get((words[1].upper(), len(words)))


def _cluster(performer: Performer, words: Words) -> None:
    (_scan_or_none(words) or _SHOWN.act)(performer, words)


def _cluster_need(words: Words) -> Need:
    return Need.LOGIN if _scan_or_none(words) is None else Need.READ_ALL


def _cluster_bytes(performer: Performer, words: Words) -> int:
    return slot_reply_bytes(words) if _scan_or_none(words) is keys_in_slot else 0


def _shown(performer: Performer, words: Words) -> bytes:
    topology, here = performer.server.backend.topology, performer.server.id
    match words[1].upper(), len(words):
        case b"SLOTS", 2:
            return replies.array(map(_slots, slot_ranges(_known(topology))))
        case b"SHARDS", 2:
            return replies.array(_shard(each, performer.session.protocol) for each in shards(_known(topology)))
        case b"NODES", 2:
            return replies.bulk(b"".join(_lines(_known(topology), here)))
        case b"INFO", 2:
            return replies.bulk(_info(topology))
        case b"MYID", 2:
            return replies.bulk(node_id(here))
        case b"KEYSLOT", 3:
            return replies.number(slot_of(words[2]))
        case _:
            raise CommandError(
                "ERR unknown subcommand or wrong number of arguments. CLUSTER supports COUNTKEYSINSLOT, GETKEYSINSLOT, "
                "INFO, KEYSLOT, MYID, NODES, SHARDS and SLOTS here; `kvstore ring` shows the ring"
            )


_SHOWN = in_turn(_shown)


def _known(topology: ClusterTopology) -> ClusterTopology:
    """Return the topology. Raises CommandError if it has no server."""
    if not topology.servers:
        raise CommandError("CLUSTERDOWN no server is known yet")
    return topology


def _slots(slots: SlotRange) -> bytes:
    return replies.array([replies.number(slots.first), replies.number(slots.last), *map(_node, slots.nodes)])


def _node(node: SlotNode) -> bytes:
    parts = [replies.bulk(node.host), replies.number(node.port), replies.bulk(node.id), replies.array([])]
    return replies.array(parts)


def _shard(shard: Shard, protocol: int) -> bytes:
    nodes = [
        replies.mapping(
            {
                b"id": replies.bulk(node.id),
                b"port": replies.number(node.port),
                b"ip": replies.bulk(node.host),
                b"endpoint": replies.bulk(node.host),
                b"role": replies.bulk(b"replica" if number else b"master"),
                b"replication-offset": replies.ZERO,
                b"health": replies.bulk(b"online"),
            },
            protocol,
        )
        for number, node in enumerate(shard.nodes)
    ]
    slots = replies.array(replies.number(slot) for span in shard.ranges for slot in span)
    return replies.mapping({b"slots": slots, b"nodes": replies.array(nodes)}, protocol)


def _lines(topology: ClusterTopology, here: ServerId) -> list[bytes]:
    """Return one line for each server. A server leads some partitions and follows in others, which the format cannot
    show, so each is a master."""
    ranges = ranges_by_primary(topology)
    lines = []
    for node in nodes_of(topology):
        flags = b"myself,master" if node.server == here else b"master"
        slots = b"".join(b" %d-%d" % each for each in ranges.get(node.server, ()))
        lines.append(b"%b %b:%d@%d %b - 0 0 0 connected%b\n" % (node.id, node.host, node.port, node.port, flags, slots))
    return lines


def _info(topology: ClusterTopology) -> bytes:
    slots = sum(each.last - each.first + 1 for each in slot_ranges(topology))
    facts: Sequence[tuple[str, object]] = (
        ("cluster_enabled", 1),
        ("cluster_state", "ok" if slots == SLOTS else "fail"),
        ("cluster_slots_assigned", SLOTS),
        ("cluster_slots_ok", slots),
        ("cluster_slots_pfail", 0),
        ("cluster_slots_fail", SLOTS - slots),
        ("cluster_known_nodes", len(topology.servers)),
        ("cluster_size", len(ranges_by_primary(topology))),
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
            "CLUSTER",
            "Show the cluster and its slots.",
            Alone(_cluster, _cluster_bytes),
            2,
            OPTIONS_MAX,
            _cluster_need,
            differs="Supports COUNTKEYSINSLOT, GETKEYSINSLOT, INFO, KEYSLOT, MYID, NODES, SHARDS, SLOTS. A slot "
            "belongs to its partition's leader. In a cluster with the key hash `murmur3`, the slots are divided among "
            "the nodes, and COUNTKEYSINSLOT and GETKEYSINSLOT fail. These two require the right to read all keys, and "
            "any node answers them for every slot. GETKEYSINSLOT returns at most 10,000 keys. NODES shows no replicas. "
            "The reply is MOVED only with `[redis] redirects = true`. Every node serves all keys, so a client that "
            "sends SCAN, KEYS or DBSIZE to every node gets every key from each of them.",
        ),
        Command(
            "READONLY",
            "Allow stale reads on this connection.",
            replying(_read_at(Level.STALE)),
            1,
            1,
            Need.LOGIN,
            differs="The contacted node answers from its own replica, if it has one. While keys are watched, reads "
            "stay linearizable, because EXEC relies on them.",
        ),
        Command("READWRITE", "End READONLY.", replying(_read_at(Level.LINEARIZABLE)), 1, 1, Need.LOGIN),
    ),
)
