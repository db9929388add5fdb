"""A table of all places that report health, and of the kinds of trouble. Each row consists of the facts that nodes and
the metadata store have. They are passed through the one computation (kvstore.server.status.health), and checked where
people and programs read the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.fsck import as_text
from kvstore.cli.recovery.autorecovery import copies_document, lacks_copies
from kvstore.cli.status import command
from kvstore.devcluster.zookeeper import free_port
from kvstore.env.beat import Beat
from kvstore.env.transport import TcpTransport
from kvstore.meta.registration import RegisteredBookies
from kvstore.meta.store import SessionState
from kvstore.proto.admin_pb2 import DEGRADED, DOWN, HEALTHY, ClusterReport, NodeReport
from kvstore.proto.availability import HeldEntries
from kvstore.ring import plan
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.fsck.findings import FsckReport, check_missing
from kvstore.server.fsck.presence import missing_runs, subject_of
from kvstore.server.http.listener import HttpListener
from kvstore.server.status.copy_count import copies_report
from kvstore.server.status.health_numbers import counts_of, numbers_of, unserved_of
from kvstore.server.status.overview import STUCK_S, ClusterSurvey, report_of_cluster
from kvstore.server.ui.view import page_of
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum, ServerId
from kvstore.wal.census import Census
from kvstore.wal.creator import OWNER_KEY
from tests.server.status.test_overview import B1, B2, B3, N1, N2, N3, P1, P2, RING, SERVERS, told
from tests.source import ROOT

OLD = BookieId("n3-00")
"""The ID of n3's bookie before its disk was lost."""
FAR = tuple(BookieId(f"far-{number}") for number in range(3))
"""Bookies that belong to no node, for example Apache's."""
OWN, PULSAR = ((OWNER_KEY, b"p1"),), (("application", b"pulsar"),)


class Facts:
    """The reports of nodes, the registrations and the ledgers of a healthy cluster."""

    def __init__(self) -> None:
        self.reports = {
            N1: told(N1, p1=("serving", 70, 4), p2=("following", 55, 6)),
            N2: told(N2, p1=("following", 70, 4), p2=("serving", 55, 6)),
            N3: told(N3, p1=("following", 70, 4), p2=("following", 55, 6)),
        }
        self.silence: dict[ServerId, str] = {}
        self.topology = ClusterTopology(RING, {P1: (N1, 4), P2: (N2, 6)}, SERVERS)
        self.registered = {B1: "n1:3181", B2: "n2:3181", B3: "n3:3181"}
        self.known = {B1, B2, B3}
        self.census, self.is_counted = Census(), True
        self.ledgers: list[LedgerMetadata] = []
        self.marked = 0
        self.has(*((B1, B2, B3),) * 3)
        self.has((B1, B2, B3), custom=PULSAR)

    def has(self, *ensembles: tuple[BookieId, ...], custom: tuple[tuple[str, bytes], ...] = OWN) -> None:
        """Add a closed ledger with ten entries on each of these ensembles."""
        for ensemble in ensembles:
            made = LedgerMetadata(
                LedgerId(len(self.ledgers)), Quorum(3, 3, 2), (Fragment(EntryId(0), ensemble),), custom=custom
            ).closed(EntryId(9), 1_000)
            self.ledgers.append(made)
            self.census.add(made)

    def kill(self, *servers: ServerId) -> None:
        """Remove these nodes, whose sessions have ended."""
        for server in servers:
            bookie = BookieId(self.reports.pop(server).bookie.id)
            self.silence[server] = "refuses connections"
            del self.registered[bookie]

    def each_report(self, change: Callable[[NodeReport], None]) -> None:
        for report in self.reports.values():
            change(report)

    def report(self) -> ClusterReport:
        """Return the state of the cluster as the first answering node finds it."""
        server = min(self.reports)
        if self.is_counted:
            count = copies_report(self.census, self.census.shortage(self.registered), 3.0)
            self.reports[server].copies.CopyFrom(count)
        for each in self.reports.values():
            each.repair.marked = self.marked
        spaces = {each: (100, 50) for each in self.registered if each in FAR}
        return report_of_cluster(
            ClusterSurvey(
                server=server,
                topology=self.topology,
                reports=self.reports,
                silence=self.silence,
                bookies=RegisteredBookies(self.registered, {}),
                known_bookies=self.known,
                spaces=spaces,
                date_ms=1_795_590_664_786,
            )
        )

    def checked(self) -> FsckReport:
        """Return the findings of `kvstore fsck`: who holds which entries, and what servers report."""
        report = FsckReport()
        held = {bookie: HeldEntries.of_runs([(0, 10)]) for bookie in self.registered}
        for each in self.ledgers:
            for entries, lacking in [run for runs in missing_runs(each, each.last_entry, held) for run in runs]:
                check_missing(report, subject_of(each), each.quorum, entries, lacking, self.registered.__contains__)
        report.add_health(self.report().findings)
        return report

    def autorecovery(self) -> dict[str, Any]:
        """Return the document of `kvstore autorecovery status` as far as it reports copies."""
        return {**copies_document(self.census, self.registered), "marked_ledgers": self.marked}


