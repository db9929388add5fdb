"""The dashboard's colours, computed from its stylesheet: text and lines have enough contrast with their background."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from kvstore.server.ui import dashboard

TEXT_MIN, LINE_MIN = 4.5, 3.0
"""WCAG 2.2, 1.4.3 and 1.4.11 (AA)."""
PAGE = ("bg", "card")
"""Backgrounds of elements that have no background themselves."""
TRANSPARENT = {"line"}
"""Rules between rows and around cards, which carry no information."""
STYLE = (resources.files(dashboard.__package__) / "files" / "ui.css").read_text("utf-8")

Themes = dict[str, dict[str, str]]


def themes(style: str) -> Themes:
    """Return the colours of the light and the dark theme by their names. A colour that the dark theme does not set
    is that of the light one."""
    light, dark = (
        dict(re.findall(r"--([\w-]+):(#[0-9a-f]{3,6})", each)) for each in re.findall(r":root{(.*?)}", style, re.S)
    )
    return {"light": light, "dark": light | dark}


def pairs(style: str) -> set[tuple[str, str, float]]:
    """Return (colour, background, minimum ratio) of every rule that colours a text or a line."""
    found: set[tuple[str, str, float]] = set()
    for declared in re.findall(r"{([^{}]*)}", style):
        rules = dict(each.split(":", 1) for each in declared.split(";") if ":" in each)
        own = re.findall(r"var\(--([\w-]+)\)", rules.get("background", ""))
        for name, least in (("color", TEXT_MIN), ("fill", TEXT_MIN), ("stroke", LINE_MIN)):
            for colour in re.findall(r"var\(--([\w-]+)\)", rules.get(name, "")):
                if colour not in TRANSPARENT:
                    found |= {(colour, behind, least) for behind in own or PAGE}
    return found


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ratio(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def too_weak(style: str, theme: str) -> list[str]:
    colours = themes(style)[theme]
    ratios = {(fore, back): ratio(colours[fore], colours[back]) for fore, back, _ in pairs(style)}
    return sorted(
        f"{fore} on {back}: {ratios[fore, back]:.2f}, want {least}"
        for fore, back, least in pairs(style)
        if ratios[fore, back] < least
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_have_enough_contrast(theme: str) -> None:
    assert too_weak(STYLE, theme) == []


def test_every_colour_is_checked() -> None:
    seen = {fore for fore, _, _ in pairs(STYLE)} | {back for _, back, _ in pairs(STYLE)}
    assert set(themes(STYLE)["light"]) == seen | TRANSPARENT
    assert set(re.findall(r"#[0-9a-f]{3,6}", STYLE)) == {
        colour for colours in themes(STYLE).values() for colour in colours.values()
    }, "a colour without a name is not looked at"


def test_contrast_ratio_is_that_of_the_standard() -> None:
    assert (round(ratio("#fff", "#000000"), 2), round(ratio("#767676", "#ffffff"), 2)) == (21.0, 4.54)
    assert too_weak(STYLE.replace("--soft:#566073", "--soft:#8a93a5"), "light")
