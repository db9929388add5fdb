"""Timelines as inline SVG: lines over seconds, with numbered marks for events. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 22, 26
TICKS = 5


class Curve(NamedTuple):
    """One curve. A point of None leaves a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: str
    """CSS class in the page's style sheet."""


class EventMark(NamedTuple):
    """An event: a line, or a band if it lasted."""

    number: int
    at_s: float
    ended_s: float | None
    text: str


def timeline(
    title: str,
    lines: Sequence[Curve],
    marks: Sequence[EventMark],
    *,
    seconds: float,
    is_log: bool = False,
    warmup_s: float = 0.0,
    goal: float | None = None,
) -> str:
    """Draw one chart. A log scale leaves out values of 0. The warm-up is shaded, and `goal` is a line across."""
    values = [value for line in lines for _, value in line.points if value is not None and (value > 0 or not is_log)]
    values += [goal] if goal is not None else []
    scale, ticks = (_log_scale if is_log else _linear_scale)(values)
    across = lambda at_s: LEFT + (WIDTH - LEFT - RIGHT) * at_s / max(seconds, 1.0)  # noqa: E731 - two scales, one shape
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{LEFT}" y="14">{escape(title)}</text>',
        _warmup(warmup_s, across),
        *_grid(ticks, scale, across, seconds),
        _goal(goal, scale),
        *(_mark(mark, across) for mark in marks),
        *(_curve(line, scale, across, is_log=is_log) for line in lines),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _warmup(warmup_s: float, across: Callable[[float], float]) -> str:
    if not warmup_s:
        return ""
    left, right = across(0.0), across(warmup_s)
    return (
        f'<g class="warmup"><title>warm-up, in no table</title><rect x="{left:.1f}" y="{TOP}" '
        f'width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<text class="tick" x="{left + 4:.1f}" y="{HEIGHT - BOTTOM - 5}">warm-up</text></g>'
    )


def _goal(goal: float | None, scale: Callable[[float], float]) -> str:
    if goal is None:
        return ""
    y = scale(goal)
    return (
        f'<g class="goal"><line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">'
        f"p99 goal {_number(goal)} ms</text></g>"
    )


def _linear_scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    top = _nice(max(values, default=1.0) or 1.0)
    height = HEIGHT - TOP - BOTTOM
    return (lambda value: TOP + height * (1 - value / top)), [top * each / TICKS for each in range(TICKS + 1)]


def _log_scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    low, high = floor(log10(min(values, default=1.0))), ceil(log10(max(values, default=10.0)))
    high = max(high, low + 1)
    height = HEIGHT - TOP - BOTTOM
    return (
        lambda value: TOP + height * (1 - (log10(value) - low) / (high - low)),
        [10.0**each for each in range(low, high + 1)],
    )


def _nice(value: float) -> float:
    """Round up to 1, 2, 2.5, 5 or 10 times a power of ten."""
    power: float = 10 ** floor(log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _grid(
    ticks: Sequence[float], scale: Callable[[float], float], across: Callable[[float], float], seconds: float
) -> list[str]:
    parts = []
    for tick in ticks:
        y = scale(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    step = _nice(max(seconds, 1.0) / 12)
    for number in range(int(seconds / step) + 1):
        x = across(number * step)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_number(number * step)} s</text>'
        )
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def _mark(mark: EventMark, across: Callable[[float], float]) -> str:
    x, bottom = across(mark.at_s), HEIGHT - BOTTOM
    y = TOP + 17 * (mark.number % 2)  # neighbours do not overlap
    band = ""
    if mark.ended_s is not None and mark.ended_s > mark.at_s:
        width = min(across(mark.ended_s), WIDTH - RIGHT) - x  # an event may end after the run
        band = f'<rect class="band" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}"/>'
    return (
        f'<g class="mark" data-event="{mark.number}"><title>{escape(mark.text)}</title>{band}'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<circle cx="{x:.1f}" cy="{y}" r="8"/>'
        f'<text x="{x:.1f}" y="{y + 4}" text-anchor="middle">{mark.number}</text></g>'
    )


def _curve(line: Curve, scale: Callable[[float], float], across: Callable[[float], float], *, is_log: bool) -> str:
    path, is_drawing = [], False
    for at_s, value in line.points:
        if value is None or (is_log and value <= 0):
            is_drawing = False
            continue
        path.append(f"{'L' if is_drawing else 'M'}{across(at_s):.1f} {scale(value):.1f}")
        is_drawing = True
    return f'<path class="{line.style}" d="{"".join(path)}"><title>{escape(line.name)}</title></path>'


def _legend(lines: Sequence[Curve]) -> list[str]:
    parts, x = [], WIDTH - RIGHT
    for line in reversed(lines):
        x -= 18 + 7 * len(line.name)
        parts.append(f'<path class="{line.style}" d="M{x} 10h12"/><text class="tick" x="{x + 15}" y="14">')
        parts.append(f"{escape(line.name)}</text>")
        x -= 8
    return parts
