"""The content of the dashboard, made of a report of the cluster: words and numbers for the template, and those that
are updated. Decides only. kvstore.server.status.health gives the verdict, as for `kvstore status`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from kvstore.proto.admin_pb2 import (
    DOWN,
    BookieReport,
    ClusterReport,
    DiskReport,
    Grade,
    MoveView,
    Namespace,
    NodeView,
    PartitionView,
)
from kvstore.proto.namespaces import KINDS, refusing, shares_of, warning_of
from kvstore.server.status.health import BEHIND_MAX, copies_of, is_scarce
from kvstore.server.ui.history import SAMPLES, LoadHistory
from kvstore.server.ui.picture import line_of, ring_of
from kvstore.server.ui.words import count, key, rate, size, span, took

HOT_KEYS_MAX = 10
CHARTS = (("operations", "Operations", rate), ("writes", "Writes", rate), ("written_bytes", "Bytes written", size))


class Cell(NamedTuple):
    """A cell of a table. `tone`: its CSS class. `part`: a progress from 0 to 1. `live`: the name under which it is
    updated. `link`: another page about its subject."""

    text: str
    tone: str = ""
    part: float | None = None
    live: str = ""
    link: str = ""


def page_of(report: ClusterReport, history: LoadHistory) -> dict[str, Any]:
    """Return the context of the template."""
    grade = Grade.Name(report.health.grade)
    return {
        "grade": grade,
        "grade_word": grade.capitalize(),
        "health": report.health.text,
        "shape": shape_of(report),
        "server": report.server,
        "date": f"{datetime.fromtimestamp(report.date_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "findings": [
            {
                "subject": each.subject,
                "reason": each.reason,
                "next_step": each.next_step or "wait",
                "tone": "bad" if each.grade == DOWN else "warn",
            }
            for each in report.findings
        ],
        "ring": ring_of(report),
        "tiles": [{"id": name, "name": label, "text": text} for name, label, text in _tiles(report)],
        "charts": [_chart(history.of(name), label, words) for name, label, words in CHARTS],
        "hot": _hot(report.partitions),
        "moves": _moves(report),
        "nodes": table("nodes", "Nodes", NODE_COLUMNS, map(_node, report.nodes)),
        "partitions": table("partitions", "Partitions", PARTITION_COLUMNS, map(_partition, report.partitions)),
        "bookies": table("bookies", "Bookies", BOOKIE_COLUMNS, map(_bookie, report.bookies), _copies(report)),
        "namespaces": table("namespaces", "Namespaces", NAMESPACE_COLUMNS, map(_namespace, report.namespaces)),
        "facts": _facts(report),
    }


def live_of(report: ClusterReport) -> dict[str, Any]:
    """Return the data that an open page receives at each update."""
    return {
        "grade": Grade.Name(report.health.grade),
        "health": report.health.text,
        "changed": shape_of(report),
        "numbers": {name: text for name, _, text in _tiles(report)},
        "cells": {
            **{f"load {each.id}": rate(each.lead.ops_per_s) for each in report.partitions},
            **{f"{name} {node.id}": text for node in report.nodes for name, text in _latencies(node)},
            **{f"{what} of {each.name}": text for each in report.namespaces for what, text in _uses(each)},
        },
    }


def shape_of(report: ClusterReport) -> str:
    """Return a value that changes when anything other than a number has changed, so that an open page knows when to
    reload."""
    shape = [f"{each.subject} {each.code}" for each in report.findings]
    shape += [f"{each.id} {each.leader} {each.served}" for each in report.partitions]
    shape += [f"{each.id} {each.state} {bool(each.stuck)}" for each in report.ring.moves]
    shape += [f"{each.id} {bool(each.no_answer)}" for each in report.nodes]
    shape += [f"{each.name} {each.prefix!r} {each.limits} {_standing(each)}" for each in report.namespaces]
    return f"{zlib.crc32('|'.join(shape).encode('utf-8', 'replace')):08x}"


def _tiles(report: ClusterReport) -> list[tuple[str, str, str]]:
    leads = [each.lead for each in report.partitions]
    behind = max((each.behind for partition in report.partitions for each in partition.replicas), default=0)
    answering = sum(not node.no_answer for node in report.nodes)
    return [
        ("operations", "operations", rate(sum(lead.ops_per_s for lead in leads))),
        ("writes", "writes", rate(sum(lead.writes_per_s for lead in leads))),
        ("written", "written", f"{size(sum(lead.written_bytes_per_s for lead in leads))}/s"),
        ("queued", "queued at leaders", f"{sum(lead.queued for lead in leads):,}"),
        ("keys", "keys", f"{sum(each.keys for each in report.partitions):,}"),
        ("behind", "maximum replica lag", f"{behind:,}"),
        ("lacking", "under-replicated ledgers", f"{copies_of(report).lacking:,}"),
        ("nodes", "nodes responding", f"{answering} of {len(report.nodes)}"),
    ]


def _chart(samples: Sequence[float], name: str, words: Any) -> dict[str, str]:
    return {
        "name": name,
        "points": line_of(samples, SAMPLES),
        "last": words(samples[-1]) if samples else "unknown yet",
        "most": words(max(samples, default=0.0)),
    }


def _hot(partitions: Iterable[PartitionView]) -> list[dict[str, str]]:
    found = [(each.share, partition.id, each.key) for partition in partitions for each in partition.lead.hot_keys]
    return [
        {"key": key(raw), "partition": partition, "share": f"{share:.0%}"}
        for share, partition, raw in sorted(found, key=lambda each: -each[0])[:HOT_KEYS_MAX]
    ]


def table(name: str, title: str, columns: Sequence[str], rows: Iterable[list[Cell]], note: str = "") -> dict[str, Any]:
    """Return a table for the template."""
    return {"id": name, "title": title, "columns": columns, "rows": list(rows), "note": note}


LATENCIES = {"get": "get: p50, p99", "put": "put: p50, p99", "session": "client batches: p50, p99"}
NODE_COLUMNS = (
    *("node", "state", "zone", "version", "uptime", "leads", *LATENCIES.values(), "disk free", "metadata store"),
    "processor",
)


def _node(node: NodeView) -> list[Cell]:
    if node.no_answer:
        leads = Cell(f"{len(node.leads)} last known", "bad" if node.leads else "")
        silent, unknown = Cell(f"no answer: {node.no_answer}", "bad"), Cell("?")
        return [Cell(node.id), silent, *[unknown] * 3, leads, *[unknown] * (len(LATENCIES) + 3)]
    report = node.report
    state = "draining" if report.draining else "; ".join(report.not_ready) or "ready"
    store = report.metadata
    return [
        Cell(node.id),
        Cell(state, "warn" if report.not_ready or report.draining else "good"),
        Cell(report.zone or "none"),
        Cell(report.version),
        Cell(span(report.uptime_s)),
        Cell(f"{len(node.leads)} of {len(node.holds)}"),
        *(Cell(text, live=f"{name} {node.id}") for name, text in _latencies(node)),
        _disk(report.disk),
        Cell(f"{store.state}, read {span(store.read_age_s)} ago", "" if store.state == "connected" else "bad"),
        Cell(f"starved {report.loop_starved:.0%}", "warn" if report.loop_starved > 0.5 else ""),
    ]


def _latencies(node: NodeView) -> list[tuple[str, str]]:
    """Return (operation, shown latency) of every operation of LATENCIES."""
    found = {each.operation: f"{took(each.p50_s)}, {took(each.p99_s)}" for each in node.report.latencies}
    return [(name, found.get(name, "none" if not node.no_answer else "?")) for name in LATENCIES]


PARTITION_COLUMNS = (
    *("partition", "state", "leader", "operations", "share of keys", "keys", "epoch", "sequence"),
    *("ledgers", "log kept", "replicas: lag"),
)


def _partition(partition: PartitionView) -> list[Cell]:
    lead, is_well = partition.lead, partition.served or partition.state == "retired"
    lacking = f", {lead.ledgers_lacking_copies:,} under-replicated" if lead.ledgers_lacking_copies else ""
    return [
        Cell(partition.id),
        Cell(partition.state if is_well else f"{partition.state}, not served", "good" if is_well else "bad"),
        Cell(partition.leader or "none", "" if partition.leader or is_well else "bad"),
        Cell(rate(lead.ops_per_s), "n", live=f"load {partition.id}"),
        Cell(f"{partition.share:.1%}", "n"),
        Cell(f"{partition.keys:,}", "n"),
        Cell(f"{partition.epoch:,}", "n"),
        Cell(f"{partition.sequence:,}", "n"),
        Cell(f"{lead.ledgers:,}{lacking}", "warn" if lacking else "", link=ledgers_path(partition.id)),
        Cell(f"from {lead.trimmed_sequence:,} on" if lead.trimmed_sequence else "complete"),
        _replicas(partition),
    ]


def _replicas(partition: PartitionView) -> Cell:
    words, is_amiss = [], False
    if partition.state == "retired":
        return Cell("retired: needs none; removed once no pin holds its log")
    for each in partition.replicas:
        if each.failure or not each.is_up or each.is_in_doubt:
            words.append(f"{each.server}: {each.failure or ('in doubt' if each.is_in_doubt else 'down')}")
            is_amiss = True
        else:
            words.append(f"{each.server}: {each.behind:,}" if each.HasField("behind") else f"{each.server}: ?")
            is_amiss = is_amiss or each.behind > BEHIND_MAX
    return Cell(" · ".join(words), "warn" if is_amiss else "")


BOOKIE_COLUMNS = (
    "bookie",
    "state",
    "zone",
    "disk free",
    "ledgers",
    "under-replicated",
    "in limbo",
    "failed directories",
)


NOT_REPORTED = Cell("not reported")
"""For a bookie whose node is not a server, or not one of ours."""


def _bookie(bookie: BookieReport) -> list[Cell]:
    failed = [f"{each.path}: {each.failure}" for each in bookie.directories if each.failure]
    state = f"{bookie.state}, no answer: {bookie.no_answer}" if bookie.no_answer else bookie.state
    lacking = Cell(f"{bookie.lacking_ledgers:,}", "n warn" if bookie.lacking_ledgers else "n")
    if not bookie.node:  # the bookie protocol reports only free space and state
        row = [
            Cell(bookie.id),
            Cell(state, "good" if state == "writable" else "bad"),
            Cell(bookie.zone or "none"),
        ]
        return [*row, _disk(bookie.disk), NOT_REPORTED, lacking, NOT_REPORTED, NOT_REPORTED]
    return [
        Cell(bookie.id),
        Cell(state, "good" if state == "writable" else "bad"),
        Cell(bookie.zone or "none"),
        _disk(bookie.disk),
        Cell(f"{bookie.ledgers:,}", "n"),
        lacking,
        Cell(f"{bookie.limbo_ledgers:,}", "n warn" if bookie.limbo_ledgers else "n"),
        Cell("; ".join(failed) or "none", "bad" if failed else ""),
    ]


def _disk(disk: DiskReport) -> Cell:
    if not disk.total_bytes:
        return Cell("?")
    return Cell(f"{size(disk.free_bytes)} of {size(disk.total_bytes)}", "bad" if is_scarce(disk) else "")


def _copies(report: ClusterReport) -> str:
    repair = report.repair
    switched = "" if repair.enabled else "; auto-recovery is disabled"
    copies, counted = copies_of(report), report.copies
    of = f"of {count(counted.ledgers, 'ledger')}, {counted.foreign:,} of them not written by partitions, "
    # A mark waits until its bookie has been missing for the delay. The leader itself looks after the copies of an open
    # ledger.
    return (
        f"{of if copies.is_counted else 'not all ledgers are counted; '}{copies.lacking:,} are under-replicated and "
        f"{copies.at_risk:,} are at risk; {repair.marked:,} marked for repair, {repair.repairing} being repaired "
        f"now{switched}"
    )


def ledgers_path(partition: str) -> str:
    """Return the path of the page of a partition's ledgers."""
    return f"/ui/ledgers?partition={quote(partition, safe='')}"


