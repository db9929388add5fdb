"""What the store answers by itself is exact; everything else is left to Spark. Checked against rows, one by one."""

from collections.abc import Sequence
from itertools import product

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from kvstore.spark.filters import KEYS_MAX, Wanted, contains, push
from kvstore.spark.options import KeyRange

KEYS = [b"\0", b"a", b"a\0", b"ab", b"b", b"b\xff", b"c", b"\xff"]
KEY, PARTITION = ("key",), ("partition",)

MEANINGS = {
    EqualTo: lambda key, value: key == value,
    EqualNullSafe: lambda key, value: key == value,
    GreaterThan: lambda key, value: key > value,
    GreaterThanOrEqual: lambda key, value: key >= value,
    LessThan: lambda key, value: key < value,
    LessThanOrEqual: lambda key, value: key <= value,
    In: lambda key, value: key in value,
}


def given(wanted: Wanted) -> set[bytes]:
    """The keys that the store would give."""
    if wanted.is_nothing:
        return set()
    points = wanted.point_keys()
    return {key for key in KEYS if contains(wanted.keys, key) and (points is None or key in points)}


ONE_KEY = [kind(KEY, key) for kind in MEANINGS if kind is not In for key in (b"", b"a", b"b", b"bb")]
CONDITIONS = [*ONE_KEY, In(KEY, (b"a", b"c")), In(KEY, ())]


@pytest.mark.parametrize("first", CONDITIONS, ids=str)
def test_any_two_conditions_give_what_both_mean(first: Filter) -> None:
    for second, keys in product(CONDITIONS, (KeyRange(), KeyRange(b"a", b"b"))):
        wanted, left = push(Wanted(keys), [first, second])
        assert left == []
        expected = {key for key in KEYS if contains(keys, key) and all(holds(each, key) for each in (first, second))}
        assert given(wanted) == expected, (first, second, keys)


def holds(condition: Filter, key: bytes) -> bool:
    found: bool = MEANINGS[type(condition)](key, condition.value)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("value",), b"a"),
        GreaterThan(("version",), 7),
        Not(EqualTo(KEY, b"a")),
        IsNull(KEY),
        StringStartsWith(KEY, "a"),
        EqualTo(KEY, "a"),
        EqualTo(("key", "x"), b"a"),
        EqualNullSafe(KEY, None),
    ],
    ids=str,
)
def test_what_is_not_exact_is_left_to_spark(condition: Filter) -> None:
    assert push(Wanted(KeyRange(b"a", b"c")), [condition]) == (Wanted(KeyRange(b"a", b"c")), [condition])


def test_a_long_list_is_left_to_spark_within_its_range() -> None:
    listed = In(KEY, tuple(b"%06d" % number for number in range(KEYS_MAX + 1)))
    wanted, left = push(Wanted(KeyRange()), [listed])
    assert left == [listed]
    assert wanted.keys == KeyRange(b"000000", b"%06d\0" % KEYS_MAX)


def test_keys_are_never_null() -> None:
    assert push(Wanted(KeyRange()), [IsNotNull(KEY), IsNotNull(PARTITION)]) == (Wanted(KeyRange()), [])


@pytest.mark.parametrize(("partitions", "expected"), [(["p1"], "p1"), (["p1", "p1"], "p1"), (["p1", "p2"], None)])
def test_one_partition_can_be_read_alone(partitions: Sequence[str], expected: str | None) -> None:
    wanted, left = push(Wanted(KeyRange()), [EqualTo(PARTITION, each) for each in partitions])
    assert left == []
    assert wanted.is_nothing == (expected is None)
    assert expected in (None, wanted.partition)
