"""A bookie's configuration."""

from __future__ import annotations

import pytest

from kvstore.bookie.config import BookieConfig
from kvstore.errors import ConfigError


def test_default_bookie_config_is_valid() -> None:
    assert BookieConfig(name="n1").segment_bytes == 64 << 20


def test_bookie_config_names_all_faults_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"name.*listen.*index_dir.*sparse_share.*scrub_bytes_per_s.*pending_bytes_max"
    ):
        BookieConfig(
            name="a/b", listen="here", index_dir="bookie/journal", sparse_share=1, scrub_bytes_per_s=-1,
            pending_bytes_max=0,
        )  # fmt: skip
