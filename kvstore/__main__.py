"""`python -m kvstore` and the `kvstore` command. A node starts here without the tree of commands: what reads them would
stay in its memory, 11 MB of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import StoreError
from kvstore.places import fault_of

__all__ = ["main"]


def plain_node_run(words: Sequence[str]) -> tuple[Path, bool] | None:
    """The configuration and `--insecure` of a plain `node run`. None for all else, wrong usage and `--help` too, which
    the tree of commands answers."""
    match words:
        case ["node", "run", "--config", config]:
            is_insecure = False
        case ["node", "run", "--config", config, "--insecure"] | ["node", "run", "--insecure", "--config", config]:
            is_insecure = True
        case _:
            return None
    is_path = config and not config.startswith("-") and not fault_of(config)
    return (Path(config), is_insecure) if is_path else None


def main() -> None:
    """Run a command line. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    found = plain_node_run(sys.argv[1:])
    if found is None:
        from kvstore.cli.main import main as run_tree

        run_tree()
        return
    from kvstore.server.node import run_node

    config, is_insecure = found
    try:
        run_node(config, insecure=is_insecure)
    except (StoreError, OSError, KeyboardInterrupt) as error:
        from kvstore.cli.main import end

        end(error)


if __name__ == "__main__":
    main()
