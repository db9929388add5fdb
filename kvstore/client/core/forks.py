"""Clients that were open when their process was forked.

The child has them too, and must not use them: it would send on the parent's connections, and use the request ids that
the parent uses. Of two requests with one id on one key, the second counts as a retry of the first, and receives its
answer without being carried out.

So the child refuses every call of such a client; a client that is opened in the child is a new one. The same holds for
watches and readers of the feed, because their streams belong to the parent and gRPC would wait for threads that do not
exist in the child. Sessions are over in the child: only the parent learns when their keys are released.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from kvstore.errors import InvalidRequest

FORKED = "the client was opened before this process was forked: open one in each process, after the fork"


class OpenedBeforeFork(Protocol):
    """An object that knows whether it was opened before this process was forked."""

    is_forked: bool


class ForkAware(Protocol):
    """The state of an open client or session."""

    def after_fork_in_child(self) -> None:
        """In the child: touch nothing of the parent's, wait for no lock of a thread that does not exist here, and
        refuse all calls."""
        ...


_engines: WeakSet[ForkAware] = WeakSet()
_of_parents: list[object] = []


def watch(engine: ForkAware) -> None:
    """Call the engine's `after_fork_in_child` if the process is forked."""
    _engines.add(engine)


def check(opened: OpenedBeforeFork) -> None:
    """Raise InvalidRequest in a child if the object was opened by the parent."""
    if opened.is_forked:
        raise InvalidRequest(FORKED)


def keep(*of_parent: object) -> None:
    """In a child: keep objects of the parent referenced for the life of the process. gRPC ends a call or a channel that
    is no longer referenced, or waits for a thread that does not exist here."""
    _of_parents.extend(of_parent)


def _leave_all() -> None:
    for engine in list(_engines):
        engine.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # on systems that fork
    os.register_at_fork(after_in_child=_leave_all)
