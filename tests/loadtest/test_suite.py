"""The benchmark suite leaves no process behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError, Unavailable
from kvstore.server.layout import Wish
from loadtest import suite


@pytest.mark.parametrize("failure", [Unavailable("n2 ended while starting"), KeyboardInterrupt()], ids=repr)
def test_what_was_started_before_the_cluster_failed_is_ended(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    tried: list[int] = []

    class Failing:
        def __init__(self, data_dir: Path, _progress: Any) -> None:
            self.data_dir = data_dir

        def up(self, wish: Wish) -> None:
            tried.append(wish.port_offset)
            if len(tried) == 1:
                raise ConfigError("taken by another process: 127.0.0.1:31401")
            running.update(("zookeeper", "n1"))
            raise failure

        def down(self) -> None:
            running.clear()

    monkeypatch.setattr(suite, "LocalCluster", Failing)
    with pytest.raises(type(failure)), suite._cluster(None, tmp_path):
        raise AssertionError("there is no cluster to measure")
    assert tried == list(suite.OFFSETS[:2]), "ports that are taken are passed over, and nothing else"
    assert running == set()
