"""Profiles as pictures and documents."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from kvstore.cli.node import flame
from kvstore.cli.node.flame import Stack

STACKS = [
    Stack(("MainThread", "run (kvstore/a.py:1)", "send<lambda> (kvstore/b.py:2)"), 60),
    Stack(("MainThread", "run (kvstore/a.py:1)"), 30),
    Stack(("syncs", "wait; long (threading.py:5)"), 10),
]
SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> dict[str, tuple[float, float]]:
    """Return the left edge and the width of each box, by its tooltip."""
    root = ElementTree.fromstring(picture)
    found = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert rect is not None
        found[title.text or ""] = float(rect.attrib["x"]), float(rect.attrib["width"])
    return found


def test_span_is_drawn_as_wide_as_its_duration_below_its_caller() -> None:
    found = boxes(flame.svg("n1", "microseconds", STACKS))
    assert found["all: 100 microseconds, 100.0 %"] == (0.0, flame.WIDTH - 0.5)
    run = found["run (kvstore/a.py:1): 90 microseconds, 90.0 %"]
    send = found["send<lambda> (kvstore/b.py:2): 60 microseconds, 60.0 %"]
    assert run[1] == flame.WIDTH * 0.9 - 0.5
    assert send == (run[0], flame.WIDTH * 0.6 - 0.5)


def test_picture_holds_no_script_and_loads_nothing() -> None:
    picture = flame.svg("<script>alert(1)</script>", "looks", STACKS)
    assert "<script" not in picture
    assert re.findall(r"https?://[^\"]+", picture) == ["http://www.w3.org/2000/svg"]


def test_spans_that_are_too_narrow_are_left_out() -> None:
    narrow = Stack(("MainThread", "rare (kvstore/c.py:3)"), 1)
    picture = flame.svg("n1", "looks", [Stack(("MainThread",), 1_000_000), narrow])
    assert "rare" not in picture


def test_profile_in_which_nothing_ran_is_a_picture_too() -> None:
    assert "all: 0 looks" in flame.svg("n1", "looks", [])


def test_document_has_each_function_once_and_all_weights() -> None:
    document = json.loads(flame.speedscope("n1", "microseconds", STACKS))
    names = [each["name"] for each in document["shared"]["frames"]]
    (profile,) = document["profiles"]
    assert len(set(names)) == len(names) == 5
    assert [[names[place] for place in sample] for sample in profile["samples"]] == [
        list(each.calls) for each in STACKS
    ]
    assert (profile["weights"], profile["endValue"], profile["type"]) == ([60, 30, 10], 100, "sampled")


def test_folded_lines_have_no_semicolon_of_a_name() -> None:
    assert flame.folded(STACKS).splitlines()[2] == "syncs;wait, long (threading.py:5) 10"


def test_hottest_functions_are_those_that_took_most_themselves() -> None:
    again = [*STACKS, Stack(("other", "run (kvstore/a.py:1)"), 40)]
    assert flame.hottest(again, 2) == [("run (kvstore/a.py:1)", 70), ("send<lambda> (kvstore/b.py:2)", 60)]
