"""Judges the health of a cluster from the reports of its nodes: findings, each with a reason and a next step, and a
one-line summary of the worst. Decides only.

A finding is DOWN if reads or writes are not served. It is DEGRADED if everything is served but an operator should act.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import DEGRADED, DOWN, HEALTHY, ClusterReport, Finding, Health, PartitionView
from kvstore.server.clock.clock_judge import RATE
from kvstore.server.status.sizes import count, size, span
from kvstore.types import BookieId
from kvstore.wal.placement import machine_count

BEHIND_MAX = 100_000
"""Mutations a replica may lag behind its leader. Applying them takes some seconds if the replica has to lead."""
OLDER = "older"
"""State that a node reports if the metadata store holds an older copy of the metadata."""
COUNT_AGE_MAX_S = 3 * 3_600.0
"""Age from which a count of copies no longer describes the present. Copies are counted at least every hour."""
COUNT_AGE_REPORTED_S = 120.0
"""Age of a count from which findings state the age, because ledgers may have been repaired since."""
READ_AGE_MAX_S = 60.0
"""Age from which a node's knowledge of the cluster is stale, whatever its session state: it rereads everything about
every 10 s."""
SCARCE_RESERVES, SCARCE_SHARE = 2.0, 0.05
"""A disk is nearly full if less is free than this multiple of its reserve, or than this share of its size."""
CERTIFICATE_WARN_S = 30 * 86_400.0
"""Remaining validity from which an expiring certificate is reported."""
DATE_WARN_S = 10.0
"""Difference between cluster time and a majority of wall clocks from which it is reported."""
NAMED_MAX = 5
"""Maximum number of names listed in one line."""
_SET_BACK = {
    "zookeeper": "; if it runs and its log says `Refusing session`, it has lost its data and rejects clients that have "
    "seen the data: restore the data"
}
_LEDGER = re.compile(r"\bledger \d+")
HANGING_AFTER_S = 30.0
"""Seconds after which an intent or a decision of a transaction is reported. Most take milliseconds."""
_BAD_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
"""Part of the error if a node's certificate has a wrong name, has expired or is of another authority."""
STUCK_AFTER = "`kvstore ring status`; cancel it with `kvstore ring cancel`, and run `kvstore fsck`"


def to_serve(report: ClusterReport) -> list[PartitionView]:
    """Return all partitions except retired ones. A retired partition owns no keys and needs no replicas, but stays in
    the ring while a pin holds its log. Every rule about partitions and replicas uses this list."""
    return [each for each in report.partitions if each.state != "retired"]


def retired_in(report: ClusterReport) -> list[str]:
    """Return the retired partitions, which stay in the ring while a pin holds their log."""
    return [each.id for each in report.partitions if each.state == "retired"]


def findings_of(report: ClusterReport) -> list[Finding]:
    """Return all findings of the report, worst first."""
    rules = (  # causes before consequences
        _unserved,
        _silent_nodes,
        _metadata,
        _read_only_bookies,
        _copies,
        _unready_nodes,
        _refused_nodes,
        _names_of_users,
        _bookies,
        _disks,
        _too_few_bookies,
        _repairs,
        _replicas,
        _moves,
        _transactions,
        _dates,
        _certificates,
        _snapshots,
    )
    found = [finding for rule in rules for finding in rule(report)]
    return sorted(found, key=lambda finding: -finding.grade)


def verdict_of(report: ClusterReport, findings: Sequence[Finding]) -> str:
    """Return the health in a few words: what is served and what is not. The findings have the reasons."""
    partitions = to_serve(report)
    if not findings:
        return f"healthy: {count(len(report.nodes), 'node')}, {count(len(partitions), 'partition')}, all served"
    down = {each.code for each in findings if each.grade == DOWN}
    if not down:
        return "degraded, all partitions served"
    unserved = [each.id for each in partitions if not each.served]
    parts = ["down"]
    if unserved:
        which = f"{len(unserved)} of {count(len(partitions), 'partition')}"
        parts.append(f"{f'partition {unserved[0]}' if len(unserved) == 1 else which} not served")
    if "no_ack_quorum" in down and len(unserved) < len(partitions):
        parts.append("no writes served")
    return ", ".join(parts if len(parts) > 1 else [*parts, "partitions are losing their leaders"])


