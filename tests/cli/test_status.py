"""`kvstore status`: its exact text, exit codes, lines in a pipe, and substitutes for an unavailable store."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.main import build
from kvstore.cli.status import command, known
from kvstore.cli.status.views import shown_bytes, shown_time, status_document, status_text, what_matters
from kvstore.errors import MetadataUnavailable, NotAuthenticated, StoreError, Unavailable
from kvstore.proto.admin_pb2 import DEGRADED, DOWN, ClusterReport, NodeReport
from kvstore.server.status.health import findings_of, health_of
from tests.server.status.test_health import not_yet, silent, well

HEALTHY_TEXT = """\
healthy: 3 nodes, 2 partitions, all served

NODE  STATE  VERSION  UP         ZONE    FREE                   BOOKIE    LEADS  REPLICAS  MOST BEHIND
n1    ready  0.1.0    1 h 2 min  rack-1  50.0 GiB of 100.0 GiB  writable      0         2            0
n2    ready  0.1.0    1 h 2 min  rack-2  50.0 GiB of 100.0 GiB  writable      0         2            0
n3    ready  0.1.0    1 h 2 min  rack-3  50.0 GiB of 100.0 GiB  writable      0         2            0

ZooKeeper zk:2181: connected
partitions: 2 of 2 are served; ring version 4, no moves
copies: 0 ledgers are under-replicated, 0 are at risk; 40 ledgers were counted 12 s ago
auto-recovery: on, 0 marked
access control: off; last snapshot: none is known
as seen by n1"""
SILENT_LINE = (
    "degraded, all partitions served: node n3: refuses connections; it has 2 replicas (and 1 more finding). "
    "Next: start n3, or restart it if its process hangs; see its log\n"
)
SILENT_TEXT = f"""\
{SILENT_LINE}
NODE  STATE      VERSION  UP         ZONE    FREE                   BOOKIE    LEADS  REPLICAS  MOST BEHIND
n1    ready      0.1.0    1 h 2 min  rack-1  50.0 GiB of 100.0 GiB  writable      0         2            0
n2    ready      0.1.0    1 h 2 min  rack-2  50.0 GiB of 100.0 GiB  writable      0         2            0
n3    no answer  -        -          -       -                      -             0         2            -

!  node n3: refuses connections; it has 2 replicas (node_silent)
   -> start n3, or restart it if its process hangs; see its log
!  the log: 2 of 3 bookies accept writes, but each entry should have 3 copies (small_ensembles)
   -> start the bookies that are down, free space on full ones, or add a bookie

ZooKeeper zk:2181: suspended, last read 1 min 30 s ago
partitions: 2 of 2 are served; ring version 4, 3 of 8 moves done, 40%, about 1 min 15 s left
copies: 0 ledgers are under-replicated, 0 are at risk; 40 ledgers were counted 12 s ago
auto-recovery: on, 0 marked
access control: on; last snapshot: 2 d 3 h old
as seen by n1"""


def test_version_of_the_cluster_is_shown_where_it_is_known() -> None:
    report = ClusterReport(server="n1", cluster_version=2)
    assert "cluster version: 2, which kvstore 0.2.0 supports" in status_text(report).splitlines()
    assert status_document(report)["cluster_version"] == 2
    older = ClusterReport(server="n1")
    assert "cluster version" not in status_text(older)
    assert status_document(older)["cluster_version"] is None


def test_processes_of_a_machine_share_a_line() -> None:
    report = whole(well())
    report.nodes[1].id = "n1.2"
    report.nodes[1].report.uptime_s, report.nodes[1].report.disk.free_bytes = 30.0, 10 << 30
    lines = status_text(report).splitlines()
    table = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:5]]
    names = ("NODE", "PROCESSES", "STATE", "VERSION", "UP", "ZONE", "FREE", "BOOKIE", "LEADS", "REPLICAS")
    assert table == [
        [*names, "MOST BEHIND"],
        ["n1", "2", "ready", "0.1.0", "30 s", "rack-1, rack-2", "10.0 GiB of 100.0 GiB", "writable", "0", "4", "0"],
        ["n3", "1", "ready", "0.1.0", "1 h 2 min", "rack-3", "50.0 GiB of 100.0 GiB", "writable", "0", "2", "0"],
    ]
    report.nodes[1].ClearField("report")
    report.nodes[1].no_answer = "refuses connections"
    assert "no answer: n1.2" in status_text(report).splitlines()[3]


def whole(report: ClusterReport) -> ClusterReport:
    """Return the report with the nodes' answers as text, and its findings."""
    for number, node in enumerate(report.nodes, 1):
        if node.HasField("report"):
            node.report.version, node.report.uptime_s, node.report.zone = "0.1.0", 3_725.0, f"rack-{number}"
            node.report.bookie.state = "writable"
    if not report.HasField("metadata"):
        report.metadata.CopyFrom(report.nodes[0].report.metadata)
    report.date_ms = 1_795_590_664_786
    report.ClearField("findings")
    report.findings.extend(findings_of(report))
    report.health.CopyFrom(health_of(report, report.findings))
    return report


