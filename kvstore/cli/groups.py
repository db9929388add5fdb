"""Command groups that several branches of the command tree extend."""

from __future__ import annotations

import typer


def group_of(app: typer.Typer, name: str) -> typer.Typer:
    """Return a group that an earlier branch of kvstore.cli.main.BRANCHES has added."""
    found = {group.name: group.typer_instance for group in app.registered_groups}[name]
    assert found is not None, f"an earlier branch adds {name}"
    return found
