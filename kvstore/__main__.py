"""The `python -m kvstore` entry point and the `kvstore` command.

`node run` starts without the command tree, because the modules that parse the tree would add 11 MB to a node's memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.config import Setting, setting
from kvstore.env.files.private import PRIVATE_UMASK
from kvstore.errors import StoreError
from kvstore.extras import install_hint
from kvstore.places import fault_of
from kvstore.standard_streams import prepare_standard_streams

__all__ = ["main"]
INSECURE = Setting("insecure", True)


def plain_node_run(words: Sequence[str]) -> tuple[Path, list[Setting]] | None:
    """Return the configuration file and options of a plain `node run`. Return None for any other command line,
    including wrong usage and `--help`, which the command tree handles."""
    if list(words[:2]) != ["node", "run"]:
        return None
    config, settings, rest = "", [], iter(words[2:])
    for word in rest:
        value = "" if word == "--insecure" else next(rest, "-")
        if word == "--insecure":
            settings.append(INSECURE)
        elif word == "--config" and not config and is_file_name(value):
            config = value
        elif word == "--set" and not value.startswith("-"):
            settings.append(setting(value))
        else:
            return None
    return (Path(config), settings) if config else None


def is_file_name(word: str) -> bool:
    """Return True if a word of a command line can be a path."""
    return bool(word) and not word.startswith("-") and not fault_of(word)


def main() -> None:
    """Run a command line. Exit codes: 0 success, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    prepare_standard_streams()
    os.umask(PRIVATE_UMASK)
    try:
        found = plain_node_run(sys.argv[1:])
        if found is None:
            from kvstore.cli.main import main as run_tree

            run_tree()
            return
        from kvstore.cli.node.starting import start

        start(*found)
    except (StoreError, OSError, KeyboardInterrupt) as error:
        from kvstore.cli.main import end

        end(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvstore":
            raise
        sys.exit(f"kvstore: no module {error.name}: {install_hint('node')}")


if __name__ == "__main__":
    main()
