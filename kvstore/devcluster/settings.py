"""Settings of `kvstore up --set SECTION.NAME=VALUE`: into the node.toml files of a local cluster. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig

PLACED = (
    *("id", "zookeeper", "metadata.uri", "data_dir", "secret_file", "log_dir", "bookie", "bookie_id", "resp", "grpc"),
    *("http", "log.bookies"),
    *("storage.journal_dir", "storage.journal_dirs", "storage.index_dir", "storage.lost_dirs"),
)
"""Settings that differ from node to node, or that the cluster's record says too."""


def parse(text: str) -> Setting:
    """One that is the same on all nodes. Raises ConfigError."""
    found = toml.setting(text)
    if found.name in PLACED or found.name.partition(".")[0] in PLACED:
        raise ConfigError(f"--set {found.name}: `kvstore up` itself decides {found.name} of each node")
    return found


def with_settings(text: str, settings: Sequence[Setting], *, what: str) -> str:
    """The text of a node.toml with other values. `what` names the file in errors. Raises ConfigError, also for what the
    file itself has wrong."""
    table = toml.with_settings(toml.parse(text, Path(what)), settings)
    try:
        return toml.to_toml(toml.from_table(table, NodeConfig))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
