"""Adjusts the paths in the files of a local cluster whose folder was moved. Blocking."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from kvstore import config as toml
from kvstore.devcluster.layout import ClusterFile
from kvstore.devcluster.processes import place_of
from kvstore.devcluster.record import ClusterRecord, replace_file
from kvstore.errors import ConfigError
from kvstore.places import is_same_place, is_within
from kvstore.server.config import NodeConfig

_MARKS = ("node.toml", "zoo.cfg", "etcd/data")
"""Suffixes of the arguments that identify processes of a cluster: nodes, ZooKeeper and etcd."""


def move_here(data_dir: Path) -> None:
    """Adjust the record and each node's file of the cluster in this folder. An interrupted call can be repeated,
    because the record is written last. Raises ConfigError if a process of the cluster runs."""
    record = ClusterRecord(data_dir)
    found = record.read_or_none()
    if found is None or is_same_place(found.data_dir, data_dir):
        return
    old = found.data_dir
    if running := _running(old):
        raise ConfigError(f"--moved: {running} still runs in {old}; stop it first; a copied cluster is not a moved one")
    for node in found.nodes:
        path = data_dir / Path(node.config).relative_to(old)
        if path.exists():
            table = with_paths(toml.parse(toml.text_of(path), path), old, data_dir)
            replace_file(path, toml.to_toml(toml.from_table(table, NodeConfig)))
    document = with_paths(json.loads(json.dumps(found.document())), old, data_dir)
    record.save(ClusterFile.from_document(document).with_pids({}, None))


def with_paths(value: Any, old: Path, new: Path) -> Any:
    """Return the value with each path at or below `old` moved to `new`, at any depth. Idempotent."""
    match value:
        case dict():
            return {name: with_paths(each, old, new) for name, each in value.items()}
        case list() | tuple():
            return [with_paths(each, old, new) for each in value]
        case str() if value.startswith("/") and Path(value).is_relative_to(old):
            is_done = new.is_relative_to(old) and Path(value).is_relative_to(new)
            return value if is_done else str(new / Path(value).relative_to(old))
        case _:
            return value


def _running(folder: Path) -> str:
    """Describe a process that uses a file in the folder, as nodes and metadata stores do; empty if there is none."""
    for process in psutil.process_iter(["cmdline", "pid"]):
        for word in process.info["cmdline"] or ():
            with suppress(psutil.Error):
                if word.endswith(_MARKS) and is_within(place_of(process, word), folder):
                    return f"process {process.info['pid']} ({word})"
    return ""