def lame() -> ClusterReport:
    report = well()
    silent(report, 3)
    report.metadata.kind, report.metadata.address, report.metadata.state = "zookeeper", "zk:2181", "suspended"
    report.metadata.read_age_s, report.access_on, report.snapshot.age_s = 90.0, True, 183_700.0
    report.ring.moves.add(id=7)
    report.ring.moves_planned, report.ring.moves_done, report.ring.progress, report.ring.eta_s = 8, 3, 0.4, 75.0
    return whole(report)


def test_text_of_a_healthy_and_of_a_lame_cluster() -> None:
    assert status_text(whole(well())) == HEALTHY_TEXT
    assert status_text(lame()) == SILENT_TEXT


def test_retired_partition_is_not_counted_as_unserved() -> None:
    report = well()
    report.partitions.add(id="p0", state="retired")
    text = status_text(whole(report))
    assert text.startswith("healthy: 3 nodes, 2 partitions, all served")
    assert "partitions: 2 of 2 are served; retired: p0, kept by pins (`kvstore partition pins`); ring" in text


def test_status_line_counts_foreign_ledgers_and_unknown_ones() -> None:
    report = well()
    report.copies.foreign, report.copies.lacking, report.copies.at_risk = 30, 5, 1
    line = (
        "copies: 5 ledgers are under-replicated, 1 is at risk; 40 ledgers (30 of them written by other clients) were "
        "counted 12 s ago"
    )
    assert line in status_text(whole(report)).splitlines()
    report.copies.lacking = report.copies.at_risk = 0
    report.repair.marked = 1
    assert "copies: up to 1 ledger is under-replicated, 0 are at risk; 40 ledgers" in status_text(whole(report))
    report.repair.marked = 0
    report.ClearField("copies")
    line = "copies: at least 0 ledgers are under-replicated, 0 are at risk; not all are counted yet"
    assert line in status_text(whole(report)).splitlines()


def test_of_very_many_findings_the_worst_are_shown() -> None:
    report = well()
    for number in range(30):
        report.nodes[0].report.replicas.add(partition=f"p{number}", moves_stuck=1)
    not_yet(report)
    lines = status_text(whole(report)).splitlines()
    worst = "!! partition p1: the leader n1 does not serve yet (leader_not_serving)"
    assert [each for each in lines if each.startswith("!!")] == [worst]
    assert sum(each.startswith("!") for each in lines) == 20
    assert "… and 11 more (--json shows all)" in lines


def test_document_has_numbers_as_numbers_and_each_nodes_own_report() -> None:
    report = whole(well())
    report.partitions[0].lead.hot_keys.add(key=b"\xff", share=0.25)
    document = status_document(report, [{"id": "n2", "pid": 17}])
    assert document["health"] == {"grade": "healthy", "text": "healthy: 3 nodes, 2 partitions, all served"}
    assert document["nodes"][0]["report"]["disk"] == {
        "free_bytes": 50 << 30,
        "total_bytes": 100 << 30,
        "reserve_bytes": 0,
        "trouble": "",
    }
    assert (document["nodes"][1]["pid"], document["nodes"][1]["uptime_s"]) == (17, 3_725.0)
    assert document["partitions"][0]["hot_keys"] == [{"key": b"\xff", "share": 0.25}]
    assert document["bookies"][0]["failed_directories"] == []
    assert (document["snapshot"], document["ring"]["version"]) == (None, 4)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build(), ["status", *arguments])


