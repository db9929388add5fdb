"""The names of metrics about the cluster's health, as metric_names.py has the others."""

from __future__ import annotations

HEALTH = {
    "cluster_grade": (
        "cluster_grade",
        "Health of the cluster, as this node finds it every 15 s: 0 healthy, 1 degraded, 2 something is not served.",
    ),
    "cluster_ledgers_lacking_copies": (
        "cluster_ledgers_lacking_copies",
        "Ledgers of any writer that lack copies, as `kvstore status` shows them.",
    ),
    "cluster_ledgers_at_risk": (
        "cluster_ledgers_at_risk",
        "Ledgers of any writer that have fewer copies than an ack quorum on bookies that are up.",
    ),
    "cluster_copies_counted": (
        "cluster_copies_counted",
        "1 if a server has counted the copies of all ledgers in the last 3 h; 0 if only leaders and marks tell.",
    ),
    "cluster_survey_age_s": ("cluster_survey_age_seconds", "Age of what the metrics of the cluster's health say."),
    "finding_count": (
        "cluster_findings",
        "Number of findings of `kvstore status`, by their code; a code without a finding is absent.",
    ),
}