def health_of(report: ClusterReport, findings: Sequence[Finding]) -> Health:
    """Return a summary: the verdict, the worst finding in one line, and the number of other findings."""
    verdict = verdict_of(report, findings)
    if not findings:
        return Health(grade=HEALTHY, text=verdict)
    first = max(findings, key=lambda finding: finding.grade)
    more = f" (and {count(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
    next_step = f". Next: {first.next_step}" if first.next_step else ""
    return Health(grade=first.grade, text=f"{verdict}: {first.subject}: {first.reason}{more}{next_step}")


def _unserved(report: ClusterReport) -> Iterator[Finding]:
    """Find the partitions that no server serves, grouped by reason. Reasons that differ only in their ledger are
    one reason, which is given for the first partition."""
    silent = {node.id: node.no_answer for node in report.nodes if node.no_answer}
    full = _without_space(report)
    reasons: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for partition in to_serve(report):
        if partition.served:
            continue
        if not partition.leader:
            up = sum(replica.is_up for replica in partition.replicas)
            tried = [f"{each.server}: {each.lead_failure}" for each in partition.replicas if each.lead_failure]
            failed = f"; {' and '.join(tried)}" if tried else ""
            why = f"no leader; {up} of {len(partition.replicas)} replicas are up{failed}"
            code = "no_leader"
        elif partition.leader in silent:
            why, code = f"the leader {partition.leader} does not answer: {silent[partition.leader]}", "leader_silent"
        else:
            why, code = f"the leader {partition.leader} does not serve yet", "leader_not_serving"
        alike = (code, _LEDGER.sub("ledger", why), _next_for(partition, silent, full))
        reasons.setdefault(alike, (why, []))[1].append(partition.id)
    for (code, _, next_step), (why, partitions) in reasons.items():
        yield _finding(DOWN, code, _named("partition", partitions), why, next_step)


def _without_space(report: ClusterReport) -> list[str]:
    """Return the nodes whose disks keep the cluster from writing: those with a data directory that cannot be written
    to, and, while too few bookies accept writes, those with a read-only bookie."""
    found = {node.id for node in report.nodes if node.report.disk.trouble}
    if _writable(report) < report.ack_quorum:
        found |= {bookie.node for bookie in report.bookies if bookie.state == "readonly" and bookie.node}
    return sorted(found)


def _next_for(partition: admin_pb2.PartitionView, silent: Iterable[str], full: Sequence[str]) -> str:
    down = sorted({replica.server for replica in partition.replicas} & set(silent))
    steps = []
    if down:
        steps = [f"start {', '.join(down)}, or find out why {'it does' if len(down) == 1 else 'they do'} not answer"]
    if full:
        steps.append(
            f"free space on {', '.join(full)} or raise the limit that their findings name; restart no node that "
            "answers (docs/how-to/when-a-disk-is-full.md)"
        )
    if steps:
        return "; ".join(steps)
    failed = [replica.server for replica in partition.replicas if replica.failure]
    if failed:
        return f"read the logs of {', '.join(failed)}: a replica there has stopped"
    if any(replica.lead_failure for replica in partition.replicas):
        return (
            "wait some seconds, because the replicas retry; then run `kvstore fsck` to see which entries of the "
            "log are missing"
        )
    return "wait some seconds; then read the logs of its replicas' nodes and check the metadata store"


def _writable(report: ClusterReport) -> int:
    """Return the number of machines with a bookie that accepts writes. Copies of an entry are on distinct machines."""
    return machine_count(map(BookieId, _accepting(report)))


