"""Chooses the bookie that is asked next for a confirmed entry. Decides only (docs/protocol.md T1).

The nearest bookie is asked first. The next one is asked if that one fails, answers "absent", sends bytes with a wrong
digest, or takes too long (then both answers are awaited). A bookie may lack a confirmed entry, so only all bookies of
the write set together can prove that it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import assert_never

from kvstore.errors import BookieError, Corrupted, NoSuchEntry, StoreError
from kvstore.proto.digest import Packet
from kvstore.types import BookieId, EntryId


@dataclass(frozen=True, slots=True)
class Answered:
    """The packet as stored, or None from a bookie that is sure that it has none."""

    bookie: BookieId
    packet: bytes | None


@dataclass(frozen=True, slots=True)
class ReadFailed:
    bookie: BookieId
    reason: str


@dataclass(frozen=True, slots=True)
class HedgeDue:
    """The asked bookies have taken so long that another one is asked as well."""


Event = Answered | ReadFailed | HedgeDue


@dataclass(frozen=True, slots=True)
class AskBookie:
    bookie: BookieId


@dataclass(frozen=True, slots=True)
class Done:
    packet: Packet


@dataclass(frozen=True, slots=True)
class Impossible:
    error: StoreError


Command = AskBookie | Done | Impossible


def in_order(
    write_set: Iterable[BookieId], own: BookieId | None = None, troubled: Collection[BookieId] = ()
) -> tuple[BookieId, ...]:
    """Return the own bookie first, and those in trouble last."""
    return tuple(sorted(write_set, key=lambda bookie: (bookie in troubled, bookie != own)))


class EntryRead:
    """The state of one attempt to read an entry from the bookies that store it."""

    def __init__(self, entry: EntryId, order: tuple[BookieId, ...], open_packet: Callable[[bytes], Packet]) -> None:
        self._entry = entry
        self._to_ask = list(order)
        self._awaited: set[BookieId] = set()
        self._open = open_packet
        self._absent = 0
        self._failures: list[str] = []
        self._damaged: list[BookieId] = []
        self._done = False

    @property
    def damaged(self) -> tuple[BookieId, ...]:
        """Bookies whose copy has a wrong digest."""
        return tuple(self._damaged)

    def start(self) -> list[Command]:
        return self._ask_next()

    def handle(self, event: Event) -> list[Command]:
        """Return the commands that `event` calls for. After Done or Impossible, return none."""
        if self._done:
            return []
        match event:
            case Answered(bookie, packet):
                return self._answered(bookie, packet)
            case ReadFailed(bookie, reason):
                self._awaited.discard(bookie)
                self._failures.append(f"{bookie}: {reason}")
                return self._ask_next()
            case HedgeDue():
                return self._ask_next() if self._to_ask else []
            case _:
                assert_never(event)

    def _answered(self, bookie: BookieId, packet: bytes | None) -> list[Command]:
        self._awaited.discard(bookie)
        if packet is None:
            self._absent += 1
            return self._ask_next()
        try:
            opened = self._open(packet)
        except Corrupted as error:
            self._damaged.append(bookie)
            self._failures.append(f"{bookie}: {error}")
            return self._ask_next()
        self._done = True
        return [Done(opened)]

    def _ask_next(self) -> list[Command]:
        if self._to_ask:
            bookie = self._to_ask.pop(0)
            self._awaited.add(bookie)
            return [AskBookie(bookie)]
        if self._awaited:
            return []
        self._done = True
        if self._failures:
            return [Impossible(BookieError(f"entry {self._entry}: {'; '.join(self._failures)}"))]
        return [Impossible(NoSuchEntry(f"entry {self._entry}: none of the {self._absent} bookies asked has it"))]
