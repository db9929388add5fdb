"""Runs a command in a process that a shell has prepared: descriptors, limits, ignored signals."""

from __future__ import annotations

from collections.abc import Sequence


def run_by_shell(preparation: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs `preparation` in a shell and then becomes `command`.

    subprocess has `preexec_fn` for this. It forks without exec, so gRPC's fork handlers run in the child, where they
    abort now and then.
    """
    return ["sh", "-c", f'{preparation}exec "$@"', "sh", *command]
