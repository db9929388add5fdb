import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore import config as toml
from kvstore.bookie.config import StorageConfig
from kvstore.config import Setting
from kvstore.devcluster import layout
from kvstore.devcluster.layout import UpOptions, plan
from kvstore.devcluster.local import LocalCluster, _write
from kvstore.devcluster.settings import PLACED, parse, with_settings
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig
from kvstore.types import Quorum

CLUSTER = plan(UpOptions(data_dir=Path("/data")), None)
TEXT = toml.to_toml(layout.node_config(CLUSTER, CLUSTER.nodes[0], Path("/data")))


def read(text: str) -> NodeConfig:
    return toml.from_table(tomllib.loads(text), NodeConfig)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("log.roll_bytes=1024", 1024),
        ("repair_after_s=1.5", 1.5),
        ("insecure=true", True),
        ('zone="r1"', "r1"),
        ("zone=r1", "r1"),
        ("zone=", ""),
        ("zone=a=b", "a=b"),
        ('roles=["bookie"]', ["bookie"]),
        ("zone=1\nunsafe = true", "1\nunsafe = true"),
    ],
)
def test_value_is_toml_or_a_plain_string(text: str, value: object) -> None:
    assert parse(text) == Setting(text.partition("=")[0], value)


@pytest.mark.parametrize(
    "text", ["", "zone", "=5", ".a=5", "a..b=5", "log.=5", "Log.roll_bytes=5", *map("{}=5".format, PLACED)]
)
def test_unknown_or_node_specific_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse(text)


def test_no_place_of_one_node_goes_into_the_files_of_all() -> None:
    """Three bookies in one directory refuse each other's cookies permanently."""
    directories = {f"storage.{each.name}" for each in fields(StorageConfig) if each.name.endswith(("_dir", "_dirs"))}
    assert directories | {"bookie_id", "metadata.uri"} <= set(PLACED)


def test_settings_of_any_depth_are_written_and_all_others_stay() -> None:
    settings = [parse(each) for each in ("repair_after_s=5", "log.quorum.ensemble=4", "log.quorum.write=3", "zone=r1")]
    settings += [Setting("log.quorum.ack", 2), parse("autorecovery.lost_bookie_delay_s=5")]
    found = read(with_settings(TEXT, settings, what="node.toml"))
    assert (found.repair_after_s, found.zone, found.autorecovery.lost_bookie_delay_s) == (5.0, "r1", 5)
    assert found.log.quorum == Quorum(4, 3, 2)
    assert (found.id, found.resp) == (read(TEXT).id, read(TEXT).resp)
    assert with_settings(TEXT, [], what="node.toml") == TEXT


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("log.roll_byte=5", "log.roll_byte: unknown"),
        ("log.roll_bytes=five", "log.roll_bytes: expected a whole number, got 'five'"),
        ("server.redis_flush='maybe'", "server.redis_flush: expected true or false, got 'maybe'"),
        ("log.roll_bytes=0", "roll_bytes: expected 1 to 1099511627776"),
        ("zone.a=5", "zone is a value"),
        ("nothing.a=5", "nothing: unknown"),
    ],
)
def test_setting_that_a_node_would_refuse_is_refused_with_its_file(setting: str, says: str) -> None:
    text = f'zone = "r1"\n{TEXT}'
    with pytest.raises(ConfigError, match=says):
        with_settings(text, [parse(setting)], what="/data/n1/node.toml")


def test_nothing_is_written_when_one_nodes_file_would_be_wrong(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path)
    cluster = plan(UpOptions(data_dir=tmp_path), None)
    files = local._files_with([parse("zone=r1")], cluster, is_moved=False)
    _write(files)
    assert [read(Path(node.config).read_text()).zone for node in cluster.nodes] == ["r1"] * 3
    assert local._files_with([parse("zone=r1")], cluster, is_moved=False) == {}, "they say so already"
    Path(cluster.nodes[2].config).write_text("id = 5\n")
    with pytest.raises(ConfigError, match="n3"):
        local._files_with([parse("zone=r2")], cluster, is_moved=False)
    assert read(Path(cluster.nodes[0].config).read_text()).zone == "r1"