def _accepting(report: ClusterReport) -> list[str]:
    return [bookie.id for bookie in report.bookies if bookie.state == "writable" and not bookie.no_answer]


def _too_few_bookies(report: ClusterReport) -> Iterator[Finding]:
    if not report.bookies:
        return
    writable, accepting = _writable(report), len(_accepting(report))
    of = f"{accepting} of {count(len(report.bookies), 'bookie')} accept writes"
    if writable < accepting:
        of += f", on {count(writable, 'machine')}"
    step = "start the bookies that are down, free space on full ones, or add a bookie"
    if writable < report.ack_quorum:
        yield _finding(DOWN, "no_ack_quorum", "the log", f"{of}, but a write needs {report.ack_quorum}", step)
    elif writable < report.ensemble_size:
        yield _finding(
            DEGRADED,
            "small_ensembles",
            "the log",
            f"{of}, but each entry should have {report.ensemble_size} copies",
            step,
        )


def _silent_nodes(report: ClusterReport) -> Iterator[Finding]:
    for node in report.nodes:
        if not node.no_answer:
            continue
        has = f"; it has {count(len(node.holds), 'replica')}" if node.holds else ""
        if _BAD_CERTIFICATE in node.no_answer:
            step = (
                f"replace the certificate of {node.id} by one of the cluster's authority for this address; no restart"
            )
        elif node.holds:
            step = f"start {node.id}, or restart it if its process hangs; see its log"
        else:
            step = f"start {node.id} if it is still needed"
        yield _finding(DEGRADED, "node_silent", f"node {node.id}", f"{node.no_answer}{has}", step)


def _unready_nodes(report: ClusterReport) -> Iterator[Finding]:
    for node in report.nodes:
        reasons = [each for each in node.report.not_ready if each != "draining"]
        if reasons:
            step = f"wait while it starts; otherwise remove this cause, which the log of {node.id} explains"
            yield _finding(DEGRADED, "node_not_ready", f"node {node.id}", "; ".join(reasons), step)
        if node.report.draining:
            yield _finding(
                DEGRADED,
                "node_draining",
                f"node {node.id}",
                "it was drained and serves no clients",
                f"stop it, or make it serve again: `kvstore node undrain {node.id}`",
            )


def _refused_nodes(report: ClusterReport) -> Iterator[Finding]:
    """Find nodes whose connections other nodes refuse. Open connections of such a node keep working until its next
    restart."""
    for node in report.nodes:
        reasons: dict[str, list[str]] = {}
        for each in node.report.refused_by:
            reasons.setdefault(each.reason, []).append(each.by)
        for reason, by in reasons.items():
            yield _finding(
                DEGRADED,
                "node_refused",
                f"node {node.id}",
                f"{', '.join(by)} refuse its connections: {reason}",
                f"compare [tls], `bookie_clients` and the cluster's secret on {node.id} and on those nodes",
            )


def _names_of_users(report: ClusterReport) -> Iterator[Finding]:
    for name in sorted({each for node in report.nodes for each in node.report.users_like_nodes}):
        yield _finding(
            DEGRADED,
            "user_like_node",
            f"user {name}",
            "it has the name of a node or a bookie, so a certificate with this name cannot log a user in",
            f"add a user with another name, then run `kvstore user remove {name}`",
        )


