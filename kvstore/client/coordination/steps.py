"""The steps that recipes request from their driver. Decides only.

A recipe is a generator. It yields one step at a time, receives the step's result or StoreError, and returns its own
result. So each recipe is written once for asyncio, threads and the simulation. The driver knows the deadline of all
steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.values import Item
from kvstore.client.core.watching import Change
from kvstore.errors import OutcomeUnknown, Refused, Retryable, StoreError

T = TypeVar("T")
Found = Mapping[bytes, Item]
"""Items by key."""


class SessionEnded(Refused):
    """The session has ended: it was closed, or was not renewed in time. Its keys are deleted, or will be soon."""


class NotInTime(Refused):
    """The time was over before the awaited event. Nothing is held or kept for the caller."""


class NameTaken(Refused):
    """The key exists and does not belong to this session. Another session owns it, possibly one whose process has died
    and that has not ended yet, or a plain write has created it. Nothing was written."""


class SessionFull(Refused):
    """The session would exceed its maximum number of keys or bytes; the message says by how much. Nothing was
    written."""


@dataclass(frozen=True, slots=True)
class WriteStep:
    """A step that writes one batch if the session is alive. Its result is the results of `more`, `puts` and `drops`, in
    this order."""

    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    """Keys that end with the session. A key that does not belong to the session yet must be absent, or ConditionFailed
    is raised."""
    drops: tuple[bytes, ...] = ()
    """Keys of the session to delete now."""
    more: tuple[ClientOperation, ...] = ()
    """Other operations on keys of the same tag, including conditions, whose errors are raised."""
    renews: bool = False
    """Renew the session, even if the last renewal was recent."""
    is_given_up: bool = False
    """True if the recipe keeps nothing of a write of unknown outcome, so that being late is the whole result."""
    needs_receipt: bool = False
    """True if the session must not renew the keys of `puts`, all of them new, unless the caller receives the result."""


@dataclass(frozen=True, slots=True)
class FindStep:
    """A step that reads the keys that begin with `prefix`, linearizably. Its result is a Found."""

    prefix: bytes
    limit: int = 0
    """Maximum number of keys; 0: all."""
    keys_only: bool = False
    """True if values are not needed: they are empty, and a changed value wakes nobody."""


# docs/protocol.md Q4
def is_news(find: FindStep, found: Found, change: Change) -> bool:
    """Return True if `find` might now return something else than `found`, after `change` was received from a watch that
    began before `found` was read. The periodic rewrites by which sessions keep their keys do not count, because each
    renewal would make all waiters read the whole line."""
    item, had = change.item, found.get(change.key)
    if item is None:
        return had is not None and change.version > had.version
    if had is None:  # a key that was there before came with its creation, or lies beyond the limit
        return item.created == change.version or not find.keys_only
    if change.version <= had.version:
        return False
    return item.created != had.created or not (find.keys_only or item.value == had.value)


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """A step that waits until `is_met` is true for the result of `find`. It reads again after each change for which
    `wakes` is true. Its result is a Found. Raises NotInTime, or SessionEnded if the session ends first."""

    find: FindStep
    is_met: Callable[[Found], bool]
    is_key: bool = False
    """True if the prefix is one complete key, and only its changes matter."""
    wakes: Callable[[FindStep, Found, Change], bool] = is_news
    """Decides whether a change wakes the waiter, from the last result and the change."""


Step = WriteStep | FindStep | AwaitStep
Recipe = Generator[Step, Any, T]


def is_late(error: StoreError, step: Step) -> bool:
    """Return True if an error after the deadline says only that nothing was done, or that nothing of it is kept."""
    return isinstance(error, Retryable) or (
        isinstance(error, OutcomeUnknown) and not (isinstance(step, WriteStep) and not step.is_given_up)
    )
