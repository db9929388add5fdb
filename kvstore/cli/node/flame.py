"""A profile as a flame graph: an SVG for a browser, JSON for speedscope, or folded lines. Decides only.

In a flame graph each box is a function, below its caller. Its width is the weight of the samples that contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.sax.saxutils import escape
from zlib import crc32

WIDTH, ROW, TOP, CHARACTER = 1_400, 17, 46, 6.6
"""In pixels: width of the picture, height of a row, space above the first row, width of a character."""
LEAST = 0.4
"""Minimum width of a box in pixels. Narrower boxes are left out, with all their callees."""


class Stack(NamedTuple):
    """Calls from the outermost to the innermost, with the weight of the samples in the profile's unit."""

    calls: tuple[str, ...]
    weight: int


@dataclass(slots=True)
class Box:
    """A function at one position of the call tree."""

    name: str
    weight: int = 0
    inner: dict[str, Box] = field(default_factory=dict)


def tree_of(stacks: Sequence[Stack]) -> Box:
    """Merge all stacks into one tree, whose root has the total weight."""
    root = Box("all")
    for calls, weight in stacks:
        box = root
        box.weight += weight
        for name in calls:
            box = box.inner.setdefault(name, Box(name))
            box.weight += weight
    return root


def svg(title: str, unit: str, stacks: Sequence[Stack]) -> str:
    """Return the SVG, with a tooltip for each box. It contains no script and loads nothing."""
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
    """Return a document for https://www.speedscope.app, which also opens local files."""
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
    """Return one line per stack: its calls, separated by semicolons, and its weight."""
    return "".join(f"{';'.join(name.replace(';', ',') for name in calls)} {weight}\n" for calls, weight in stacks)


def hottest(stacks: Sequence[Stack], count: int) -> list[tuple[str, int]]:
    """Return the functions with the most weight of their own, without their callees."""
    own: dict[str, int] = {}
    for calls, weight in stacks:
        if calls:
            own[calls[-1]] = own.get(calls[-1], 0) + weight
    return sorted(own.items(), key=lambda each: (-each[1], each[0]))[:count]


def _placed(root: Box, scale: float) -> Iterator[tuple[Box, int, float, float]]:
    """Yield boxes with their row, left edge and width. Siblings are sorted by name, so that profiles can be
    compared."""
    waiting = [(root, 0, 0.0)]
    while waiting:
        box, row, left = waiting.pop()
        yield box, row, left, box.weight * scale
        for _, inner in sorted(box.inner.items()):
            if inner.weight * scale >= LEAST:
                waiting.append((inner, row + 1, left))
            left += inner.weight * scale


def _drawn(box: Box, row: int, left: float, width: float, unit: str, total: int) -> str:
    name, top = escape(box.name), TOP + row * ROW
    share = 100 * box.weight / max(1, total)
    letters = int((width - 6) / CHARACTER)
    shown = escape(box.name if len(box.name) <= letters else f"{box.name[: letters - 1]}…") if letters >= 3 else ""
    label = f'<text x="{left + 3:.1f}" y="{top + 12}">{shown}</text>' if shown else ""
    size = f'x="{left:.1f}" y="{top}" width="{max(width - 0.5, 0.3):.1f}" height="{ROW - 1}"'
    label_text = f"{name}: {box.weight:,} {unit}, {share:.1f} %"
    return f'<g><title>{label_text}</title><rect {size} fill="{_colour(box.name)}"/>{label}</g>'


def _colour(name: str) -> str:
    """Return a warm colour for our functions and a cool one for others, always the same for a function."""
    spread = crc32(name.encode())
    hue = 15 + spread % 40 if "(kvstore/" in name else 190 + spread % 40
    return f"hsl({hue},75%,{68 + spread // 64 % 12}%)"
