"""Chooses the servers for a partition's replicas: on distinct machines, in distinct zones if there are zones, the least
loaded servers first (docs/protocol.md, H15). Decides only, deterministically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from kvstore.ring.ring import Member, PartitionState
from kvstore.types import PartitionId, ServerId, machine_of


def place_replicas(
    servers: Mapping[ServerId, str], count: int, replicas: Mapping[ServerId, int], leads: Mapping[ServerId, int]
) -> tuple[ServerId, ...]:
    """Choose `count` servers for the replicas of one partition; the first is the preferred leader. `servers` maps each
    candidate to its zone.

    Servers in zones without a replica come first, then the servers with the fewest replicas (`replicas`), then the
    order of names decides. Among the chosen servers, the one that leads the fewest partitions (`leads`) becomes the
    preferred leader. Raises ValueError if the servers are on fewer than `count` machines.
    """
    if not 1 <= count <= (machines := machine_count(servers)):
        raise ValueError(f"expected 1 to {machines} replicas, one per machine, got {count}")
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
    """Return the best server to take over the replica on `leaving`, or None if no candidate may. `servers` maps each
    candidate to its zone. A server that already has a replica but is not a candidate counts as being in no zone."""
    staying = [server for server in member.replicas if server != leaving]
    known = {
        server: zone
        for server, zone in servers.items()
        if server in staying or may_replace(server, leaving, member.replicas)
    }
    return _best(known, staying, replicas) if known.keys() - set(staying) else None


# docs/protocol.md H15
def may_replace(newcomer: ServerId, leaving: ServerId, replicas: Collection[ServerId]) -> bool:
    """Return True if `newcomer` may take over the replica on `leaving` of a partition with these replicas: it has none,
    and no other replica is on its machine."""
    return newcomer not in replicas and machine_of(newcomer) not in {
        machine_of(server) for server in replicas if server != leaving
    }


def machine_count(servers: Iterable[ServerId]) -> int:
    """Return the number of machines that the servers are on."""
    return len(set(map(machine_of, servers)))


def _best(servers: Mapping[ServerId, str], chosen: list[ServerId], replicas: Mapping[ServerId, int]) -> ServerId:
    zones = Counter(zone for zone in (servers.get(server, "") for server in chosen) if zone)
    machines = set(map(machine_of, chosen))
    rest = [server for server in servers if machine_of(server) not in machines]
    return min(rest, key=lambda server: (zones[servers[server]], replicas.get(server, 0), server))
