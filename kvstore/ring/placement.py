"""Chooses the servers for a partition's replicas: distinct servers, in distinct zones if there are zones, the least
loaded servers first. Decides only, deterministically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvstore.ring.ring import Member, PartitionState
from kvstore.types import PartitionId, ServerId


def place_replicas(
    servers: Mapping[ServerId, str], count: int, replicas: Mapping[ServerId, int], leads: Mapping[ServerId, int]
) -> tuple[ServerId, ...]:
    """Choose `count` servers for the replicas of one partition; the first is the preferred leader. `servers` maps each
    candidate to its zone.

    Servers in zones without a replica come first, then the servers with the fewest replicas (`replicas`), then the
    order of names decides. Among the chosen servers, the one that leads the fewest partitions (`leads`) becomes the
    preferred leader. Raises ValueError if there are fewer than `count` servers.
    """
    if not 1 <= count <= len(servers):
        raise ValueError(f"expected 1 to {len(servers)} replicas, one per server, got {count}")
    chosen: list[ServerId] = []
    while len(chosen) < count:
        chosen.append(_best(servers, chosen, replicas))
    first = min(chosen, key=lambda server: (leads.get(server, 0), server))
    turn = chosen.index(first)
    return (*chosen[turn:], *chosen[:turn])


def place_members(
    partitions: Iterable[PartitionId],
    servers: Mapping[ServerId, str],
    count: int,
    present: Iterable[Member] = (),
    state: PartitionState = PartitionState.SERVING,
) -> list[Member]:
    """Return new partitions with `count` replicas each, placed so that the load stays even together with the partitions
    in `present`. `servers` maps each candidate to its zone."""
    held: Counter[ServerId] = Counter()
    leads: Counter[ServerId] = Counter()
    for member in present:
        held.update(member.replicas)
        leads.update(member.replicas[:1])
    members = []
    for partition in partitions:
        replicas = place_replicas(servers, count, held, leads)
        held.update(replicas)
        leads[replicas[0]] += 1
        members.append(Member(partition, replicas, state))
    return members


def replacement(
    servers: Mapping[ServerId, str], member: Member, leaving: ServerId, replicas: Mapping[ServerId, int]
) -> ServerId | None:
    """Return the best server to take over the replica on `leaving`, or None if every candidate already has a replica.
    `servers` maps each candidate to its zone. A server that already has a replica but is not a candidate counts as
    being in no zone."""
    staying = [server for server in member.replicas if server != leaving]
    if not set(servers) - set(member.replicas):
        return None
    return _best(servers, staying, replicas, never=leaving)


def _best(
    servers: Mapping[ServerId, str],
    chosen: list[ServerId],
    replicas: Mapping[ServerId, int],
    never: ServerId | None = None,
) -> ServerId:
    zones = Counter(zone for zone in (servers.get(server, "") for server in chosen) if zone)
    rest = [server for server in servers if server not in chosen and server != never]
    return min(rest, key=lambda server: (zones[servers[server]], replicas.get(server, 0), server))
