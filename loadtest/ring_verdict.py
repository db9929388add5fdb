"""How long operations waited in all moves of a drill, and what untouched ranges kept of their throughput, against what
is wanted. Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from loadtest.ring_spans import Longest, quantile

WRITE_WAIT_MAX_S, READ_WAIT_MAX_S = 0.2, 0.05
"""The longest of any key in a move, p99.9 over the moves."""
KEPT_LEAST = 0.8
"""Of the throughput of ranges that do not move, while others do."""


@dataclass
class Verdict:
    """Of all changes of a drill without kills."""

    moving: list[Longest] = field(default_factory=list)
    """Of each move."""
    untouched: list[Longest] = field(default_factory=list)
    """Of keys that do not move, in the times of the same moves: what the machine adds."""
    kept: list[float] = field(default_factory=list)
    """Of each change."""
    freezes: list[int] = field(default_factory=list)
    """Of each move: more than one, if the first took too long."""

    def rows(self) -> list[dict[str, Any]]:
        """One for each figure that is wanted."""
        rows = [self._waits("write", WRITE_WAIT_MAX_S), self._waits("read", READ_WAIT_MAX_S)]
        least = min(self.kept, default=0.0)
        throughput = {"what": "throughput of untouched ranges, of that before; the least of the changes"}
        return [*rows, throughput | {"figure": f"{least:.2f}", **_judged(least >= KEPT_LEAST, f">= {KEPT_LEAST:g}")}]

    @property
    def is_met(self) -> bool:
        return all(row["verdict"] == "PASS" for row in self.rows())

    def text(self) -> str:
        """For people."""
        again = sum(count - 1 for count in self.freezes)
        lines = [
            f"{each['verdict']}  {each['what']}: {each['figure']} (wanted {each['wanted']})" for each in self.rows()
        ]
        return "\n".join(
            [*lines, f"      {len(self.freezes)} moves; {again} freezes ended before the release and were tried again"]
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
