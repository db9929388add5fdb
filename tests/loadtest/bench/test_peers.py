"""A cluster to be measured finds free ports, and leaves no process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstore.devcluster.layout import UpOptions
from kvstore.errors import ConfigError, Unavailable
from loadtest.bench import peers

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


@pytest.fixture(autouse=True)
def _three_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "OFFSETS", range(100, 400, 100))


def up(cluster: Cluster) -> object:
    return peers.up_on_free_ports(cast("LocalCluster", cluster), partitions=5)


def test_ports_that_are_taken_are_passed_over() -> None:
    cluster = Cluster(TAKEN, TAKEN)
    assert up(cluster) == "up"
    assert [(each.port_offset, each.partitions) for each in cluster.wishes] == [(100, 5), (200, 5), (300, 5)]


@pytest.mark.parametrize(("refusals", "message"), [([TAKEN] * 3, "no free ports"), (["no Java"], "no Java")])
def test_error_that_cannot_be_ignored_is_reported(refusals: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        up(Cluster(*refusals))


@pytest.mark.parametrize("failure", [Unavailable("n2 ended while starting"), KeyboardInterrupt()], ids=repr)
def test_processes_started_before_the_cluster_failed_are_ended(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    tried: list[int] = []

    class Failing:
        def __init__(self, data_dir: Path, _progress: Any) -> None:
            self.data_dir = data_dir

        def up(self, wish: UpOptions) -> None:
            tried.append(wish.port_offset)
            self.data_dir.mkdir()
            if len(tried) == 1:
                self.data_dir.rmdir()
                raise ConfigError("taken by another process: 127.0.0.1:31401")
            if len(tried) == 2:
                raise Unavailable("node n1 ended while starting; it said:\nOSError: [Errno 98] Address already in use")
            running.update(("zookeeper", "n1"))
            raise failure

        def down(self) -> None:
            running.clear()

    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(failure)), peers.kvstore(cast("type[LocalCluster]", Failing)):
        raise AssertionError("there is no cluster to measure")
    assert tried == list(peers.OFFSETS[:3]), "ports that are taken are passed over, and nothing else"
    assert running == set()
    assert not list(tmp_path.glob("reports/*"))