def node_killed(facts: Facts) -> None:
    facts.kill(N3)


def leader_killed(facts: Facts) -> None:
    facts.kill(N2)


def disk_lost(facts: Facts) -> None:
    facts.known.add(OLD)
    facts.has((B1, B2, OLD), (B1, B2, OLD))


def disk_lost_and_repair_off(facts: Facts) -> None:
    disk_lost(facts)
    facts.each_report(lambda report: setattr(report.repair, "enabled", False))


def disk_lost_and_being_repaired(facts: Facts) -> None:
    disk_lost(facts)
    facts.marked = 2


def disk_lost_and_repaired(facts: Facts) -> None:
    facts.known.add(OLD)


def two_bookies_lost(facts: Facts) -> None:
    facts.kill(N2, N3)


def copies_of_another_client_lost(facts: Facts) -> None:
    facts.registered |= {FAR[0]: "far:1", FAR[1]: "far:2"}
    facts.known |= set(FAR)
    facts.has((FAR[0], FAR[1], FAR[2]), custom=PULSAR)


def copies_of_another_client_at_risk(facts: Facts) -> None:
    facts.registered[FAR[0]] = "far:1"
    facts.known |= set(FAR)
    facts.has((FAR[0], FAR[1], FAR[2]), custom=PULSAR)


def nobody_leads(facts: Facts) -> None:
    facts.topology = ClusterTopology(RING, {P2: (N2, 6)}, SERVERS)
    facts.reports[N1].replicas[0].role = "standing"


def metadata_away(facts: Facts) -> None:
    facts.each_report(lambda report: setattr(report.metadata, "state", "suspended"))


def metadata_older(facts: Facts) -> None:
    facts.each_report(lambda report: setattr(report.metadata, "state", SessionState.OLDER.name.lower()))


def metadata_unreachable(facts: Facts) -> None:
    facts.reports[N3].metadata.state = "suspended"


def metadata_of_a_ledger_damaged(facts: Facts) -> None:
    facts.census.unreadable = 1


def bookie_full(facts: Facts) -> None:
    facts.reports[N3].bookie.state = "readonly"


def directory_failed(facts: Facts) -> None:
    facts.reports[N3].bookie.directories.add(path="/disks/b", failure="[Errno 5] Input/output error")


def entries_unreadable(facts: Facts) -> None:
    facts.marked = 1
    facts.reports[N2].repair.unreadable = 1


def replica_failed(facts: Facts) -> None:
    facts.reports[N3].replicas[0].failure = "the log has a gap"


def replicas_differ(facts: Facts) -> None:
    facts.reports[N3].replicas[0].is_in_doubt = True


def node_drained(facts: Facts) -> None:
    facts.reports[N3].draining = True
    facts.reports[N3].not_ready.append("draining")


def node_cut_off(facts: Facts) -> None:
    facts.reports[N3].not_ready.append("no other server can be reached")


def move_stuck(facts: Facts) -> None:
    ring = plan.shift(RING, P1, P2, 1 << 20)
    facts.topology = ClusterTopology(ring, facts.topology.leaders, SERVERS)
    for move in ring.moves:
        facts.reports[N2].copied.add(id=move, failure="the copy was wrong", failing_s=STUCK_S)


def date_in_doubt(facts: Facts) -> None:
    facts.reports[N3].date_doubt = "it is 9.0 s ahead of n1, n2"


def certificate_expires(facts: Facts) -> None:
    facts.reports[N3].tls.left_s = 86_400.0


def snapshots_stopped(facts: Facts) -> None:
    facts.each_report(lambda report: setattr(report, "snapshot_age_max_s", 3600.0))


def uncounted(facts: Facts) -> None:
    disk_lost(facts)
    facts.is_counted = False


