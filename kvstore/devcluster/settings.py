"""Settings of `kvstore up --set SECTION.NAME=VALUE`: into the node.toml files of a local cluster. Decides only."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore import config as toml
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig

_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)*")
PLACED = ("id", "zookeeper", "data_dir", "secret_file", "log_dir", "bookie", "resp", "grpc", "http", "log.bookies")
"""Settings that differ from node to node, or that the cluster's record says too."""


class Setting(NamedTuple):
    """A value for one name of node.toml."""

    name: str
    """With dots between sections."""
    value: Any


def parse(text: str) -> Setting:
    """A value is TOML; what is not TOML is a word. Raises ConfigError."""
    name, is_there, value = text.partition("=")
    if not is_there or not _NAME.fullmatch(name):
        raise ConfigError(f"--set {text}: want SECTION.NAME=VALUE, for example autorecovery.lost_bookie_delay_s=5")
    if name in PLACED or name.partition(".")[0] in PLACED:
        raise ConfigError(f"--set {text}: `kvstore up` itself decides {name} of each node")
    try:
        found = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return Setting(name, value)
    return Setting(name, found["value"]) if list(found) == ["value"] else Setting(name, value)


def with_settings(text: str, settings: Sequence[Setting], *, what: str) -> str:
    """The text of a node.toml with other values. `what` names the file in errors. Raises ConfigError, also for what the
    file itself has wrong."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what}: not TOML: {error}") from error
    for setting in settings:
        *sections, name = setting.name.split(".")
        section = table
        for each in sections:
            section = section.setdefault(each, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--set {setting.name}: {each} is a value, not a section")
        section[name] = setting.value
    try:
        return toml.to_toml(toml.from_table(table, NodeConfig))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
