"""Settings of logs that are refused."""

import pytest

from kvstore.types import Quorum
from kvstore.wal.config import LogConfig


# docs/protocol.md L1
def test_config_refuses_an_ack_quorum_of_one_unless_unsafe() -> None:
    one = Quorum(3, 3, 1)
    with pytest.raises(ValueError, match="ack quorum of at least 2, got 1"):
        LogConfig(quorum=one)
    assert LogConfig(quorum=one, unsafe=True).quorum == one


def test_config_refuses_ensembles_that_overfill_the_metadata() -> None:
    with pytest.raises(ValueError, match="quorum: expected roll_fragments times the ensemble to be at most 5000"):
        LogConfig(quorum=Quorum(6, 3, 2), roll_fragments=1_000)
    with pytest.raises(ValueError, match="got 32000000000"):
        LogConfig(quorum=Quorum(10**9, 10**9, 10**9))
    assert LogConfig(quorum=Quorum(5, 3, 2), roll_fragments=1_000).roll_fragments == 1_000