def _metadata(report: ClusterReport) -> Iterator[Finding]:
    away = {each.id: each.report.metadata for each in report.nodes if _is_away(each.report)}
    answering = [each for each in report.nodes if each.HasField("report")]
    if not away:
        return
    sample = next(iter(away.values()))
    kind = {"zookeeper": "ZooKeeper", "etcd": "etcd"}.get(sample.kind, "the metadata store")
    if refusing := sorted(id for id, metadata in away.items() if metadata.state == OLDER):
        yield _finding(
            DOWN,
            "metadata_older",
            kind,
            f"it holds an older copy of the metadata, so no partition can be led; found by {', '.join(refusing)}",
            "restore a later copy (docs/how-to/back-up-and-restore-metadata.md)",
        )
        return
    age_s = min(each.read_age_s for each in away.values())
    known = f"their knowledge is {age_s:.0f} s old"
    if len(away) == len(answering):
        yield _finding(
            DEGRADED,
            "metadata_away",
            kind,
            f"no node reaches it; {known}. Clients are still served, but no leader, ledger or bookie can be replaced",
            f"start {kind} at {sample.address}, or check the network to it{_SET_BACK.get(sample.kind, '')}",
        )
        return
    for id, metadata in away.items():
        yield _finding(
            DEGRADED,
            "metadata_unreachable_from",
            f"node {id}",
            f"it cannot reach {kind} (session {metadata.state}, last read {metadata.read_age_s:.0f} s ago); other "
            "nodes can",
            f"check the network from {id} to {metadata.address}",
        )


def _is_away(report: admin_pb2.NodeReport) -> bool:
    if not report.HasField("metadata"):
        return False
    return report.metadata.state != "connected" or report.metadata.read_age_s > READ_AGE_MAX_S


def _read_only_bookies(report: ClusterReport) -> Iterator[Finding]:
    for bookie in report.bookies:
        if bookie.state == "readonly":
            why = bookie.disk.trouble or f"its disk is full: {_free_of_bookie(bookie.disk)}"
            step = "free or raise what it names" if bookie.disk.trouble else "free space on its disk"
            name, reason = f"bookie {bookie.id}", f"it is read-only because {why}"
            yield _finding(DEGRADED, "bookie_readonly", name, reason, f"{step}, or add a bookie")


def _bookies(report: ClusterReport) -> Iterator[Finding]:
    silent = {node.id for node in report.nodes if node.no_answer}
    unknown = report.repair.marked and not copies_of(report).is_counted
    there = {bookie.node for bookie in report.bookies if bookie.node and bookie.state in ("writable", "readonly")}
    for bookie in report.bookies:
        name = f"bookie {bookie.id}"
        is_needed = bookie.node not in there or bookie.lacking_ledgers or unknown
        if bookie.state == "away" and bookie.node not in silent and is_needed:
            named = (
                f"; copies of {count(bookie.lacking_ledgers, 'ledger')} are missing" if bookie.lacking_ledgers else ""
            )
            yield _finding(
                DEGRADED,
                "bookie_away",
                name,
                f"it is not registered: it is down, cannot reach the metadata store, or has lost its disk{named}",
                f"start it; if it will not come back, run `kvstore bookie decommission {bookie.id}`",
            )
        elif bookie.no_answer and bookie.state != "away" and bookie.node not in silent:
            yield _finding(DEGRADED, "bookie_silent", name, bookie.no_answer, "read its log")
        if bookie.disk.trouble and bookie.state != "readonly":
            reason, step = f"it cannot write: {bookie.disk.trouble}", "check its disk, or add a bookie"
            yield _finding(DEGRADED, "bookie_cannot_write", name, reason, step)
        for directory in bookie.directories:
            if directory.failure:
                yield _finding(
                    DEGRADED,
                    "directory_failed",
                    name,
                    f"its directory {directory.path} has failed: {directory.failure}",
                    "restart it if the disk is healthy; otherwise replace the disk and list the directory in "
                    "`storage.lost_dirs` (docs/how-to/use-several-disks.md)",
                )
        if bookie.limbo_ledgers:
            yield _finding(
                DEGRADED,
                "bookie_limbo",
                name,
                f"it may have lost entries of {count(bookie.limbo_ledgers, 'ledger')}; they are being repaired",
                "follow the repair with `kvstore autorecovery status`",
            )
        if bookie.refused_other_entry:
            yield _finding(
                DEGRADED,
                "bookie_conflict",
                name,
                f"it refused {count(bookie.refused_other_entry, 'add')} because it has another payload for the "
                "entry: a "
                "ledger id was used twice",
                "follow docs/how-to/back-up-and-restore-metadata.md",
            )


