"""Every test of the ring runs with each key hash."""

from collections.abc import Iterator

import pytest

from kvstore.ring import HASHES, KeyHash
from tests.ring import rings


@pytest.fixture(scope="module", params=HASHES.values(), ids=lambda each: each.name, autouse=True)
def key_hash(request: pytest.FixtureRequest) -> Iterator[KeyHash]:
    before, rings.key_hash = rings.key_hash, request.param
    yield rings.key_hash
    rings.key_hash = before
