"""Clients that were open when their process was forked. The child has them too, and must not use them: it would send on
connections on which the parent sends, and give out the request ids that the parent gives out. Of two requests with one
id on one key the second counts as the first one's retry, and gets its answer without being done.

So in the child every call is refused; a client that is opened there is another one. Sessions are over in it: only the
parent hears when their keys are released, and another process may have them then.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

FORKED = "the client was opened before this process was forked: open one in each process, after the fork"


class Engine(Protocol):
    """The state of a client, or of a session, that is open."""

    def leave_to_parent(self) -> None:
        """In a child: touch nothing that is the parent's, wait for no lock of a thread that is not here, and refuse all
        calls from now on."""
        ...


_engines: WeakSet[Engine] = WeakSet()


def watch(engine: Engine) -> None:
    """Have the engine told if the process is forked."""
    _engines.add(engine)


def _leave_all() -> None:
    for engine in list(_engines):
        engine.leave_to_parent()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_leave_all)
