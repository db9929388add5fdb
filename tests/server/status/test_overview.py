"""Combining the reports of nodes: which reports are believed, and what is shown of nodes that do not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvstore.meta.registration import RegisteredBookies
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import ClusterReport, NodeReport
from kvstore.ring import plan
from kvstore.ring.moves import Pace
from kvstore.server.cluster.topology import ClusterTopology, Member
from kvstore.server.status.overview import STUCK_S, ClusterSurvey, node_of, report_of_cluster
from kvstore.types import BookieId, PartitionId, ServerId
from tests.ring.rings import new_ring

N1, N2, N3 = (ServerId(f"n{number}") for number in (1, 2, 3))
P1, P2 = PartitionId("p1"), PartitionId("p2")
RING = new_ring([P1, P2], {N1: "", N2: "", N3: ""}, 3)
SERVERS = {each: Member(id=each, resp=f"{each}:1", bookie=f"{each}:3181", version="0.1.0") for each in (N1, N2, N3)}
TOPOLOGY = ClusterTopology(RING, {P1: (N1, 4), P2: (N2, 6)}, SERVERS)
B1, B2, B3 = (BookieId(f"n{number}-ab") for number in (1, 2, 3))
REGISTERED = RegisteredBookies({B1: "n1:3181", B2: "n2:3181", B3: "n3:3181"}, {})


def told(server: ServerId, **roles: tuple[str, int, int]) -> NodeReport:
    """Return a report with a bookie, and for each partition a replica with role, sequence and epoch."""
    report = NodeReport(id=server, version="0.1.0")
    report.metadata.state, report.metadata.read_age_s = "connected", 2.5
    report.bookie.id, report.bookie.address, report.bookie.node = f"{server}-ab", f"{server}:3181", server
    report.bookie.state = "writable"
    report.repair.enabled = True
    for partition, (role, sequence, epoch) in roles.items():
        replica = report.replicas.add(partition=partition, role=role, sequence=sequence, epoch=epoch)
        if role == "serving":
            replica.lead.epoch = epoch
    return report


def reports() -> dict[ServerId, NodeReport]:
    return {
        N1: told(N1, p1=("serving", 70, 4), p2=("following", 50, 6)),
        N2: told(N2, p1=("following", 60, 4), p2=("serving", 55, 6)),
        N3: told(N3, p1=("following", 70, 4), p2=("opening", 0, 0)),
    }


def seen(**changes: Any) -> ClusterReport:
    given: dict[str, Any] = {"reports": reports(), "bookies": REGISTERED, "topology": TOPOLOGY} | changes
    return report_of_cluster(ClusterSurvey(server=N1, **given))


def test_newest_snapshot_and_smallest_limit_of_all_nodes_count() -> None:
    given = reports()
    given[N2].snapshot.age_s, given[N2].snapshot_age_max_s = 7200.0, 3600.0
    assert [each.code for each in seen(reports=given).findings] == ["snapshot_old"]
    given[N3].snapshot.age_s, given[N1].snapshot_age_max_s = 3000.0, 90_000.0
    report = seen(reports=given)
    assert (report.snapshot.age_s, report.snapshot_age_max_s, list(report.findings)) == (3000.0, 3600.0, [])
    assert not seen().HasField("snapshot")


def test_partitions_show_leader_epoch_and_replica_lag() -> None:
    first, second = seen().partitions
    assert (first.id, first.leader, first.epoch, first.served, first.sequence) == ("p1", "n1", 4, True, 70)
    assert {each.server: each.behind for each in first.replicas} == {"n1": 0, "n2": 10, "n3": 0}
    assert (second.leader, {each.server: each.behind for each in second.replicas}) == (
        "n2",
        {"n1": 5, "n2": 0, "n3": 55},
    )


def test_server_that_reports_serving_is_believed() -> None:
    stale = ClusterTopology(RING, {P1: (N3, 3), P2: (N2, 6)}, SERVERS)
    first = seen(topology=stale).partitions[0]
    assert (first.leader, first.epoch, first.served) == ("n1", 4, True)


def test_serving_server_of_later_epoch_is_believed() -> None:
    answers = reports()
    answers[N2] = told(N2, p1=("serving", 80, 5), p2=("serving", 55, 6))
    first = seen(reports=answers).partitions[0]
    assert (first.leader, first.epoch, first.sequence) == ("n2", 5, 80)
    answers[N1] = told(N1, p1=("serving", 70, 6))
    assert seen(reports=answers).partitions[0].leader == "n1"


def test_partition_with_silent_leader_is_not_served() -> None:
    answers = reports()
    del answers[N1]
    answers[N2].replicas[0].role = "standing"
    report = report_of_cluster(
        ClusterSurvey(
            server=N2, topology=TOPOLOGY, reports=answers, silence={N1: "no answer within 1 s"}, bookies=REGISTERED
        )
    )
    first = report.partitions[0]
    assert (first.leader, first.served, [each.HasField("behind") for each in first.replicas]) == (
        "n1",
        False,
        [False] * 3,
    )
    silent = report.nodes[0]
    assert (silent.id, silent.no_answer, silent.HasField("report")) == ("n1", "no answer within 1 s", False)
    assert report.health.grade == admin_pb2.DOWN
    assert "the leader n1 does not answer: no answer within 1 s" in report.health.text
    lost = next(each for each in report.bookies if each.id == B1)
    assert (lost.state, lost.no_answer) == ("writable", "no answer within 1 s"), "registered still, and it is silent"


def test_node_of_old_release_is_shown_by_others() -> None:
    answers = reports()
    answers[N1] = told(N1, p1=("following", 70, 4), p2=("following", 50, 6))
    answers[N2] = NodeReport(id=N2, version="0.0.9")
    report = seen(reports=answers)
    assert report.partitions[1].served, "n2 is known to lead it, and is there"
    assert report.partitions[1].replicas[[each.server for each in report.partitions[1].replicas].index("n2")].is_up


def test_bookies_without_node_are_shown_by_their_answer() -> None:
    far, mute, gone = BookieId("store-1-00"), BookieId("store-2-00"), BookieId("n3-99")
    registered = RegisteredBookies({**REGISTERED.writable, far: "far:3181"}, {mute: "mute:3181"}, {far: "rack-9"})
    report = seen(bookies=registered, known_bookies=[gone, B1], spaces={far: (100, 40), mute: "no answer within 1 s"})
    rows = {each.id: each for each in report.bookies}
    assert sorted(rows) == sorted([B1, B2, B3, far, mute, gone])
    assert (rows[far].zone, rows[far].disk.free_bytes, rows[far].state, rows[far].node) == (
        "rack-9",
        40,
        "writable",
        "",
    )
    assert (rows[mute].state, rows[mute].no_answer) == ("readonly", "no answer within 1 s")
    assert (rows[gone].state, rows[gone].node) == ("away", "n3")


def test_bookie_is_believed_about_its_full_disk() -> None:
    answers = reports()
    answers[N1].bookie.state = "readonly"
    assert seen(reports=answers).bookies[0].state == "readonly"


def test_bookie_belongs_to_node_by_address_or_name() -> None:
    assert node_of(BookieId("store:3181"), "n2:3181", TOPOLOGY) == "n2"
    assert node_of(BookieId("n3-00"), "", TOPOLOGY) == "n3"
    assert node_of(BookieId("other-00"), "x:1", TOPOLOGY) == ""


def test_repairs_show_largest_backlog_and_sum_of_work() -> None:
    answers = reports()
    for server, marked, repairing in ((N1, 5, 1), (N2, 7, 2), (N3, 0, 0)):
        answers[server].repair.marked, answers[server].repair.repairing = marked, repairing
    repair = seen(reports=answers).repair
    assert (repair.enabled, repair.marked, repair.repairing) == (True, 7, 3)
    answers[N3].repair.enabled = False
    assert not seen(reports=answers).repair.enabled


def test_node_known_only_from_ring_is_shown_unregistered() -> None:
    two = ClusterTopology(RING, TOPOLOGY.leaders, {N1: SERVERS[N1], N2: SERVERS[N2]})
    answers = {N1: reports()[N1], N2: reports()[N2]}
    report = seen(topology=two, reports=answers, silence={N3: "no address is known for server n3"})
    assert [(each.id, each.registered) for each in report.nodes] == [("n1", True), ("n2", True), ("n3", False)]
    assert list(report.nodes[0].leads) == ["p1"]
    assert list(report.nodes[2].holds) == ["p1", "p2"]


def with_move(*, paused: bool = False) -> ClusterTopology:
    """Return a topology with a planned move from p1, which n1 leads, to p2, which n2 leads."""
    ring = replace(plan.shift(RING, P1, P2, 1 << 20), pace=Pace(paused=paused))
    return ClusterTopology(ring, TOPOLOGY.leaders, SERVERS)


def stuck(topology: ClusterTopology, failing_s: float = STUCK_S, **changes: Any) -> list[str]:
    """Return why the moves do not continue if the target's leader reports that their last steps failed."""
    answers = reports()
    for move in topology.ring.moves:
        answers[N2].copied.add(id=move, part=0.25, failure="partition p1: the copy was wrong", failing_s=failing_s)
    return [each.stuck for each in seen(reports=answers, topology=topology, **changes).ring.moves]