def _disks(report: ClusterReport) -> Iterator[Finding]:
    for bookie in report.bookies:
        if bookie.state == "writable" and is_scarce(bookie.disk):
            yield _finding(
                DEGRADED,
                "disk_scarce",
                f"bookie {bookie.id}",
                f"its disk is nearly full: {_free_of_bookie(bookie.disk)}",
                "free space on its disk, or add a bookie, before it becomes read-only",
            )
    for node in report.nodes:
        if node.report.disk.trouble:
            yield _finding(
                DEGRADED,
                "disk_not_writable",
                f"node {node.id}",
                f"its data directory cannot be written to: {node.report.disk.trouble}",
                "check that disk; the node leads no partition while another node can",
            )
        elif is_scarce(node.report.disk):
            yield _finding(
                DEGRADED,
                "disk_scarce",
                f"node {node.id}",
                f"the disk of its data directory is nearly full: {_free_for_replicas(node.report.disk)}",
                "free space on it: replicas that cannot write to their disk hand over their leadership",
            )


def is_scarce(disk: admin_pb2.DiskReport) -> bool:
    """Return True if an operator should free space on the disk. False if its state is unknown."""
    if not disk.total_bytes:
        return False
    return disk.free_bytes < max(SCARCE_RESERVES * disk.reserve_bytes, SCARCE_SHARE * disk.total_bytes)


class Copies(NamedTuple):
    """The state of the ledgers' copies, from all sources in the report."""

    lacking: int
    """Number of under-replicated ledgers."""
    at_risk: int
    """Number of ledgers with an entry that has fewer copies than the ack quorum: one more failure can lose data."""
    is_counted: bool
    """False if `lacking` covers only what leaders and repair marks show, because there is no recent count."""
    is_upper_bound: bool
    """True if `lacking` is the number of repair marks, because neither the count nor the leaders know as many
    under-replicated ledgers. A mark is a request to check, and the mark of an open ledger outlasts its copies."""


def copies_of(report: ClusterReport) -> Copies:
    """Return the state of all copies. Leaders know the under-replicated entries of their own logs, the count covers all
    other ledgers by registrations, and a repair mark exists for each copy that is to be repaired."""
    counted = report.copies
    by_leaders = sum(each.lead.ledgers_lacking_copies for each in report.partitions) + counted.lacking_foreign
    found, marked = max(counted.lacking, by_leaders), report.repair.marked
    at_risk = sum(each.lead.ledgers_at_risk for each in report.partitions) + counted.at_risk_foreign
    is_counted = report.HasField("copies") and counted.age_s <= COUNT_AGE_MAX_S
    return Copies(max(found, marked), max(counted.at_risk, at_risk), is_counted, is_counted and marked > found)


