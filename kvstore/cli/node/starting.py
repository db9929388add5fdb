"""Starts what a node's file describes: a node, or the supervisor of a machine's processes. Imports only what it runs,
because a supervisor needs a small part of a node's code."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from kvstore import config as toml
from kvstore.config import Setting
from kvstore.env.parent import end_with_parent
from kvstore.server.config import NodeConfig


def start(path: Path, settings: Sequence[Setting] = ()) -> None:
    """Run until SIGTERM or SIGINT. `settings` override the file. Raises ConfigError, OSError."""
    is_supervised = end_with_parent(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it asks for new certificates, and none have been read yet
    config = toml.read(path, NodeConfig, settings)
    if config.processes > 1:
        from kvstore.server.host import run_host

        run_host(config)
        return
    gc.disable()  # modules that are being loaded are no garbage; collecting them took a tenth of the start
    from kvstore.server.node import run_node

    gc.enable()
    run_node(config, is_supervised=is_supervised)
