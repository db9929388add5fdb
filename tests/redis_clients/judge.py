"""The judge of the test results of Redis clients.

A test may fail because of a command that the store does not support (`ABSENT`), or for a reason that its client's
module gives with the test's name. Any other failure is a fault of ours, and so is a reason that is no longer needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

PLACE = Path(__file__).parent.parent.parent / ".interop"
"""Folder of the fetched sources; git ignores it."""
TIMEOUT_S = 1800

ABSENT = {
    "lists": "RPUSH LPUSH LPUSHX RPUSHX BRPOP",
    "sets": "SADD",
    "sorted sets": "ZADD ZMSCORE",
    "hashes": "HSET HMSET HSETNX HINCRBY HINCRBYFLOAT HRANDFIELD",
    "streams": "XADD XGROUP XACK XDEL XLEN XTRIM",
    "places": "GEOADD GEOPOS",
    "hyperloglogs": "PFADD",
    "bitmaps": "SETBIT GETBIT BITCOUNT BITPOS BITOP BITFIELD",
    "channels": "SUBSCRIBE",
    "scripts, but those of locks": "EVAL EVAL_RO EVALSHA_RO",
    "values written elsewhere, and their likeness": "DUMP LCS MIGRATE",
    "users by Redis' commands": "ACL",
    "other clients' connections": "CLIENT",
    "more than one database": "MOVE SWAPDB",
    "the server's own matters": (
        "BGSAVE COMMAND CONFIG DEBUG LASTSAVE LATENCY LOLWUT MEMORY MODULE MONITOR REPLICAOF ROLE SAVE SLAVEOF WAITAOF"
    ),
}
"""Commands that the store does not support, by topic."""

_KINDS = {name: kind for kind, names in ABSENT.items() for name in names.split()}
_REFUSALS = (
    re.compile(r"unknown command '(\w+)'"),
    re.compile(r"unknown subcommand.*? (ACL|CLIENT|COMMAND|LATENCY|MEMORY|MODULE|OBJECT|SLOWLOG) supports"),
    re.compile(r"(CONFIG) supports only GET here"),
    re.compile(r"Command # \d+ \((\w+) .* caused error: .*(?:unknown command|unknown subcommand)"),
)
_SCRIPT = re.compile(r"only the scripts of some libraries are supported|No matching script")


class Outcome(NamedTuple):
    """One test. `failure` is empty if it passed, None if the client's own suite skipped it."""

    name: str
    failure: str | None


def outcomes(report: Path) -> Iterator[Outcome]:
    """Yield the outcomes in a report of JUnit's format."""
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [found for found in (case.find("failure"), case.find("error")) if found is not None]
        name = f"{case.get('classname', '')}::{case.get('name')}"
        if bad:
            yield Outcome(name, f"{bad[0].get('message')}\n{bad[0].text}")
        else:
            yield Outcome(name, None if case.find("skipped") is not None else "")


def judge(client: str, report: Path, excused: Mapping[str, str]) -> int:
    """Print failures by their reason, and the faults. Returns the exit code. `excused`: reasons by a part of a
    test's name."""

    def reason(outcome: Outcome) -> str:
        """Return the reason why a test may fail; empty if it may not."""
        failure = outcome.failure or ""
        name = max((each for each in excused if each in outcome.name), key=len, default="")
        if name:
            return f"{name}: {excused[name]}"
        if _SCRIPT.search(failure):
            return _KINDS["EVAL"]
        found = next((match for each in _REFUSALS if (match := each.search(failure))), None)
        return _KINDS.get(found[1].upper(), "") if found else ""

    found = list(outcomes(report))
    failed = [each for each in found if each.failure]
    reasons = Counter(map(reason, failed))
    ours = [each for each in failed if not reason(each)]
    needless = [name for name in excused if not any(why.startswith(f"{name}: ") for why in reasons)]
    for why, count in sorted(reasons.items(), key=lambda item: (":" in item[0], -item[1])):
        if why:
            print(f"{count:5} not here: {why}")
    for each in ours:
        print(f"FAILED {each.name}\n{each.failure}")
    for name in needless:
        print(f"NEEDLESS reason for {name}: it passes")
    passed = sum(each.failure == "" for each in found)
    skipped = sum(each.failure is None for each in found)
    print(f"{client}: {passed} passed, {skipped} not chosen or skipped by it, {len(failed) - len(ours)} not here")
    return 1 if ours or needless or not passed else 0
