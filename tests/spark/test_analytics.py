"""The example's page shows what was found, whatever keys look like."""

from examples.analytics import chart, page

FOUND = {
    "sizes": [{"prefix": "a/b", "bytes": 10, "keys": 2}, {"prefix": "<i>", "bytes": 5, "keys": 1}],
    "value_sizes": [{"up_to_bytes": 1024, "values": 3}],
    "hottest": [{"prefix": "a/b", "changes": 7, "deletes": 1}],
    "growth": None,
}


def test_bars_are_as_long_as_their_share_of_the_longest() -> None:
    shown = chart("Growth", [("a", 200.0), ("b", -50.0)])
    assert 'class="" style="width:100.0%"' in shown
    assert 'class="less" style="width:25.0%"' in shown
    assert "-50" in shown


def test_keys_are_text_in_the_page() -> None:
    shown = page(FOUND)
    assert "&lt;i&gt;" in shown
    assert "<td><i>" not in shown


def test_growth_is_shown_between_two_snapshots_only() -> None:
    grown = {"from": "s1", "to": "s2", "prefixes": [{"prefix": "a", "keys": 1, "bytes": 2}]}
    assert "Growth" not in page(FOUND)
    assert "Growth in bytes, s1 to s2" in page({**FOUND, "growth": grown})


def test_nothing_is_no_error() -> None:
    assert "nothing" in chart("Empty", [])
