"""Numbers and verdicts of load tests as people read them. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10
from typing import Any


def two_digits(value: float) -> str:
    """Return a measured number with two significant digits and thousands separators. More digits would claim a
    precision that no run has."""
    if value == 0:
        return "0"
    decimals = 1 - floor(log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, 1 - floor(log10(abs(rounded))))}f}"


def progress(at_s: float, seconds: float, warmup: float, seen: Mapping[str, Any]) -> str:
    """Return the line about the last seconds of a run that is in progress."""
    when = f"{at_s:.0f} of {seconds:g} s{' (warm-up)' if at_s < warmup else ''}"
    times = "no operation that was due has ended"
    if seen["p99_ms"]:
        times = f"p50 {two_digits(seen['p50_ms'])} ms, p99 {two_digits(seen['p99_ms'])} ms"
    return (
        f"loadtest: {when}: {two_digits(seen['done_per_s'])}/s of {two_digits(seen['due_per_s'])}/s due, {times}, "
        f"{seen['errors']} errors"
    )


def last_line(made: Mapping[str, Any], report: object) -> str:
    """Return the verdict on a run in one line."""
    total, verdict = made["total"], made["verdict"]
    if verdict["reasons"]:
        reasons = verdict["reasons"]
        more = f" (and {len(reasons) - 1} more reasons)" if reasons[1:] else ""
        found = f"FAILED: {reasons[0]}{more}"
    elif verdict["spoiled"]:
        found = f"SPOILED, says nothing about the store: {verdict['spoiled'][0]}"
    else:
        found = (
            f"PASSED: {two_digits(total['per_s'])}/s, p99 {two_digits(total['p99_ms'])} ms, {total['errors']} errors"
        )
    return f"loadtest: {found}; report in {report}"
