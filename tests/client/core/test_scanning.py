"""Pages of several partitions become one stream in order."""

from random import Random

import pytest

from kvstore.client.core.scanning import PAGE_KEYS, Merge, scan_bounds, tagged_key_or_none
from kvstore.errors import InvalidRequest
from kvstore.ring.hashing import hash_tag


def scan(
    stored: dict[str, list[bytes]],
    *,
    page: int,
    limit: int = 0,
    start: bytes = b"",
    end: bytes = b"",
    backwards: bool = False,
) -> tuple[list[bytes], int, tuple[bytes, bytes] | None]:
    """Return the keys in the order of the merge, the largest number that it held, and the rest."""
    merge: Merge[int] = Merge(list(stored), start, end, limit=limit, backwards=backwards)
    given: list[bytes] = []
    held = 0
    while not merge.is_done:
        wanted = merge.wanted()
        assert wanted, "a scan that is not done needs a page"
        for each in wanted:
            size = min(page, each.limit)
            keys = [key for key in stored[each.partition] if key >= each.start and (not each.end or key < each.end)]
            keys = keys[::-1] if backwards else keys
            following = None if len(keys) <= size else keys[size - 1] if backwards else keys[size]
            merge.feed(each.partition, [(key, 0) for key in keys[:size]], following)
        held = max(held, len(merge._held))
        given += [key for key, _ in merge.take()]
    return given, held, merge.rest


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("number", range(30))
def test_pages_of_any_partitions_merge_in_order_and_completely(number: int, backwards: bool) -> None:
    random = Random(number)
    keys = sorted({random.randbytes(random.randint(1, 3)) for _ in range(random.randint(0, 300))})
    stored: dict[str, list[bytes]] = {f"p{i}": [] for i in range(random.randint(1, 6))}
    for key in keys:
        stored[random.choice(sorted(stored))].append(key)
    page = random.randint(1, 20)
    start, end = random.choice((b"", *keys)), random.choice((b"", *keys))
    expected = [key for key in keys if key >= start and (not end or key < end)][:: -1 if backwards else 1]
    given, held, rest = scan(stored, page=page, start=start, end=end, backwards=backwards)
    assert (given, rest) == (expected, None)
    assert held <= page * len(stored)
    bounds: tuple[bytes, bytes] | None = (start, end)
    limit, walked = random.randint(1, 50), list[bytes]()
    while bounds is not None:
        some, _, bounds = scan(stored, page=page, limit=limit, start=bounds[0], end=bounds[1], backwards=backwards)
        assert some == expected[len(walked) :][:limit]
        walked += some
    assert walked == expected


def test_key_that_moved_meanwhile_is_returned_once() -> None:
    merge: Merge[int] = Merge(["p1", "p2"], b"")
    merge.feed("p1", [(b"k", 1)], None)
    merge.feed("p2", [(b"k", 2)], None)
    assert [key for key, _ in merge.take()] == [b"k"]


def test_scan_with_a_limit_requests_no_more_keys() -> None:
    assert [page.limit for page in Merge[int](["p1", "p2"], b"", limit=3).wanted()] == [3, 3]
    assert Merge[int](["p1"], b"").wanted()[0].limit == PAGE_KEYS


@pytest.mark.parametrize(("prefix", "end"), [(b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b""), (b"a\x00", b"a\x01")])
def test_prefix_ends_before_the_next_key_without_it(prefix: bytes, end: bytes) -> None:
    assert scan_bounds(b"", b"", prefix) == (prefix, end)


def test_prefix_together_with_bounds_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        scan_bounds(b"a", b"", b"p")


@pytest.mark.parametrize("prefix", [b"{t}", b"{t}/lock/", b"a{t}b", b"{{t}", b"{t}\xff"])
def test_keys_with_the_tag_of_their_prefix_are_in_one_partition(prefix: bytes) -> None:
    tagged = tagged_key_or_none(*scan_bounds(b"", b"", prefix))
    assert tagged is not None
    assert hash_tag(tagged) == hash_tag(prefix + b"more{u}")


@pytest.mark.parametrize(
    ("start", "end"),
    [(b"{t", b"{u"), (b"{}", b"{~"), (b"{t}", b""), (b"{t}", b"{u}"), (b"{t}", b"{t~\0"), (b"t", b"u"), (b"", b"")],
)
def test_other_ranges_may_span_partitions(start: bytes, end: bytes) -> None:
    assert tagged_key_or_none(start, end) is None