def _copies(report: ClusterReport) -> Iterator[Finding]:
    copies, repair = copies_of(report), report.repair
    away = sorted(bookie.id for bookie in report.bookies if bookie.state == "away")
    if copies.at_risk:
        yield _finding(
            DEGRADED,
            "copies_at_risk",
            "the log",
            f"{count(copies.at_risk, 'ledger')} {_have(copies.at_risk)} fewer copies on running bookies than an ack "
            "quorum: one more failure can lose data",
            f"start {', '.join(away[:NAMED_MAX]) or 'the bookies that are down'} before anything else; `kvstore fsck` "
            "names the ledgers",
        )
    if copies.lacking:
        foreign = report.copies.lacking_foreign
        of_others = f", {foreign:,} of them written by other clients of the bookies" if foreign else ""
        up_to = "up to " if copies.is_upper_bound else ""
        are = "is" if copies.lacking == 1 else "are"
        lacking = f"{up_to}{count(copies.lacking, 'ledger')} {are} under-replicated{of_others}"
        if copies.lacking == report.copies.lacking and report.copies.age_s >= COUNT_AGE_REPORTED_S:
            lacking += f", according to a count {report.copies.age_s / 60:.0f} min ago"
        if report.HasField("repair") and not repair.enabled:
            why = f"{lacking}, and auto-recovery is disabled"
            yield _finding(DEGRADED, "repair_off", "the log", why, "enable it with `kvstore autorecovery enable`")
        elif repair.marked:
            step = "" if repair.repairing else _next_for_marked(report)
            are = "is" if repair.marked == 1 else "are"
            why = f"{lacking}; {repair.marked:,} {are} marked for repair, {repair.repairing} are being repaired now"
            yield _finding(DEGRADED, "repair_backlog", "the log", why, step)
        else:
            why = f"{lacking}; none is marked for repair yet"
            yield _finding(DEGRADED, "copies_lacking", "the log", why, _next_for_unmarked(report))
    if report.bookies and away and not copies.is_counted:
        since = f" for {report.copies.age_s / 3600:.1f} h" if report.HasField("copies") else " yet"
        yield _finding(
            DEGRADED,
            "copies_not_counted",
            "the log",
            f"{_named('bookie', away)} {'is' if len(away) == 1 else 'are'} down, and the ledgers that are "
            f"under-replicated because of it were not counted{since}",
            "wait: the count takes 1 s per 1,000 ledgers; `kvstore fsck` reads every ledger now",
        )


def _has_spare(report: ClusterReport) -> bool:
    """Return True if a bookie outside the ensemble of a ledger with a lost bookie can receive the missing copies."""
    return _writable(report) >= report.ensemble_size


def _next_for_unmarked(report: ClusterReport) -> str:
    if all(bookie.state != "away" and not bookie.no_answer for bookie in report.bookies):
        if full := sorted(each.id for each in report.bookies if each.state == "readonly" and each.lacking_ledgers):
            return f"free space on {_named('bookie', full)}: no copies can be written there until then"
        return "wait some minutes: the nodes recreate the missing copies"
    if not _has_spare(report):
        return "start the bookies that are down; if one is lost, add a bookie, because no other is free for its copies"
    return (
        "start the bookies that are down; otherwise other bookies get their copies after the delay that "
        "`kvstore autorecovery lost-bookie-delay` shows"
    )


def _next_for_marked(report: ClusterReport) -> str:
    where = "`kvstore autorecovery list` names the ledgers, and the logs of the nodes say why a repair failed"
    if not _has_spare(report):
        return (
            "start the bookies that are down, free space on full ones, or add a bookie, because no other is free for "
            f"the copies; {where}"
        )
    return (
        "wait: the nodes try again, at first after 5 s and later up to 5 min apart, and an open ledger keeps its mark "
        f"until its leader closes it, usually within 15 min; {where}"
    )


def _repairs(report: ClusterReport) -> Iterator[Finding]:
    if report.repair.unreadable:
        yield _finding(
            DEGRADED,
            "ledgers_unreadable",
            "the log",
            f"no good copy was found of some entries in {count(report.repair.unreadable, 'ledger')}",
            "run `kvstore fsck`, and bring back the bookies that had the copies",
        )
    if report.copies.unreadable:
        yield _finding(
            DEGRADED,
            "ledger_metadata_unreadable",
            "the log",
            f"the metadata of {count(report.copies.unreadable, 'ledger')} cannot be read, so their copies are unknown",
            "run `kvstore fsck` to see which",
        )
    for partition in report.partitions:
        if partition.lead.ledgers_undecodable:
            yield _finding(
                DEGRADED,
                "ledgers_undecodable",
                f"partition {partition.id}",
                f"the metadata of {count(partition.lead.ledgers_undecodable, 'ledger')} cannot be read",
                "run `kvstore fsck` to see which",
            )