class Row(NamedTuple):
    """A kind of trouble, and its correct reports."""

    happens: Callable[[Facts], None]
    grade: int
    code: str = ""
    """A finding that names it; empty: there is none."""
    fsck: str = ""
    """The start of the verdict of fsck, if the grade does not determine it."""
    lacks_copies: bool = False
    unready: Sequence[ServerId] = ()
    """The nodes whose /readyz refuses clients."""


ROWS = {
    "nothing is amiss": Row(lambda _: None, HEALTHY),
    "a node is killed": Row(node_killed, DEGRADED, "node_silent", lacks_copies=True, unready=(N3,)),
    "a leader is killed": Row(leader_killed, DOWN, "leader_silent", lacks_copies=True, unready=(N2,)),
    "a disk is lost, and its delay runs": Row(disk_lost, DEGRADED, "copies_lacking", lacks_copies=True),
    "a disk is lost, and repair is off": Row(disk_lost_and_repair_off, DEGRADED, "repair_off", lacks_copies=True),
    "a lost disk is being repaired": Row(disk_lost_and_being_repaired, DEGRADED, "repair_backlog", lacks_copies=True),
    "a lost disk is repaired": Row(disk_lost_and_repaired, HEALTHY),
    "copies are not counted": Row(uncounted, DEGRADED, "copies_not_counted", lacks_copies=True),
    "two of three bookies are lost": Row(
        two_bookies_lost, DOWN, "no_ack_quorum", fsck="AT RISK", lacks_copies=True, unready=(N2, N3)
    ),
    "another client's ledgers lack copies": Row(
        copies_of_another_client_lost, DEGRADED, "copies_lacking", lacks_copies=True
    ),
    "another client's ledgers are at risk": Row(
        copies_of_another_client_at_risk, DEGRADED, "copies_at_risk", fsck="AT RISK", lacks_copies=True
    ),
    "metadata of a ledger are damaged": Row(
        metadata_of_a_ledger_damaged, DEGRADED, "ledger_metadata_unreadable", lacks_copies=True
    ),
    "entries have no good copy": Row(entries_unreadable, DEGRADED, "ledgers_unreadable", lacks_copies=True),
    "nobody leads a partition": Row(nobody_leads, DOWN, "no_leader"),
    "the metadata store is away": Row(metadata_away, DEGRADED, "metadata_away"),
    "the metadata store is an older copy": Row(metadata_older, DOWN, "metadata_older"),
    "one node has no metadata session": Row(metadata_unreachable, DEGRADED, "metadata_unreachable_from"),
    "a bookie's disk is full": Row(bookie_full, DEGRADED, "bookie_readonly"),
    "a directory of a bookie has failed": Row(directory_failed, DEGRADED, "directory_failed"),
    "a replica has failed": Row(replica_failed, DEGRADED, "replica_failed"),
    "replicas differ": Row(replicas_differ, DEGRADED, "replica_in_doubt"),
    "a node is drained": Row(node_drained, DEGRADED, "node_draining", unready=(N3,)),
    "a node is cut off": Row(node_cut_off, DEGRADED, "node_not_ready", unready=(N3,)),
    "a move is stuck": Row(move_stuck, DEGRADED, "move_stuck"),
    "a date is in doubt": Row(date_in_doubt, DEGRADED, "date_doubtful"),
    "a certificate expires": Row(certificate_expires, DEGRADED, "certificate_expires"),
    "no snapshot is taken": Row(snapshots_stopped, DEGRADED, "snapshot_old"),
}
WORDS = {HEALTHY: "healthy", DEGRADED: "degraded, all partitions served", DOWN: "down, "}
VERDICTS = {HEALTHY: "Healthy", DEGRADED: "No data is lost, but", DOWN: "NOT ALL IS SERVED"}


class Shown:
    """A node of that cluster, as its HTTP interface shows it."""

    def __init__(self, report: ClusterReport, server: ServerId) -> None:
        self._report, self._server = report, server

    def status(self) -> dict[str, Any]:
        return {}

    def not_live(self) -> list[str]:
        return []

    def not_ready(self) -> list[str]:
        return [reason for node in self._report.nodes if node.id == self._server for reason in node.report.not_ready]

    def leaderless(self) -> list[str]:
        return []

    async def unserved(self) -> Sequence[str]:
        return unserved_of(self._report)

    def statistics(self) -> dict[str, Any]:
        findings = {code: {"count": count} for code, count in counts_of(self._report).items()}
        return {"cluster": numbers_of(self._report), "findings": findings}


