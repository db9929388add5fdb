"""`kvstore ring`, without a cluster."""

from __future__ import annotations

import pytest

from tests.commands import kvstore


@pytest.mark.parametrize("key", ["", "k" * 4097])
def test_key_that_no_server_accepts_is_not_located(key: str) -> None:
    answer = kvstore("ring", "locate", key, "--server", "127.0.0.1:1")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert f"expected a key of 1 to 4096 bytes, got {len(key)}" in answer.stderr
