"""Groups of commands to which several branches of the command tree add."""

from __future__ import annotations

import typer


def group_of(app: typer.Typer, name: str) -> typer.Typer:
    """Return the group that an earlier branch of kvstore.cli.main.BRANCHES has added."""
    found = {group.name: group.typer_instance for group in app.registered_groups}[name]
    assert found is not None, f"an earlier branch adds {name}"
    return found
