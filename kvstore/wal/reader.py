"""Chooses which bookie to ask next for a confirmed entry. Decides only (docs/protocol.md T1).

The nearest bookie is asked first. The next bookie is asked if the previous one fails, answers "absent" or returns bytes
with a wrong digest. If a bookie takes too long, the next one is asked as well and the first good answer wins. Any
single bookie may lack a confirmed entry, so an entry counts as absent only if every bookie of its write set says so.
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
    """Event: a bookie gave a definite answer. `packet` is the packet as stored, or None if the bookie is sure that it
    does not have the entry."""

    bookie: BookieId
    packet: bytes | None


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Event: a bookie failed to answer, or gave no definite answer."""

    bookie: BookieId
    reason: str


@dataclass(frozen=True, slots=True)
class HedgeDue:
    """Event: the bookies asked so far have not answered in time, so another one should be asked as well."""


Event = Answered | ReadFailed | HedgeDue


@dataclass(frozen=True, slots=True)
class AskBookie:
    """Command: request the entry from this bookie."""

    bookie: BookieId


@dataclass(frozen=True, slots=True)
class Done:
    """Command: finish the read with this packet, whose digest is verified."""

    packet: Packet


@dataclass(frozen=True, slots=True)
class Impossible:
    """Command: fail the read. The error is NoSuchEntry if every bookie answered "absent", otherwise BookieError."""

    error: StoreError


Command = AskBookie | Done | Impossible


def in_order(
    write_set: Iterable[BookieId], own: BookieId | None = None, troubled: Collection[BookieId] = ()
) -> tuple[BookieId, ...]:
    """Return the write set in the order in which to ask: this node's own bookie first, `troubled` bookies last."""
    return tuple(sorted(write_set, key=lambda bookie: (bookie in troubled, bookie != own)))


class EntryRead:
    """The state of one attempt to read an entry from the bookies of its write set."""

    def __init__(self, entry: EntryId, order: tuple[BookieId, ...], open_packet: Callable[[bytes], Packet]) -> None:
        """Prepare to ask the bookies in `order`. `open_packet` verifies a packet's digest and raises Corrupted if it is
        wrong."""
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
        """Bookies that returned a packet with a wrong digest."""
        return tuple(self._damaged)

    def start(self) -> list[Command]:
        """Return the command that asks the first bookie. Call it once, before `handle`."""
        return self._ask_next()

    def handle(self, event: Event) -> list[Command]:
        """Apply `event` and return the commands to perform. Returns no commands after Done or Impossible."""
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
