"""Turns measurements into a document: totals, operations, timeline, effects of events, verdict. Decides only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.loadtest.report.goals import Goals, slow
from kvstore.loadtest.report.recorder import FINE, Recorder, Tally, TimelineSecond, histogram, percentiles
from kvstore.loadtest.report.spoiled import spoils

FORMAT = 1
PERCENTILES = (50.0, 95.0, 99.0, 99.9)
DISTURBED_S = 30
"""Seconds after an event in which its effect is measured."""
SUSTAINED = 0.95
"""A second with a smaller share of its due operations done counts as disturbed."""
SHORT_S = 3
P99_OF_DUE_MIN = 0.99
"""If fewer of the due operations were done, a p99 goal is missed: the missing ones are in no percentile."""


@dataclass(slots=True)
class Event:
    """Something that happened to the cluster. Times are wall clock."""

    at: float
    what: str
    outcome: str = ""
    ended: float | None = None
    """None for an instant event, or one still in progress."""
    is_failed: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """The conditions of a run: times, options, machine, goals and events."""

    began: float
    ended: float
    counted_from: float
    options: Mapping[str, Any]
    machine: Mapping[str, Any]
    goals: Goals
    events: Sequence[Event] = ()
    knee: Mapping[str, Any] | None = None
    users: Mapping[int, int] = field(default_factory=dict)
    """Number of running users by second."""
    faults: Sequence[str] = ()
    """Other failures of the run: users that broke, commands that failed."""
    notes: Sequence[str] = ()
    """Remarks about the figures that do not fail the run."""
    is_spoilable: bool = True
    """If False, a spoiled run only gets a note."""


def document(recorder: Recorder, run: Run) -> dict[str, Any]:
    """Return everything that the report shows, ready for JSON."""
    total = _total(recorder, run)
    operations = [_operation(*key, tally, _counted_s(run)) for key, tally in sorted(recorder.tallies.items())]
    return {
        "format": FORMAT,
        "began": run.began,
        "seconds": round(run.ended - run.began, 1),
        "counted_from_s": round(run.counted_from - run.began, 1),
        "options": dict(run.options),
        "machine": dict(run.machine),
        "total": total,
        "operations": operations,
        "errors": [
            {"endpoint": endpoint, "operation": operation, "error": error, "count": count}
            for (endpoint, operation, error), count in sorted(recorder.error_counts.items())
        ],
        "wrong": list(recorder.wrong),
        "timeline": _timeline(recorder, run),
        "events": [_event(recorder, run, event) for event in sorted(run.events, key=lambda event: event.at)],
        "knee": run.knee,
        "verdict": verdict(total, operations, spoils(total, recorder.queued), run),
    }


def verdict(
    total: Mapping[str, Any], operations: Sequence[Mapping[str, Any]], spoiled_by: Sequence[str], run: Run
) -> dict[str, Any]:
    """Return whether the run met its goals, and the reasons if not. Figures of a spoiled run are not judged: missed
    goals become notes."""
    goals = run.goals
    reasons = [f"{event.what}: {event.outcome}" for event in run.events if event.is_failed]
    reasons += run.faults
    if total["wrong"]:
        reasons.append(f"{total['wrong']} reads returned wrong values")
    if not total["done"]:
        reasons.append("no operation was done")
    ended = total["done"] + total["errors"]
    if ended and total["errors"] > goals.errors_max * ended:
        share = total["errors"] / ended
        reasons.append(f"{share:.2%} of the operations failed; the limit is {goals.errors_max:.2%}")
    missed = slow(operations, goals)
    if goals.p99_ms and total["achieved"] < P99_OF_DUE_MIN:
        missed.append(
            f"the p99 goals are not met: {total['achieved']:.2%} of the due operations were done, and the missing ones "
            f"are in no percentile; the minimum is {P99_OF_DUE_MIN:.0%}"
        )
    if total["achieved"] < goals.achieved_min:
        missed.append(
            f"{total['achieved']:.2%} of the due operations were done; the minimum is {goals.achieved_min:.2%}"
        )
    found: dict[str, Any] = {"is_met": True, "reasons": reasons, "spoiled": [], "notes": list(run.notes)}
    found["spoiled" if run.is_spoilable else "notes"] += spoiled_by
    add_figures(found, missed)
    return found | {"is_met": not found["reasons"] and not found["spoiled"]}


def add_figures(verdict: dict[str, Any], missed: Sequence[str]) -> None:
    """Add the goals that the figures miss: as reasons, or as notes if the run was spoiled."""
    if verdict["spoiled"]:
        verdict["notes"] += [f"not judged because the run was spoiled: {each}" for each in missed]
    else:
        verdict["reasons"] += missed


def _counted_s(run: Run) -> float:
    return max(run.ended - run.counted_from, 0.001)


def _total(recorder: Recorder, run: Run) -> dict[str, Any]:
    first, last = whole_seconds(run.counted_from, run.ended)
    window = recorder.between(first, last)
    whole = recorder.between(min(recorder.cells, default=0), max(recorder.cells, default=0) + 1)
    responses = _sum(tally.responses for tally in recorder.tallies.values())
    services = _sum(tally.services for tally in recorder.tallies.values())
    span = max(last - first, 1)
    return {
        "done": whole.done,
        "due": whole.due,
        "errors": whole.errors,
        "wrong": recorder.wrong_count,
        "per_s": round(window.done / span, 1),
        "due_per_s": round(window.due / span, 1),
        "achieved": round(window.responses.get_total_count() / window.due, 4) if window.due else 0.0,
        **_percentiles(responses),
        **{f"service_{name}": value for name, value in _percentiles(services).items()},
        **{f"late_{name}": value for name, value in _percentiles(recorder.late).items()},
    }


def whole_seconds(since: float, until: float) -> tuple[int, int]:
    """Return the seconds [first, last) that lie entirely within the interval."""
    first = int(since) if since == int(since) else int(since) + 1
    return first, max(int(until), first)


def _operation(endpoint: str, operation: str, tally: Tally, counted_s: float) -> dict[str, Any]:
    count = tally.responses.get_total_count()
    return {
        "endpoint": endpoint,
        "operation": operation,
        "count": count,
        "per_s": round(count / counted_s, 1),
        "errors": tally.errors,
        "bytes_per_s": round(tally.bytes / counted_s),
        **_percentiles(tally.responses),
        **{f"service_{name}": value for name, value in _percentiles(tally.services).items()},
    }


def _percentiles(histogram: Any) -> dict[str, float]:
    """Return percentiles in milliseconds, rounded to three decimals."""
    found = percentiles(histogram, PERCENTILES) | {"max_ms": histogram.get_max_value() / 1000}
    return {name: round(value, 3) for name, value in found.items()}


def _sum(histograms: Any) -> Any:
    whole = histogram(FINE)
    for each in histograms:
        whole.add(each)
    return whole


def _timeline(recorder: Recorder, run: Run) -> list[dict[str, Any]]:
    points = []
    for second in range(int(run.began), int(run.ended) + 1):
        cell = recorder.cells.get(second) or TimelineSecond()
        histogram = cell.responses
        points.append(
            {
                "at_s": round(second - run.began, 1),
                "users": run.users.get(second),
                "due": cell.due,
                "done": cell.done,
                "errors": cell.errors,
                "p50_ms": histogram.get_value_at_percentile(50) / 1000,
                "p99_ms": histogram.get_value_at_percentile(99) / 1000,
                "max_ms": histogram.get_max_value() / 1000,
            }
        )
    return points


def _event(recorder: Recorder, run: Run, event: Event) -> dict[str, Any]:
    later = [each.at for each in run.events if each.at > event.at + SHORT_S]
    until = min([event.at + DISTURBED_S, run.ended, *later])
    # After the run there are no callers: nobody sees an event then, such as the removal of an added partition.
    last = max(int(until), int(event.at) + 1) if event.at < run.ended else int(event.at)
    cells = [recorder.cells.get(second) or TimelineSecond() for second in range(int(event.at), last)]
    disturbed = sum(cell.done < SUSTAINED * cell.due for cell in cells)
    return {
        "at_s": round(event.at - run.began, 1),
        "ended_s": None if event.ended is None else round(event.ended - run.began, 1),
        "what": event.what,
        "outcome": event.outcome,
        "is_failed": event.is_failed,
        "watched_s": len(cells),
        "disturbed_s": disturbed,
        "least_done": min((cell.done for cell in cells), default=None),
        "errors": sum(cell.errors for cell in cells),
        "max_ms": max(cell.responses.get_max_value() for cell in cells) / 1000 if cells else None,
    }
