"""The example's page shows the results, whatever bytes keys have."""

from pathlib import Path

import pytest

from examples import analytics
from examples.analytics import chart, human, page, text_of

FOUND = {
    "totals": {"keys": 5, "bytes": 17, "prefixes": 4},
    "changes": 9,
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


def test_rows_that_are_not_shown_are_in_one_row() -> None:
    shown = page(FOUND)
    assert '<td title="all others">all others<td title="2">2 B<td><i class="rest"' in shown
    assert "all others" not in chart("Sizes", [("a", 1.0)], "bytes", 1.0)


def test_totals_begin_the_page() -> None:
    shown = page({**FOUND, "totals": {"keys": 12_345, "bytes": 3 << 20, "prefixes": 4}})
    assert "<dt>keys<dd>12.3 k</div><div><dt>bytes<dd>3.0 MiB" in shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "count", "0"),
        (999, "count", "999"),
        (1_234, "count", "1.2 k"),
        (-1536, "bytes", "-1.5 KiB"),
        (1 << 60, "bytes", "1024 PiB"),
        (5_400_000_000_000, "count", "5.4 T"),
    ],
)
def test_numbers_are_short_with_their_unit(value: float, unit: str, text: str) -> None:
    assert human(value, unit) == text


def test_small_bar_beside_a_huge_one_is_visible() -> None:
    shown = chart("Sizes", [("a", 1e9), ("b", 1e3)], "bytes")
    assert "logarithmic scale" in shown
    assert "width:33.3%" in shown
    assert "logarithmic" not in chart("Sizes", [("a", 100.0), ("b", 1.0)])


def test_page_fits_phones_and_dark_rooms() -> None:
    shown = page(FOUND)
    assert "width=device-width" in shown
    assert "prefers-color-scheme:dark" in shown
    assert "max-width:40rem" in shown


def test_growth_is_shown_between_two_snapshots_only() -> None:
    grown = {"from": "s1", "to": "s2", "bytes": 2, "prefixes": [{"prefix": "a", "keys": 1, "bytes": 2}]}
    assert "Growth" not in page(FOUND)
    assert "Growth in bytes, s1 to s2" in page({**FOUND, "growth": grown})


def test_long_name_is_cut_in_the_middle_and_complete_in_its_tooltip() -> None:
    name = "a" * 60 + "z"
    shown = chart("Sizes", [(name, 1.0)])
    assert f'<td title="{name}">{"a" * 23}…{"a" * 22}z<td title="1">1' in shown
    assert "table-layout:fixed" in page(FOUND), "so that a name takes no more than its column"


def test_bytes_are_shown_so_that_no_two_look_alike() -> None:
    names = [b"caf\xc3\xa9/1", b"\xff\x00\n", b"\\xff\x00\n", b"\xc2\x80", b"\xef\xbf\xbd", b"\xe2\x80\xae", b""]
    shown = [text_of(each) for each in names]
    assert shown[:3] == ["café/1", "\\xff\\x00\\x0a", "\\\\xff\\x00\\x0a"]
    assert shown[3] == "\\xc2\\x80", "no control character of the page"
    assert shown[5] == "\\xe2\\x80\\xae", "nor one that turns its text round"
    assert len(set(shown)) == len(names)
    assert all(each.isprintable() for each in shown)


def test_nothing_is_no_error() -> None:
    assert "nothing" in chart("Empty", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data-dir", "nope"), "analytics: dataDir: no cluster at"),
        (("--servers", "127.0.0.1:1"), "analytics: no server of the cluster answers at 127.0.0.1:1"),
        (("--depth", "0"), "--depth: expected 1 or more, got 0"),
        (("--out", "nowhere/report.html"), "--out: there is no directory"),
    ],
)
def test_error_is_reported_in_one_line_before_spark_starts(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analytics, "open_session", lambda *_, **__: pytest.fail("Spark was started"))
    with pytest.raises(SystemExit) as ended:
        analytics.main(arguments)
    shown = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in shown
    assert "\n" not in shown
    assert list(tmp_path.iterdir()) == []
