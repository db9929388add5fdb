"""Checks the request ids of plain puts in batches, in columns. Decides only.

A request id is accepted as new in exactly the cases in which `RetryTable.find` and `Overlay.find_request` would accept
it individually. All other ids, such as a retry, a late duplicate or an id of a client at its bound, are left to these
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.errors import InvalidRequest, Overloaded
from kvstore.partition.state.commands import RequestId
from kvstore.partition.state.draft import Draft, RequestColumns
from kvstore.partition.state.operations import check_request
from kvstore.partition.state.overlay import Overlay
from kvstore.partition.state.retry_table import BYTES_PER_CLIENT, BYTES_PER_RESULT, RetryTable, hashes_at_hand


# docs/protocol.md P12, P14, P15, P33
def new_or_none(
    requests: Sequence[RequestId | None],
    keys: list[bytes],
    row_keys: list[bytes],
    draft: Draft,
    overlay: Overlay,
    retries: RetryTable,
) -> RequestColumns | None:
    """Return the request ids of a batch of puts in columns, if all of them are new and their results can be remembered.
    Returns None if any of them needs an individual check. At least one of the puts has a request id. `row_keys` are the
    row keys of `keys`."""
    asked = _asked(requests, hashes_at_hand(keys, row_keys))
    groups = _by_client(asked)
    layers = [draft.layer, *overlay.layers]
    cost = len(keys) * BYTES_PER_RESULT + len(groups) * BYTES_PER_CLIENT
    try:
        for clients, _, sequences, first_unacked, seen_ms, hashes in groups:
            client, lowest, acknowledged, latest_ms = clients[0], min(sequences), max(first_unacked), max(seen_ms)
            oldest = RequestId(client, lowest, min(first_unacked), min(seen_ms))
            check_request(oldest)
            check_request(RequestId(client, max(sequences), acknowledged, latest_ms))
            ids = set(zip(clients, sequences, hashes, strict=True))
            if lowest < acknowledged or len(ids) < len(sequences):
                return None
            for layer in layers:
                known = layer.first_unacked.get(client)
                if known is not None and (known > lowest or not ids.isdisjoint(layer.requests)):
                    return None
            if not retries.are_new(oldest, sequences, draft.time_ms):
                return None
            pending, size = overlay.results_in_flight(client, draft.layer)
            retries.admit_all(client, first_unacked, latest_ms, draft.time_ms, pending, size + cost)
    except (InvalidRequest, Overloaded):
        return None
    return asked


def _asked(requests: Sequence[RequestId | None], hashes: list[int]) -> RequestColumns:
    """Return the columns of the puts that have a request id."""
    places: Sequence[int] = range(len(requests))
    some = [each for each in requests if each is not None]
    if len(some) < len(requests):
        places = [place for place in places if requests[place] is not None]
        hashes = [hashes[place] for place in places]
    clients, sequences, first_unacked, seen_ms = zip(*some, strict=True)
    return RequestColumns(clients, places, sequences, first_unacked, seen_ms, hashes)


def _by_client(asked: RequestColumns) -> list[RequestColumns]:
    """Split the columns by client. Mostly there is one client."""
    if asked.is_of_one:
        return [asked]
    groups: dict[bytes, list[tuple[Any, ...]]] = {client: [] for client in asked.clients}
    for row in zip(*asked, strict=True):
        groups[row[0]].append(row)
    return [RequestColumns(*zip(*group, strict=True)) for group in groups.values()]
