"""The dashboard's content, made of reports: words and drawings."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from kvstore.cli.status.views import bookie_document
from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.server.status.health import findings_of, health_of
from kvstore.server.status.sizes import size, span
from kvstore.server.ui.picture import ring_of
from kvstore.server.ui.view import BOOKIE_COLUMNS, NODE_COLUMNS, live_of, page_of, shape_of
from kvstore.server.ui.words import key, parts, rate, took, when
from tests.server.status.test_health import silent, well


def judged(report: ClusterReport) -> ClusterReport:
    findings = findings_of(report)
    report.findings.extend(findings)
    report.health.CopyFrom(health_of(report, findings))
    return report


def loaded() -> ClusterReport:
    report = well()
    for partition, share, ops in zip(report.partitions, (0.25, 0.75), (300.0, 100.0), strict=True):
        partition.share, partition.lead.ops_per_s = share, ops
    return report


def cells(report: ClusterReport, table: str) -> dict[str, str]:
    """Return the rows of a table as text, by their headings."""
    rows: list[list[Any]] = page_of(report)[table]["rows"]
    return {row[0].text: " | ".join(cell.text for cell in row[1:]) for row in rows}


def test_silent_node_is_shown_with_reason_and_last_known_leads() -> None:
    report = judged(loaded())
    silent(report, 2)
    report.nodes[1].leads.append("p2")
    assert "no answer: refuses connections" in cells(report, "nodes")["n2"]
    assert "1 last known" in cells(report, "nodes")["n2"]
    assert "n2: down" in cells(report, "partitions")["p1"]
    assert "not served" in cells(report, "partitions")["p2"]


def test_retired_partition_is_not_shown_as_unserved() -> None:
    report = loaded()
    report.partitions.add(id="p0", state="retired")
    page = page_of(judged(report))
    assert "not served" not in cells(report, "partitions")["p0"]
    [row] = [each for each in page["partitions"]["rows"] if each[0].text == "p0"]
    assert "bad" not in [cell.tone for cell in row]
    assert (page["ring"]["partitions"], page["ring"]["label"].partition(". ")[0]) == (
        2,
        "Ring of 2 partitions; not served: none",
    )


def test_verdict_is_that_of_the_health_rules() -> None:
    report = loaded()
    silent(report, 2)
    page = page_of(judged(report))
    assert (page["grade"], page["verdict"]) == (
        "DOWN",
        "Down, partition p2 not served, 3 findings",
    )
    assert [each["reason"] for each in page["findings"]] == [each.reason for each in report.findings]


def test_full_disk_and_failed_directory_are_shown_at_their_bookie() -> None:
    report = loaded()
    report.bookies[0].state, report.bookies[0].disk.free_bytes = "readonly", 1 << 20
    report.bookies[1].directories.add(path="/d2", failure="Input/output error")
    bookies = cells(report, "bookies")
    assert "read-only" in bookies["n1-ab"]
    assert "1.0 MiB | 100 GiB" in bookies["n1-ab"]
    assert "/d2: Input/output error" in bookies["n2-ab"]


def test_stuck_move_is_shown_with_its_progress() -> None:
    report = loaded()
    why = "no step of it has gone well for 31 s: partition p1: no answer"
    report.ring.moves.add(id=7, source="p1", target="p2", state="copying", attempt=3, copied=0.4, stuck=why)
    report.ring.eta_s = 600
    report.ring.moves.add(id=8, source="p1", target="p3", state="copying", attempt=1, copied=0.5, eta_s=150)
    report.ring.moves.add(id=9, source="p1", target="p3", state="planned")
    assert cells(report, "moves") == {
        "7": f"p1 → p2 | copying, stuck | 40% | unknown | 3 | {why}",
        "8": "p1 → p3 | copying | 50% | 2 min | 1 | in progress",
        "9": "p1 → p3 | planned | ? | unknown | 0 | waits for its turn",
    }
    assert "remaining" not in page_of(report)["moves"]["note"]
    report.ring.moves[0].stuck = ""
    assert ", about 10 min remaining" in page_of(report)["moves"]["note"]


def test_latencies_are_shown_at_their_node_and_updated() -> None:
    report = judged(loaded())
    report.nodes[0].report.latencies.add(operation="get", p50_s=0.000256, p99_s=0.004096, timed=9, within_s=60)
    silent(report, 3)
    assert "256 µs, 4.1 ms | idle | idle" in cells(report, "nodes")["n1"]
    assert "| ? | ? | ? |" in cells(report, "nodes")["n3"]
    assert live_of(report)["cells"]["get n1"] == "256 µs, 4.1 ms"
    rows = page_of(report)["nodes"]["rows"]
    assert [cell.live for cell in rows[0] if cell.live] == ["get n1", "put n1", "session n1"]
    assert all(len(row) == len(NODE_COLUMNS) for row in rows)


def test_bookie_without_a_server_is_shown_as_not_reported() -> None:
    report = loaded()
    report.bookies[0].node, report.bookies[0].limbo_ledgers = "", 0
    bookies = cells(report, "bookies")
    assert bookies["n1-ab"].count("not reported") == 3
    assert "not reported" not in bookies["n2-ab"]
    assert bookie_document(report.bookies[0])["limbo_ledgers"] is None
    assert bookie_document(report.bookies[1])["limbo_ledgers"] == 0


def test_what_nobody_reports_is_shown_as_unknown() -> None:
    report = loaded()
    silent(report, 2)
    report.bookies[1].no_answer = "refuses connections"
    report.partitions[0].served, report.partitions[0].leader = False, ""
    report.partitions[0].ClearField("lead")
    assert cells(report, "bookies")["n2-ab"].endswith("| ? | 0 | ? | ?")
    p1 = cells(report, "partitions")["p1"].split(" | ")
    assert p1[:3] == ["not served", "none", "?"]
    assert p1[5:7] == ["?", "?"], "the ledgers, and from where the log is kept"
    assert live_of(report)["cells"]["load p1"] == "?"


def test_finding_about_several_partitions_links_to_their_table() -> None:
    report = loaded()
    for partition in report.partitions:
        partition.served, partition.leader = False, ""
    [finding] = page_of(judged(report))["findings"]
    assert (finding["subject"], finding["link"]) == ("partitions p1, p2", "/ui#partitions")


def test_missing_copies_are_shown_per_bookie_and_in_total() -> None:
    report = judged(loaded())
    report.partitions[0].lead.ledgers_lacking_copies = 2
    report.bookies[2].lacking_ledgers = 2
    page = page_of(report)
    place = BOOKIE_COLUMNS.index("under-replicated")
    assert [row[place].text for row in page["bookies"]["rows"]] == ["0", "0", "2"]
    assert page["bookies"]["note"] == (
        "Ledgers that are under-replicated: 2, at risk: 0, marked for repair: 0, being repaired now: 0. "
        "40 ledgers were counted 12 s ago."
    )
    assert next(each["text"] for each in page["tiles"] if each["id"] == "lacking") == "2"


def test_page_shows_the_state_of_an_unavailable_metadata_store() -> None:
    report = loaded()
    report.nodes[0].report.metadata.state, report.nodes[0].report.metadata.read_age_s = "suspended", 200.0
    assert "suspended, read 3 min ago" in cells(report, "nodes")["n1"]


def test_arcs_fill_the_circle_and_bands_show_the_load() -> None:
    arcs = ring_of(loaded())["arcs"]
    assert [(each["length"], each["offset"]) for each in arcs] == [("248.50", "-0.00"), ("748.50", "-250.00")]
    assert [each["load_width"] for each in arcs] == ["22.0", "7.3"]
    report = loaded()
    report.partitions[1].served = False
    assert [each["tone"] for each in ring_of(report)["arcs"]] == ["c0", "bad"]


def test_shape_changes_when_more_than_numbers_changes() -> None:
    report = loaded()
    before = shape_of(report)
    report.partitions[0].lead.ops_per_s = 5
    assert shape_of(report) == before
    report.partitions[0].leader = "n3"
    assert shape_of(report) != before


def test_updated_numbers_are_those_of_the_page() -> None:
    report = judged(loaded())
    live, page = live_of(report), page_of(report)
    assert live["numbers"] == {each["id"]: each["text"] for each in page["tiles"]}
    assert {"load p1": "300/s", "load p2": "100/s"}.items() <= live["cells"].items()
    named = {cell.live for table in ("nodes", "partitions") for row in page[table]["rows"] for cell in row} - {""}
    assert named == set(live["cells"])
    assert (live["verdict"], live["changed"]) == (page["verdict"], page["shape"])


def test_numbers_have_readable_units() -> None:
    assert [size(each) for each in (5, 1536, 20 << 30, 5 << 40)] == ["5 B", "1.5 KiB", "20 GiB", "5.0 TiB"]
    assert [span(each) for each in (3, 119, 120, 7200, 200_000)] == ["3 s", "119 s", "2 min", "2 h", "2 d"]
    assert [rate(each) for each in (0, 0.01, 0.5, 12_345)] == ["0/s", "<0.1/s", "0.5/s", "12,345/s"]
    assert [took(each) for each in (0.000064, 0.004096, 0.131072)] == ["64 µs", "4.1 ms", "131 ms"]
    assert [when(each, 70_000) for each in (0, 80_000, 40_000)] == ["never", "in 10 s", "30 s ago"]
    assert key(b"a\n\x1b[\xff") == "a\\n\\x1b[\\xff"
    assert len(key(b"k" * 1000)) == 60


def test_commands_are_distinguished_from_text() -> None:
    assert parts("run `kvstore fsck`, then `b`") == [
        ("run ", False),
        ("kvstore fsck", True),
        (", then ", False),
        ("b", True),
    ]
    assert parts("a ` that nobody ends") == [("a ` that nobody ends", False)]
    assert parts("") == []


class Elements(HTMLParser):
    """The elements of a page: names with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


