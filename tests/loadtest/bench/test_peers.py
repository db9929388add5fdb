"""A cluster to be measured finds free ports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.devcluster.layout import UpOptions
from kvstore.errors import ConfigError
from loadtest.bench.peers import up_on_free_ports

if TYPE_CHECKING:
    from kvstore.devcluster.local import LocalCluster

TAKEN = "taken by another process: 127.0.0.1:31401"


class Cluster:
    """Refuses the given offsets, once each; then it is up."""

    data_dir = Path("data")

    def __init__(self, *refusals: str) -> None:
        self._refusals, self.wishes = list(refusals), list[UpOptions]()

    def up(self, wish: UpOptions) -> str:
        self.wishes.append(wish)
        if self._refusals:
            raise ConfigError(self._refusals.pop(0))
        return "up"


def up(cluster: Cluster) -> object:
    return up_on_free_ports(cast("LocalCluster", cluster), range(100, 400, 100), partitions=5)


def test_ports_that_are_taken_are_passed_over() -> None:
    cluster = Cluster(TAKEN, TAKEN)
    assert up(cluster) == "up"
    assert [(each.port_offset, each.partitions) for each in cluster.wishes] == [(100, 5), (200, 5), (300, 5)]


@pytest.mark.parametrize(("refusals", "message"), [([TAKEN] * 3, "no free ports"), (["no Java"], "no Java")])
def test_error_that_cannot_be_ignored_is_reported(refusals: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        up(Cluster(*refusals))
