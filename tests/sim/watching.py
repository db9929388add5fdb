"""Observes the code under test: what writers confirm and replicas apply goes into the logbook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.partition.state.entry import Entry
from kvstore.partition.state.state import ReplicaState
from kvstore.types import BookieId, EntryId, Position
from kvstore.wal.writer import AddStored, Append, Command, Confirm, Event, LedgerWriter
from tests.sim.judges.logbook import Logbook
from tests.sim.judges.rules import MetadataRules
from tests.sim.world.loop import current_node


@contextmanager
def watching(logbook: Logbook, rules: MetadataRules) -> Iterator[None]:
    """Record everything that happens in the block, in any node."""
    handle, append, stored = LedgerWriter.handle, LedgerWriter.append, LedgerWriter.stored
    apply_decoded, apply_run = ReplicaState.apply_decoded, ReplicaState.apply_run

    def is_watched(writer: LedgerWriter) -> bool:
        return writer._frozen_lac is None  # a recovery writes back: its confirmed entries were found, not appended

    def note_confirmed(self: LedgerWriter, commands: list[Command]) -> list[Command]:
        ledger = self.metadata.ledger
        for command in commands:
            if isinstance(command, Confirm):
                logbook.confirm(ledger, command.entry, rules.written.get(ledger), ledger in rules.partition_of)
        return commands

    def handle_and_note(self: LedgerWriter, event: Event) -> list[Command]:
        commands = handle(self, event)
        is_noted = isinstance(event, Append | AddStored)  # recorded by the two functions below
        return commands if is_noted or not is_watched(self) else note_confirmed(self, commands)

    def append_and_note(self: LedgerWriter, payload: bytes, now: float) -> list[Command]:
        commands = append(self, payload, now)
        if is_watched(self):
            logbook.append(self.metadata.ledger, self.last_added, payload)
        return commands

    def store_and_note(self: LedgerWriter, entry: EntryId, bookie: BookieId) -> list[Command]:
        if not is_watched(self):
            return stored(self, entry, bookie)
        logbook.stored(self.metadata.ledger, entry, bookie)
        return note_confirmed(self, stored(self, entry, bookie))

    def apply_and_note(self: ReplicaState, position: Position, entry: Entry, data_keys: Any) -> None:
        node = current_node.get()
        logbook.apply(node.name if node else "test", self.partition, position, entry)
        apply_decoded(self, position, entry, data_keys)

    def apply_and_note_all(self: ReplicaState, run: Sequence[tuple[Position, Entry]]) -> None:
        node = current_node.get()
        for position, entry in run:
            logbook.apply(node.name if node else "test", self.partition, position, entry)
        apply_run(self, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerWriter, "handle", handle_and_note)
        patch.setattr(LedgerWriter, "append", append_and_note)
        patch.setattr(LedgerWriter, "stored", store_and_note)
        patch.setattr(ReplicaState, "apply_decoded", apply_and_note)
        patch.setattr(ReplicaState, "apply_run", apply_and_note_all)
        yield
