"""Sizes of values follow their distribution."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import median

import pytest

from kvstore.limits import VALUE_BYTES_MAX
from kvstore.loadtest.generator.sizes import sizes_of


def drawn(text: str) -> list[int]:
    sizes, random = sizes_of(text), Random(5)
    return [sizes(random) for _ in range(20_000)]


def test_constant_is_constant() -> None:
    assert set(drawn("100")) == {100}


def test_uniform_covers_both_ends_evenly() -> None:
    found = Counter(drawn("uniform:10:19"))
    assert set(found) == set(range(10, 20))
    assert max(found.values()) < 1.2 * min(found.values())


def test_lognormal_has_its_median_and_a_long_tail() -> None:
    found = sorted(drawn("lognormal:300:1.0"))
    assert 290 < median(found) < 310
    assert 1_900 < found[int(len(found) * 0.975)] < 2_400


def test_mix_keeps_its_weights() -> None:
    found = Counter(drawn("mix:100=80,1000=18,16000=2"))
    assert set(found) == {100, 1_000, 16_000}
    assert 0.78 < found[100] / 20_000 < 0.82
    assert 0.015 < found[16_000] / 20_000 < 0.025


def test_no_value_is_larger_than_the_store_accepts() -> None:
    assert max(drawn("lognormal:900000:3.0")) == VALUE_BYTES_MAX


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "uniform:9:1",
        "uniform:1",
        "lognormal:1",
        "mix:",
        "mix:1=0",
        "1048577",
        "normal:1:2",
        "lognormal:9:nan",
        "lognormal:9:1000",
    ],
)
def test_unknown_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="value sizes"):
        sizes_of(text)