MOVE_COLUMNS = ("move", "from → to", "state", "copied", "remaining", "attempt", "reason")


def _moves(report: ClusterReport) -> dict[str, Any]:
    ring = report.ring
    rows = [
        [
            Cell(str(move.id)),
            Cell(f"{move.source} → {move.target}"),
            Cell(f"{move.state}, stuck" if move.stuck else move.state, "bad" if move.stuck else ""),
            Cell(f"{move.copied:.0%}", part=move.copied) if move.HasField("copied") else Cell("?"),
            Cell(span(move.eta_s) if move.HasField("eta_s") else "unknown"),
            Cell(f"{move.attempt}", "n"),
            Cell(move.stuck or _why_not_stuck(move, is_paused=ring.paused)),
        ]
        for move in ring.moves
    ]
    is_known = ring.HasField("eta_s") and not any(move.stuck for move in ring.moves)
    left = f", about {span(ring.eta_s)} remaining" if is_known else ""
    paused = "; paused: `kvstore ring resume`" if ring.paused else ""
    note = f"{ring.moves_done} of {ring.moves_planned} moves done, {ring.progress:.0%}{left}{paused}"
    return table("moves", "Moves", MOVE_COLUMNS, rows, note)


def _why_not_stuck(move: MoveView, *, is_paused: bool) -> str:
    if is_paused:
        return "the ring is paused"
    return "waits for its turn" if move.state == "planned" else "in progress"


