"""Reference of the rules about operations (docs/reference/rules.md), from the table that a test checks."""

from __future__ import annotations

from scripts.pages import table
from tests.cluster.rules.table import ENDPOINTS, RULES, Ask

NAMES = {
    "redis": "Redis",
    "grpc": "gRPC",
    "http": "HTTP",
    "python": "Python, asyncio and blocking",
    "spark": "Spark",
    "command": "command line",
}
HEAD = """# Rules about operations

The rules about operations, for people who write clients or read errors: how each endpoint answers a request that
breaks a rule.
`make reference` writes this page from tests/cluster/rules/table.py: do not edit it here. A test sends every request to
a real cluster.

A refused request changes nothing. `<4,097 bytes>` stands for so many bytes. An endpoint is missing below a rule if its
users cannot write such a request. [Handle errors](../how-to/handle-errors.md) describes the errors.
"""


def reference() -> str:
    """The page."""
    answers, requests = [], []
    for rule in RULES:
        asked: list[tuple[str, Ask]] = [(each, ask) for each in ENDPOINTS if (ask := getattr(rule, each)) is not None]
        answered = {each: ask.answer for each, ask in asked}
        answers.append((rule.rule, *(_code(answered.get(each, "")) for each in ENDPOINTS)))
        rows = [(NAMES[each], _code(ask.request)) for each, ask in asked]
        requests.append(f"### {rule.rule}\n\n{table(('endpoint', 'request'), rows)}")
    shown = table(("rule", *(NAMES[each] for each in ENDPOINTS)), answers)
    return "\n".join([HEAD, f"## Answers\n\n{shown}", "## Requests\n", *requests])


def _code(text: str) -> str:
    """Text as code in a cell."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else "–"