async def pages_of(report: ClusterReport, server: ServerId) -> dict[str, tuple[int, str]]:
    """Return status and text of the node's health pages."""
    address = f"127.0.0.1:{free_port()}"
    listener = HttpListener(Shown(report, server), TcpTransport(), Beat())
    await listener.open(address)
    found = {}
    try:
        async with aiohttp.ClientSession() as session:
            for path in ("/readyz", "/clusterz", "/metrics"):
                async with session.get(f"http://{address}{path}") as answer:
                    found[path] = (answer.status, await answer.text())
    finally:
        await listener.close()
    return found


def firing(metrics: str) -> set[str]:
    """Return the alerts on the cluster's health that fire for these metrics."""
    rules = yaml.safe_load((ROOT / "docs" / "monitoring" / "rules.yml").read_text(encoding="utf-8"))
    found = set()
    for rule in next(group["rules"] for group in rules["groups"] if group["name"] == "kvstore-health"):
        [(metric, operator, bound)] = re.findall(r"^max\((\w+)\) (==|>) (\d+)$", rule["expr"])
        [value] = re.findall(rf"^{metric} (\S+)$", metrics, re.MULTILINE)
        if float(value) == float(bound) if operator == "==" else float(value) > float(bound):
            found.add(rule["alert"])
    return found


@pytest.mark.parametrize("kind", ROWS)
async def test_all_health_reports_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, facts = ROWS[kind], Facts()
    row.happens(facts)
    report = facts.report()
    codes = {each.code for each in report.findings}
    assert row.code in codes if row.code else codes == set(), report.findings

    # kvstore status: exit code, first line, document
    monkeypatch.setattr(command, "cluster_report", lambda _: report)
    look = command.ClusterView(ClusterOptions(server="n1:7401"))
    assert look.exit_code == row.grade == report.health.grade
    assert look.text().startswith(WORDS[row.grade]), look.text()
    assert look.document()["health"]["grade"] == ("healthy", "degraded", "down")[row.grade]

    # the dashboard
    page = page_of(report)
    assert page["verdict"].lower().startswith(WORDS[row.grade]), page["verdict"]
    assert [each["subject"] for each in page["findings"]] == [each.subject for each in report.findings]
    lacking = next(each["text"] for each in page["tiles"] if each["id"] == "lacking")
    assert int(lacking) == look.document()["copies"]["lacking"]

    # the pages of a node that answers: /readyz is about that node, /clusterz about the cluster
    pages = await pages_of(report, server := max(facts.reports))
    assert pages["/readyz"][0] == (503 if server in row.unready else 200)
    assert pages["/clusterz"][0] == (503 if row.grade == DOWN or server in row.unready else 200)

    # metrics and alerts
    metrics = pages["/metrics"][1]
    assert f"kvstore_cluster_grade {float(row.grade)}\n" in metrics
    assert set(re.findall(r'kvstore_cluster_findings\{finding="(\w+)"\}', metrics)) == codes
    alerts = {HEALTHY: set(), DEGRADED: {"KvstoreDegraded"}, DOWN: {"KvstoreNotAllServed"}}[row.grade]
    assert firing(metrics) - {"KvstoreCopiesAtRisk", "KvstoreCopiesNotCounted"} == alerts
    assert ("KvstoreCopiesAtRisk" in firing(metrics)) == (row.fsck == "AT RISK")
    assert ("KvstoreCopiesNotCounted" in firing(metrics)) == (not facts.is_counted)

    # kvstore fsck: verdict and errors, which are exit code 1
    checked = facts.checked()
    verdict = row.fsck or VERDICTS[row.grade]
    assert as_text(checked, notes=False).splitlines()[-1].startswith(verdict)
    assert bool(checked.errors) == (row.grade == DOWN or row.fsck == "AT RISK")

    # kvstore autorecovery status: exit code 1
    assert lacks_copies(facts.autorecovery()) == row.lacks_copies
    assert (numbers_of(report)["ledgers_lacking_copies"] > 0) == (
        row.lacks_copies and facts.is_counted and not facts.census.unreadable
    )


def test_table_covers_all_kinds() -> None:
    assert len(ROWS) > 15
    assert {row.grade for row in ROWS.values()} == {HEALTHY, DEGRADED, DOWN}
