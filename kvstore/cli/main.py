"""The `kvstore` command: a tree of subcommands, one module per branch. Errors go to standard error, with a non-zero
exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from kvstore.cli.cluster import with_options
from kvstore.errors import NoSuchNode, StoreError

BRANCHES = {
    "local": ("up", "down", "node"),
    "node.commands": ("node",),
    "status.command": ("status",),
    "data": ("get", "put", "del", "scan", "count", "delete-prefix", "load-tree", "verify-tree"),
    "watching": ("watch",),
    "cluster_init": ("cluster",),
    "ring": ("ring",),
    "partitions": ("partition",),
    "replicas": ("partition",),
    "even_replicas": ("partition",),
    "intents": ("partition",),
    "balance": ("balance",),
    "transactions": ("transaction",),
    "ledgers": ("ledger",),
    "bookies": ("bookie", "autorecovery"),
    "snapshots": ("snapshot",),
    "bench": ("bench",),
    "fsck": ("fsck",),
    "access.users": ("user", "role", "access"),
    "access.tokens": ("token",),
    "access.namespaces": ("namespace",),
}
"""Modules of this package, with the first words of their commands. Each has `register(app)`, which adds the commands.
Heavy imports are inside the commands."""


HELP = """A distributed key-value store whose only source of truth is a replicated log.

Start a local cluster with `kvstore up`. Other commands use it, or the cluster that --server HOST:PORT or --metadata
HOST:PORT/CHROOT names. `kvstore COMMAND --help` describes a command."""
HELP_COLUMNS_MAX = 120
"""Maximum width of help on a wider terminal. In 80 columns the lists of commands cut most summaries."""


class _Commands(typer.core.TyperGroup):
    """The command tree. A closed output pipe, as in a pipe to `head`, is not an error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest of the output
            return None
        return done


def branches_of(words: Sequence[str]) -> list[str]:
    """Return the branches that a command line needs: one command's if the line begins with its name, none for the
    version, otherwise all, because help and errors need the whole tree. Loading all branches took a third of the time
    of a `get`."""
    first = words[0] if words else ""
    if first == "--version":
        return []
    return [name for name, begin in BRANCHES.items() if first in begin] or list(BRANCHES)


def build(branches: Iterable[str] = BRANCHES) -> typer.Typer:
    """Return the command tree of the branches that are installed."""
    app = typer.Typer(
        name="kvstore",
        cls=_Commands,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets in help texts are literal
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS_MAX},
    )
    app.callback()(_root)
    for branch in branches:
        name = f"kvstore.cli.{branch}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register(app)
    _give_options(app)
    return app


def _give_options(app: typer.Typer) -> None:
    """Give each command of the tree its options --data-dir, --metadata and --server."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _give_options(group.typer_instance)


def _version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("kvstore-log"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself. `HELP` is its help."""


def main() -> None:
    """Run a command line. Exit codes: 0 success, also if the output pipe was closed; 1 refused or failed; 2 wrong
    usage; 130 interrupted."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC logs each failed handshake; errors report the last one
    try:
        build(branches_of(sys.argv[1:]))()
    except UnicodeEncodeError as error:  # bytes of an argument that are no text, in a place other than a key
        fail(StoreError(f"expected UTF-8, got {error.object!r}"))
    except (StoreError, OSError, KeyboardInterrupt) as error:
        end(error)


def end(error: StoreError | OSError | KeyboardInterrupt) -> None:
    """Report the error on standard error and exit."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    if isinstance(error, OSError) and not isinstance(error, StoreError):  # an error of a file or folder
        error = StoreError(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    fail(error)


def fail(error: StoreError) -> None:
    """Report the error on standard error and exit with 1."""
    text = (
        f"the metadata store has no {error}; check that it holds a cluster at this path"
        if isinstance(error, NoSuchNode)
        else error
    )
    print(f"kvstore: {text or type(error).__name__}", file=sys.stderr)
    sys.exit(1)
