"""The comparison of two trees."""

from __future__ import annotations

import pytest

from loadtest.bench.beside import compared, is_met, parsed

TEXT = """\
put, batch 100                    20.51  22.12  23.00 µs
get, batch 1                      11.00  11.52  12.30 µs
replica: decode and apply          6.43 µs
yardstick                         17.95  18.20 µs
payload of 100 puts               40.12 µs encode, 51.00 µs decode
"""


def test_first_figure_of_each_line_is_read() -> None:
    assert parsed(TEXT) == {
        "put, batch 100": 20.51,
        "get, batch 1": 11.0,
        "replica: decode and apply": 6.43,
        "yardstick": 17.95,
        "payload of 100 puts": 40.12,
    }
    assert parsed("nothing\n") == {}


@pytest.mark.parametrize(("this", "met"), [(10.0, "yes"), (10.2, "yes"), (10.3, "NO")])
def test_line_is_judged_by_the_median_ratio_of_the_turns(this: float, met: str) -> None:
    turns = [({"get": 10.0 * busy}, {"get": this * busy}) for busy in (1, 3, 2)] + [({"get": 10.0}, {"get": 99.0})]
    (row,) = compared(turns[:3], 1.02)
    assert (row["ratio"], row["met"]) == (this / 10, met)
    (row,) = compared(turns, 1.02)
    assert row["ratio"] == this / 10, "one turn in which another program was busy"
    assert is_met([row]) is (met == "yes")


def test_yardstick_and_tiny_lines_are_not_judged() -> None:
    rows = compared([({"yardstick": 10.0, "tiny": 0.5}, {"yardstick": 20.0, "tiny": 0.9})], 1.02)
    assert [row["met"] for row in rows] == ["-", "-"]
