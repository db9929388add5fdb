"""The pages about one subject: node, partition, bookie, clients, transactions, snapshots, slow log, users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvstore.errors import MetadataUnavailable
from kvstore.proto.admin_pb2 import LedgersResponse, SlowLogResponse, TransactionsResponse
from kvstore.proto.data_pb2 import PinsResponse
from kvstore.server.ui.cells import page_path
from kvstore.server.ui.ledgers import BOOKIE_COLUMNS, bookie_ledgers_page_of
from kvstore.server.ui.local import (
    NOT_COUNTED,
    ROWS_MAX,
    clients_page,
    clients_report,
    oldest_of,
    slow_page,
    snapshots_page,
    transactions_page,
    users_page,
)
from kvstore.server.ui.pages import DETAILS, MENU, POLICY
from kvstore.server.ui.subjects import bookie_page, node_page, partition_page
from tests.server.status.test_health import silent
from tests.server.ui.made import HOSTILE, NOW_MS, audited, clients, made_details, slow, transactions, users
from tests.server.ui.test_dashboard import Opened, fetch, log_of, opened
from tests.server.ui.test_view import Elements, judged, loaded

__all__ = ["opened"]

PAGES = (
    *("partition?id=p1", "bookie?id=n1-ab", "node?id=n1", "ledgers?partition=p1", "ledgers?bookie=n1-ab"),
    *("clients", "transactions", "snapshots", "slow", "users"),
)


def facts(page: dict[str, Any]) -> dict[str, str]:
    return {fact.name: fact.text for fact in page["facts"]}


def rows(page: dict[str, Any], table: str) -> list[list[str]]:
    [found] = [each for each in page["tables"] if each["id"] == table]
    return [[cell.text for cell in row] for row in found["rows"]]


@pytest.mark.parametrize("path", PAGES)
async def test_page_escapes_the_names_of_others_and_can_be_used_by_everybody(opened: Opened, path: str) -> None:
    opened.made.report.partitions[0].lead.hot_keys.add(key=HOSTILE.encode(), share=0.5)
    opened.made.report.nodes[0].report.refused_by.add(by=HOSTILE, reason='"onload=alert(1)')
    answer, page = await fetch(f"{opened.url}/ui/{path}")
    assert (answer.status, answer.headers["Content-Security-Policy"]) == (200, POLICY)
    assert "<script>alert" not in page
    elements = Elements(page)
    assert [len(elements.of(name)) for name in ("main", "header", "footer", "nav", "h1")] == [1] * 5
    assert not [name for _, each in elements.found for name in each if name == "style" or name.startswith("on")]
    headings = [each["id"] for each in elements.of("h2") if "id" in each]
    assert len(set(headings)) == len(headings)
    assert all(each.get("aria-labelledby") in headings for each in elements.of("section"))
    assert all(each.get("scope") in ("col", "row") for each in elements.of("th"))
    loads = [each for name in ("link", "img") for each in elements.of(name)]
    assert [each["href"] for each in loads] == ["/ui/ui.css"]
    assert [each["src"] for each in elements.of("script")] == ["/ui/tables.js"]


@pytest.mark.parametrize("path", ["clients", "transactions", "slow", "users", "snapshots"])
async def test_names_of_others_are_shown_as_text(opened: Opened, path: str) -> None:
    assert "&lt;script&gt;alert(1)" in (await fetch(f"{opened.url}/ui/{path}"))[1]


async def test_every_page_is_reached_from_every_other(opened: Opened) -> None:
    for path in ("", "/clients", "/node?id=n1"):
        linked = {str(each["href"]) for each in Elements((await fetch(f"{opened.url}/ui{path}"))[1]).of("a")}
        assert {path for path, _ in MENU} <= linked
    linked = {str(each["href"]) for each in Elements((await fetch(f"{opened.url}/ui"))[1]).of("a")}
    assert {"/ui/node?id=n1", "/ui/partition?id=p1", "/ui/bookie?id=n1-ab"} <= linked
    assert {path for path, _ in MENU} <= {"/ui", *(f"/ui/{name}" for name in (*DETAILS, "keys", "sessions"))}


async def test_unknown_subject_is_not_found(opened: Opened) -> None:
    found = [await fetch(f"{opened.url}/ui/{name}?id=%3Cb%3Ex9") for name in ("node", "partition", "bookie")]
    assert [answer.status for answer, _ in found] == [404, 404, 404]
    assert found[1][1] == "404: no partition '<b>x9'; expected ?id= with one of p1, p2\n"
    assert {answer.content_type for answer, _ in found} == {"text/plain"}
    bad = [await fetch(f"{opened.url}/ui/ledgers?bookie=n1-ab&first={first}") for first in ("-1", "x", "9" * 20)]
    assert [answer.status for answer, _ in bad] == [400, 400, 400]


async def test_partition_page_is_complete_without_the_metadata_store(opened: Opened) -> None:
    opened.listener.dashboard.details._details = made_details(MetadataUnavailable("the session is lost"))  # type: ignore[union-attr]
    answer, page = await fetch(f"{opened.url}/ui/partition?id=p1")
    assert answer.status == 200
    assert "Unknown: the session is lost" in page
    assert "Replicas" in page
    assert [(await fetch(f"{opened.url}/ui/{name}"))[0].status for name in ("users", "snapshots")] == [200, 200]
    assert "Unknown: the session is lost" in (await fetch(f"{opened.url}/ui/snapshots"))[1]


async def test_ledgers_of_a_bookie_are_read_in_pages(opened: Opened) -> None:
    _, page = await fetch(f"{opened.url}/ui/ledgers?bookie=n3-ab")
    assert "3 of the 3 ledgers that were read." in page
    assert "/ui/ledgers?bookie=n3-ab&amp;first=2001" in page
    assert "first=" not in (await fetch(f"{opened.url}/ui/ledgers?bookie=n3-ab&first=2001"))[1]
    assert "0 of the 3 ledgers" in (await fetch(f"{opened.url}/ui/ledgers?bookie=n9"))[1]


def test_partition_page_shows_replicas_moves_ledgers_and_pins() -> None:
    report = loaded()
    report.partitions[0].replicas[2].behind, report.partitions[0].replicas[1].role = 12, "following"
    report.partitions[0].replicas[2].is_joining = True
    report.ring.moves.add(id=7, source="p1", target="p2", state="copying", copied=0.4)
    report.ring.moves.add(id=8, source="p3", target="p2", state="planned")
    page = partition_page(report, report.partitions[0], log_of(12), "the session is lost")
    assert facts(page)["operations"] == "300/s"
    assert rows(page, "replicas")[1:] == [
        ["n2", "up", "following", "0", "0", "none"],
        ["n3", "up", "?", "?", "12", "joining"],
    ]
    assert [row[0] for row in rows(page, "moves")] == ["7"]
    assert [row[0] for row in rows(page, "ledgers")] == [str(number) for number in range(12, 2, -1)]
    assert rows(page, "pins") == []


def test_pages_show_what_the_cluster_finds_about_their_subject() -> None:
    report = loaded()
    for partition in report.partitions:
        partition.served, partition.leader = False, ""
    silent(report, 3)
    report.bookies[2].no_answer = "refuses connections"
    judged(report)
    page = partition_page(report, report.partitions[1], log_of(1), PinsResponse())
    assert [each["subject"] for each in page["findings"]] == ["partition p2"], "without p1, which has the same reason"
    assert (page["grade"], page["verdict"]) == ("DOWN", "Down, 2 of 2 partitions not served, 3 findings")
    page = bookie_page(report, report.bookies[2])
    assert [each["subject"] for each in page["findings"]] == ["node n3"]
    assert "ledgers" not in facts(page), "nobody reports them"
    assert node_page(judged(loaded()), loaded().nodes[0])["verdict"] == ""


def test_clients_page_shows_the_clients_of_all_nodes() -> None:
    page = clients_page(
        {"n1": clients(), "n2": clients_report([], {"http_watches": 3})}, {"n3": "no answer within 1 s"}
    )
    assert rows(page, "counts") == [["n1", "2", "5", "0", "0"], ["n2", "0", "0", "0", "3"]]
    assert page["tables"][0]["columns"][2] == "asyncio clients"
    assert page["tables"][0]["note"] == f"{NOT_COUNTED} n3 is not included: no answer within 1 s."
    assert [row[:2] for row in rows(page, "clients")] == [["n1", "7"], ["n1", "7"]]
    nobody = clients_page({"n1": clients_report([], {})}, {})
    assert [each["note"] for each in nobody["tables"]] == [NOT_COUNTED, "No client is connected to the Redis port."]


def test_transactions_page_shows_the_oldest_of_all_leaders_first() -> None:
    report = loaded()
    report.partitions[0].lead.intents, report.partitions[0].lead.oldest_intent_s = 700, 45.0
    report.partitions[1].lead.intents = 1
    other = TransactionsResponse()
    other.replicas.add(partition="p2", is_leader=True).intents.add(key=b"k", attempt="p1/1/1", home="p1", age_s=90.0)
    page = transactions_page(judged(report), {"n1": transactions(), "n2": other}, {"n3": "refuses connections"})
    assert [row[:4] for row in rows(page, "intents")] == [["p2", "n2", "k", "p1"], ["p1", "n1", HOSTILE, "p2"]]
    assert [row[:3] for row in rows(page, "decisions")] == [["p1", "n1", "h"]]
    assert page["tables"][0]["note"].startswith("701 intents. ")
    assert page["tables"][1]["note"] == "1 decision. n3 is not included: refuses connections."
    assert [each["code"] for each in page["findings"]] == ["transaction_hangs"]


def test_server_reports_its_oldest_transactions_up_to_a_bound() -> None:
    found = TransactionsResponse()
    leader = found.replicas.add(partition="p1", is_leader=True)
    for number in range(ROWS_MAX + 7):
        leader.intents.add(key=b"%d" % number, age_s=number)
    found.replicas.add(partition="p2", is_leader=False).intents.add(key=b"its leader reports it")
    [shown] = oldest_of(found).replicas
    assert (len(shown.intents), shown.intents[0].age_s, shown.intents[-1].age_s) == (ROWS_MAX, ROWS_MAX + 6, 7)


def test_slow_page_shows_the_newest_operations_of_all_nodes_first() -> None:
    off = SlowLogResponse(slow_ms=0)
    page = slow_page({"n1": slow(), "n2": slow(NOW_MS + 1_000), "n4": off}, {"n3": "refuses connections"})
    assert [row[1:5] for row in rows(page, "slow")] == [
        [node, "leader", HOSTILE, "9c27d7d4f5a1b2c3"] for node in ("n2", "n1")
    ]
    assert page["tables"][0]["note"] == (
        "2 operations, the newest first. Each node's `slow_ms`, and its number of slow operations since its start: "
        "n1 100 ms (41), n2 100 ms (41), n4 0 (off). n3 is not included: refuses connections."
    )


def test_users_page_shows_the_newest_audit_lines_of_all_nodes_first() -> None:
    found = {"n1": audited("BEGUN", "OK"), "n2": audited("PERMISSION_DENIED", date_ms=NOW_MS + 1_000)}
    page = users_page(users(), found, {"n3": "refuses connections"}, NOW_MS)
    said = ["ada", "10.0.0.9:5", "ChangeAccess", HOSTILE]
    assert [row[1:] for row in rows(page, "audit")] == [
        ["n2", *said, "PERMISSION_DENIED", "no such role"],
        ["n1", *said, "OK", "no such role"],
        ["n1", *said, "BEGUN", "no such role"],
    ]
    assert page["tables"][-1]["note"] == (
        "3 lines, the newest first. Each node keeps the last 200 since its start. The files of the audit log have all "
        "lines. n3 is not included: refuses connections."
    )


@pytest.mark.parametrize("page", [slow_page, partial(users_page, "the session is lost", date_ms=NOW_MS)])
def test_pages_of_logs_show_at_most_a_number_of_rows(page: Callable[..., dict[str, Any]]) -> None:
    is_slow = page is slow_page
    many: Any = slow() if is_slow else audited("OK")
    rows_of_it: Any = many.operations if is_slow else many.entries
    rows_of_it.extend([rows_of_it[0]] * ROWS_MAX)
    last = page({"n1": many}, {})["tables"][-1]
    assert len(last["rows"]) == ROWS_MAX
    noun = "operations" if is_slow else "lines"
    assert last["note"].startswith(f"{ROWS_MAX + 1} {noun}, of which the newest {ROWS_MAX} are shown.")


def test_snapshots_page_shows_the_limit_and_what_the_cluster_finds() -> None:
    report = judged(loaded())
    assert "No node limits its age." in snapshots_page(report, [])["tables"][0]["note"]
    report.snapshot_age_max_s = 26 * 3600
    page = snapshots_page(judged(report), [])
    assert "The last should be at most 26 h old." in page["tables"][0]["note"]
    assert [(each["subject"], each["link"]) for each in page["findings"]] == [("snapshots", "/ui/snapshots")]


def test_ledgers_of_a_bookie_are_shown_without_what_their_list_lacks() -> None:
    ledger = log_of(1).ledgers[0]
    [row] = bookie_ledgers_page_of(LedgersResponse(ledgers=[ledger]), "n1-ab", "n1")["tables"][0]["rows"]
    shown = dict(zip(BOOKIE_COLUMNS, [cell.text for cell in row], strict=True))
    assert shown["state"] == ledger.state
    assert "epoch" not in shown


def test_node_page_of_a_silent_node_shows_what_is_known() -> None:
    report = judged(loaded())
    silent(report, 2)
    report.nodes[1].leads.append("p2")
    judged(report)
    page = node_page(report, report.nodes[1])
    assert facts(page) == {
        "state": "no answer: refuses connections",
        "leads, last known": "p2",
        "should have replicas of": "p1, p2",
    }
    assert page["findings"][0]["subject"] == "node n2"
    assert page["tables"] == []


def test_bookie_page_names_the_partitions_that_lack_copies_there() -> None:
    report = loaded()
    report.partitions[1].lead.lacking_at.add(bookie="n3-ab", ledgers=4)
    report.bookies[2].directories.add(path="/d1", free_bytes=5 << 30)
    report.bookies[2].directories.add(path="/d2", failure="Input/output error")
    page = bookie_page(report, report.bookies[2])
    assert rows(page, "lacking") == [["p2", "4"]]
    assert rows(page, "directories") == [["/d1", "writable", "5.0 GiB"], ["/d2", "failed: Input/output error", "0 B"]]
    assert (facts(page)["disk free"], facts(page)["used by ledgers"]) == ("50 GiB", "50 GiB")


def test_parameters_of_a_page_are_encoded() -> None:
    assert page_path("keys", prefix='a&b=<"', after="") == "/ui/keys?prefix=a%26b%3D%3C%22"
