"""Namespace limits as users type them."""

from __future__ import annotations

import pytest
import typer

from kvstore.cli.access.namespaces import _limits


def test_numbers_are_read_with_their_units() -> None:
    assert _limits("2M", "64K", "10k", None, "12h") == {
        "keys_max": 2_000_000,
        "bytes_max": 65_536,
        "ops_per_s": 10_000,
        "burst": None,
        "ttl_ms": 43_200_000,
    }


@pytest.mark.parametrize("wrong", ["-1", "1.5", "many", "5 X", "", "999999999999999999T", "9007199254740993"])
def test_number_that_makes_no_sense_is_refused_by_its_option(wrong: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected") as refused:
        _limits(None, wrong, None, None, None)
    assert refused.value.param_hint == "--bytes"
