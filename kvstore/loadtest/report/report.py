"""Renders a run's document as one self-contained HTML page: tables, and timelines with events. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from kvstore.loadtest.report.baseline import FigureChange
from kvstore.loadtest.report.charts import Curve, EventMark, timeline
from kvstore.loadtest.report.goals import ALL, p99_goals
from kvstore.loadtest.report.words import two_digits

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707f; --line: #dde2e9; --paper: #fff; --good: #1a7f4b;
  --bad: #c22f2f; --one: #2563c9; --two: #d97a12; --three: #8a4fc7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #97a1b0; --line: #333b47; --paper: #14181e;
  --good: #4cc38a; --bad: #ff7b72; --one: #6ea8ff; --two: #f0a04b; --three: #c297ff; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.soft { color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad); font-weight: 600 }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0 }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem }
.cards b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th.text, td.text { text-align: left; white-space: normal } th { color: var(--soft); font-weight: 500;
  white-space: normal }
svg { width: 100%; height: auto; margin: .4rem 0 1rem } svg text { fill: var(--ink); font: 11px system-ui, sans-serif }
svg .title { font-size: 13px; font-weight: 600 } svg .tick { fill: var(--soft) } svg .grid { stroke: var(--line) }
svg path { fill: none; stroke-width: 1.6 } .one { stroke: var(--one) } .two { stroke: var(--two) }
.three { stroke: var(--three) } .due { stroke: var(--soft); stroke-dasharray: 4 3 } .errors { stroke: var(--bad) }
.mark line { stroke: var(--bad); stroke-dasharray: 2 3 } .mark circle { fill: var(--bad) }
.mark text { fill: var(--paper); font-weight: 600 } .mark .band { fill: var(--bad); opacity: .12 }
.warmup rect { fill: var(--soft); opacity: .12 } .goal line { stroke: var(--good); stroke-dasharray: 8 4 }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
"""
TEXTS = {"endpoint", "operation", "error", "what", "outcome", "figure", "option", "property", "value", ""}


