"""The configurations of a machine's processes, and all faults of the file that they come from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvstore import config as toml
from kvstore.errors import ConfigError
from kvstore.server.config import PROCESSES_MAX, NodeConfig
from kvstore.server.processes import configs_of, split

GOOD: dict[str, Any] = {"id": "n1", "zookeeper": "h:1/kv", "data_dir": "/kv", "secret_file": "/secret"}


def config(**settings: Any) -> NodeConfig:
    return toml.from_table({**GOOD, **settings}, NodeConfig)


def test_one_process_is_the_node_of_the_file() -> None:
    assert configs_of(config(zone="a")) == [config(zone="a")]
    assert configs_of(config()) == [config()]


def test_first_process_keeps_its_place_whatever_the_number() -> None:
    two, four = configs_of(config(processes=2)), configs_of(config(processes=4))
    for one, other in zip(two, four, strict=False):
        assert [getattr(one, name) for name in ("id", "data_dir", "zone", *one.listeners())] == [
            getattr(other, name) for name in ("id", "data_dir", "zone", *other.listeners())
        ]
    assert (two[0].id, two[0].data_dir, two[0].listeners()) == ("n1", Path("/kv"), config().listeners())


def test_further_processes_follow_by_number() -> None:
    third = configs_of(config(processes=3, advertise="m1", grpc="0.0.0.0:7401", insecure=True))[2]
    assert (third.id, third.data_dir, third.zone, third.processes) == ("n1.3", Path("/kv/process-3"), "n1", 1)
    assert third.listeners() == {
        "http": "127.0.0.1:8403",
        "bookie": "127.0.0.1:3183",
        "resp": "127.0.0.1:6403",
        "grpc": "0.0.0.0:7403",
    }
    assert third.advertised(third.grpc) == "m1:7403"


def test_free_ports_and_zones_of_the_file_stay() -> None:
    for each in configs_of(config(processes=2, http="127.0.0.1:0", zone="rack-1")):
        assert (each.http, each.zone) == ("127.0.0.1:0", "rack-1")


def test_absolute_directories_get_the_number() -> None:
    storage = {
        "journal_dirs": ["journal", "/disk2/journal"],
        "lost_dirs": ["/disk2/journal"],
        "index_dir": "/ssd/index",
    }
    one, two = configs_of(config(processes=2, storage=storage))
    assert one.storage.journal_dirs == ("journal", "/disk2/journal")
    assert two.storage.journal_dirs == ("journal", "/disk2/journal-2")
    assert (two.storage.lost_dirs, two.storage.index_dir) == (("/disk2/journal-2",), "/ssd/index-2")


def test_budgets_are_divided_and_the_reserve_is_multiplied() -> None:
    whole = config()
    for each in configs_of(config(processes=4)):
        assert each.partition.memory_bytes * 4 == whole.partition.memory_bytes
        assert each.storage.scrub_bytes_per_s * 4 == whole.storage.scrub_bytes_per_s
        assert each.storage.rewrite_bytes_per_s * 4 == whole.storage.rewrite_bytes_per_s
        assert each.autorecovery.bytes_per_s * 4 == whole.autorecovery.bytes_per_s
        assert each.storage.reserve_bytes == 4 * whole.storage.reserve_bytes
    assert configs_of(config(processes=2, storage={"scrub_bytes_per_s": 0}))[0].storage.scrub_bytes_per_s == 0


@pytest.mark.parametrize("count", [1, 2, 16])
def test_configurations_survive_their_file(count: int) -> None:
    """The supervisor writes them as TOML, and the process reads that."""
    for each in configs_of(config(processes=count, storage={"journal_dirs": ["/a", "/b"]}, roles=["bookie"])):
        assert toml.from_table(toml.parse(toml.to_toml(each), Path("x")), NodeConfig) == each


def test_every_pair_of_processes_shares_no_place() -> None:
    found = configs_of(config(processes=9, storage={"journal_dirs": ["/a", "/b"]}))
    for one, other in itertools.combinations(found, 2):
        assert not set(one.listeners().values()) & set(other.listeners().values())
        assert one.id != other.id
        assert one.data_dir != other.data_dir
        assert not set(one.outside) & set(other.outside)


def test_all_faults_are_named_at_once() -> None:
    wrong = config(
        processes=4,
        resp="127.0.0.1:65533",
        http="127.0.0.1:65534",
        bookie_id="h:3181",
        partition={"memory_bytes": 32 << 20},
        storage={"rewrite_bytes_per_s": 2_000},
        autorecovery={"bytes_per_s": 2_048},
    )
    with pytest.raises(ConfigError) as caught:
        configs_of(wrong)
    assert sorted(each.partition(":")[0] for each in caught.value.faults) == [
        "autorecovery.bytes_per_s",
        "bookie_id",
        "http",
        "partition.memory_bytes",
        "resp",
        "storage.rewrite_bytes_per_s",
    ]
    assert "resp: expected a port of at most 65535 for process 4, got 65536" in caught.value.faults


def test_ports_of_processes_that_collide_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        configs_of(config(processes=3, http="127.0.0.1:6403", bookie="127.0.0.1:6400"))
    assert sorted(caught.value.faults) == [
        "bookie: expected an unused address of process 2, got 127.0.0.1:6401, which resp uses, too",
        "bookie: expected an unused address of process 3, got 127.0.0.1:6402, which resp of process 2 uses, too",
        "resp: expected an unused address of process 3, got 127.0.0.1:6403, which http uses, too",
    ]


def test_file_of_a_further_process_has_no_processes() -> None:
    assert [each.name for each in split(config(id="n1.2", processes=2))[1]] == ["id"]
    assert split(config(id="n1.2"))[1] == []


@pytest.mark.parametrize("id", ["n1.1", "n1.0", "n1.02", "n1.100", "n1.", "n1.2.3", ".2", "n1.x"])
def test_only_numbers_of_further_processes_follow_a_dot(id: str) -> None:
    with pytest.raises(ConfigError, match="id: expected"):
        config(id=id)


def test_more_processes_than_the_limit_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"processes: expected 1 to {PROCESSES_MAX}"):
        config(processes=PROCESSES_MAX + 1)
