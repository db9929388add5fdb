"""Settings of logs that are refused."""

import pytest

from kvstore.types import Quorum
from kvstore.wal.config import LogConfig


# docs/protocol.md L1
def test_an_ack_quorum_of_one_is_refused_unless_it_is_asked_for() -> None:
    one = Quorum(3, 3, 1)
    with pytest.raises(ValueError, match="ack quorum 1"):
        LogConfig(quorum=one)
    assert LogConfig(quorum=one, unsafe=True).quorum == one
