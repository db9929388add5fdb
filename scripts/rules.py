"""The reference of the rules about operations, docs/rules.md, written from the table that a test asks a cluster for.

python scripts/rules.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.rules.table import ENDPOINTS, RULES, Ask

HERE = Path(__file__).parents[1] / "docs" / "rules.md"
NAMES = {
    "redis": "Redis",
    "grpc": "gRPC",
    "http": "HTTP",
    "python": "Python, asyncio and blocking",
    "spark": "Spark",
    "command": "command line",
}
HEAD = """# Rules about operations

What each endpoint answers to a request that breaks a rule, for people who write clients or read errors.
`make reference` writes this page from tests/cluster/rules/table.py: do not edit it here. A test sends every request to
a real cluster.

A refused request changes nothing. `<4,097 bytes>` stands for so many bytes. An endpoint is missing below a rule if its
users cannot write such a request. [clients.md](clients.md#outcomes) describes the errors.
"""


def main(words: list[str]) -> None:
    """Write the reference."""
    (Path(words[0]) if words else HERE).write_text(reference(), encoding="utf-8")


def reference() -> str:
    """The page."""
    lines = ["| rule | " + " | ".join(NAMES[each] for each in ENDPOINTS) + " |", "|---" * (len(ENDPOINTS) + 1) + "|"]
    details = []
    for rule in RULES:
        asked: list[tuple[str, Ask]] = [(each, ask) for each in ENDPOINTS if (ask := getattr(rule, each)) is not None]
        answers = {each: ask.answer for each, ask in asked}
        lines.append(f"| {rule.rule} | " + " | ".join(_code(answers.get(each, "")) for each in ENDPOINTS) + " |")
        details.append(f"### {rule.rule}\n")
        details.append("| endpoint | request |\n|---|---|")
        details += [f"| {NAMES[each]} | {_code(ask.request)} |" for each, ask in asked]
        details.append("")
    return "\n".join([HEAD, "## Answers\n", *lines, "\n## Requests\n", *details])


def _code(text: str) -> str:
    """Text as code in a cell."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else "–"


if __name__ == "__main__":
    main(sys.argv[1:])
