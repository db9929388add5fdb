"""Checks that a client is used on its own event loop."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop

from kvstore.errors import InvalidRequest


def check_loop(loop: AbstractEventLoop) -> None:
    """Raise InvalidRequest on another event loop than `loop`. asyncio's own error would not say what to do, or the call
    would hang."""
    if get_running_loop() is not loop:
        ended = ", which has ended" if loop.is_closed() else ""
        raise InvalidRequest(
            f"expected a call on the event loop on which the client was opened{ended}, got another event loop; "
            "open a client in each event loop"
        )