def _replicas(report: ClusterReport) -> Iterator[Finding]:
    silent = {node.id for node in report.nodes if node.no_answer}
    absent: dict[str, list[str]] = {}
    for partition in to_serve(report):
        for replica in partition.replicas:
            subject = f"partition {partition.id} on {replica.server}"
            if replica.failure:
                yield _finding(
                    DEGRADED,
                    "replica_failed",
                    subject,
                    f"the replica has stopped: {replica.failure}",
                    f"read the log of {replica.server}, then run `kvstore fsck`",
                )
            elif replica.is_in_doubt:
                yield _finding(
                    DEGRADED,
                    "replica_in_doubt",
                    subject,
                    "its state differs from another replica's; the replicas are finding out which is damaged",
                    "if this lasts longer than a minute, run `kvstore fsck`, then `kvstore partition trust "
                    f"{partition.id}`",
                )
            elif replica.behind > BEHIND_MAX:
                yield _finding(
                    DEGRADED,
                    "replica_behind",
                    subject,
                    f"the replica is {replica.behind:,} mutations behind its leader",
                    f"wait until it catches up; if it does not, read the log of {replica.server}",
                )
            elif not replica.is_up and replica.server not in silent and not replica.is_joining:
                absent.setdefault(replica.server, []).append(partition.id)
    for server, partitions in absent.items():
        yield _finding(
            DEGRADED,
            "replica_absent",
            f"node {server}",
            f"it does not have its replica of {_named('partition', partitions)} yet",
            f"wait until it has created it; if it does not, read the log of {server}",
        )


def _transactions(report: ClusterReport) -> Iterator[Finding]:
    """Find the partitions with intents or decisions that stay. One home without a leader may hold up transactions of
    all partitions, so all partitions are one finding, with the command for the one that has waited longest."""
    hanging = [each for each in report.partitions if each.lead.oldest_intent_s > HANGING_AFTER_S]
    if hanging:
        oldest = max(hanging, key=lambda each: each.lead.oldest_intent_s)
        intents = count(sum(each.lead.intents for each in hanging), "intent")
        yield _finding(
            DEGRADED,
            "transaction_hangs",
            _named("partition", [each.id for each in hanging]),
            f"transactions hold keys, the oldest for {oldest.lead.oldest_intent_s:.0f} s: {intents}",
            f"`kvstore partition intents {oldest.id}` names their homes: serve homes without a leader again",
        )
    waiting = [each for each in report.partitions if each.lead.oldest_decision_s > HANGING_AFTER_S]
    if waiting:
        oldest = max(waiting, key=lambda each: each.lead.oldest_decision_s)
        yield _finding(
            DEGRADED,
            "decision_not_delivered",
            _named("partition", [each.id for each in waiting]),
            f"a committed transaction has not reached all of its partitions for {oldest.lead.oldest_decision_s:.0f} s",
            f"`kvstore partition intents {oldest.id}` names its keys: serve the partitions that own them",
        )


def _moves(report: ClusterReport) -> Iterator[Finding]:
    stuck = {
        (node.id, replica.partition): replica.moves_stuck
        for node in report.nodes
        for replica in node.report.replicas
        if replica.moves_stuck
    }
    served = {each.id for each in report.partitions if each.served}
    for move in report.ring.moves:
        if move.stuck:
            subject = f"move {move.id}, {move.source} → {move.target}"
            yield _finding(DEGRADED, "move_stuck", subject, move.stuck, _next_for_move(move, served))
    reported = {move.source for move in report.ring.moves if move.stuck}
    for (node, partition), moves in stuck.items():
        if partition in reported:
            continue
        yield _finding(
            DEGRADED,
            "move_stuck",
            f"partition {partition} on {node}",
            f"{count(moves, 'move')} of its keys to other partitions stopped: the copy was wrong three times",
            STUCK_AFTER,
        )
    if report.ring.paused and report.ring.moves:
        yield _finding(
            DEGRADED,
            "moves_paused",
            "the ring",
            f"moves are paused, {count(len(report.ring.moves), 'move')} remaining",
            "resume them with `kvstore ring resume`",
        )


