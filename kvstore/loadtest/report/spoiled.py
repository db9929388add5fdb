"""Whether a run's own machine has spoiled its figures: then it says nothing of the store, neither good nor bad. Decides
only.

*Late* is how long after the moment in which a user was free and had something due its request went out: the load
generator's own waiting, which no store has caused. *Queued* is the share of the time in which the thread that sends was
ready to run and waited for a processor, as Linux counts it: a process may use a quarter of a processor and starve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXIT = 3
"""Of a run that says nothing of the store; 1 is that of one that says it is not as it must be."""
LATE_MS_MAX, LATE_SHARE_MAX = 5.0, 0.20
"""Of the 99th percentile: more than both, in milliseconds and of the latency that is told, is too late."""
QUEUED_MAX = 0.25
SHAPES = ("steady", "step", "spike", "soak")
"""Judged. A knee overloads everything, and chaos starts processes beside the load: there it is a note."""


def spoils(total: Mapping[str, Any], queued: float | None) -> list[str]:
    """Return the reasons that spoiled the run, as sentences."""
    found = []
    late_ms, p99_ms = total["late_p99_ms"], total["p99_ms"]
    bound_ms = max(LATE_MS_MAX, LATE_SHARE_MAX * p99_ms)
    if late_ms > bound_ms:
        found.append(
            f"the load generator was late: one request in a hundred went out {late_ms:g} ms or more after it was due "
            f"and its user free; the most is {bound_ms:g} ms, where p99 is {p99_ms:g} ms"
        )
    if queued is not None and queued > QUEUED_MAX:
        found.append(
            f"the load generator starved: it was ready to run and waited for a processor {queued:.0%} of the time; "
            f"the most is {QUEUED_MAX:.0%}"
        )
    return found
