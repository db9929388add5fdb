"""The state as it will be after the entries in flight. The leader evaluates operations against the state with these
layers on top. Decides only.

There is one layer per entry. It is removed when the entry has been applied. Reads never use the overlay, because
effects that are not acknowledged may never take place.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from msgspec import Struct

from kvstore.errors import RequestExpired
from kvstore.partition.state.commands import RequestId, Result
from kvstore.partition.state.decisions import Decision
from kvstore.partition.state.intents import Intent

Row = tuple[bytes, int, int, int, int]
"""A Record, perhaps as a plain tuple."""


class Untouched(Enum):
    """The type of UNTOUCHED. Lets mypy distinguish it from a row, and from None for a key that will be absent."""

    UNTOUCHED = "untouched"


UNTOUCHED: Final = Untouched.UNTOUCHED
"""No entry in flight changes the key."""


class TransactionChanges(Struct, eq=False):
    """The intents and decisions that one entry in flight adds and removes, each in the order of the entry."""

    intents: list[Intent] = []
    resolved: list[Intent] = []
    decisions: list[Decision] = []
    ended: list[Decision] = []

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The lengths of the lists."""
        return len(self.intents), len(self.resolved), len(self.decisions), len(self.ended)

    def cut(self, counts: tuple[int, int, int, int]) -> None:
        """Remove what was added since the lists had these lengths."""
        del self.intents[counts[0] :], self.resolved[counts[1] :]
        del self.decisions[counts[2] :], self.ended[counts[3] :]


class Layer(Struct, eq=False):
    """The effects of one entry in flight."""

    rows: dict[bytes, Row | None] = {}
    """Key → its record after the entry; None if it is deleted."""
    requests: dict[tuple[bytes, int, int], Result] = {}
    """(client, sequence, key hash) → result."""
    first_unacked: dict[bytes, int] = {}
    counts: dict[bytes, int] = {}
    """Client → number of its results in `requests`."""
    results_bytes: int = 0
    """Upper bound of the bytes that these results and their clients will take in the retry table."""
    transactions: TransactionChanges | None = None
    """None if the entry changes neither intents nor decisions, as most entries do."""


class Overlay:
    """The layers of all entries in flight, the oldest first."""

    def __init__(self) -> None:
        self.layers: deque[Layer] = deque()

    def find(self, key: bytes) -> Row | Untouched | None:
        """Return the key's record as it will be after all entries in flight. Returns None if the key will be absent,
        and UNTOUCHED if no entry in flight changes the key."""
        for layer in reversed(self.layers):
            row: Row | Untouched | None = layer.rows.get(key, UNTOUCHED)
            if row is not UNTOUCHED:
                return row
        return UNTOUCHED

    def touched_of(self, keys: list[bytes]) -> set[bytes]:
        """Return those of `keys` that an entry in flight changes."""
        touched: set[bytes] = set()
        for layer in self.layers:
            if not layer.rows.keys().isdisjoint(keys):
                touched.update(layer.rows.keys() & set(keys))
        return touched

    def rows_between(self, start: bytes, end: bytes | None) -> dict[bytes, Row | None]:
        """Return the records of all keys in [start, end) that entries in flight change, as they will be. An `end` of
        None means up to the last key."""
        return {
            key: row
            for layer in self.layers
            for key, row in layer.rows.items()
            if key >= start and (end is None or key < end)
        }

    def find_request(self, request: RequestId, hash_of_key: int) -> Result:
        """Return the result of the request if it is in flight, or UNTOUCHED if it is not. Raises RequestExpired for a
        late duplicate: the client has since acknowledged the answer, in a request that is in flight."""
        client, sequence, _, _ = request
        acknowledged = 0
        for layer in self.layers:
            first_unacked = layer.first_unacked.get(client)
            if first_unacked is not None:
                result = layer.requests.get((client, sequence, hash_of_key), UNTOUCHED)
                if result is not UNTOUCHED:
                    return result
                acknowledged = max(acknowledged, first_unacked)
        if sequence < acknowledged:
            raise RequestExpired(f"request {sequence} was answered, and its client has acknowledged it")
        return UNTOUCHED

    def results_in_flight(self, client: bytes, draft: Layer) -> tuple[int, int]:
        """Return how many results of this client are in the layers and in `draft`, and how many bytes the results of
        all clients take there."""
        count, size = draft.counts.get(client, 0), draft.results_bytes
        for layer in self.layers:
            count += layer.counts.get(client, 0)
            size += layer.results_bytes
        return count, size
