"""The rules for a cluster's health, each tested with one report that contains one fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import getsource

import pytest

from kvstore.meta.store import SessionState
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import DEGRADED, DOWN, HEALTHY, ClusterReport, Finding
from kvstore.server.status import health
from kvstore.server.status.health import copies_of, findings_of, health_of, is_scarce, verdict_of
from kvstore.server.ui import view

GIB = 1 << 30


def well() -> ClusterReport:
    """Three nodes, each with a bookie and a replica of each of two partitions."""
    report = ClusterReport(server="n1", ensemble_size=3, ack_quorum=2)
    report.ring.version = 4
    report.repair.enabled = True
    report.copies.ledgers, report.copies.age_s = 40, 12.0
    for number in (1, 2, 3):
        node = report.nodes.add(id=f"n{number}", registered=True, holds=["p1", "p2"])
        node.report.id = node.id
        node.report.metadata.kind, node.report.metadata.state = "zookeeper", "connected"
        node.report.metadata.address, node.report.metadata.read_age_s = "zk:2181", 3.0
        node.report.disk.total_bytes, node.report.disk.free_bytes = 100 * GIB, 50 * GIB
        bookie = report.bookies.add(id=f"n{number}-ab", node=node.id, state="writable")
        bookie.disk.total_bytes, bookie.disk.free_bytes, bookie.disk.reserve_bytes = 100 * GIB, 50 * GIB, GIB
    for partition, leader in (("p1", "n1"), ("p2", "n2")):
        view = report.partitions.add(id=partition, state="serving", leader=leader, served=True, sequence=500_000)
        for number in (1, 2, 3):
            view.replicas.add(server=f"n{number}", is_up=True, behind=0)
    return report


def silent(report: ClusterReport, *numbers: int) -> None:
    """Return the report of a node that is killed or disconnected."""
    for number in numbers:
        node, bookie = report.nodes[number - 1], report.bookies[number - 1]
        node.ClearField("report")
        node.no_answer = bookie.no_answer = "refuses connections"
        for partition in report.partitions:
            partition.replicas[number - 1].is_up = False
            partition.replicas[number - 1].ClearField("behind")
            partition.served = partition.served and partition.leader != node.id


def leaderless(report: ClusterReport) -> None:
    silent(report, 2, 3)
    report.partitions[0].leader, report.partitions[0].served = "", False


def not_yet(report: ClusterReport) -> None:
    report.partitions[0].served = False


def cut_off_all(report: ClusterReport) -> None:
    for node in report.nodes:
        node.report.metadata.state, node.report.metadata.read_age_s = "suspended", 14.2


# docs/protocol.md B29
def refused(report: ClusterReport) -> None:
    cut_off_all(report)
    report.nodes[0].report.metadata.state = SessionState.OLDER.name.lower()


def old_knowledge(report: ClusterReport) -> None:
    for node in report.nodes:
        node.report.metadata.read_age_s = 61


def cut_off_one(report: ClusterReport) -> None:
    report.nodes[2].report.metadata.state = "lost"


def wiped(report: ClusterReport) -> None:
    """The bookie has another incarnation, and its former one is still in a ledger."""
    report.bookies.add(id="n1-00", node="n1", state="away", lacking_ledgers=3)
    report.copies.lacking = 3


def away(report: ClusterReport) -> None:
    report.bookies[0].state = "away"


def mute(report: ClusterReport) -> None:
    report.bookies[0].node, report.bookies[0].no_answer = "", "no answer within 1 s"


def full(report: ClusterReport) -> None:
    report.bookies[0].state, report.bookies[0].disk.free_bytes = "readonly", 0


def one_directory(report: ClusterReport) -> None:
    report.bookies[0].directories.add(path="/disks/b", failure="[Errno 5] Input/output error")


def limbo(report: ClusterReport) -> None:
    report.bookies[0].limbo_ledgers = 1


def conflict(report: ClusterReport) -> None:
    report.bookies[0].refused_other_entry = 2


def scarce(report: ClusterReport) -> None:
    report.bookies[0].disk.free_bytes = 4 * GIB


def without_inodes(report: ClusterReport) -> None:
    report.nodes[1].report.disk.trouble = report.bookies[0].disk.trouble = "no inodes are free, 1,024 are used"


def scarce_data(report: ClusterReport) -> None:
    report.nodes[1].report.disk.free_bytes = GIB


def unreadable(report: ClusterReport) -> None:
    report.repair.unreadable = 2


def uncounted(report: ClusterReport) -> None:
    report.ClearField("copies")
    report.bookies.add(id="n1-00", node="n1", state="away")


def at_risk(report: ClusterReport) -> None:
    silent(report, 2, 3)
    report.copies.lacking, report.copies.at_risk = 12, 7


def metadata_damaged(report: ClusterReport) -> None:
    report.copies.unreadable = 1


def backlog(report: ClusterReport) -> None:
    report.repair.marked = 17


def switched_off(report: ClusterReport) -> None:
    report.repair.marked, report.repair.enabled = 17, False


def undecodable(report: ClusterReport) -> None:
    report.partitions[0].lead.ledgers_undecodable = 1


def failed(report: ClusterReport) -> None:
    report.partitions[1].replicas[2].failure = "the log has a gap"


def in_doubt(report: ClusterReport) -> None:
    report.partitions[1].replicas[2].is_in_doubt = True


def behind(report: ClusterReport) -> None:
    report.partitions[1].replicas[2].behind = 100_001


def absent(report: ClusterReport) -> None:
    for partition in report.partitions:
        partition.replicas[2].is_up = False


def stuck(report: ClusterReport) -> None:
    report.nodes[0].report.replicas.add(partition="p1", moves_stuck=2)


def hanging(report: ClusterReport) -> None:
    report.partitions[0].lead.intents, report.partitions[0].lead.oldest_intent_s = 3, 31.0


def undelivered(report: ClusterReport) -> None:
    report.partitions[0].lead.decisions, report.partitions[0].lead.oldest_decision_s = 3, 31.0


def move_of(report: ClusterReport, why: str) -> None:
    report.ring.moves.add(id=7, source="p1", target="p2", state="copying", stuck=why)


def paused(report: ClusterReport) -> None:
    report.ring.paused = True
    report.ring.moves.add(id=7)


def doubtful(report: ClusterReport) -> None:
    report.nodes[0].report.date_doubt = "it is 9.0 s ahead of n2, n3"


def dated_behind(report: ClusterReport) -> None:
    report.nodes[0].report.date_behind_s = 60.0


def starting(report: ClusterReport) -> None:
    report.nodes[0].report.not_ready.append("no other server can be reached")


def draining(report: ClusterReport) -> None:
    report.nodes[0].report.draining = True
    report.nodes[0].report.not_ready.append("draining")


def expiring(report: ClusterReport) -> None:
    report.nodes[0].report.tls.left_s = 12.5 * 86_400
    report.nodes[1].report.tls.left_s = 31 * 86_400
    report.nodes[2].report.tls.left_s = -5  # which it reports as not ready


def unusable(report: ClusterReport) -> None:
    report.nodes[0].report.tls.left_s, report.nodes[0].report.tls.failing = 300 * 86_400, True


def refused_by_two(report: ClusterReport) -> None:
    for by in ("n2", "n3-ab"):
        report.nodes[0].report.refused_by.add(by=by, reason="the link was refused")


def named_like_a_node(report: ClusterReport) -> None:
    for node in report.nodes:
        node.report.users_like_nodes.append("n2")


def snapshot_old(report: ClusterReport) -> None:
    report.snapshot.age_s, report.snapshot_age_max_s = 28 * 3600.0, 26 * 3600.0


CASES: dict[str, tuple[Callable[[ClusterReport], None], int, str, str, str]] = {
    # code: what is wrong, its severity, its subject, its reason (a part of it), the next step (a part of it)
    "no_leader": (leaderless, DOWN, "partition p1", "no leader; 1 of 3 replicas are up", "start n2, n3"),
    "leader_silent": (lambda r: silent(r, 2), DOWN, "partition p2", "n2 does not answer: refuses", "start n2"),
    "leader_not_serving": (not_yet, DOWN, "partition p1", "n1 does not serve yet", "wait"),
    "no_ack_quorum": (lambda r: silent(r, 2, 3), DOWN, "the log", "1 of 3 bookies", "start the bookies"),
    "small_ensembles": (lambda r: silent(r, 3), DEGRADED, "the log", "2 of 3 bookies", "start the bookies"),
    "node_silent": (lambda r: silent(r, 3), DEGRADED, "node n3", "refuses connections; it has 2 replicas", "start n3"),
    "node_not_ready": (starting, DEGRADED, "node n1", "no other server can be reached", "log of n1"),
    "node_refused": (
        refused_by_two,
        DEGRADED,
        "node n1",
        "n2, n3-ab refuse its connections: the link was refused",
        "secret on n1",
    ),
    "user_like_node": (named_like_a_node, DEGRADED, "user n2", "the name of a node", "kvstore user remove n2"),
    "node_draining": (draining, DEGRADED, "node n1", "it was drained", "undrain n1"),
    "metadata_older": (refused, DOWN, "ZooKeeper", "an older copy of the metadata", "a later copy"),
    "metadata_away": (cut_off_all, DEGRADED, "ZooKeeper", "no node reaches it; their knowledge is 14 s old", "zk:2181"),
    "metadata_unreachable_from": (
        cut_off_one,
        DEGRADED,
        "node n3",
        "session lost, last read 3 s ago",
        "network from n3",
    ),
    "bookie_away": (away, DEGRADED, "bookie n1-ab", "not registered", "kvstore bookie decommission n1-ab"),
    "bookie_silent": (mute, DEGRADED, "bookie n1-ab", "no answer within 1 s", "its log"),
    "bookie_readonly": (
        full,
        DEGRADED,
        "bookie n1-ab",
        "read-only because its disk is full: 0 B are free",
        "add a bookie",
    ),
    "directory_failed": (one_directory, DEGRADED, "bookie n1-ab", "/disks/b has failed: [Errno 5]", "lost_dirs"),
    "bookie_limbo": (limbo, DEGRADED, "bookie n1-ab", "may have lost entries of 1 ledger", "autorecovery status"),
    "bookie_conflict": (
        conflict,
        DEGRADED,
        "bookie n1-ab",
        "refused 2 adds because",
        "back-up-and-restore-metadata.md",
    ),
    "disk_scarce": (scarce, DEGRADED, "bookie n1-ab", "4.0 GiB are free and 96 GiB are used", "free space"),
    "bookie_cannot_write": (
        without_inodes,
        DEGRADED,
        "bookie n1-ab",
        "cannot write: no inodes are free",
        "add a bookie",
    ),
    "disk_not_writable": (without_inodes, DEGRADED, "node n2", "no inodes are free, 1,024", "check that disk"),
    "ledgers_unreadable": (unreadable, DEGRADED, "the log", "of some entries in 2 ledgers", "fsck"),
    "copies_at_risk": (
        at_risk,
        DEGRADED,
        "the log",
        "7 ledgers have fewer copies on running bookies",
        "before anything",
    ),
    "copies_lacking": (
        wiped,
        DEGRADED,
        "the log",
        "3 ledgers are under-replicated; none is marked",
        "lost-bookie-delay",
    ),
    "copies_not_counted": (uncounted, DEGRADED, "the log", "bookie n1-00 is down, and", "fsck"),
    "ledger_metadata_unreadable": (metadata_damaged, DEGRADED, "the log", "metadata of 1 ledger", "fsck"),
    "repair_backlog": (
        backlog,
        DEGRADED,
        "the log",
        "up to 17 ledgers are under-replicated; 17 are marked for repair, 0 are being",
        "autorecovery list",
    ),
    "repair_off": (switched_off, DEGRADED, "the log", "disabled", "autorecovery enable"),
    "ledgers_undecodable": (undecodable, DEGRADED, "partition p1", "metadata of 1 ledger cannot be read", "fsck"),
    "replica_failed": (failed, DEGRADED, "partition p2 on n3", "has stopped: the log has a gap", "log of n3"),
    "replica_in_doubt": (
        in_doubt,
        DEGRADED,
        "partition p2 on n3",
        "differs from another replica",
        "partition trust p2",
    ),
    "replica_behind": (behind, DEGRADED, "partition p2 on n3", "100,001 mutations behind", "wait"),
    "replica_absent": (absent, DEGRADED, "node n3", "does not have its replica of partitions p1, p2", "wait"),
    "move_stuck": (stuck, DEGRADED, "partition p1 on n1", "2 moves of its keys", "ring cancel"),
    "transaction_hangs": (hanging, DEGRADED, "partition p1", "oldest for 31 s: 3 intents", "partition intents p1"),
    "decision_not_delivered": (undelivered, DEGRADED, "partition p1", "all of its partitions for 31 s", "intents p1"),
    "moves_paused": (paused, DEGRADED, "the ring", "paused, 1 move remaining", "ring resume"),
    "certificate_expires": (expiring, DEGRADED, "node n1", "expires in 12 days", "no restart is needed"),
    "certificate_unusable": (unusable, DEGRADED, "node n1", "in use is valid for 300 days", "log of n1"),
    "snapshot_old": (snapshot_old, DEGRADED, "snapshots", "is 28 h old; expected at most 26 h", "snapshot create --to"),
    "date_doubtful": (doubtful, DEGRADED, "node n1", "9.0 s ahead", "its clock is right"),
    "date_behind": (dated_behind, DEGRADED, "cluster time", "60.0 s behind", "correct-cluster-time.md"),
}


def test_snapshot_is_demanded_only_with_a_limit() -> None:
    def limited(report: ClusterReport) -> None:
        report.snapshot_age_max_s = 26 * 3600.0

    [finding] = found_in(limited)
    assert (finding.code, finding.reason) == ("snapshot_old", "there is none; expected one of at most 26 h")

    def fresh(report: ClusterReport) -> None:
        snapshot_old(report)
        report.snapshot.age_s = report.snapshot_age_max_s

    def unlimited(report: ClusterReport) -> None:
        snapshot_old(report)
        report.snapshot_age_max_s = 0.0

    assert found_in(fresh) == found_in(unlimited) == []


def found_in(change: Callable[[ClusterReport], None]) -> list[Finding]:
    report = well()
    change(report)
    return findings_of(report)


def test_date_ahead_of_wall_clocks_is_a_finding() -> None:
    report = well()
    report.nodes[1].report.date_behind_s = -3600.0
    [finding] = findings_of(report)
    assert finding.reason == "it is 3600.0 s ahead of a majority of wall clocks and moves by 36 s an hour"


@pytest.mark.parametrize("code", CASES)
def test_findings_have_reason_and_next_step(code: str) -> None:
    change, grade, subject, reason, next_step = CASES[code]
    [finding] = [each for each in found_in(change) if each.code == code]
    assert (finding.grade, finding.subject) == (grade, subject)
    assert reason in finding.reason
    assert next_step in finding.next_step


def test_readonly_bookie_names_what_its_disk_lacks() -> None:
    report = well()
    full(report)
    without_inodes(report)
    [finding] = [each for each in findings_of(report) if each.code == "bookie_readonly"]
    assert finding.reason == "it is read-only because no inodes are free, 1,024 are used"


def test_leaderless_partition_names_failed_attempts() -> None:
    report = well()
    first = report.partitions[0]
    first.leader, first.served = "", False
    first.replicas[1].lead_failure = "no such ledger: 7"
    [finding] = findings_of(report)
    assert finding.reason == "no leader; 3 of 3 replicas are up; n2: no such ledger: 7"
    assert "`kvstore fsck`" in finding.next_step


@pytest.mark.parametrize("down", [False, True])
def test_leaderless_partition_says_which_disks_to_free_first(down: bool) -> None:
    report = well()
    for bookie in report.bookies[:2]:
        bookie.state = "readonly"
    first = report.partitions[0]
    first.leader, first.served = "", False
    first.replicas[0].lead_failure = "expected 2 bookies with space, got 1"
    if down:
        silent(report, 3)
    line = health_of(report, findings_of(report))
    free = "free space on n1, n2 or raise the limit that their findings name; restart no node that answers"
    start = "start n3, or find out why it does not answer; " if down else ""
    assert f"Next: {start}{free}" in line.text
    assert "wait" not in line.text


def test_leaderless_partition_names_full_data_directories() -> None:
    report = well()
    report.partitions[0].leader, report.partitions[0].served = "", False
    report.nodes[1].report.disk.trouble = "a disk quota is reached"
    assert "Next: free space on n2" in health_of(report, findings_of(report)).text


def test_full_disk_that_keeps_nobody_from_writing_is_not_the_next_step() -> None:
    report = well()
    report.bookies[0].state = "readonly"
    not_yet(report)
    assert "Next: wait some seconds" in health_of(report, findings_of(report)).text


def test_every_rule_has_a_case() -> None:
    codes = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', getsource(health)))
    assert codes == set(CASES)


def test_cluster_without_findings_is_healthy() -> None:
    assert findings_of(well()) == []
    line = health_of(well(), [])
    assert (line.grade, line.text) == (HEALTHY, "healthy: 3 nodes, 2 partitions, all served")


def test_unserved_partition_comes_first_in_the_summary() -> None:
    report = well()
    cut_off_one(report)
    not_yet(report)
    found = findings_of(report)
    assert [each.code for each in found] == ["leader_not_serving", "metadata_unreachable_from"]
    line = health_of(report, found)
    assert line.grade == DOWN
    assert line.text == (
        "down, partition p1 not served: partition p1: the leader n1 does not serve yet (and 1 more finding). Next: "
        "wait some seconds; then read the logs of its replicas' nodes and check the metadata store"
    )


def test_node_with_a_wrong_certificate_is_not_to_be_restarted() -> None:
    report = well()
    silent(report, 3)
    report.nodes[2].no_answer = "is unreachable: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
    (found,) = [each for each in findings_of(report) if each.code == "node_silent"]
    assert "replace the certificate of n3" in found.next_step


# docs/protocol.md H15
@pytest.mark.parametrize(("machines", "code"), [((1, 2, 2), "small_ensembles"), ((1, 1, 1), "no_ack_quorum")])
def test_bookies_of_one_machine_count_once(machines: tuple[int, ...], code: str) -> None:
    report = well()
    for process, (bookie, machine) in enumerate(zip(report.bookies, machines, strict=True), 1):
        bookie.id = f"n{machine}.{process}-00000000000a"
    (found,) = [each for each in findings_of(report) if each.code == code]
    assert f"3 of 3 bookies accept writes, on {len(set(machines))} machine" in found.reason


def test_node_that_is_down_is_named_instead_of_its_parts() -> None:
    report = well()
    silent(report, 3)
    assert [each.code for each in findings_of(report)] == ["node_silent", "small_ensembles"]
    assert health_of(report, findings_of(report)).text.startswith("degraded, all partitions served: node n3: refuses")


def test_partitions_with_one_reason_are_one_finding() -> None:
    report = well()
    for number in range(3, 20):
        report.partitions.add(id=f"p{number}", state="serving", leader="n9", served=False)
    [finding] = findings_of(report)
    assert finding.subject == "partitions p3, p4, p5, p6, p7 and 12 more"


def test_partitions_whose_transactions_hang_are_one_finding() -> None:
    report = well()
    for number, partition in enumerate(report.partitions):
        partition.lead.intents, partition.lead.oldest_intent_s = 2, 40.0 + number
        partition.lead.decisions, partition.lead.oldest_decision_s = 1, 50.0 - number
    hangs, waits = findings_of(report)
    first, last = report.partitions[0].id, report.partitions[-1].id
    assert hangs.subject == waits.subject == "partitions " + ", ".join(each.id for each in report.partitions)
    assert f"{2 * len(report.partitions)} intents" in hangs.reason
    assert f"intents {last}`" in hangs.next_step
    assert f"intents {first}`" in waits.next_step


def test_partitions_that_differ_only_in_their_ledger_are_one_finding() -> None:
    report = well()
    for number, partition in enumerate(report.partitions):
        partition.leader, partition.served = "", False
        partition.replicas[0].lead_failure = f"ledger {number}: no definite answer from n2-ab, n3-ab"
    [finding] = findings_of(report)
    assert finding.subject == "partitions p1, p2"
    assert finding.reason == "no leader; 3 of 3 replicas are up; n1: ledger 0: no definite answer from n2-ab, n3-ab"
    report.partitions[1].replicas[0].lead_failure = "ledger 1: entry 7 is damaged"
    assert [each.subject for each in findings_of(report)] == ["partition p1", "partition p2"]


def read_only(report: ClusterReport) -> None:
    for bookie in report.bookies[:2]:
        bookie.state = "readonly"


def unled(report: ClusterReport) -> None:
    for partition in report.partitions:
        partition.leader, partition.served = "", False


def older(report: ClusterReport) -> None:
    report.nodes[0].report.metadata.state = "older"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ((), "healthy: 3 nodes, 2 partitions, all served"),
        ((cut_off_one,), "degraded, all partitions served"),
        ((not_yet,), "down, partition p1 not served"),
        ((not_yet, read_only), "down, partition p1 not served, no writes served"),
        ((unled, read_only), "down, 2 of 2 partitions not served"),
        ((read_only,), "down, no writes served"),
        ((older,), "down, partitions are losing their leaders"),
    ],
)
def test_verdict_says_what_is_not_served(changes: Sequence[Callable[[ClusterReport], None]], verdict: str) -> None:
    report = well()
    for change in changes:
        change(report)
    report.findings.extend(findings_of(report))
    assert verdict_of(report, report.findings) == verdict
    assert health_of(report, report.findings).text.startswith(verdict)
    shown = view.verdict_of(report)
    assert shown.lower().startswith(verdict.lower())
    assert shown.endswith("finding" if len(report.findings) == 1 else "findings") == bool(changes)


def test_retired_partition_needs_no_leader() -> None:
    report = well()
    report.partitions.add(id="p0", state="retired")
    assert findings_of(report) == []


def test_stuck_move_is_one_finding() -> None:
    report = well()
    stuck(report)
    move_of(report, "no step of it has gone well for 31 s: the copy was wrong")
    [finding] = findings_of(report)
    assert (finding.code, finding.subject) == ("move_stuck", "move 7, p1 → p2")
    assert finding.reason.endswith("the copy was wrong")
    assert "`kvstore ring cancel 7`" in finding.next_step


def test_move_with_unserved_source_needs_no_cancelling() -> None:
    report = well()
    not_yet(report)
    move_of(report, "partition p1, its source, is not served")
    assert [each.code for each in findings_of(report)] == ["leader_not_serving", "move_stuck"]
    assert findings_of(report)[1].next_step == "bring back partition p1; then the move continues by itself"


def test_stale_knowledge_counts_as_metadata_outage() -> None:
    [finding] = found_in(old_knowledge)
    assert finding.code == "metadata_away"


def test_unreachable_zookeeper_finding_mentions_older_data() -> None:
    """Emptied, or restored from a copy, it runs and refuses all nodes: starting it would not help."""
    [finding] = found_in(cut_off_all)
    assert "`Refusing session`" in finding.next_step

    def etcd(report: ClusterReport) -> None:
        cut_off_all(report)
        for node in report.nodes:
            node.report.metadata.kind = "etcd"

    [finding] = found_in(etcd)
    assert "Refusing" not in finding.next_step


def test_nearly_full_data_disk_is_found() -> None:
    [finding] = found_in(scarce_data)
    assert (finding.code, finding.subject) == ("disk_scarce", "node n2")


def test_small_disk_near_sync_limit_is_found() -> None:
    """It is above a twentieth of the total, and still too little for an engine."""

    def small(report: ClusterReport) -> None:
        disk = report.nodes[1].report.disk
        disk.total_bytes, disk.free_bytes, disk.reserve_bytes = GIB, 200 << 20, 128 << 20

    [finding] = found_in(small)
    assert (finding.code, finding.subject) == ("disk_scarce", "node n2")
    assert "200 MiB of 1.0 GiB are free, and replicas stop syncing below 128 MiB" in finding.reason


def test_wiped_bookie_is_no_finding_after_repair() -> None:
    report = well()
    wiped(report)
    assert [each.code for each in findings_of(report)] == ["copies_lacking", "bookie_away"]
    report.repair.marked = 3
    assert [each.code for each in findings_of(report)] == ["repair_backlog", "bookie_away"]
    report.repair.marked = report.copies.lacking = report.bookies[-1].lacking_ledgers = 0
    assert findings_of(report) == []


def test_next_step_promises_copies_elsewhere_only_if_a_bookie_is_free() -> None:
    """With three bookies of which one is down, no other bookie can get its copies."""
    report = well()
    report.copies.lacking = 3
    assert "wait some minutes" in findings_of(report)[0].next_step, "every bookie is up"
    report.bookies[0].state = "away"
    first = findings_of(report)[0]
    assert (first.code, "other bookies get" in first.next_step) == ("copies_lacking", False)
    assert "add a bookie, because no other is free for its copies" in first.next_step
    report.repair.marked = 3
    first = findings_of(report)[0]
    assert first.code == "repair_backlog"
    assert "add a bookie, because no other is free for the copies" in first.next_step
    report.bookies.add(id="n4-ab", node="n4", state="writable", disk=report.bookies[1].disk)
    assert "at first after 5 s and later up to 5 min apart" in findings_of(report)[0].next_step
    report.repair.marked = 0
    assert "other bookies get their copies" in findings_of(report)[0].next_step


def test_copies_of_absent_bookie_are_unknown_until_counted() -> None:
    report = well()
    report.ClearField("copies")
    assert findings_of(report) == [], "every bookie is registered"
    report.bookies.add(id="n1-00", node="n1", state="away")
    assert [each.code for each in findings_of(report)] == ["copies_not_counted"]
    report.copies.age_s = health.COUNT_AGE_MAX_S + 1
    assert [each.code for each in findings_of(report)] == ["copies_not_counted"]
    report.copies.age_s = 1
    assert findings_of(report) == []


def test_missing_copies_show_the_age_of_an_old_count() -> None:
    """With 100,000 ledgers, repaired ledgers used to be reported as lacking copies for up to 17 min."""
    report = well()
    wiped(report)
    report.copies.age_s = health.COUNT_AGE_REPORTED_S - 1
    assert "are under-replicated; none" in findings_of(report)[0].reason
    report.copies.age_s = 720.0
    assert "3 ledgers are under-replicated, according to a count 12 min ago; none" in findings_of(report)[0].reason
    report.repair.marked = 4
    assert "up to 4 ledgers are under-replicated; 4 are marked" in findings_of(report)[0].reason, "marks are of now"


def test_full_bookie_is_named_when_it_cannot_accept_its_copies() -> None:
    report = well()
    report.bookies[0].state, report.bookies[0].lacking_ledgers, report.copies.lacking = "readonly", 2, 2
    (found,) = [each for each in findings_of(report) if each.code == "copies_lacking"]
    assert found.next_step == f"free space on bookie {report.bookies[0].id}: no copies can be written there until then"


def test_missing_copies_use_the_best_source() -> None:
    report = well()
    report.partitions[0].lead.ledgers_lacking_copies, report.partitions[1].lead.ledgers_lacking_copies = 2, 3
    assert copies_of(report).lacking == 5, "leaders know of entries, the count only of bookies"
    report.copies.lacking = report.copies.lacking_foreign = 4
    assert copies_of(report).lacking == 9, "no leader knows of what others write"
    report.repair.marked = 11
    assert copies_of(report).lacking == 11


def test_ledgers_at_risk_include_what_leaders_find_entry_by_entry() -> None:
    """`kvstore fsck` said AT RISK while the count of registrations said 0."""
    report = well()
    report.partitions[0].lead.ledgers_at_risk, report.partitions[1].lead.ledgers_at_risk = 2, 3
    assert copies_of(report).at_risk == 5
    assert "copies_at_risk" in {each.code for each in findings_of(report)}
    report.copies.at_risk = report.copies.at_risk_foreign = 4
    assert copies_of(report).at_risk == 9
    report.copies.at_risk = 12
    assert copies_of(report).at_risk == 12, "the count sees an unregistered bookie before leaders do"


def test_retired_partition_waits_for_no_replica() -> None:
    report = well()
    view = report.partitions.add(id="p0", state="retired")
    view.replicas.add(server="n1", is_up=False)
    assert findings_of(report) == []


def test_newcomer_without_replica_is_no_finding() -> None:
    report = well()
    report.partitions[0].replicas.add(server="n1", is_joining=True)
    assert findings_of(report) == []


def test_node_of_old_release_does_not_lack_the_metadata_store() -> None:
    report = well()
    report.nodes[0].report.Clear()
    report.nodes[0].report.id = "n1"
    assert findings_of(report) == []


def test_finding_is_one_line_whatever_its_reason() -> None:
    report = well()
    report.nodes[0].report.date_doubt = "two\nlines \x1b[2J\x9b"
    assert ": two lines [2J." in health_of(report, findings_of(report)).text


@pytest.mark.parametrize(
    ("free", "total", "reserve", "is_so"),
    [
        (0, 0, 0, False),  # nothing is known
        (0, 100, 0, True),
        (5, 100, 0, False),
        (4, 100, 0, True),
        (19, 100, 10, True),
        (20, 100, 10, False),
    ],
)
def test_disk_is_scarce_near_its_reserve_or_full(free: int, total: int, reserve: int, is_so: bool) -> None:
    disk = admin_pb2.DiskReport(free_bytes=free, total_bytes=total, reserve_bytes=reserve)
    assert is_scarce(disk) is is_so
