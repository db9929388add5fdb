"""Search the scopes of transactions, and print what was found: `python -m tests.models.txn_search [WORDS]` for the
scopes and rules whose names contain one of the words."""

from __future__ import annotations

import sys
import time
from dataclasses import fields, replace

from tests.models.search import search
from tests.models.txn import Model
from tests.models.txn_rules import Rules
from tests.models.txn_scopes import LARGE, LARGEST, NEEDED_FOR, SMALL

STATES_MAX = 20_000_000
SCOPES = SMALL | LARGE | LARGEST


def searched(name: str, rules: Rules, label: str) -> None:
    began, wanted = time.monotonic(), SCOPES[name]
    model = Model(wanted.txns, rules, **wanted.bounds)
    found = search(model.first, model.steps, states_max=STATES_MAX, above=model.above)
    sys.stdout.write(
        f"{label:70} {found.states:>9,} states {time.monotonic() - began:6.1f} s {'broken' if found.way else 'kept'}\n"
    )
    for number, step in enumerate(found.way, 1):
        sys.stdout.write(f"    {number:2}. {step}\n")
    sys.stdout.flush()


def main(words: list[str]) -> None:
    for name in SCOPES:
        if not words or any(word in name for word in words):
            searched(name, Rules(), name)
    for rule in (field.name for field in fields(Rules)):
        if not words or any(word in rule for word in words):
            name = NEEDED_FOR.get(rule, "one attempt each")
            searched(name, replace(Rules(), **{rule: False}), f"without {rule}: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
