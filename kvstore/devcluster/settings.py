"""Applies `kvstore up --set SECTION.NAME=VALUE` to the node.toml files of a local cluster. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig

PLACED = (
    *("id", "zookeeper", "metadata.uri", "data_dir", "secret_file", "log_dir", "bookie", "bookie_id", "resp", "grpc"),
    *("http", "log.bookies", "processes"),
    *("storage.journal_dir", "storage.journal_dirs", "storage.index_dir", "storage.lost_dirs"),
)
"""Settings that differ from node to node, or that are also in the cluster's record."""


def parse(text: str) -> Setting:
    """Parse a setting that is the same on all nodes. Raises ConfigError."""
    found = toml.setting(text)
    if found.name in PLACED or found.name.partition(".")[0] in PLACED:
        raise ConfigError(f"--set {found.name}: `kvstore up` sets {found.name} of each node itself")
    return found


def with_settings(text: str, settings: Sequence[Setting], *, what: str) -> str:
    """Return the text of a node.toml with other values. `what` names the file in errors. Raises ConfigError if the file
    or a value is invalid."""
    table = toml.with_settings(toml.parse(text, Path(what)), settings)
    try:
        return toml.to_toml(toml.from_table(table, NodeConfig))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
