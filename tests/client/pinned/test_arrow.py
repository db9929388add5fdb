"""Pages of pinned reads as record batches: small pages become larger batches of the same records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from random import Random

import pytest

from kvstore.client.pinned.arrow import batch_of, batches_of
from kvstore.client.pinned.read import SplitPage
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.partition.state.rows import data_key, encode_record
from kvstore.proto import pinned_page
from kvstore.ring.hashing import MURMUR3

NOW_MS = 1_700_000_000_000


def pages(times_ms: Sequence[int], seed: int = 0) -> list[SplitPage]:
    """Pages with records of all kinds, one for each time by which records have expired (0: none has)."""
    random, found = Random(seed), []
    for number, time_ms in enumerate(times_ms):
        keys = [b"key-%d-%d" % (number, each) for each in range(random.randrange(1, 30))]
        rows = [
            encode_record(
                random.randbytes(random.randrange(40)),
                version := random.randrange(1, 1000),
                random.randrange(1, version + 1),
                NOW_MS,
                random.choice([0, NOW_MS - 5, NOW_MS + 5]) if time_ms else 0,
            )
            for _ in keys
        ]
        found.append(
            SplitPage.of(
                pinned_page.encode(list(map(partial(data_key, MURMUR3), keys)), rows, time_ms, keys[-1], ends=False)
            )
        )
    return found


@pytest.mark.parametrize("bytes_min", [1, 700, 1 << 20])
@pytest.mark.parametrize("times_ms", [[], [0] * 9, [NOW_MS] * 9, [0, NOW_MS, NOW_MS, NOW_MS - 9, 0]])
def test_records_of_joined_pages_equal_those_of_the_pages(times_ms: list[int], bytes_min: int) -> None:
    given = pages(times_ms)
    expected = [row for page in given for row in batch_of(page, "p1").to_pylist()]
    assert [row for batch in batches_of(given, "p1", bytes_min) for row in batch.to_pylist()] == expected


def test_batch_collects_pages_until_they_are_large_enough() -> None:
    given = pages([0] * 40)
    sizes = [len(page.columns.keys) + len(page.columns.rows) for page in given]
    batches = list(batches_of(given, "p1", 2 * max(sizes)))
    assert 1 < len(batches) <= 1 + sum(sizes) // (2 * max(sizes))


@pytest.mark.parametrize("expires_ms", [EXPIRES_MS_MAX, (1 << 63) // 1000 + 1, 253_402_300_800_000])
def test_expiry_beyond_all_timestamps_is_far_in_the_future(expires_ms: int) -> None:
    row = encode_record(b"v", 1, 1, NOW_MS, expires_ms)
    page = SplitPage.of(pinned_page.encode([data_key(MURMUR3, b"k")], [row], NOW_MS, b"k", ends=True))
    (found,) = batch_of(page, "p1").to_pylist()
    assert found["expires_at"] == datetime(9999, 12, 30, tzinfo=UTC)
