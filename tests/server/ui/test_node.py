"""The page of one node."""

from __future__ import annotations

from typing import Any

from kvstore.server.ui.node import node_page_of
from kvstore.server.ui.pages import Pages

STATUS: dict[str, Any] = {
    "id": "n1<script>",
    "version": "1.2.3",
    "python": "CPython 3.13",
    "roles": ["server", "bookie"],
    "metadata": "connected",
    "ring_version": 7,
    "servers": ["n1", "n2"],
    "partitions": {
        "p1": {"role": "serving", "seq": 1234, "epoch": 3, "keys": 5, "leader": "n1", "leading": {"queued": 1}},
        "p2": {"role": "serving", "seq": 1, "leader": None, "failure": "its state differs"},
    },
    "leaders": {"p1": "n1"},
    "server": {"resp_commands": 12345},
    "bookie": {"adds": 5, "sync_s_sum": 0.25, "read_only": False},
    "not_ready": ["draining"],
    "leaderless": ["p2"],
}


def page(status: dict[str, Any], *, has_dashboard: bool = True) -> str:
    context = node_page_of(status, has_dashboard=has_dashboard)
    return Pages().html("node.html", context).body.decode()


def cells(status: dict[str, Any]) -> dict[str, list[list[str]]]:
    tables = node_page_of(status, has_dashboard=True)["tables"]
    return {each["id"]: [[cell.text for cell in row] for row in each["rows"]] for each in tables}


def test_node_page_shows_all_that_the_node_reports() -> None:
    assert cells(STATUS) == {
        "partitions": [
            ["p1", "serving", "n1", "1,234", "3", "5", "1"],
            ["p2", "stopped: its state differs", "none", "1", "", "", ""],
        ],
        "leaders": [["p1", "n1"]],
        "server": [["resp commands", "12,345"]],
        "bookie": [["adds", "5"], ["sync s sum", "0.25"], ["read only", "False"]],
    }
    text = page(STATUS)
    assert "not ready: draining; without a leader: p2" in text
    facts = "version 1.2.3 · Python CPython 3.13 · roles server, bookie · metadata store connected · ring version 7"
    assert f"{facts} · servers up n1, n2" in text


def test_node_page_escapes_what_the_node_reports() -> None:
    text = page(STATUS)
    assert "<script>" not in text
    assert "n1&lt;script&gt;" in text


def test_node_page_of_a_starting_node_has_no_tables() -> None:
    starting = {"id": "n1", "not_ready": ["starting"], "partitions": {}, "server": {}}
    text = page(starting, has_dashboard=False)
    assert "not ready: starting" in text
    assert "this node is starting or stopping, or is not a server" in text
    assert "<table" not in text


def test_node_page_asks_nothing_of_other_hosts() -> None:
    text = page(STATUS)
    for outside in ("http://", "https://", "src="):
        assert outside not in text
