"""Decides whether a run's own machine spoiled its figures, so that they say nothing about the store. Decides only.

*Late* is the time from when an operation was due and its user free until its request was sent. The load generator
causes this delay, not the store. *Queued* is the share of time in which the sending thread was runnable but waited for
a processor, as Linux counts it: a process may use a quarter of a processor and still starve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXIT = 3
"""Exit code of a spoiled run. A run that missed its goals exits with 1."""
LATE_MS_MAX, LATE_SHARE_MAX = 5.0, 0.20
"""Limits for the p99 of lateness, in milliseconds and as a share of p99 latency. A run is late if it exceeds both."""
QUEUED_MAX = 0.25
SHAPES = ("steady", "step", "spike", "soak")
"""Shapes that can be spoiled. A knee overloads everything, and chaos starts processes itself: both only get a note."""


def spoils(total: Mapping[str, Any], queued: float | None) -> list[str]:
    """Return a sentence for each reason why the run is spoiled."""
    found = []
    late_ms, p99_ms = total["late_p99_ms"], total["p99_ms"]
    bound_ms = max(LATE_MS_MAX, LATE_SHARE_MAX * p99_ms)
    if late_ms > bound_ms:
        found.append(
            f"the load generator was late: 1 % of the requests were sent {late_ms:g} ms or more after they were due "
            f"and their user was free; the limit is {bound_ms:g} ms at a p99 latency of {p99_ms:g} ms"
        )
    if queued is not None and queued > QUEUED_MAX:
        found.append(
            f"the load generator starved: it was runnable but waited for a processor {queued:.0%} of the time; "
            f"the limit is {QUEUED_MAX:.0%}"
        )
    return found
