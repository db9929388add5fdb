"""Rows for readers and for programs."""

from __future__ import annotations

import json

from kvstore.cli.access.users import prefix_of
from kvstore.cli.output import as_json, as_table, printable, shown_prefix


def test_columns_are_aligned_and_numbers_are_right_aligned() -> None:
    rows = [{"name": "a", "keys": 5, "is_up": True}, {"name": "longer", "keys": 1000, "is_up": None}]
    assert as_table(rows) == "NAME    KEYS  IS UP\na          5  yes\nlonger  1000  -"
    assert as_table([{"keys": 1000}, {"keys": None}]) == "KEYS\n1000\n   -", "unknown numbers stay in their column"


def test_without_rows_only_the_requested_headers_are_printed() -> None:
    assert as_table([], ["name", "keys"]) == "NAME  KEYS"
    assert as_table([]) == ""


def test_only_the_requested_columns_are_shown() -> None:
    assert as_table([{"a": 1, "b": [1, 2]}], ["b", "c"]) == "B    C\n1,2  -"


def test_values_without_a_json_type_become_text() -> None:
    document = json.loads(as_json({"key": b"\xff\x00k", "set": {2, 1}}))
    assert document == {"key": "\\xff\x00k", "set": [1, 2]}


def test_stored_bytes_do_nothing_to_a_terminal_and_stay_apart() -> None:
    assert printable("grün 漢字 a b".encode()) == "grün 漢字 a b"
    assert printable(b"a\n\t\r\x1b[2J\x00\xff\\n") == r"a\n\t\r\x1b[2J\x00\xff\\n"
    assert printable("\u202e\x9b\U000e0001".encode()) == r"\u202e\x9b\U000e0001"
    assert as_table([{"key": b"\x1b]0;x\x07"}]) == "KEY\n" + r"\x1b]0;x\x07"


def test_prefix_is_shown_as_a_command_takes_it() -> None:
    for prefix in (b"a\\bc", b"\x00\xff", "é\\ü".encode(), b"a\n\x1b[2J", "\u2028".encode(), b"plain/", b""):
        shown = shown_prefix(prefix)
        assert prefix_of(shown) == prefix
        assert shown.isprintable()
    assert (shown_prefix(b"plain/"), shown_prefix("grün/".encode())) == ("plain/", "grün/")
