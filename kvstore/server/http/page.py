"""The status page as HTML: what `/` says in JSON, for people. Decides only.

One self-contained page: no script, no other request. It shows what any node may say of itself, as it is; everything is
escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Status = Mapping[str, Any]

REFRESH_S = 5
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #ddd}
th{font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}
.good{color:#070}.bad{color:#b00;font-weight:600}small,.quiet{color:#666}details{margin-top:.4rem}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}th,td{border-color:#444}.good{color:#6c6}
.bad{color:#f77}small,.quiet{color:#999}a{color:#8bf}}
"""
_FOOT = (
    '<p><small><a href="/metrics">metrics</a> · <a href="/readyz">readyz</a> · <a href="/clusterz">clusterz</a> · '
    '<a href="/healthz">healthz</a> · '
    "this page as JSON: <code>curl -H 'Accept: application/json'</code></small></p>"
)


def page_of(status: Status) -> str:
    """The whole page."""
    name = str(status.get("id", "?"))
    parts = [
        f"<h1>kvstore node {_text(name)} {_readiness(status)}</h1>",
        f"<p class=quiet>{_about(status)}</p>",
        *_partitions(status.get("partitions")),
        *_leaders(status),
        *(line for part in ("server", "bookie") for line in _numbers(part, status.get(part))),
        _FOOT,
    ]
    head = (
        f'<meta charset=utf-8><meta http-equiv=refresh content={REFRESH_S}><meta name=viewport content="width=device-'
        f'width">' + f"<title>kvstore {_text(name)}</title><style>{_STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _readiness(status: Status) -> str:
    faults = status.get("not_ready") or []
    leaderless = status.get("leaderless") or []
    ready = f"<span class=bad>not ready: {_text('; '.join(map(str, faults)))}</span>" if faults else ""
    led = f" <span class=bad>without a leader: {_text(', '.join(map(str, leaderless)))}</span>" if leaderless else ""
    return (ready or "<span class=good>ready</span>") + led


def _about(status: Status) -> str:
    facts = {
        "version": status.get("version"),
        "Python": status.get("python"),
        "roles": ", ".join(map(str, status.get("roles", ()))),
        "metadata store": status.get("metadata"),
        "ring version": status.get("ring_version"),
        "servers up": ", ".join(map(str, status.get("servers", ()))),
    }
    return " · ".join(f"{name} <b>{_text(value)}</b>" for name, value in facts.items() if value not in (None, ""))


def _partitions(partitions: Any) -> list[str]:
    if not isinstance(partitions, Mapping) or not partitions:
        return []
    rows = []
    for name, replica in sorted(partitions.items()):
        leading = replica.get("leading") or {}
        failure = replica.get("failure")
        role = f"<span class=bad>stopped: {_text(failure)}</span>" if failure else _text(replica.get("role"))
        numbers = (replica.get("seq"), replica.get("epoch"), replica.get("keys"), leading.get("queued", ""))
        lead = _text(replica.get("leader") or "nobody")
        rows.append([_cell(name), f"<td>{role}</td>", f"<td>{lead}</td>", *map(_cell, numbers)])
    return _table("Partitions here", ("partition", "role", "leader", "sequence", "epoch", "keys", "queued"), rows)


def _leaders(status: Status) -> list[str]:
    leaders = status.get("leaders")
    if not isinstance(leaders, Mapping) or not leaders:
        return []
    rows = [[_cell(partition), _cell(leader)] for partition, leader in sorted(leaders.items())]
    return _table("Leaders of all partitions, as known here", ("partition", "leader"), rows)


def _numbers(part: str, values: Any) -> list[str]:
    if not isinstance(values, Mapping) or not values:
        return []
    rows = [[_cell(str(name).replace("_", " ")), _cell(value)] for name, value in values.items()]
    lines = _table("", ("", ""), rows)
    return [f"<details><summary>{_text(part)}: {len(rows)} numbers</summary>", *lines, "</details>"]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return [f"<h2>{_text(title)}</h2>" if title else "", f"<table><tr>{head}</tr>{body}</table>"]


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{_text(value)}</td>"
    return f"<td class=n>{value:,}</td>" if isinstance(value, int) else f"<td class=n>{value:,.4g}</td>"


def _text(value: Any) -> str:
    return escape(str(value))
