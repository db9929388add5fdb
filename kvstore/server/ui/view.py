"""The content of the dashboard, made of a report of the cluster: words and numbers for the template, and those that
are updated. Decides only. kvstore.server.status.health gives the verdict, as for `kvstore status`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.proto.admin_pb2 import (
    DOWN,
    BookieReport,
    ClusterReport,
    DiskReport,
    Grade,
    MoveView,
    Namespace,
    NodeReport,
    NodeView,
    PartitionView,
)
from kvstore.proto.namespaces import KINDS, refusing, shares_of, warning_of
from kvstore.server.status import health
from kvstore.server.status.health import BEHIND_MAX, copies_of, is_scarce
from kvstore.server.status.sizes import count, size, span
from kvstore.server.ui.cells import Cell, page_path, table
from kvstore.server.ui.charts import PERIODS
from kvstore.server.ui.history import lag_of
from kvstore.server.ui.picture import ring_of
from kvstore.server.ui.words import date, key, rate, share, took

HOT_KEYS_MAX = 10
SUBJECTS = ("node", "partition", "bookie")
"""The first words of the subjects of findings about which there is a page of that name."""


def page_of(report: ClusterReport, charts: Sequence[Any] = (), *, period: str = "1h", note: str = "") -> dict[str, Any]:
    """Return the context of the template. `charts` are those of kvstore.server.ui.charts, and `note` says what they
    cover."""
    grade = Grade.Name(report.health.grade)
    return {
        "grade": grade,
        "grade_word": grade.capitalize(),
        "verdict": verdict_of(report),
        "shape": shape_of(report),
        "server": report.server,
        "date": date(report.date_ms),
        "findings": findings_of(report),
        "ring": ring_of(report),
        "tiles": [{"id": name, "name": label, "text": text} for name, label, text in _tiles(report)],
        "charts": charts,
        "period": period,
        "periods": list(PERIODS),
        "chart_note": note,
        "hot": hot_keys(report.partitions),
        "moves": moves_of(report, report.ring.moves),
        "nodes": table("nodes", "Nodes", NODE_COLUMNS, map(_node, report.nodes)),
        "partitions": table("partitions", "Partitions", PARTITION_COLUMNS, map(_partition, report.partitions)),
        "bookies": table("bookies", "Bookies", BOOKIE_COLUMNS, map(_bookie, report.bookies), _copies(report)),
        "namespaces": table("namespaces", "Namespaces", NAMESPACE_COLUMNS, map(_namespace, report.namespaces)),
        "facts": _facts(report),
    }


def verdict_of(report: ClusterReport) -> str:
    """Return the verdict of `kvstore status`, with the number of findings."""
    verdict = health.verdict_of(report, report.findings)
    findings = f", {count(len(report.findings), 'finding')}" if report.findings else ""
    return f"{verdict[0].upper()}{verdict[1:]}{findings}"


def findings_of(report: ClusterReport, subject: str = "") -> list[dict[str, str]]:
    """Return the findings for the template, most severe first: all of them, or those about one subject such as
    `node n1`."""
    return [
        {
            "subject": each.subject,
            "code": each.code,
            "reason": each.reason,
            "next_step": each.next_step or "wait",
            "tone": "bad" if each.grade == DOWN else "warn",
            "grade": "down" if each.grade == DOWN else "degraded",
            "link": _page_about(each.subject),
        }
        for each in report.findings
        if subject in ("", each.subject) or each.subject.startswith(f"{subject} ")
    ]


def _page_about(subject: str) -> str:
    """Return the path of the page about a subject such as `node n1` or `partition p1 on n2`; empty if there is none."""
    kind, _, rest = subject.partition(" ")
    id_ = rest.partition(" ")[0]
    if kind == "partitions":
        return "/ui#partitions"
    if kind == "snapshots":
        return page_path(kind)
    return page_path(kind, id=id_) if kind in SUBJECTS and id_ else ""


def live_of(report: ClusterReport) -> dict[str, Any]:
    """Return the data that an open page receives at each update."""
    return {
        "grade": Grade.Name(report.health.grade),
        "verdict": verdict_of(report),
        "changed": shape_of(report),
        "numbers": {name: text for name, _, text in _tiles(report)},
        "cells": {
            **{f"load {each.id}": _operations(each) for each in report.partitions},
            **{f"{name} {node.id}": text for node in report.nodes for name, text in latencies_of(node)},
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
    answering = sum(not node.no_answer for node in report.nodes)
    return [
        ("operations", "operations", rate(sum(lead.ops_per_s for lead in leads))),
        ("writes", "writes", rate(sum(lead.writes_per_s for lead in leads))),
        ("written", "written", f"{size(sum(lead.written_bytes_per_s for lead in leads))}/s"),
        ("queued", "queued at leaders", f"{sum(lead.queued for lead in leads):,}"),
        ("keys", "keys", f"{sum(each.keys for each in report.partitions):,}"),
        ("behind", "maximum replica lag", f"{lag_of(report):,}"),
        ("lacking", "under-replicated ledgers", f"{copies_of(report).lacking:,}"),
        ("nodes", "nodes responding", f"{answering} of {len(report.nodes)}"),
    ]


HOT_COLUMNS = ("key", "partition", "share of its operations")


def hot_keys(partitions: Iterable[PartitionView]) -> dict[str, Any]:
    """Return the table of the keys with the most operations."""
    found = [(each.share, partition.id, each.key) for partition in partitions for each in partition.lead.hot_keys]
    rows = [
        [
            Cell(key(raw), "wrap", link=page_path("key", key=raw)),
            Cell(partition, link=page_path("partition", id=partition)),
            Cell(share(part), "n"),
        ]
        for part, partition, raw in sorted(found, key=lambda each: -each[0])[:HOT_KEYS_MAX]
    ]
    note = "" if rows else "No key has a noticeable share of its partition's operations."
    return table("hot", "Hot keys", HOT_COLUMNS, rows, note)


LATENCIES = {"get": "reads: p50, p99", "put": "writes: p50, p99", "session": "client batches: p50, p99"}
IDLE = "idle"
"""Shown for a latency that nothing was measured for within the last minute."""
NODE_COLUMNS = (
    *("node", "state", "uptime", "leads", *LATENCIES.values(), "data disk free", "metadata store"),
    "waits for a processor",
)


def _node(node: NodeView) -> list[Cell]:
    own = Cell(node.id, link=page_path("node", id=node.id))
    if node.no_answer:
        leads = Cell(f"{len(node.leads)} last known", "bad" if node.leads else "")
        silent, unknown = Cell(f"no answer: {node.no_answer}", "bad"), Cell("?")
        return [own, silent, unknown, leads, *[unknown] * (len(LATENCIES) + 3)]
    report = node.report
    state, tone = state_of(report)
    return [
        own,
        Cell(state, tone),
        Cell(span(report.uptime_s)),
        Cell(f"{len(node.leads)} of {len(node.holds)}"),
        *(Cell(text, live=f"{name} {node.id}") for name, text in latencies_of(node)),
        disk_free(report.disk),
        Cell(metadata_state(report), "" if report.metadata.state == "connected" else "bad"),
        Cell(f"{report.loop_starved:.0%} of the time"),
    ]


def state_of(report: NodeReport) -> tuple[str, str]:
    """Return (state, tone) of a node that answers."""
    if report.draining:
        return "draining", "warn"
    return ("; ".join(report.not_ready), "warn") if report.not_ready else ("ready", "good")


def metadata_state(report: NodeReport) -> str:
    return f"{report.metadata.state}, read {span(report.metadata.read_age_s)} ago"


def latencies_of(node: NodeView) -> list[tuple[str, str]]:
    """Return (operation, shown latency) of every operation of LATENCIES."""
    found = {each.operation: f"{took(each.p50_s)}, {took(each.p99_s)}" for each in node.report.latencies}
    return [(name, found.get(name, IDLE if not node.no_answer else "?")) for name in LATENCIES]


PARTITION_COLUMNS = (
    *("partition", "state", "leader", "operations", "share of keys", "keys", "ledgers", "log kept"),
    "replicas: lag",
)


def _partition(partition: PartitionView) -> list[Cell]:
    lead, (state, tone), is_known = partition.lead, partition_state(partition), partition.HasField("lead")
    lacking = f" ({lead.ledgers_lacking_copies:,} under-replicated)" if lead.ledgers_lacking_copies else ""
    kept = f"from {lead.trimmed_sequence:,} on" if lead.trimmed_sequence else "complete"
    return [
        Cell(partition.id, link=page_path("partition", id=partition.id)),
        Cell(state, tone),
        _leader(partition, "" if partition.leader or tone == "good" else "bad"),
        Cell(_operations(partition), "n", live=f"load {partition.id}"),
        Cell(f"{partition.share:.1%}", "n"),
        Cell(f"{partition.keys:,}", "n"),
        Cell(
            f"{lead.ledgers:,}{lacking}" if is_known else "?",
            "warn" if lacking else "",
            link=page_path("ledgers", partition=partition.id),
        ),
        Cell(kept if is_known else "?"),
        _replicas(partition),
    ]


def _leader(partition: PartitionView, tone: str) -> Cell:
    leader = partition.leader
    return Cell(leader or "none", tone, link=page_path("node", id=leader) if leader else "")


def _operations(partition: PartitionView) -> str:
    """Return the rate of operations, which only the leader knows."""
    return rate(partition.lead.ops_per_s) if partition.HasField("lead") else "?"


def partition_state(partition: PartitionView) -> tuple[str, str]:
    """Return (state, tone). A retired partition needs no leader."""
    if partition.served or partition.state == "retired":
        return partition.state, "good"
    return "not served" if partition.state == "serving" else f"{partition.state}, not served", "bad"


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
    *("bookie", "state", "disk free", "used by ledgers", "ledgers", "under-replicated", "in limbo"),
    "failed directories",
)
NOT_REPORTED = Cell("not reported")
"""For a bookie whose node is not a server, or not one of ours."""


def _bookie(bookie: BookieReport) -> list[Cell]:
    failed = [f"{each.path}: {each.failure}" for each in bookie.directories if each.failure]
    row = [
        Cell(bookie.id, link=page_path("bookie", id=bookie.id)),
        Cell(*bookie_state(bookie)),
        bookie_free(bookie.disk),
        bookie_used(bookie.disk),
    ]
    lacking = Cell(f"{bookie.lacking_ledgers:,}", "n warn" if bookie.lacking_ledgers else "n")
    if bookie.no_answer:
        return [*row, Cell("?", "n"), lacking, Cell("?", "n"), Cell("?")]
    if not bookie.node:  # the bookie protocol reports only free space and state
        return [*row, NOT_REPORTED, lacking, NOT_REPORTED, NOT_REPORTED]
    return [
        *row,
        Cell(f"{bookie.ledgers:,}", "n"),
        lacking,
        Cell(f"{bookie.limbo_ledgers:,}", "n warn" if bookie.limbo_ledgers else "n"),
        Cell("; ".join(failed) or "none", "bad" if failed else ""),
    ]


def bookie_state(bookie: BookieReport) -> tuple[str, str]:
    """Return (state, tone)."""
    state = "read-only" if bookie.state == "readonly" else bookie.state
    state += f", no answer: {bookie.no_answer}" if bookie.no_answer else ""
    return state, "good" if state == "writable" else "bad"


def disk_free(disk: DiskReport) -> Cell:
    """Return the free space of a node's data disk."""
    if not disk.total_bytes:
        return Cell("?")
    return Cell(f"{size(disk.free_bytes)} of {size(disk.total_bytes)}", "bad" if is_scarce(disk) else "")


