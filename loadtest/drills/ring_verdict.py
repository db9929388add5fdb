"""Judges how long operations waited in all moves of a drill, and how much of their throughput untouched ranges kept.
Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadtest.drills.ring_spans import Longest, quantile

WRITE_WAIT_MAX_S, READ_WAIT_MAX_S = 0.2, 0.05
"""Maximum of the longest wait of any key in a move, as p99.9 over the moves."""
KEPT_LEAST = 0.8
"""Minimum share of their throughput that ranges must keep if they do not move while others do."""


class Load(NamedTuple):
    """The figures of one change while ranges move."""

    kept: float
    """Throughput of untouched ranges, as a share of that before the change."""
    per_s: float
    """Operations per second."""
    busy: float
    """Share of the time of all processors that was used by any process."""


@dataclass
class Verdict:
    """The verdict on all changes of a drill without kills."""

    moving: list[Longest] = field(default_factory=list)
    """The longest waits in each move."""
    untouched: list[Longest] = field(default_factory=list)
    """The longest waits of keys that do not move, during the same moves: they show the share of the machine."""
    freezes: list[int] = field(default_factory=list)
    """Number of freezes of each move. There are several if the first one took too long."""
    changes: list[Load] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each required figure."""
        rows = [self._waits("write", WRITE_WAIT_MAX_S), self._waits("read", READ_WAIT_MAX_S)]
        least = min((each.kept for each in self.changes), default=0.0)
        throughput = {"what": "throughput of untouched ranges, of that before; the least of the changes"}
        return [*rows, throughput | {"figure": f"{least:.2f}", **_judged(least >= KEPT_LEAST, f">= {KEPT_LEAST:g}")}]

    @property
    def is_met(self) -> bool:
        return all(row["verdict"] == "PASS" for row in self.rows())

    def text(self) -> str:
        """Return the verdict as text."""
        again = sum(count - 1 for count in self.freezes)
        rates = ", ".join(f"{each.per_s:.0f}/s with {100 * each.busy:.0f} %" for each in self.changes)
        return "\n".join(
            [
                *(f"{row['verdict']}  {row['what']}: {row['figure']} (wanted {row['wanted']})" for row in self.rows()),
                "      callers are closed loops with rests: a stall is one wait of each, and takes from the throughput",
                f"      {len(self.freezes)} moves; {again} freezes ended before the release and were tried again",
                f"      operations done, and processors busy, change by change: {rates}",
            ]
        )

    def _waits(self, kind: str, most_s: float) -> dict[str, Any]:
        waits, others = _of(self.moving, kind), _of(self.untouched, kind)
        figure = f"{_summary(waits)}, in {len(waits)} moves; of untouched keys at the same times: {_summary(others)}"
        is_met = bool(waits) and quantile(waits, 0.999) <= most_s
        what = f"longest {kind} wait of any key of a range, over the moves"
        return {"what": what, "figure": figure, **_judged(is_met, f"p99.9 <= {1_000 * most_s:.0f} ms")}


def _of(longest: Iterable[Longest], kind: str) -> list[float]:
    return [wait for each in longest if (wait := getattr(each, kind)) is not None]


def _summary(waits: list[float]) -> str:
    parts = (("p99.9", 0.999), ("median", 0.5), ("max", 1.0))
    return ", ".join(f"{name} {1_000 * quantile(waits, part):.0f} ms" for name, part in parts)


def _judged(is_met: bool, wanted: str) -> dict[str, str]:
    return {"wanted": wanted, "verdict": "PASS" if is_met else "FAIL"}
