"""The reference of the commands, docs/reference/commands.md, from the tree that `kvstore --help` shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

from kvstore.cli.main import build
from scripts.pages import one_line, table

HEAD = """# Commands

Every command of `kvstore` with its options, for people at a terminal. `make reference` writes this page from the code:
do not edit it here. [The how-to guides](../how-to/index.md) tell when to use which command. Exit codes are 0 (done),
1 (refused or failed), 2 (wrong usage) and 130 (interrupted). A command with other exit codes lists them.
"""
ENVIRONMENT = """## Environment

No option takes a password or a token, because every account can read the arguments of processes. Commands read these
variables; the Python clients read the first two rows. Files with secrets need mode 0600.
"""
VARIABLES = (
    ("`KVSTORE_USER`, and `KVSTORE_PASSWORD_FILE` or `KVSTORE_PASSWORD`", "Login to the cluster"),
    ("`KVSTORE_TOKEN_FILE` or `KVSTORE_TOKEN`", "Access token, instead of a user and a password"),
    (
        "`KVSTORE_TLS_CA`, `KVSTORE_TLS_CERT`, `KVSTORE_TLS_KEY`",
        "PEM files for a cluster with TLS: its CA, and the certificate and key of the caller",
    ),
    (
        "`KVSTORE_METADATA_USER`, and `KVSTORE_METADATA_PASSWORD_FILE` or `KVSTORE_METADATA_PASSWORD`",
        "Login to the metadata store",
    ),
    (
        "`KVSTORE_METADATA_AUTH`, `KVSTORE_METADATA_ACL`",
        "As `auth` and `acl` of [`[metadata]`](configuration.md#metadata)",
    ),
    (
        "`KVSTORE_METADATA_TLS_CA`, `KVSTORE_METADATA_TLS_CERT`, `KVSTORE_METADATA_TLS_KEY`",
        "PEM files for a metadata store with TLS",
    ),
    ("`KVSTORE_SNAPSHOT_KEY_FILE` or `KVSTORE_SNAPSHOT_KEY`", "Key that signs the manifests of snapshots"),
    ("`KVSTORE_SNAPSHOT_NOTIFY`", "As `--notify` of `kvstore snapshot nightly`"),
    ("`KVSTORE_JAVA`", "The Java for a local ZooKeeper and for Spark"),
)
SHARED_BY = 20
"""Options that at least so many commands have are explained once."""
OWN = "--help"


def reference() -> str:
    """The whole page."""
    tree = [(path, command) for path, command in commands(typer.main.get_command(build())) if path]
    counted = Counter(row for path, command in tree for row in rows_of(path, command))
    shared = [row for row, count in counted.items() if count >= SHARED_BY]
    parts = [
        HEAD,
        "Most commands have these options, which are only named below:\n",
        options(shared),
        ENVIRONMENT,
        table(("variable", "description"), VARIABLES),
    ]
    for path, command in tree:
        rows = rows_of(path, command)
        parts.append(f"{'##' if len(path) == 1 else '###'} kvstore {' '.join(path)}\n\n{paragraphs(command.help)}\n")
        if hasattr(command, "commands"):
            continue
        usage = " ".join(command.collect_usage_pieces(typer.Context(command)))
        parts.append(f"`kvstore {' '.join(path)} {usage}`\n")
        if own := [row for row in rows if row not in shared]:
            parts.append(options(own))
        if also := [f"`{row[0].partition(' <')[0]}`" for row in rows if row in shared]:
            parts.append(f"Also: {', '.join(also)}.\n")
    return "\n".join(parts)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The whole tree, each command with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def rows_of(path: tuple[str, ...], command: Any) -> list[tuple[str, str]]:
    """Arguments and options with what help says of them."""
    context = typer.Context(command, info_name=path[-1])
    records = [each.get_help_record(context) for each in command.params]
    return [
        (one_line(record[0]), one_line(record[1]).replace("[required]", "(required)"))
        for record in records
        if record and OWN not in record[0]
    ]


def options(rows: list[tuple[str, str]]) -> str:
    return table(
        ("argument or option", "description"), [(f"`{option}`", text.replace("[", "\\[")) for option, text in rows]
    )


def paragraphs(text: str) -> str:
    """A help text without its indentation and line breaks; the blank lines between its paragraphs stay."""
    return "\n\n".join(one_line(each) for each in re.split(r"\n\s*\n", text.replace("\b", "")))