def bookie_free(disk: DiskReport) -> Cell:
    return Cell(size(disk.free_bytes), "bad" if is_scarce(disk) else "") if disk.total_bytes else Cell("?")


def bookie_used(disk: DiskReport) -> Cell:
    """Return what a bookie's own ledgers use. A bookie counts the free space and its own data as its total, because the
    disk may hold other data too."""
    return Cell(size(disk.total_bytes - disk.free_bytes)) if disk.total_bytes else Cell("?")


def _copies(report: ClusterReport) -> str:
    repair = report.repair
    switched = "" if repair.enabled else "; auto-recovery is disabled"
    copies, counted = copies_of(report), report.copies
    bound = "up to " if copies.is_upper_bound else ""
    # A mark waits until its bookie has been missing for the delay. The leader itself looks after the copies of an open
    # ledger.
    now = (
        f"Ledgers that are under-replicated: {bound}{copies.lacking:,}, at risk: {copies.at_risk:,}, marked for "
        f"repair: {repair.marked:,}, being repaired now: {repair.repairing}{switched}."
    )
    if not copies.is_counted:
        return f"{now} Not all ledgers are counted."
    others = f" ({counted.foreign:,} of them written by other clients)" if counted.foreign else ""
    were = "was" if counted.ledgers == 1 else "were"
    return f"{now} {count(counted.ledgers, 'ledger')}{others} {were} counted {span(counted.age_s)} ago."


MOVE_COLUMNS = ("move", "from → to", "state", "copied", "remaining", "attempt", "reason")


def moves_of(report: ClusterReport, moves: Iterable[MoveView]) -> dict[str, Any]:
    """Return the table of some moves of the ring."""
    ring = report.ring
    rows = [
        [
            Cell(str(move.id)),
            Cell(f"{move.source} → {move.target}"),
            Cell(f"{move.state}, stuck" if move.stuck else move.state, "bad" if move.stuck else ""),
            Cell(f"{move.copied:.0%}", part=move.copied) if move.HasField("copied") else Cell("?"),
            Cell(span(move.eta_s) if move.HasField("eta_s") else "unknown"),
            Cell(f"{move.attempt}", "n"),
            Cell(move.stuck or _why_not_stuck(move, is_paused=ring.paused), is_prose=True),
        ]
        for move in moves
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
