"""Steps that recipes ask of whoever carries them out. Decides only.

A recipe is a generator: it yields one step at a time, is sent what came of it (or thrown the StoreError that came), and
returns its result. So each is written once for asyncio, for threads and for the simulation. How long all of its steps
may take together its driver is told.
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
"""Keys and what they hold."""


class SessionEnded(Refused):
    """The session is over: it was closed, or was not renewed in time. Its keys are gone, or will be soon."""


class NotInTime(Refused):
    """The time was over before that for which the caller waited. Nothing is held or kept for the caller."""


class NameTaken(Refused):
    """A key of that name is there and is not this session's: another session has it, perhaps one whose process has died
    and that has not ended yet; or a plain write has made it. Nothing was written."""


class SessionFull(Refused):
    """The session would keep more than one may, in keys or in bytes; says how much. Nothing was written."""


@dataclass(frozen=True, slots=True)
class WriteStep:
    """Write by one batch, if the session is alive. Answered by the results of `more`, `puts` and `drops`, in this
    order, in which they are done."""

    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    """Keys that shall end with the session. One that is not the session's yet must be absent: ConditionFailed."""
    drops: tuple[bytes, ...] = ()
    """Keys of the session to delete now."""
    more: tuple[ClientOperation, ...] = ()
    """Anything else, on keys of the same tag: conditions too, and what they say is thrown."""
    renews: bool = False
    """Renew the session, however short ago that was done."""
    is_given_up: bool = False
    """If its outcome is unknown its recipe keeps nothing of it: so that it was late is all there is to say."""


@dataclass(frozen=True, slots=True)
class FindStep:
    """Read what begins with `prefix`, linearizably. Answered by Found."""

    prefix: bytes
    limit: int = 0
    """The first so many keys; 0: all."""
    keys_only: bool = False
    """The values are not wanted: they are empty, and it is no news that one has changed."""


# docs/protocol.md Q4
def is_news(find: FindStep, found: Found, change: Change) -> bool:
    """Whether `find` might find something else than `found`, of which a watch that began before has told `change`.
    Sessions write their keys again and again to keep them: that is none, else each renewal would have all who wait read
    the whole line."""
    item, had = change.item, found.get(change.key)
    if item is None:
        return had is not None and change.version > had.version
    if had is None:  # one that was there before has been told with its creation, or lies beyond the limit
        return item.created == change.version or not find.keys_only
    if change.version <= had.version:
        return False
    return item.created != had.created or not (find.keys_only or item.value == had.value)


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """Wait until `is_met` of what `find` finds, looking again after each change that `wakes`. Answered by Found. Raises
    NotInTime, or SessionEnded if the session ends before."""

    find: FindStep
    is_met: Callable[[Found], bool]
    is_key: bool = False
    """The prefix is one whole key, of which alone changes are wanted."""
    wakes: Callable[[FindStep, Found, Change], bool] = is_news
    """Of what was found last, and a change that came since."""


Step = WriteStep | FindStep | AwaitStep
Recipe = Generator[Step, Any, T]


def is_late(error: StoreError, step: Step) -> bool:
    """Whether, once the time is over, an error says no more than that: nothing was done, or nothing of it is kept."""
    return isinstance(error, Retryable) or (
        isinstance(error, OutcomeUnknown) and not (isinstance(step, WriteStep) and not step.is_given_up)
    )
