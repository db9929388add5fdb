"""Every test of the ring runs with each key hash."""

import pytest

from kvstore.ring import KeyHash


@pytest.fixture(scope="module", autouse=True)
def _each(key_hash: KeyHash) -> None:
    pass
