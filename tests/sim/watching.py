"""Looks over the shoulders of the code under test: what writers confirm and replicas apply goes into the logbook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.partition.state.entry import Entry
from kvstore.partition.state.state import State
from kvstore.types import Position
from kvstore.wal.writer import Append, Command, Confirm, Event, LedgerWriter, Stored
from tests.sim.judges.logbook import Logbook
from tests.sim.judges.rules import MetadataRules
from tests.sim.world.loop import current_node


@contextmanager
def watching(logbook: Logbook, rules: MetadataRules) -> Iterator[None]:
    """Note everything that happens meanwhile, in whatever node."""
    handle, apply_decoded = LedgerWriter.handle, State.apply_decoded

    def handle_and_note(self: LedgerWriter, event: Event) -> list[Command]:
        if self._frozen_lac is not None:
            return handle(self, event)  # a recovery writes back: what it confirms was found, not appended
        ledger = self.metadata.ledger
        if isinstance(event, Stored):
            logbook.stored(ledger, event.entry, event.bookie)
        before = self.last_added
        commands = handle(self, event)
        if isinstance(event, Append) and self.last_added > before:
            logbook.append(ledger, self.last_added, event.payload)
        for command in commands:
            if isinstance(command, Confirm):
                logbook.confirm(ledger, command.entry, rules.ledgers.get(ledger), ledger in rules.partition_of)
        return commands

    def apply_and_note(self: State, position: Position, entry: Entry, data_keys: Any) -> None:
        node = current_node.get()
        logbook.apply(node.name if node else "test", self.partition, position, entry)
        apply_decoded(self, position, entry, data_keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerWriter, "handle", handle_and_note)
        patch.setattr(State, "apply_decoded", apply_and_note)
        yield
