"""Steps that recipes ask of whoever carries them out. Decides only.

A recipe is a generator: it yields one step at a time, is sent what came of it (or thrown the StoreError that came), and
returns its result. So each is written once for asyncio, for threads and for the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.client.core.operation import Operation
from kvstore.client.core.values import Item
from kvstore.errors import Refused

T = TypeVar("T")
Found = Mapping[bytes, Item]
"""Keys and what they hold."""


class SessionEnded(Refused):
    """The session is over: it was closed, or was not renewed in time. Its keys are gone, or will be soon."""


class NotInTime(Refused):
    """The time was over before that for which the caller waited. Nothing is held or kept for the caller."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write by one batch, if the session is alive, and renew it. Answered by the results of `more`, `puts` and `drops`,
    in this order, in which they are done."""

    puts: Mapping[bytes, bytes] = field(default_factory=dict)
    """Keys that shall end with the session."""
    drops: tuple[bytes, ...] = ()
    """Keys of the session to delete now."""
    more: tuple[Operation, ...] = ()
    """Anything else, on keys of the same tag: conditions too, and what they say is thrown."""


@dataclass(frozen=True, slots=True)
class Find:
    """Read what begins with `prefix`, linearizably. Answered by Found."""

    prefix: bytes
    limit: int = 0
    """The first so many keys; 0: all."""
    keys_only: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until `is_met` of what `find` finds, looking again after each change below its prefix. Answered by Found.
    Raises NotInTime, or SessionEnded if the session ends before."""

    find: Find
    is_met: Callable[[Found], bool]
    until: float
    """By the driver's clock; inf: without end."""
    is_key: bool = False
    """The prefix is one whole key, of which alone changes are wanted."""


Step = Write | Find | Await
Recipe = Generator[Step, Any, T]