@pytest.mark.parametrize(("change", "code"), [(lambda _: None, 0), (lambda r: silent(r, 3), 1), (not_yet, 2)])
def test_exit_code_is_the_health(monkeypatch: pytest.MonkeyPatch, change: Any, code: int) -> None:
    report = well()
    change(report)
    monkeypatch.setattr(command, "cluster_report", lambda _: whole(report))
    for arguments in (["--server", "x:1"], ["--server", "x:1", "--json"]):
        answer = run(*arguments)
        assert answer.exit_code == code, answer.output
    assert json.loads(answer.stdout)["health"]["grade"] == ("healthy", "degraded", "down")[code]


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable("no server can be reached"), 2), (NotAuthenticated("who?"), 3)]
)
def test_no_answer_is_not_served_and_a_refused_login_is_nothing_learnt(
    monkeypatch: pytest.MonkeyPatch, error: StoreError, code: int
) -> None:
    def ask(_: Any) -> ClusterReport:
        raise error

    monkeypatch.setattr(command, "cluster_report", ask)
    answer = run("--server", "x:1")
    assert answer.exit_code == code
    assert str(error) in answer.output


def test_in_a_pipe_each_change_is_one_line_and_nothing_else_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [whole(well()), whole(well()), lame(), lame()]
    looks[1].nodes[0].report.uptime_s += 2

    def ask(_: Any) -> ClusterReport:
        if not looks:
            raise KeyboardInterrupt
        return looks.pop(0)

    monkeypatch.setattr(command, "cluster_report", ask)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    answer = run("--watch", "--server", "x:1")
    assert answer.stdout == (
        f"2026-11-25T07:11:04Z healthy: 3 nodes, 2 partitions, all served\n2026-11-25T07:11:04Z {SILENT_LINE}"
    )
    assert answer.exit_code == 1, "as the last look"


