"""Replicas are moved one by one until all servers hold about the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.server.placement.balancing import BalancingMove, is_complete, next_balancing_move, not_considered


def cluster(zones: Mapping[str, str], *placed: Sequence[str]) -> ClusterReport:
    """Return servers in zones, and partitions p1, p2 … with replicas on the servers that each of `placed` names."""
    report = ClusterReport(server="a")
    for server, zone in zones.items():
        node = report.nodes.add(id=server, registered=True)
        node.report.roles.append("server")
        node.report.zone = zone
    for number, servers in enumerate(placed, 1):
        view = report.partitions.add(id=f"p{number}", state="serving", leader=servers[0], served=True)
        for server in servers:
            view.replicas.add(server=server, is_up=True)
    return report


def settled(report: ClusterReport) -> list[str]:
    """Return the servers of each partition after all moves."""
    for _ in range(100):
        move = next_balancing_move(report)
        if move is None:
            return ["".join(sorted(each.server for each in view.replicas)) for view in report.partitions]
        view = next(each for each in report.partitions if each.id == move.partition)
        replica = next(each for each in view.replicas if each.server == move.leaving)
        replica.server = move.newcomer
    raise AssertionError("moves do not end")


FOUR = dict.fromkeys("abcd", "")


def test_undrained_server_gets_its_share_again() -> None:
    report = cluster(FOUR, *["bcd"] * 8)
    assert next_balancing_move(report) == BalancingMove("p1", "c", "a"), (
        "b leads them; of the others the first by name gives one"
    )
    found = "".join(settled(report))
    assert sorted(found.count(server) for server in "abcd") == [6, 6, 6, 6]


def test_nothing_moves_when_replicas_are_balanced() -> None:
    assert next_balancing_move(cluster(FOUR, "abc", "abd", "acd")) is None
    assert next_balancing_move(cluster(dict.fromkeys("abc", ""), *["abc"] * 5)) is None


def test_zones_stay_distinct() -> None:
    zones = {"a": "east", "b": "west", "c": "north", "d": "west"}
    report = cluster(zones, *["abc"] * 6)
    assert settled(report) == ["acd"] * 3 + ["abc"] * 3, "only b's replicas go to d, which is in its zone"


# docs/protocol.md H15
def test_replicas_stay_on_distinct_machines() -> None:
    processes = [f"{machine}{process}" for machine in "abc" for process in ("", ".2")]
    report = cluster(dict.fromkeys(processes, ""), *[list("abc")] * 6)
    assert next_balancing_move(report) == BalancingMove("p1", "b", "b.2"), "not to a.2, because a has a replica"
    found = settled(report)
    assert all(sorted(servers.replace(".2", "")) == ["a", "b", "c"] for servers in found)
    assert [sum(process in servers for servers in found) for process in ("a.2", "b.2", "c.2")] == [3, 3, 3]


def test_absent_or_draining_servers_take_nothing() -> None:
    report = cluster(FOUR, *["bcd"] * 4)
    report.nodes[0].no_answer = "refuses connections"
    assert next_balancing_move(report) is None
    report.nodes[0].no_answer = ""
    report.ring.draining.append("a")
    assert next_balancing_move(report) is None
    del report.ring.draining[:]
    report.nodes[0].report.roles[0] = "bookie"
    assert next_balancing_move(report) is None


def test_servers_without_an_answer_are_named_unless_they_drain() -> None:
    report = cluster(FOUR, *["bcd"] * 4)
    assert not_considered(report) == []
    report.nodes[0].no_answer = "timed out"
    report.nodes[1].report.not_ready.append("starting")
    report.nodes[2].no_answer = "timed out"
    report.ring.draining.append("c")
    assert not_considered(report) == ["a", "b"]
    report.nodes[1].report.roles[0] = "bookie"
    report.nodes[0].registered = False
    assert not_considered(report) == []


def test_report_by_an_older_ring_is_not_complete() -> None:
    report = cluster(FOUR, *["bcd"] * 4)
    report.ring.version = 7
    assert is_complete(report)
    report.nodes[0].report.ring_version = 8
    assert not is_complete(report)


def test_incomplete_or_retired_partition_is_skipped() -> None:
    report = cluster(FOUR, "bcd", "bcd", "bcd")
    report.partitions[0].replicas[1].is_up = False
    report.partitions[1].replicas[2].is_leaving = True
    move = next_balancing_move(report)
    assert move is not None
    assert move.partition == "p3"
    report.partitions[2].state = "retired"
    assert next_balancing_move(report) is None
