"""What is learned about processes of a local cluster."""

from __future__ import annotations

from typing import Any, cast

from kvstore.devcluster.processes import arguments_of


class Loading:
    """A process that has no arguments until it was asked some times."""

    def __init__(self, empty: int) -> None:
        self._empty = empty

    def cmdline(self) -> list[str]:
        self._empty -= 1
        return [] if self._empty >= 0 else ["kvstore", "node", "run"]


def test_arguments_of_a_process_that_loads_its_program_are_awaited() -> None:
    """A full machine may interrupt the loading: `kvstore up` took such a node for one that had ended."""
    assert arguments_of(cast("Any", Loading(20))) == ["kvstore", "node", "run"]
    assert arguments_of(cast("Any", Loading(20)), wait_s=0.0) == []
