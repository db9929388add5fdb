"""SIGINT in a Locust process."""

from __future__ import annotations

import signal

import gevent


def interrupt_main_greenlet() -> None:
    """Raise KeyboardInterrupt for SIGINT only in the main greenlet.

    Python raises it in whatever code runs at that moment. In gevent's own code this keeps an ended greenlet in its
    group, and Locust then waits for the group forever, at full processor load. Does nothing if the process ignores
    SIGINT or has another handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        gevent.signal_handler(signal.SIGINT, _interrupt)


def _interrupt() -> None:
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
