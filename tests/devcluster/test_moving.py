"""A moved folder of a local cluster continues with one command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from kvstore import config as toml
from kvstore.devcluster import layout
from kvstore.devcluster.layout import UpOptions
from kvstore.devcluster.moving import move_here, with_paths
from kvstore.devcluster.record import ClusterRecord
from kvstore.errors import ConfigError
from tests.waiting import wait_until_blocking


def a_cluster(folder: Path) -> None:
    """The files of the cluster, with a disk directory beside it whose name begins with the same prefix."""
    made = layout.plan(UpOptions(data_dir=folder), None).with_pids({"n1": 17}, 18)
    for node in made.nodes:
        config = Path(node.config)
        config.parent.mkdir(parents=True)
        text = toml.to_toml(layout.node_config(made, node, folder))
        config.write_text(f'{text}\n[storage]\njournal_dir = "{folder}-fast/{node.id}"\n', encoding="utf-8")
    ClusterRecord(folder).save(made)


@pytest.mark.parametrize("name", ["a b & c", "jörg", "old/deeper", "old-2"])
def test_moved_folder_continues_in_its_new_place(tmp_path: Path, name: str) -> None:
    old, new = tmp_path / "old", tmp_path / name
    a_cluster(old)
    (tmp_path / "away").mkdir()
    old.rename(tmp_path / "away" / "x")
    new.parent.mkdir(exist_ok=True)
    (tmp_path / "away" / "x").rename(new)
    with pytest.raises(ConfigError) as refused:
        ClusterRecord(new).load_or_none()
    command = str(refused.value).partition("`")[2].partition("`")[0]
    assert shlex.split(command) == ["kvstore", "up", "--moved", "--data-dir", str(new)]
    move_here(new)
    found = ClusterRecord(new).load_or_none()
    assert found is not None
    assert (found.data_dir, found.zookeeper_pid, found.nodes[0].pid) == (new, None, None)
    for node in found.nodes:
        table = tomllib.loads(Path(node.config).read_text(encoding="utf-8"))
        assert table["data_dir"] == f"{new}/{node.id}"
        assert table["storage"]["journal_dir"] == f"{old}-fast/{node.id}"
    before = (new / "cluster.json").read_bytes()
    move_here(new)
    assert (new / "cluster.json").read_bytes() == before


def test_paths_are_changed_once() -> None:
    old, deeper = Path("/data"), Path("/data/deeper")
    once = with_paths({"a": ["/data/n1", "/data", "/database", "data/n1", 5]}, old, deeper)
    assert once == {"a": ["/data/deeper/n1", "/data/deeper", "/database", "data/n1", 5]}
    assert with_paths(once, old, deeper) == once
    assert with_paths("/data/deeper/n1", deeper, old) == "/data/n1"


def test_copy_of_a_cluster_that_runs_is_none_that_was_moved(tmp_path: Path) -> None:
    a_cluster(tmp_path / "old")
    (tmp_path / "new").mkdir()
    text = json.dumps(json.loads((tmp_path / "old" / "cluster.json").read_text()))
    (tmp_path / "new" / "cluster.json").write_text(text)
    words = ["-c", "import sys; sys.stdin.read()", "node", "run", "--config", f"{tmp_path}/old/n2/node.toml"]
    with subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE) as process:
        try:
            # The arguments are empty for a moment while the process loads its program.
            wait_until_blocking(psutil.Process(process.pid).cmdline, what="the process' words")
            with pytest.raises(
                ConfigError, match=rf"process {process.pid} .*n2/node.toml\) still runs in {tmp_path}/old"
            ):
                move_here(tmp_path / "new")
        finally:
            process.kill()
    assert (tmp_path / "new" / "cluster.json").read_text() == text


@pytest.mark.parametrize("word", ["link/n2/node.toml", "real/zookeeper/zoo.cfg", "real/etcd/data"])
def test_moving_is_refused_while_a_process_runs_by_another_path(tmp_path: Path, word: str) -> None:
    """A process can be started through a symbolic link, or from its working directory."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    a_cluster(tmp_path / "link")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "cluster.json").write_bytes((tmp_path / "real" / "cluster.json").read_bytes())
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            wait_until_blocking(psutil.Process(process.pid).cmdline, what="the process' words")
            with pytest.raises(ConfigError, match=f"process {process.pid} "):
                move_here(tmp_path / "new")
        finally:
            process.kill()