def page(document: Mapping[str, Any], beside: Sequence[FigureChange] = ()) -> str:
    """Return the whole page."""
    options = document["options"]
    title = f"Load test: {options.get('workload')}, {options.get('shape')}"
    began = datetime.fromtimestamp(document["began"], tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    version = escape(f"kvstore {document['machine'].get('version', 'of an unknown version')}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{began}, {document["seconds"]:g} s; warm-up: {document["counted_from_s"]:g} s; {version}</p>',
        _verdict(document),
        _cards(document["total"]),
        *_charts(document),
        _events(document["events"]),
        _operations(document),
        _section("Errors returned to callers", _table(document["errors"])),
        _wrong(document),
        _knee(document["knee"]),
        _section("Compared with the baseline", _table([each.row() for each in beside])),
        _details(document),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _verdict(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    faults = [f'<p class="bad">✗ {escape(reason)}</p>' for reason in verdict["reasons"]]
    faults += [
        f'<p class="bad">Spoiled, says nothing about the store: {escape(each)}</p>' for each in verdict["spoiled"]
    ]
    notes = [f"<p>Note: {escape(note)}</p>" for note in verdict["notes"]]
    return "".join([*(faults or ['<p class="good">✓ all goals met</p>']), *notes])


def _cards(total: Mapping[str, Any]) -> str:
    shown = (
        ("operations/s", two_digits(total["per_s"])),
        ("of due operations", f"{total['achieved']:.2%}"),
        ("p50", f"{two_digits(total['p50_ms'])} ms"),
        ("p99", f"{two_digits(total['p99_ms'])} ms"),
        ("p99.9", f"{two_digits(total['p99.9_ms'])} ms"),
        ("send delay, p99", f"{two_digits(total['late_p99_ms'])} ms"),
        ("errors", f"{total['errors']:,}"),
        ("wrong values", f"{total['wrong']:,}"),
    )
    return f'<div class="cards">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in shown)}</div>'


def _charts(document: Mapping[str, Any]) -> list[str]:
    # The first and the last second are incomplete.
    points = [point for point in document["timeline"][:-1] if point["at_s"] >= 0]
    marks = [
        EventMark(number, event["at_s"], event["ended_s"], f"{event['what']} {event['outcome']}".strip())
        for number, event in enumerate(document["events"], 1)
        if event["watched_s"]
    ]

    def line(name: str, figure: str, style: str) -> Curve:
        return Curve(name, [(point["at_s"], point[figure]) for point in points], style)

    seconds, warmup_s = document["seconds"], document["counted_from_s"]
    goal = p99_goals(str(document["options"].get("p99_ms") or "")).get(ALL)
    rates = [line("due", "due", "due"), line("done", "done", "one"), line("errors", "errors", "errors")]
    times = [line("p50", "p50_ms", "one"), line("p99", "p99_ms", "two"), line("max", "max_ms", "three")]
    return [
        timeline("Operations per second", rates, marks, seconds=seconds, warmup_s=warmup_s),
        timeline(
            "Milliseconds since the intended start",
            times,
            marks,
            seconds=seconds,
            is_log=True,
            warmup_s=warmup_s,
            goal=goal,
        ),
        timeline("Users", [line("users", "users", "one")], marks, seconds=seconds, warmup_s=warmup_s),
    ]


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "nr": number,
            "at": f"{event['at_s']:g} s",
            "what": event["what"],
            "outcome": event["outcome"],
            "took": "" if event["ended_s"] is None else f"{event['ended_s'] - event['at_s']:.1f} s",
            "disturbed": f"{event['disturbed_s']} of {event['watched_s']} s" if event["watched_s"] else "after the run",
            "least/s": "" if event["least_done"] is None else event["least_done"],
            "errors": event["errors"],
            "max ms": "" if event["max_ms"] is None else event["max_ms"],
        }
        for number, event in enumerate(events, 1)
    ]
    return _section("Events and their effect on callers until the next event", _table(rows))


def _operations(document: Mapping[str, Any]) -> str:
    names = ("p50_ms", "p95_ms", "p99_ms", "p99.9_ms", "max_ms", "service_p50_ms", "service_p99_ms")
    rows = [
        {
            **{name: each[name] for name in ("endpoint", "operation", "count", "per_s", "errors")},
            **{name.replace("_ms", " ms").replace("_", " "): each[name] for name in names},
        }
        for each in document["operations"]
    ]
    return _section("Operations", _table(rows)) + (
        '<p class="soft">Latencies are measured from the intended start; service latencies from the actual start.</p>'
    )


def _wrong(document: Mapping[str, Any]) -> str:
    if not document["total"]["wrong"]:
        return ""
    values = "\n".join(document["wrong"])
    return _section(f"Wrong values: {document['total']['wrong']}", f'<pre class="bad">{escape(values)}</pre>')


def _knee(knee: Mapping[str, Any] | None) -> str:
    if knee is None:
        return ""
    if knee["missing"]:
        found = f'<p class="bad">{escape(knee["missing"])}</p>'
    else:
        rates = f"<b>{knee['sustained_per_s']:,.0f}/s</b>; lowest rate not sustained: {knee['failed_per_s']:,.0f}/s"
        found = f"<p>Highest sustained rate: {rates}</p>"
    return _section("Saturation search (knee)", found + _table(knee["trials"]))


def _details(document: Mapping[str, Any]) -> str:
    options = [{"option": name.replace("_", "-"), "value": value} for name, value in document["options"].items()]
    machine = [{"property": name.replace("_", " "), "value": value} for name, value in document["machine"].items()]
    return _section("Options", _table(options)) + _section("Machine and load generator", _table(machine))


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    head = "".join(f"<th{_class(name)}>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{_cells(names, row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(names: Iterable[str], row: Mapping[str, Any]) -> str:
    return "".join(f"<td{_class(name)}>{escape(_shown(row[name]))}</td>" for name in names)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return two_digits(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _class(name: str) -> str:
    return ' class="text"' if name in TEXTS else ""
