"""Chooses the servers of a partition's replicas: distinct servers, distinct zones if there are any, least loaded first.
Decides only, deterministically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvstore.ring.ring import Member, PartitionState
from kvstore.types import PartitionId, ServerId


def place_replicas(
    servers: Mapping[ServerId, str], count: int, replicas: Mapping[ServerId, int], leads: Mapping[ServerId, int]
) -> tuple[ServerId, ...]:
    """Choose servers for one partition, the preferred leader first: servers in unused zones before others, then those
    with the fewest replicas (`replicas`), then by name. Among the chosen servers, the one that leads least (`leads`)
    comes first."""
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
    """Place new partitions with `count` replicas each, besides those that exist already."""
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
    """Choose the best server for the replica on `leaving`; None if every server has a replica already. `servers` are
    the candidates; a replica's server that is not among them counts as being in no zone."""
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
