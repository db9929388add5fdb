"""Attempts and outcomes: what a client may conclude from what it hears. Decides only.

A mutation keeps its request id (client, sequence) over all attempts, so that it is applied once. What was sent and got
no answer may have been carried out: it is tried again under the same id until the deadline, and is *unknown* after it.
A refusal means "not done" only if no earlier attempt may have been carried out: a late duplicate of that one could
still arrive and find what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.backoff import delays
from kvstore.client.core.operation import ClientOperation
from kvstore.errors import (
    Moved,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    RateExceeded,
    Refused,
    RequestExpired,
    Retryable,
    StoreError,
    Unavailable,
)

if TYPE_CHECKING:
    from random import Random

RENUMBER_MAX = 3
"""How often a request may get another id because the store had forgotten how old the client is."""
ATTEMPTS_MAX = 1000
"""Maximum number of retries when other clients change the key between read and write."""


class NoServerReachable(Unavailable):
    """There was no server that could be asked; says nothing of why. Callers of clients get Unavailable itself."""

    def __init__(self) -> None:
        super().__init__("no server can be reached")


def final_error_or_none(operation: ClientOperation, error: StoreError) -> StoreError | None:
    """Choose the error to raise for an attempt that was answered with `error`; None: try again under the same id."""
    operation.is_sent = False
    if isinstance(error, OutcomeUnknown):
        operation.is_unknown = not operation.is_read
        return None
    if isinstance(error, Retryable):
        return None
    if operation.is_unknown and isinstance(error, Refused):
        return OutcomeUnknown(f"an attempt may have been carried out; a later one was refused: {error}")
    if isinstance(error, RequestExpired) and operation.renumbered < RENUMBER_MAX:
        operation.numbering.renumber(operation)
        return None
    return error


def deadline_error(operation: ClientOperation, last: StoreError | None, timeout_s: float) -> StoreError:
    """Make the error to raise when the time is up. `last`: how the latest attempt failed, if it did."""
    why = f"; the last attempt: {last}" if last is not None else ""
    if not operation.is_read and (operation.is_unknown or operation.is_sent):
        return OutcomeUnknown(f"no outcome within {timeout_s:g} s{why}")
    if isinstance(last, Retryable) and not isinstance(last, NoServerReachable):
        return last
    return Unavailable(f"no answer within {timeout_s:g} s{why}")


def contended(key: bytes) -> Overloaded:
    """Return the error for a call that other clients have prevented ATTEMPTS_MAX times."""
    return Overloaded(f"{key!r} was written by others each time, {ATTEMPTS_MAX} times on end")


def lost(operation: ClientOperation, why: str) -> StoreError:
    """How an attempt ends whose connection is gone."""
    if operation.is_sent and not operation.is_read:
        return OutcomeUnknown(why)
    return Unavailable(f"{why}; nothing was sent" if not operation.is_sent else why)


def pauses(random: Random) -> Iterator[float]:
    """Seconds before each further attempt of one operation, if nothing is learnt meanwhile."""
    yield 0.0
    yield from delays(random, first_s=0.02, cap_s=0.25)


def pause_s(error: StoreError, waits: Iterator[float]) -> float:
    """How long to wait before the next attempt. Whoever refused for a while has said for how long."""
    if is_hint(error):
        return 0.0
    wait_s = next(waits)
    return max(wait_s, error.retry_after_ms / 1000) if isinstance(error, RateExceeded) else wait_s


def is_hint(error: StoreError) -> bool:
    """Whether the error names where to go, so that there is nothing to wait for."""
    return isinstance(error, NotLeader) and bool(error.address)


def may_need_new_topology(error: StoreError) -> bool:
    """Whether another topology could lead elsewhere. One that was only refused for now goes the same way again."""
    return isinstance(error, NotLeader | Moved | Unavailable | OutcomeUnknown)
