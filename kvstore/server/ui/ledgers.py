"""The pages of the ledgers of one partition's log and of one bookie, from the results of the ledger survey. Decides
only."""

from __future__ import annotations

from typing import Any

from kvstore.proto.admin_pb2 import LedgersResponse, LedgerStatus
from kvstore.server.status.sizes import count, size
from kvstore.server.ui.cells import Cell, page_path, table
from kvstore.server.ui.words import date

NEWEST = 500
"""Maximum number of ledgers on a page: the newest ones."""
COLUMNS = (
    *("ledger", "state", "first sequence", "epoch", "last entry", "size", "copies: ensemble, write quorum, ack quorum"),
    *("bookies, by first entry", "created"),
)
BOOKIE_COLUMNS = (COLUMNS[0], "partition", COLUMNS[1], *COLUMNS[4:])
"""Without the first sequence and the epoch, which only a partition's list of ledgers has."""
UNKNOWN = Cell("?")
READ_HINT = "To see the copies of each entry: `kvstore ledger read ID`"


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
        "title": f"Ledgers of partition {partition}",
        "server": server,
        "tables": [table("ledgers", f"Ledgers of {partition}", COLUMNS, map(row_of, shown), note)],
        "hint": READ_HINT,
    }


def bookie_ledgers_page_of(response: LedgersResponse, bookie: str, server: str) -> dict[str, Any]:
    """Return the context of the page of the ledgers that a bookie has, as far as `response` lists them."""
    shown = [each for each in response.ledgers if any(bookie in fragment.bookies for fragment in each.fragments)]
    note = f"{len(shown):,} of the {count(len(response.ledgers), 'ledger')} that were read"
    note += " from the leaders, because the metadata store is unavailable." if response.from_leaders else "."
    found: dict[str, Any] = {
        "title": f"Ledgers on bookie {bookie}",
        "server": server,
        "tables": [table("ledgers", f"Ledgers on {bookie}", BOOKIE_COLUMNS, map(_owned_row, shown), note)],
        "hint": READ_HINT,
    }
    if response.HasField("next"):
        found |= {"more": page_path("ledgers", bookie=bookie, first=str(response.next)), "more_label": "Next ledgers"}
    return found


def _owned_row(ledger: LedgerStatus) -> list[Cell]:
    number, state, _, _, *rest = row_of(ledger)
    owner = ledger.partition
    return [number, Cell(owner or "another client", link=owner and page_path("partition", id=owner)), state, *rest]


def row_of(ledger: LedgerStatus) -> list[Cell]:
    number = Cell(str(ledger.id))
    begins = [Cell(f"{ledger.first_sequence:,}", "n"), Cell(f"{ledger.epoch:,}", "n")]
    if not ledger.fragments:  # nothing else is known, or the metadata cannot be decoded
        state = Cell(ledger.state or "closed or closing", "bad" if ledger.state else "")
        return [number, state, *begins, *[UNKNOWN] * (len(COLUMNS) - 4)]
    last = f"{ledger.last_entry:,}" if ledger.HasField("last_entry") else "open"
    where = " · ".join(f"{each.first_entry}: {', '.join(each.bookies)}" for each in ledger.fragments)
    return [
        number,
        Cell(ledger.state, "good" if ledger.state in ("OPEN", "CLOSED") else "warn"),
        *begins,
        Cell(last if ledger.last_entry >= 0 else "no entries", "n"),
        Cell(size(ledger.length) if ledger.state == "CLOSED" else "?", "n"),
        Cell(f"{ledger.ensemble_size}, {ledger.write_quorum}, {ledger.ack_quorum}"),
        Cell(where),
        Cell(date(ledger.created_ms)),
    ]
