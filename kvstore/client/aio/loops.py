"""The event loop that a client belongs to."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop

from kvstore.errors import InvalidRequest


def check_loop(loop: AbstractEventLoop) -> None:
    """Raises InvalidRequest on another event loop than `loop`: asyncio's own error would name no way out, or a call
    would wait for ever."""
    if get_running_loop() is not loop:
        ended = ", which has ended" if loop.is_closed() else ""
        raise InvalidRequest(
            f"expected a call on the event loop on which the client was opened{ended}, got another event loop; "
            "open a client in each event loop"
        )
