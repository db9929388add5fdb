"""SIGINT in a process of Locust."""

from __future__ import annotations

import signal

import gevent


def interrupt_main_greenlet() -> None:
    """Have SIGINT raise KeyboardInterrupt in the main greenlet, and nowhere else.

    Python raises it in whatever code runs at that moment. In gevent's own code this keeps a greenlet that has ended in
    its group, and Locust then waits for the group forever, with a busy processor. No change if the process ignores
    SIGINT or has another handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        gevent.signal_handler(signal.SIGINT, _interrupt)


def _interrupt() -> None:
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())
