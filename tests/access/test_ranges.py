"""Sets of keys that consist of prefixes, compared with a naive model for each key."""

from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.access import Ranges, end_of_prefix

SHORT = st.lists(st.sampled_from([0, 97, 98, 254, 255]), max_size=3).map(bytes)
PREFIXES = st.lists(SHORT, max_size=5)
ALL_SHORT = [bytes(key) for length in range(5) for key in product((0, 97, 98, 254, 255), repeat=length)]


@given(PREFIXES, SHORT)
def test_range_contains_keys_that_begin_with_a_prefix(prefixes: list[bytes], key: bytes) -> None:
    assert Ranges(prefixes).has(key) == any(key.startswith(each) for each in prefixes)


@given(PREFIXES, SHORT, SHORT)
@example([b"\xff"], b"\xff", b"")
@example([b"a", b"b"], b"a", b"c")
@example([b"a\xff", b"b"], b"a\xff", b"c")
@example([b"a"], b"a", b"")
def test_range_is_covered_only_if_all_its_keys_are(prefixes: list[bytes], start: bytes, end: bytes) -> None:
    ranges = Ranges(prefixes)
    inside = [key for key in ALL_SHORT if start <= key and (not end or key < end)]
    if ranges.covers(start, end):
        assert all(map(ranges.has, inside))
        assert ranges.has(start)


@given(PREFIXES, st.integers(0, 4))
def test_range_of_each_prefix_is_covered(prefixes: list[bytes], which: int) -> None:
    if which < len(prefixes):
        prefix = prefixes[which]
        assert Ranges(prefixes).covers(prefix, end_of_prefix(prefix) or b"")


@given(SHORT, SHORT)
def test_end_of_prefix_separates_its_keys_from_later_keys(prefix: bytes, key: bytes) -> None:
    end = end_of_prefix(prefix)
    assert key.startswith(prefix) == (key >= prefix and (end is None or key < end))


def test_redundant_prefixes_are_dropped() -> None:
    assert Ranges([b"ab", b"a", b"b", b"a"]).prefixes == (b"a", b"b")
    assert Ranges([b"", b"a"]).prefixes == (b"",)
    assert not Ranges()