def test_on_a_terminal_each_view_is_drawn_over_the_previous(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [whole(well()), whole(well())]

    def ask(_: Any) -> ClusterReport:
        if not looks:
            raise KeyboardInterrupt
        return looks.pop(0)

    monkeypatch.setattr(command, "cluster_report", ask)
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    answer = run("--watch", "--server", "x:1")
    assert (answer.stdout, answer.exit_code) == (f"\x1b[H\x1b[2J{HEALTHY_TEXT}\n" * 2, 0)


def test_while_it_is_watched_in_json_each_change_is_a_document_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = [whole(well()), Unavailable("no server can be reached"), lame()]

    def ask(_: Any) -> ClusterReport:
        if not looks:
            raise KeyboardInterrupt
        found = looks.pop(0)
        if isinstance(found, StoreError):
            raise found
        report: ClusterReport = found
        return report

    monkeypatch.setattr(command, "cluster_report", ask)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    answer = run("--watch", "--json", "--server", "x:1")
    grades = [json.loads(line)["health"]["grade"] for line in answer.stdout.splitlines()]
    assert grades == ["healthy", "down", "degraded"], "it goes on while nobody answers"


def test_number_that_moves_is_no_change_and_another_finding_is() -> None:
    first, later, worse = whole(well()), whole(well()), lame()
    later.partitions[0].sequence += 5
    assert what_matters(first) == what_matters(later) != what_matters(worse)
    assert (worse.health.grade, DEGRADED < DOWN) == (DEGRADED, True)


class Cluster:
    """Servers and a metadata store, each of which can be unavailable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, session: str, answers: bool = True) -> None:
        self.session, self.answers, self.read = session, answers, 0
        self.is_gone = False
        """The store is unavailable, and no server has noticed it yet."""
        monkeypatch.setattr(known, "ask_admin", self._ask)
        monkeypatch.setattr(known, "cluster_report", self._report)
        monkeypatch.setattr(known, "with_tools", self._with_tools)

    def _ask(self, *_: Any) -> NodeReport:
        if not self.answers:
            raise Unavailable("no server can be reached")
        report = NodeReport()
        report.metadata.state = self.session
        return report

    def _report(self, _: Any) -> ClusterReport:
        if not self.answers:
            raise Unavailable("no server can be reached")
        report = whole(well())
        report.ring.age_s = 34.0
        return report

    def _with_tools(self, *_: Any) -> str:
        self.read += 1
        if self.session != "connected" or self.is_gone:
            raise MetadataUnavailable("no ZooKeeper answers")
        return "store"

    def ask(self, metadata: str | None = None) -> str:
        async def work(_: Any) -> str:
            raise AssertionError("not connected to anything here")

        cluster = ClusterOptions(metadata=metadata, server="n1:1")
        return known.from_store_or_servers(cluster, work, lambda report: f"answered by {report.server}")


def test_metadata_store_is_read_while_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Cluster(monkeypatch, session="connected").ask() == "store"
    assert Cluster(monkeypatch, session="connected", answers=False).ask() == "store", "no server is needed for it"
    assert capsys.readouterr().err == ""


def test_while_the_store_is_unavailable_servers_answer_with_an_age(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, session="suspended")
    assert cluster.ask() == "answered by n1"
    assert cluster.read == 0, "nobody waits for what servers know to be away"
    assert capsys.readouterr().err == (
        "kvstore: the metadata store cannot be reached (no server that answers can reach it); showing what n1 read "
        "from it 34 s ago, and what servers report now\n"
    )


def test_store_lost_during_a_read_is_unavailable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, session="connected")
    cluster.is_gone = True
    assert cluster.ask() == "answered by n1"
    cluster.answers = False
    with pytest.raises(
        Unavailable, match=r"no ZooKeeper answers.*nor a server can be reached: no server can be reached"
    ):
        cluster.ask()


def test_only_a_named_store_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, session="suspended")
    with pytest.raises(MetadataUnavailable):
        cluster.ask("zk:2181")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (3_600, "1 h 0 min"), (86_399, "23 h 59 min"), (90_000, "1 d 1 h")],
)
def test_times_are_shown_in_two_units(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1 << 10, "1.0 KiB"), (5 << 39, "2.5 TiB")])
def test_bytes_are_shown_in_the_largest_unit(count: int, shown: str) -> None:
    assert shown_bytes(count) == shown


def test_text_reports_the_connections_with_and_without_tls() -> None:
    report = well()
    assert "TLS" not in status_text(whole(report)), "nobody has any"
    for node, mode in zip(report.nodes, ("require", "prefer"), strict=False):
        node.report.tls.mode, node.report.tls.left_s = mode, 100 * 86_400
    report.nodes[1].report.tls.plain_connections = 1_234
    (line,) = [line for line in status_text(whole(report)).splitlines() if line.startswith("TLS")]
    assert line == (
        "TLS: required by n1; preferred by n2 (1,234 connections without it); not used by n3; "
        "the first certificate expires in 100 days"
    )
    report.nodes[0].report.tls.left_s = -1
    assert "the first certificate has expired" in status_text(whole(report))


def test_one_line_names_the_namespaces_that_are_near_a_quota_or_refuse() -> None:
    report = whole(well())
    assert "namespaces" not in status_text(report)
    shop = report.namespaces.add(name="shop", prefix=b"shop/", keys=89)
    shop.limits.keys_max, shop.limits.bytes_max = 100, 1000
    report.namespaces.add(name="blog", prefix=b"blog/", keys=10**9)
    assert "\nnamespaces: 2, none near a quota\n" in status_text(report)
    shop.keys = 95
    assert "\nnamespaces: 2; shop: 95% of its keys are used (95 of 100)\n" in status_text(report)
    shop.refused.update({"bytes": 41, "operations": 7})
    shop.refused_ago_s.update({"bytes": 4.2, "operations": 61.0})
    line = "95% of its keys are used (95 of 100), it refuses for its quota of bytes (41 so far, the last 4 s ago)"
    assert f"namespaces: 2; shop: {line}" in status_text(report)
    assert report.health.text.startswith("healthy"), "limits that hold are no fault of the cluster"
    document = status_document(report)["namespaces"]
    assert document[0]["warning"] == line
    assert document[0]["refused"] == {"keys": 0, "bytes": 41, "operations": 7}
    assert (document[1]["prefix"], document[1]["keys_max"], document[1]["warning"]) == ("blog/", None, None)
    for number in range(9):
        report.namespaces.add(name=f"n{number}", keys=10).limits.keys_max = 10
    assert "and 5 more (kvstore namespace list)" in status_text(report)


def test_watch_reports_missing_answers_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while a node has no table of users yet, or the metadata store that names the nodes is unavailable."""
    refused = NotAuthenticated("who?")
    looks: list[Any] = [whole(well()), refused, refused, whole(well()), OSError("no file")]

    def ask(_: Any) -> ClusterReport:
        if not looks:
            raise KeyboardInterrupt
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "cluster_report", ask)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    answer = run("--watch", "--server", "x:1")
    said = [line.partition(" ")[2] for line in answer.stdout.splitlines()]
    well_line = "healthy: 3 nodes, 2 partitions, all served"
    assert said == [well_line, "unknown: who?", well_line, "unknown: no file"]
    assert answer.exit_code == command.UNKNOWN, "as the last look"
    looks[:] = [refused]
    assert run("--watch", "--server", "x:1").exit_code == command.UNKNOWN, "the first look may end it"