def test_move_is_stuck_after_lasting_failure() -> None:
    [why] = stuck(with_move())
    assert why == "no step has succeeded for 20 s: partition p1: the copy was wrong"
    assert stuck(with_move(), STUCK_S - 1) == [""], "a change of leader takes some seconds"


def test_paused_move_is_not_stuck() -> None:
    assert stuck(with_move(paused=True)) == [""]


def test_move_of_unserved_partition_is_stuck() -> None:
    for server, why in (
        (N1, "partition p1, its source, is not served"),
        (N2, "partition p2, its target, is not served"),
    ):
        answers = reports()
        for replica in answers[server].replicas:
            replica.role = "standing"
        report = seen(reports=answers, topology=with_move())
        assert [each.stuck for each in report.ring.moves] == [why]


def test_remaining_time_of_move_is_shown_if_reported() -> None:
    answers, topology = reports(), with_move()
    [move] = topology.ring.moves
    assert not seen(reports=answers, topology=topology).ring.moves[0].HasField("eta_s")
    answers[N2].copied.add(id=move, part=0.25, eta_s=90)
    [view] = seen(reports=answers, topology=topology).ring.moves
    assert (view.copied, view.eta_s, view.stuck) == (0.25, 90, "")


def test_missing_copies_are_summed_per_bookie() -> None:
    answers = reports()
    for server, partition, rows in ((N1, 0, [("n3-ab", 2), ("n9-ab", 1)]), (N2, 1, [("n3-ab", 5)])):
        for bookie, ledgers in rows:
            answers[server].replicas[partition].lead.lacking_at.add(bookie=bookie, ledgers=ledgers)
    rows = {each.id: (each.lacking_ledgers, each.state) for each in seen(reports=answers).bookies}
    assert rows == {"n1-ab": (0, "writable"), "n2-ab": (0, "writable"), "n3-ab": (7, "writable"), "n9-ab": (1, "away")}
