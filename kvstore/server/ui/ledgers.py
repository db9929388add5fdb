"""The page of the ledgers of one partition's log, from the results of the ledger survey. Decides only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kvstore.proto.admin_pb2 import LedgersResponse, LedgerStatus
from kvstore.server.ui.cells import Cell, table
from kvstore.server.ui.words import count, size

NEWEST = 500
"""Maximum number of ledgers on a page: the newest ones."""
COLUMNS = (
    *("ledger", "state", "first sequence", "epoch", "last entry", "size", "copies: ensemble, write quorum, ack quorum"),
    *("bookies, by first entry", "created"),
)
UNKNOWN = Cell("?")


def ledgers_page_of(response: LedgersResponse, partition: str, server: str) -> dict[str, Any]:
    """Return the context of the template."""
    shown = list(reversed(response.ledgers))
    if response.from_leaders:
        source = "The metadata store is unavailable: this is the leader's present view of its log."
    else:
        source = "Read from the metadata store just now."
    note = f"{source} {count(len(shown), 'ledger')}, the newest first"
    note += f"; only the last {NEWEST} are shown, `kvstore ledger list` shows all." if len(shown) >= NEWEST else "."
    return {
        "partition": partition,
        "server": server,
        "ledgers": table("ledgers", f"Ledgers of {partition}", COLUMNS, map(_row, shown), note),
    }


def _row(ledger: LedgerStatus) -> list[Cell]:
    number = Cell(str(ledger.id))
    begins = [Cell(f"{ledger.first_sequence:,}", "n"), Cell(f"{ledger.epoch:,}", "n")]
    if not ledger.fragments:  # nothing else is known, or the metadata cannot be decoded
        state = Cell(ledger.state or "closed or closing", "bad" if ledger.state else "")
        return [number, state, *begins, *[UNKNOWN] * (len(COLUMNS) - 4)]
    last = f"{ledger.last_entry:,}" if ledger.HasField("last_entry") else "unknown while open"
    where = " · ".join(f"{each.first_entry}: {', '.join(each.bookies)}" for each in ledger.fragments)
    return [
        number,
        Cell(ledger.state, "good" if ledger.state in ("OPEN", "CLOSED") else "warn"),
        *begins,
        Cell(last if ledger.last_entry >= 0 else "no entries", "n"),
        Cell(size(ledger.length) if ledger.state == "CLOSED" else "?", "n"),
        Cell(f"{ledger.ensemble_size}, {ledger.write_quorum}, {ledger.ack_quorum}"),
        Cell(where),
        Cell(f"{datetime.fromtimestamp(ledger.created_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"),
    ]
