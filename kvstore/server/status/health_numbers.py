"""Returns the health of a cluster as numbers for metrics and alerts, and as lines for probes. Decides only;
kvstore.server.status.health makes the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvstore.proto.admin_pb2 import DOWN, ClusterReport
from kvstore.server.status.health import copies_of


def counts_of(report: ClusterReport) -> Mapping[str, int]:
    """Return the number of findings by code."""
    return Counter(finding.code for finding in report.findings)


def numbers_of(report: ClusterReport) -> Mapping[str, float]:
    """Return the grade (0 healthy, 1 degraded, 2 something is not served) and the state of all copies."""
    copies = copies_of(report)
    return {
        "grade": report.health.grade,
        "ledgers_lacking_copies": copies.lacking,
        "ledgers_at_risk": copies.at_risk,
        "copies_counted": copies.is_counted,
    }


def unserved_of(report: ClusterReport) -> Sequence[str]:
    """Return what is not served, one line per finding of grade DOWN; empty if everything is served. A line contains
    only a subject and a code, because unauthenticated clients may read it."""
    return [f"{each.subject}: {each.code.replace('_', ' ')}" for each in report.findings if each.grade == DOWN]