def _next_for_move(move: admin_pb2.MoveView, served: Collection[str]) -> str:
    if missing := sorted({move.source, move.target} - set(served)):
        return f"bring back {_named('partition', missing)}; then the move continues by itself"
    return f"cancel it with `kvstore ring cancel {move.id}`, run `kvstore fsck`, and read its target's log"


def _dates(report: ClusterReport) -> Iterator[Finding]:
    for node in report.nodes:
        if node.report.date_doubt:
            yield _finding(
                DEGRADED,
                "date_doubtful",
                f"node {node.id}",
                f"it is not sure of cluster time: {node.report.date_doubt}",
                f"check that {node.id} can reach the other servers and that its clock is right (NTP)",
            )
    behind_s = max((node.report.date_behind_s for node in report.nodes), key=abs, default=0.0)
    if abs(behind_s) > DATE_WARN_S:
        side = "behind" if behind_s > 0 else "ahead of"
        yield _finding(
            DEGRADED,
            "date_behind",
            "cluster time",
            f"it is {abs(behind_s):.1f} s {side} a majority of wall clocks and moves by {3600 * RATE:g} s an hour",
            "correct the wall clocks; if cluster time is wrong, see docs/how-to/correct-cluster-time.md",
        )


def _certificates(report: ClusterReport) -> Iterator[Finding]:
    """Find certificates that expire soon and files that cannot be used. A node with an expired certificate reports
    itself as not ready."""
    for node in report.nodes:
        tls = node.report.tls
        if not node.report.HasField("tls"):
            continue
        days = int(tls.left_s // 86_400)
        if tls.failing:
            why = f"its new certificate files cannot be used; the certificate in use is valid for {days} days"
            yield _finding(DEGRADED, "certificate_unusable", f"node {node.id}", why, f"read the log of {node.id}")
        elif 0 < tls.left_s < CERTIFICATE_WARN_S:
            why = f"its certificate expires in {count(days, 'day')}"
            step = "replace the files named in its [tls]; no restart is needed"
            yield _finding(DEGRADED, "certificate_expires", f"node {node.id}", why, step)


def _snapshots(report: ClusterReport) -> Iterator[Finding]:
    limit_s = report.snapshot_age_max_s
    if not limit_s or (report.HasField("snapshot") and report.snapshot.age_s <= limit_s):
        return
    if report.HasField("snapshot"):
        why = f"the last one is {span(report.snapshot.age_s)} old; expected at most {span(limit_s)}"
    else:
        why = f"there is none; expected one of at most {span(limit_s)}"
    yield _finding(
        DEGRADED,
        "snapshot_old",
        "snapshots",
        why,
        "read the last line of the nightly job; take a snapshot with `kvstore snapshot create --to DIRECTORY`",
    )


def _finding(grade: admin_pb2.Grade.ValueType, code: str, subject: str, reason: str, next_step: str) -> Finding:
    return Finding(grade=grade, code=code, subject=subject, reason=_one_line(reason), next_step=next_step)


def _one_line(text: str) -> str:
    """Return the text on one line without characters that affect a terminal, because it may contain errors from
    elsewhere."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def _named(noun: str, ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return f"{noun}{'s' if len(ids) != 1 else ''} {', '.join(ids[:NAMED_MAX])}{more}"


def _free_for_replicas(disk: admin_pb2.DiskReport) -> str:
    free = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} are free"
    return f"{free}, and replicas stop syncing below {size(disk.reserve_bytes)}" if disk.reserve_bytes else free


def _free_of_bookie(disk: admin_pb2.DiskReport) -> str:
    """A bookie counts free space and its own data as its total, because the disk may hold other data too."""
    if not disk.total_bytes:
        return "its free space is unknown"
    own = size(disk.total_bytes - disk.free_bytes)
    free = f"{size(disk.free_bytes)} are free and {own} are used by the bookie"
    return f"{free}; {size(disk.reserve_bytes)} are kept in reserve" if disk.reserve_bytes else free