NAMESPACE_COLUMNS = (
    *("namespace", "prefix", "keys", "bytes", "quota used", "operations", "default time to live", "refused"),
    "state",
)


def _namespace(space: Namespace) -> list[Cell]:
    limits, uses, shares = space.limits, dict(_uses(space)), shares_of(space)
    word, tone = _standing(space)
    fullest = max(shares, key=lambda quota: shares[quota], default="")
    return [
        Cell(space.name),
        Cell(key(space.prefix)),
        *(Cell(uses[what], "n", live=f"{what} of {space.name}") for what in ("keys", "bytes")),
        Cell(f"{shares[fullest]:.0%} of {fullest}", part=min(1.0, shares[fullest])) if fullest else Cell("none"),
        Cell(f"at most {limits.ops_per_s:,}/s" if limits.ops_per_s else "any number"),
        Cell(span(limits.ttl_ms / 1000) if limits.ttl_ms else "none"),
        Cell(uses["refused"], live=f"refused of {space.name}"),
        Cell(word, tone),
    ]


def _uses(space: Namespace) -> list[tuple[str, str]]:
    """Return (name, shown value) of everything that changes while a page is open."""
    limits = space.limits
    keys, size_ = f"{space.keys:,}", size(space.bytes)
    refused = [f"{space.refused[kind]:,} for {kind}" for kind in KINDS if space.refused.get(kind)]
    return [
        ("keys", f"{keys} of {limits.keys_max:,}" if limits.keys_max else keys),
        ("bytes", f"{size_} of {size(limits.bytes_max)}" if limits.bytes_max else size_),
        ("refused", " · ".join(refused) or "none"),
    ]


def _standing(space: Namespace) -> tuple[str, str]:
    """Return (word, tone)."""
    if kinds := refusing(space):
        return f"refuses: {', '.join(kinds)} limit reached", "bad"
    return ("nearly full", "warn") if warning_of(space) else ("within limits", "good")


def _facts(report: ClusterReport) -> str:
    store, snapshot = report.metadata, report.snapshot
    versions = sorted({node.report.version for node in report.nodes if not node.no_answer})
    pins = sum(replica.pins_held for node in report.nodes for replica in node.report.replicas)
    taken = f"last snapshot {span(snapshot.age_s)} ago" if report.HasField("snapshot") else "no snapshot known"
    return " · ".join(
        [
            f"metadata store {store.kind} {store.address}: {store.state}, read {span(store.read_age_s)} ago",
            taken,
            count(pins, "pin") + " held",
            f"version{'s' if len(versions) != 1 else ''} {', '.join(versions)}",
            f"ledgers on {report.ensemble_size} bookies, ack quorum {report.ack_quorum}",
            f"access control {'on' if report.access_on else 'off'}",
        ]
    )
