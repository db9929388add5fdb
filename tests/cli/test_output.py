"""Rows for people and for programs."""

from __future__ import annotations

import json

from kvstore.cli.output import as_json, as_table


def test_columns_line_up_and_numbers_stand_to_the_right() -> None:
    rows = [{"name": "a", "keys": 5, "is_up": True}, {"name": "longer", "keys": 1000, "is_up": None}]
    assert as_table(rows) == "NAME    KEYS  IS UP\na          5  yes\nlonger  1000  -"


def test_no_rows_are_only_the_heads_that_were_asked_for() -> None:
    assert as_table([], ["name", "keys"]) == "NAME  KEYS"
    assert as_table([]) == ""


def test_only_the_columns_that_were_asked_for_are_shown() -> None:
    assert as_table([{"a": 1, "b": [1, 2]}], ["b", "c"]) == "B    C\n1,2  -"


def test_what_json_does_not_have_is_text() -> None:
    document = json.loads(as_json({"key": b"\xff\x00k", "set": {2, 1}}))
    assert document == {"key": "\\xff\x00k", "set": [1, 2]}
