"""Clients that were open when their process was forked. The child has them too, and must not use them: it would send on
connections on which the parent sends, and give out the request ids that the parent gives out. Of two requests with one
id on one key the second counts as the first one's retry, and gets its answer without being done.

So in the child every call is refused; a client that is opened there is another one. So it is with watches and readers
of the feed: their streams are the parent's, and gRPC would wait for threads that are not here. Sessions are over in it:
only the parent hears when their keys are released, and another process may have them then.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from kvstore.errors import InvalidRequest

FORKED = "the client was opened before this process was forked: open one in each process, after the fork"


class OpenedBeforeFork(Protocol):
    """Something that knows whether it was open when this process was forked from the parent's."""

    is_forked: bool


class ForkAware(Protocol):
    """The state of a client, or of a session, that is open."""

    def after_fork_in_child(self) -> None:
        """In a child: touch nothing that is the parent's, wait for no lock of a thread that is not here, and refuse all
        calls from now on."""
        ...


_engines: WeakSet[ForkAware] = WeakSet()
_of_parents: list[object] = []


def watch(engine: ForkAware) -> None:
    """Have the engine told if the process is forked."""
    _engines.add(engine)


def check(opened: OpenedBeforeFork) -> None:
    """Raises InvalidRequest in a child, if it was opened by the parent."""
    if opened.is_forked:
        raise InvalidRequest(FORKED)


def keep(*of_parent: object) -> None:
    """In a child: hold what is the parent's for as long as there is a process. gRPC ends a call or a channel that
    nobody holds any more, or waits for a thread that is not here."""
    _of_parents.extend(of_parent)


def _leave_all() -> None:
    for engine in list(_engines):
        engine.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_leave_all)