def test_namespaces_show_usage_and_refusals() -> None:
    report = judged(loaded())
    assert page_of(report)["namespaces"]["rows"] == []
    shop = report.namespaces.add(name="shop", prefix=b"shop/\xff<b>", keys=920, bytes=2048)
    limits = shop.limits
    limits.keys_max, limits.bytes_max, limits.ops_per_s, limits.ttl_ms = 1000, 1 << 20, 5000, 3_600_000
    report.namespaces.add(name="free", prefix=b"free/", keys=7)
    assert cells(report, "namespaces") == {
        "shop": "shop/\\xff<b> | 920 of 1,000 | 2.0 KiB of 1.0 MiB | 92% of keys | at most 5,000/s | 60 min | none | "
        "nearly full",
        "free": "free/ | 7 | 0 B | none | any number | none | none | within limits",
    }
    shape = shape_of(report)
    shop.keys, shop.refused["keys"], shop.refused["operations"] = 940, 3, 2
    assert shape_of(report) == shape, "numbers are kept fresh without another page"
    told = live_of(report)["cells"]
    assert (told["keys of shop"], told["refused of shop"]) == ("940 of 1,000", "3 for keys · 2 for operations")
    shop.refused_ago_s["keys"] = 1.0
    assert shape_of(report) != shape
    assert cells(report, "namespaces")["shop"].endswith("refuses: keys limit reached")
