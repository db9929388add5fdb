"""A plan names every wanted row once, and reads only where such rows can be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.pinned.pins import PinnedPartition, PinnedStore
from kvstore.errors import ConfigError
from kvstore.ring.hashing import MURMUR3, SLOTS_HASH, TOKENS, KeyHash
from kvstore.spark import splits
from kvstore.spark.options import KeyRange, prefix_range
from kvstore.spark.splits import POINTS, ReadRequest, contains, plan
from kvstore.types import EntryId, LedgerId, Position

KEYS = [b"user/%d" % number for number in range(300)] + [b"order/{%d}/x" % number for number in range(50)]


def partition(name: str, spans: tuple[tuple[int, int], ...], split_tokens: tuple[int, ...] = ()) -> PinnedPartition:
    position = Position(LedgerId(7), EntryId(41))
    return PinnedPartition(name, position, 9, 1, spans, ("a:1", "b:1"), 10, 100, split_tokens, 5)


QUARTER = TOKENS // 4
STORE = PinnedStore(
    "pin",
    5,
    1,
    (
        partition("p1", ((0, QUARTER - 1), (2 * QUARTER, 3 * QUARTER - 1)), (QUARTER // 2, 2 * QUARTER + 5)),
        partition("p2", ((QUARTER, 2 * QUARTER - 1), (3 * QUARTER, TOKENS - 1))),
        partition("p3", ()),
    ),
    MURMUR3,
)


def readers_of(key: bytes, work: list[splits.Work]) -> list[str]:
    """The partitions of the parts in which the key would be found."""
    owners = {each.partition: each.spans for each in STORE.partitions}
    return [
        piece.split.partition
        for task in work
        for piece in task
        if contains(piece.keys, key)
        and piece.split.first <= MURMUR3.token_of(key) <= piece.split.last
        and any(first <= MURMUR3.token_of(key) <= last for first, last in owners[piece.split.partition])
    ]


WANTED = [
    ReadRequest(KeyRange()),
    ReadRequest(prefix_range(b"user/1")),
    ReadRequest(prefix_range(b"order/{7}")),
    ReadRequest(KeyRange(b"order/{7}/a", b"order/{7}/z")),
    ReadRequest(KeyRange(b"order/{7}", b"order/{8}")),
    ReadRequest(KeyRange(b"user/", b"user/2"), frozenset(KEYS[:120])),
    ReadRequest(KeyRange(), frozenset(KEYS)),
    ReadRequest(KeyRange(), frozenset()),
]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("only", [None, "p1", "p2", "p3"])
def test_every_wanted_key_is_read_once_and_nothing_else_is(wanted: ReadRequest, only: str | None) -> None:
    work = plan(STORE, replace(wanted, partition=only))
    points = wanted.point_keys()
    for key in KEYS:
        is_wanted = contains(wanted.keys, key) and (points is None or key in points)
        found = readers_of(key, work)
        assert len(found) == (is_wanted and only in (None, *found)), key
    if only is None:
        assert sum(len(readers_of(key, work)) for key in KEYS) == sum(
            contains(wanted.keys, key) and (points is None or key in points) for key in KEYS
        )


@given(st.binary(min_size=1, max_size=8), st.binary(max_size=8))
def test_key_in_a_range_of_one_tag_is_searched_at_its_token(start: bytes, more: bytes) -> None:
    """Braces in a prefix have no effect: the plan reads where the keys with this prefix are."""
    for prefix in (start, b"{" + start + b"}", start + b"{}" + b"{a}"):
        work = plan(STORE, ReadRequest(prefix_range(prefix)))
        assert len(readers_of(prefix + more, work)) == 1


def test_keys_of_one_tag_are_one_token() -> None:
    (task,) = plan(STORE, ReadRequest(prefix_range(b"order/{7}")))
    (piece,) = task
    assert piece.split.first == piece.split.last == MURMUR3.token_of(b"order/{7}")


def test_many_keys_are_shared_out_to_tasks() -> None:
    work = plan(STORE, ReadRequest(KeyRange(), frozenset(KEYS)))
    assert [len(task) for task in work] == [POINTS] * 3 + [len(KEYS) - 3 * POINTS]


def test_nothing_wanted_is_no_task() -> None:
    assert plan(STORE, ReadRequest(KeyRange(b"b", b"a"))) == []


def test_partition_that_the_store_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="partition: no 'p9'; expected one of p1, p2, p3"):
        plan(STORE, ReadRequest(KeyRange(), partition="p9"))


@pytest.mark.parametrize("hash", [MURMUR3, SLOTS_HASH])
def test_store_travels_as_text(hash: KeyHash) -> None:
    store = replace(STORE, hash=hash)
    assert splits.decode(splits.encode(store), None) == store
    assert splits.decode(splits.encode(STORE).replace('"hash": "murmur3", ', ""), None) == STORE


def test_key_is_looked_up_by_the_stores_key_hash() -> None:
    store = replace(STORE, hash=SLOTS_HASH)
    for key in KEYS[:40]:
        [[part]] = plan(store, ReadRequest(KeyRange(), frozenset([key])))
        assert part.split.first == part.split.last == SLOTS_HASH.token_of(key)


@pytest.mark.parametrize("text", ["", "x", "{}", "[]", '{"format": 1}', '{"format": 1, "partitions": [7]}'])
def test_another_text_is_no_pin(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pin: expected the option `pin`"):
        splits.decode(text, None)


def test_pin_of_the_future_is_refused_by_number() -> None:
    with pytest.raises(ConfigError, match="expected a pin of format 1, got 2"):
        splits.decode('{"format": 2}', None)
