"""Attempts and outcomes: what a client may conclude from answers and errors. Decides only.

A mutation keeps its request id (client, sequence) over all attempts, so it is applied once. An attempt that was sent
and not answered may have been carried out: it is retried with the same id until the deadline, and its outcome is
*unknown* after that. A refusal means "not done" only if no earlier attempt may have been carried out, because a late
duplicate of that attempt could still arrive and succeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.backoff import delays
from kvstore.client.core.operation import ClientOperation
from kvstore.errors import (
    Conflict,
    Moved,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    RateExceeded,
    RequestExpired,
    Retryable,
    StoreError,
    Unavailable,
)

if TYPE_CHECKING:
    from random import Random

RENUMBER_MAX = 3
"""Maximum number of new ids for a request because the store has forgotten how old the client is."""
ATTEMPTS_MAX = 1000
"""Maximum number of retries when other clients change the key between read and write."""


class NoServerReachable(Unavailable):
    """No server could be asked. Callers of clients get Unavailable itself."""

    def __init__(self) -> None:
        super().__init__("no server can be reached")


def final_error_or_none(operation: ClientOperation, error: StoreError) -> StoreError | None:
    """Return the error to raise for an attempt that ended with `error`, or None to retry with the same id. If an
    earlier attempt may have been carried out, it is OutcomeUnknown with the cause `error`."""
    operation.is_sent = False
    if isinstance(error, OutcomeUnknown):
        operation.is_unknown = not operation.is_read
        return None
    if isinstance(error, Retryable):
        return None
    if operation.is_unknown:
        unknown = OutcomeUnknown(f"an attempt may have been carried out; a later one failed: {error}")
        unknown.__cause__ = error
        return unknown
    if isinstance(error, RequestExpired) and operation.renumbered < RENUMBER_MAX:
        operation.numbering.renumber(operation)
        return None
    return error


def deadline_error(operation: ClientOperation, last: StoreError | None, timeout_s: float) -> StoreError:
    """Return the error to raise at the deadline. `last`: the error of the last attempt, if it failed."""
    why = f"; the last attempt: {last}" if last is not None else ""
    if not operation.is_read and (operation.is_unknown or operation.is_sent):
        return OutcomeUnknown(
            f"no answer within {timeout_s:g} s, so the write may or may not have been carried out{why}"
        )
    if isinstance(last, Retryable) and not isinstance(last, NoServerReachable):
        return last
    return Unavailable(f"no answer within {timeout_s:g} s{why}")


def contended(key: bytes) -> Overloaded:
    """Return the error for a call that other clients have prevented ATTEMPTS_MAX times."""
    return Overloaded(f"{key!r} was changed by other clients {ATTEMPTS_MAX} times in a row")


def lost(operation: ClientOperation, why: str) -> StoreError:
    """Return the error of an attempt whose connection was lost."""
    if operation.is_sent and not operation.is_read:
        return OutcomeUnknown(why)
    return Unavailable(f"{why}; nothing was sent" if not operation.is_sent else why)


def pauses(random: Random) -> Iterator[float]:
    """Yield the pauses before each further attempt of an operation, in seconds."""
    yield 0.0
    yield from delays(random, first_s=0.02, cap_s=0.25)


def pause_s(error: StoreError, waits: Iterator[float]) -> float:
    """Return the pause before the next attempt, in seconds. A server that rejected a rate has named a longer one."""
    if is_hint(error):
        return 0.0
    wait_s = next(waits)
    if isinstance(error, Conflict):  # at once it would meet the same transaction
        wait_s = wait_s or next(waits)
    return max(wait_s, error.retry_after_ms / 1000) if isinstance(error, RateExceeded) else wait_s


def transaction_pauses(random: Random) -> Iterator[float]:
    """Yield the pauses before each further attempt of a transaction, in seconds. Transactions that have met once must
    not meet again, so even the first pause is random."""
    return delays(random, first_s=0.01, cap_s=0.5)


def is_hint(error: StoreError) -> bool:
    """Return True if the error names the server to ask, so that there is nothing to wait for."""
    return isinstance(error, NotLeader) and bool(error.address)


def may_need_new_topology(error: StoreError) -> bool:
    """Return True if a newer topology could name another server. A server that refuses only for now stays the right
    one."""
    return isinstance(error, NotLeader | Moved | Unavailable | OutcomeUnknown)
