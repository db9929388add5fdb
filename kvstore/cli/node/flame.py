"""A profile as a flame graph: an SVG to look at in a browser, speedscope's JSON, or folded lines. Decides only.

In a flame graph each box is a function, below the one that called it; as wide as what was taken while it ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.sax.saxutils import escape
from zlib import crc32

WIDTH, ROW, TOP, CHARACTER = 1_400, 17, 46, 6.6
"""Pixels: of the picture, of a row, above the first, of a letter."""
LEAST = 0.4
"""Pixels: what is narrower is left out, with all that it called."""


class Stack(NamedTuple):
    """Calls from the outermost to the innermost, and what was taken there, in the profile's unit."""

    calls: tuple[str, ...]
    weight: int


@dataclass(slots=True)
class Box:
    """A function in one place of the calls."""

    name: str
    weight: int = 0
    inner: dict[str, Box] = field(default_factory=dict)


def tree_of(stacks: Sequence[Stack]) -> Box:
    """All stacks on one box, whose weight is that of all."""
    root = Box("all")
    for calls, weight in stacks:
        box = root
        box.weight += weight
        for name in calls:
            box = box.inner.setdefault(name, Box(name))
            box.weight += weight
    return root


def svg(title: str, unit: str, stacks: Sequence[Stack]) -> str:
    """The picture; what a box is stands in its tooltip. It holds no script and loads nothing."""
    root = tree_of(stacks)
    boxes = list(_placed(root, WIDTH / max(1, root.weight)))
    height = TOP + ROW * (1 + max((row for _, row, _, _ in boxes), default=0)) + 8
    drawn = "\n".join(_drawn(*each, unit, root.weight) for each in boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="monospace" font-size="11">\n'
        "<style>g:hover rect{stroke:#000}text{pointer-events:none}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>\n'
        f'<text x="8" y="35" fill="#666">{root.weight:,} {unit}; callers above, what they call below</text>\n'
        f"{drawn}\n</svg>\n"
    )


def speedscope(title: str, unit: str, stacks: Sequence[Stack]) -> str:
    """A document for https://www.speedscope.app, which works on files on one's own disk."""
    places: dict[str, int] = {}
    samples = [[places.setdefault(name, len(places)) for name in calls] for calls, _ in stacks]
    weights = [weight for _, weight in stacks]
    profile: dict[str, Any] = {
        "type": "sampled",
        "name": title,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": title,
        "shared": {"frames": [{"name": name} for name in places]},
        "profiles": [profile],
    }
    return json.dumps(document)


def folded(stacks: Sequence[Stack]) -> str:
    """A line for each stack, its calls with semicolons between, and its weight."""
    return "".join(f"{';'.join(name.replace(';', ',') for name in calls)} {weight}\n" for calls, weight in stacks)


def hottest(stacks: Sequence[Stack], count: int) -> list[tuple[str, int]]:
    """The functions that took most themselves, without what they called."""
    own: dict[str, int] = {}
    for calls, weight in stacks:
        if calls:
            own[calls[-1]] = own.get(calls[-1], 0) + weight
    return sorted(own.items(), key=lambda each: (-each[1], each[0]))[:count]


def _placed(root: Box, scale: float) -> Iterator[tuple[Box, int, float, float]]:
    """Boxes with their rows, left edges and widths; siblings by name, so that two pictures can be compared."""
    waiting = [(root, 0, 0.0)]
    while waiting:
        box, row, left = waiting.pop()
        yield box, row, left, box.weight * scale
        for _, inner in sorted(box.inner.items()):
            if inner.weight * scale >= LEAST:
                waiting.append((inner, row + 1, left))
            left += inner.weight * scale


def _drawn(box: Box, row: int, left: float, width: float, unit: str, whole: int) -> str:
    name, top = escape(box.name), TOP + row * ROW
    share = 100 * box.weight / max(1, whole)
    letters = int((width - 6) / CHARACTER)
    shown = escape(box.name if len(box.name) <= letters else f"{box.name[: letters - 1]}…") if letters >= 3 else ""
    label = f'<text x="{left + 3:.1f}" y="{top + 12}">{shown}</text>' if shown else ""
    size = f'x="{left:.1f}" y="{top}" width="{max(width - 0.5, 0.3):.1f}" height="{ROW - 1}"'
    told = f"{name}: {box.weight:,} {unit}, {share:.1f} %"
    return f'<g><title>{told}</title><rect {size} fill="{_colour(box.name)}"/>{label}</g>'


def _colour(name: str) -> str:
    """Ours warm, others' cool; the same function always the same."""
    spread = crc32(name.encode())
    hue = 15 + spread % 40 if "(kvstore/" in name else 190 + spread % 40
    return f"hsl({hue},75%,{68 + spread // 64 % 12}%)"
