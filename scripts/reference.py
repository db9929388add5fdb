"""Write the pages of docs/ that are generated from the code. `make reference` runs it.

python scripts/reference.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from scripts import alerts, commands, configuration, errors, metrics, redis_commands, rules

PAGES: dict[str, Callable[[], str]] = {
    "reference/alerts.md": alerts.reference,
    "reference/commands.md": commands.reference,
    "reference/configuration.md": configuration.reference,
    "reference/errors.md": errors.reference,
    "reference/metrics.md": metrics.reference,
    "reference/redis.md": redis_commands.reference,
    "reference/rules.md": rules.reference,
}
"""tests/scripts/test_reference.py compares each page with the file in docs/."""


def main(words: list[str]) -> None:
    """Write all pages."""
    folder = Path(words[0]) if words else Path(__file__).parents[1] / "docs"
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
