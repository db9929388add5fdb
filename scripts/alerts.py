"""The reference of the alerts, docs/reference/alerts.md, from the rules for Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1] / "docs"
RULES = DOCS / "monitoring" / "rules.yml"
HEAD = """# Alerts

This page is for operators: it lists every alerting rule, what the alert means, and what to do. `make reference` writes
this page from docs/monitoring/rules.yml: do not edit it here.

[Monitor a cluster](../how-to/monitor.md) describes how to install the rules. The severity `page` wakes somebody up;
`ticket` waits for the morning. To start from a symptom instead of an alert, see
[when something dies](../how-to/when-something-dies.md).
"""
TITLES = {
    "kvstore-health": "Health of the cluster",
    "kvstore-service": "Service to clients",
    "kvstore-replicas": "Replicas and partitions",
    "kvstore-logs": "Logs and repair",
    "kvstore-bookies": "Bookies and disks",
    "kvstore-around": "Snapshots, links, namespaces and certificates",
}
LABELS = {"instance": "the node", "partition": "the partition", "namespace": "the namespace"}


def reference() -> str:
    """Return the page."""
    parts = [HEAD]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        parts.append(f"## {TITLES[group['name']]}\n")
        parts += [_section(rule) for rule in group["rules"]]
    return "\n".join(parts)


def _section(rule: dict[str, Any]) -> str:
    notes = rule["annotations"]
    guide = notes["runbook"].removeprefix("docs/")
    title = (DOCS / guide.partition("#")[0]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    condition = f"`{' '.join(rule['expr'].split())}`" + (f" for {rule['for']}" if "for" in rule else "")
    return (
        f"### {rule['alert']}\n\n"
        f"{_without_templates(notes['summary'])}. Severity: {rule['labels']['severity']}.\n\n"
        f"- **Do**: {notes['do']}\n"
        f"- **Guide**: [{title}](../{guide})\n"
        f"- **Fires when**: {condition}\n"
    )


def _without_templates(summary: str) -> str:
    """Return a summary with words in place of Prometheus's templates."""
    summary = re.sub(
        r"(?:\b[Pp]artition |\b[Nn]amespace )?\{\{ \$labels\.(\w+) \}\}", lambda found: LABELS[found[1]], summary
    )
    summary = re.sub(r"\{\{ \$value(?: \| \w+)? \}\}", "N", summary)
    return summary[0].upper() + summary[1:]
