"""Remembers request ids, so that a mutation that a client retries is applied once. Decides only.

The table is a function of the log: (client, sequence, hash of the key) → result. Each request carries the sequence
below which its client has received all answers. The table drops results below that sequence, and refuses later requests
below it as late duplicates.

A client is forgotten after it has sent no requests for a window of record time. The table refuses a request that
carries a leader time older than record time minus the window. Every forgotten request carried such an old time, so it
can never be applied again (docs/protocol.md, Retries). The table's bounds hold whatever a client sends (P33).

In the engine, the request ids of one entry are one row. The row stays while one of its results is remembered, or while
it is the latest row of a client. The table is rebuilt from these rows at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from struct import Struct, unpack
from typing import Any

from google.protobuf.message import DecodeError
from mmh3 import mmh3_32_uintdigest

from kvstore.errors import Corrupted, InvalidRequest, Overloaded, RequestExpired, WrittenByNewer
from kvstore.partition.state.commands import RequestId
from kvstore.partition.state.entry import Requests, requests_message, requests_of
from kvstore.proto import entry_pb2
from kvstore.ring.hashing import KeyHash

BYTES_PER_CLIENT = 600
"""Approximate memory that a client takes."""
BYTES_PER_RESULT = 220
"""Approximate memory that a remembered result takes besides its bytes."""
BATCHED_MIN = 4
"""From this number of requests on, remembering them batched costs less than one by one."""
FORGOTTEN_PER_ENTRY_MAX = 64
"""Maximum number of clients forgotten per entry, which bounds the work of one entry."""

_row_head = Struct(">BQ")
ROW_FORMAT = 1

Remembered = int | bytes
"""The sequence of the mutation whose result it is, or an encoded result."""
_Chain = tuple[int, Remembered, int, int, Any]
"""Key hash, result, row, cost in bytes, and the next chain link of the same sequence or None."""


def key_hash(hash: KeyHash, key: bytes) -> int:
    """Return a hash of the key, combined from its token and a second hash."""
    return hash.token_of(key) << 32 | mmh3_32_uintdigest(key, 1)


def hash_at_hand(key: bytes, row_key: bytes) -> int:
    """Return `key_hash` of a key, using the token in its row key."""
    return int.from_bytes(row_key[1:5], "big") << 32 | mmh3_32_uintdigest(key, 1)


def hashes_at_hand(keys: list[bytes], row_keys: list[bytes]) -> list[int]:
    """Return `key_hash` of many keys, using the tokens in their row keys."""
    tokens = unpack(f">{len(keys)}I", b"".join([row_key[1:5] for row_key in row_keys]))
    seconds = map(mmh3_32_uintdigest, keys, repeat(1))
    return [token << 32 | second for token, second in zip(tokens, seconds, strict=True)]


PART_OF_A_RANGE = b"\0"
"""In place of a batch's tokens: the result of one partition's part of a DELETE_RANGE, which never moves to another
partition. Every partition carries out its own part, perhaps all under one request id."""


def touched_tokens(row_keys: list[bytes]) -> bytes:
    """Return the tokens of all keys of a batch."""
    return b"".join(sorted({each[1:5] for each in row_keys}))


class _ClientResults:
    """One client's requests and results."""

    __slots__ = ("count", "first_unacked", "left", "results", "row", "seen_ms")

    def __init__(self) -> None:
        self.first_unacked = 0
        self.seen_ms = 0
        """No request of this client was logged at a later time or carried one."""
        self.row = 0
        self.count = 0
        """Number of results remembered. One sequence may have many: one for each key."""
        self.results: dict[int, _Chain] = {}
        self.left: tuple[int, int] | None = None
        """Cache of the last call of `_left`: its argument and result, until results change. Many requests of one client
        that arrive together carry the same acknowledgement."""


# docs/protocol.md P16
class RetryTable:
    """The retry table of one replica. Only records of the log change it; the leader also reads it."""

    def __init__(self, *, window_ms: int, bytes_max: int, results_max: int, forgotten_ms: int = 0) -> None:
        self.bytes = 0
        self.forgotten_ms = forgotten_ms
        """No forgotten request carried a later time. The window in use when they were forgotten may have been smaller,
        here or at the replica from which this state was copied."""
        self._window_ms, self._bytes_max, self._results_max = window_ms, bytes_max, results_max
        self._clients: dict[bytes, _ClientResults] = {}
        self.idle: list[tuple[int, bytes]] = []
        """A heap with each client once, by a `seen_ms` that it had. Its present `seen_ms` may be later."""
        self._rows: dict[int, int] = {}
        """Row → number of results and clients that need it."""
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._clients)

    # ── what the leader asks ──────────────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md P12, P14, P15
    def find(self, request: RequestId, hash_of_key: int, now_ms: int) -> Remembered | None:
        """Return the result of a request that was applied before, or None if the request is new. A new request must
        also pass `admit`.

        Raises RequestExpired for a request that may have been forgotten, or whose answer the client has already
        acknowledged.
        """
        client_id, sequence, _, carried_ms = request
        if self._may_be_forgotten(carried_ms, now_ms):
            raise RequestExpired(f"the request carries leader time {carried_ms}, which is too old at {now_ms}")
        client = self._clients.get(client_id)
        if client is None:
            return None
        link: _Chain | None = client.results.get(sequence)
        while link is not None:
            if link[0] == hash_of_key:
                return link[1]
            link = link[4]
        if sequence < client.first_unacked:
            raise RequestExpired(
                f"request {sequence} was answered, and the client has acknowledged all below {client.first_unacked}"
            )
        return None

    def are_new(self, oldest: RequestId, sequences: Sequence[int], now_ms: int) -> bool:
        """Return True if `find` would find none of these requests of one client, and would refuse none. `oldest` is the
        request with the lowest sequence, and carries the earliest time of all. May return False for new requests if
        only `find` can tell."""
        client_id, lowest, _, carried_ms = oldest
        if self._may_be_forgotten(carried_ms, now_ms):
            return False
        client = self._clients.get(client_id)
        return client is None or (lowest >= client.first_unacked and client.results.keys().isdisjoint(sequences))

    def _may_be_forgotten(self, carried_ms: int, now_ms: int) -> bool:
        return carried_ms < now_ms - self._window_ms or carried_ms <= self.forgotten_ms

    def admit(self, request: RequestId, now_ms: int, pending: int, pending_bytes: int) -> None:
        """Check that the result of a new request can be remembered. `pending` is the number of this client's results in
        flight, and `pending_bytes` the size of all clients' results in flight. Raises Overloaded if a bound is reached.
        Raises InvalidRequest if the request carries a time so far in the future that its client could never be
        forgotten."""
        client_id, _, first_unacked, carried_ms = request
        if carried_ms > now_ms + self._window_ms:
            raise InvalidRequest(f"the request carries leader time {carried_ms}, which is ahead of {now_ms}")
        client, size = self._clients.get(client_id), self.bytes + pending_bytes
        if client is None and size >= self._bytes_max:
            raise Overloaded(f"remembered results of {len(self._clients)} clients take {size} bytes")
        count = pending + (0 if client is None else client.count)
        if count < self._results_max and size < 2 * self._bytes_max:
            return
        left = pending + (0 if client is None else _left(client, first_unacked))
        if left >= self._results_max:
            raise Overloaded(f"{left} results of this client are not acknowledged; wait for answers")
        if left and size >= 2 * self._bytes_max:
            raise Overloaded(f"remembered results take {size} bytes")

    def admit_all(
        self,
        client_id: bytes,
        first_unacked: Sequence[int],
        carried_ms: int,
        now_ms: int,
        pending: int,
        pending_bytes: int,
    ) -> None:
        """Like `admit`, for new requests of one client, in order. `carried_ms` is the latest time that any of them
        carries. `pending_bytes` includes the cost of all of them."""
        count, client = len(first_unacked), self._clients.get(client_id)
        if pending + count + (0 if client is None else client.count) > self._results_max:
            last = {first: place for place, first in enumerate(first_unacked)}
        else:
            last = {min(first_unacked): count - 1}
        for first, place in last.items():
            self.admit(RequestId(client_id, 0, first, carried_ms), now_ms, pending + place, pending_bytes)

    # ── what the log changes ──────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, first_seq: int, time_ms: int, requests: Requests, *, is_reload: bool = False) -> list[int]:
        """Record the request ids of the entry that begins with `first_seq`, as row `first_seq`. Returns the rows that
        are no longer needed. With `is_reload`, the row is one that this table wrote earlier, so its bounds have already
        been enforced."""
        self._rows[first_seq] = 1
        clients = [
            self._touch(client_id, first_seq, time_ms, first_unacked, seen_ms)
            for client_id, first_unacked, seen_ms in zip(
                requests.clients, requests.first_unacked, requests.seen_ms, strict=True
            )
        ]
        if len(clients) == 1 and len(requests.sequences) >= BATCHED_MIN and _are_plain(requests, clients[0]):
            self._remember_batched(clients[0], first_seq, requests)
        else:
            self._remember_each(clients, first_seq, requests)
        for client in () if is_reload else clients:
            self._bound(client)
        self._release(first_seq)
        return self._take_dropped()

    def _remember_batched(self, client: _ClientResults, first_seq: int, requests: Requests) -> None:
        """Do the same as `_remember_each` for plain requests, in columns."""
        sequences, count = requests.sequences, len(requests.sequences)
        versions = map(first_seq.__add__, requests.mutations)
        links = zip(requests.hashes, versions, repeat(first_seq), repeat(BYTES_PER_RESULT), repeat(None))
        client.results.update(zip(sequences, links, strict=True))
        client.count += count
        client.left = None
        self.bytes += count * BYTES_PER_RESULT
        self._rows[first_seq] += count

    def _remember_each(self, clients: list[_ClientResults], first_seq: int, requests: Requests) -> None:
        nothing = [b""] * len(requests.sequences)
        results, touched = requests.results or nothing, requests.touched or nothing
        kept = size = 0
        for number, sequence, hash_of_key, mutation, result, tokens in zip(
            requests.client, requests.sequences, requests.hashes, requests.mutations, results, touched, strict=True
        ):
            client = clients[number]
            if sequence >= client.first_unacked:
                known = client.results.get(sequence)
                if known is not None and _holds(known, hash_of_key):
                    continue  # imported before
                remembered: Remembered = result or first_seq + mutation
                cost = BYTES_PER_RESULT + len(result) + len(tokens)
                client.results[sequence] = (hash_of_key, remembered, first_seq, cost, known)
                client.count += 1
                client.left = None
                kept += 1
                size += cost
        self.bytes += size
        self._rows[first_seq] += kept

    def _bound(self, client: _ClientResults) -> None:
        """Enforce the bounds whatever the log says: drop the client's lowest sequences, as if the client had
        acknowledged them. Their duplicates are then refused, never applied (docs/protocol.md, P33)."""
        if client.count <= self._results_max and self.bytes <= 2 * self._bytes_max:
            return
        for sequence in sorted(client.results):
            if client.count <= self._results_max and self.bytes <= 2 * self._bytes_max:
                return
            client.first_unacked = sequence + 1
            self._drop(client, [sequence])

    def row(self, time_ms: int, requests: Requests) -> bytes:
        """Encode the engine row for request ids that were just applied. The row contains each client's largest values
        so far, because the rows that brought them may be gone when the table is rebuilt."""
        clients = [self._clients[each] for each in requests.clients]
        message = entry_pb2.Requests()
        message.CopyFrom(requests.message or requests_message(requests))
        message.first_unacked[:] = [client.first_unacked for client in clients]
        message.seen_ms[:] = [client.seen_ms for client in clients]
        return _row_head.pack(ROW_FORMAT, time_ms) + message.SerializeToString()

    def forget(self, time_ms: int, most: int = FORGOTTEN_PER_ENTRY_MAX) -> list[int]:
        """Forget up to `most` clients that have been idle for the whole window at record time `time_ms`. Returns the
        rows that are no longer needed."""
        horizon = time_ms - self._window_ms
        idle = self.idle
        while idle and idle[0][0] < horizon and most:
            most -= 1
            client_id = idle[0][1]
            client = self._clients[client_id]
            if client.seen_ms >= horizon:
                heapreplace(idle, (client.seen_ms, client_id))
                continue
            heappop(idle)
            self.forgotten_ms = max(self.forgotten_ms, client.seen_ms)
            del self._clients[client_id]
            self.bytes -= BYTES_PER_CLIENT
            self._drop(client, list(client.results))
            self._release(client.row)
        return self._take_dropped()

    def _touch(self, client_id: bytes, row: int, time_ms: int, first_unacked: int, seen_ms: int) -> _ClientResults:
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _ClientResults()
            self.bytes += BYTES_PER_CLIENT
            heappush(self.idle, (max(seen_ms, time_ms), client_id))
        else:
            self._release(client.row)
        client.row = row
        self._rows[row] += 1
        client.seen_ms = max(client.seen_ms, seen_ms, time_ms)
        if first_unacked > client.first_unacked:
            self._prune(client, first_unacked)
        return client

    def _prune(self, client: _ClientResults, first_unacked: int) -> None:
        before, client.first_unacked = client.first_unacked, first_unacked
        results = client.results
        if first_unacked - before <= len(results):
            self._drop(client, range(before, first_unacked))
        else:
            self._drop(client, [each for each in results if each < first_unacked])

    def _drop(self, client: _ClientResults, sequences: Iterable[int]) -> None:
        """Drop the results of sequences, if there are any. Results of one row are mostly adjacent."""
        released, many, count, size = 0, 0, 0, 0
        link: _Chain | None
        for link in map(client.results.pop, sequences, repeat(None)):
            while link is not None:
                _, _, row, cost, link = link
                count += 1
                size += cost
                if row != released and many:
                    self._release(released, many)
                    many = 0
                released, many = row, many + 1
        if many:
            self._release(released, many)
        client.count -= count
        client.left = None
        self.bytes -= size

    def _release(self, row: int, many: int = 1) -> None:
        left = self._rows[row] - many
        if left:
            self._rows[row] = left
        else:
            del self._rows[row]
            self._dropped.append(row)

    def _take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    # ── for tests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Assert the invariants of the table."""
        needed: dict[int, int] = {}
        size = 0
        for client in self._clients.values():
            needed[client.row] = needed.get(client.row, 0) + 1
            size += BYTES_PER_CLIENT
            count = 0
            for sequence, first in client.results.items():
                assert sequence >= client.first_unacked, f"{sequence} is remembered below {client.first_unacked}"
                link: _Chain | None = first
                while link is not None:
                    _, _, row, cost, link = link
                    needed[row] = needed.get(row, 0) + 1
                    count, size = count + 1, size + cost
            assert count == client.count, f"counted {client.count} results, hold {count}"
            assert client.left is None or client.left[1] == _count_from(client, client.left[0]), "an old count"
        assert sorted(each for _, each in self.idle) == sorted(self._clients), "who may be idle is not who is known"
        assert all(since <= self._clients[each].seen_ms for since, each in self.idle), "idle since later than seen"
        assert needed == self._rows, f"rows {self._rows}, needed {needed}"
        assert size == self.bytes, f"counted {self.bytes} bytes, hold {size}"

    def rows(self) -> list[int]:
        """Return the rows that the engine must hold, in order."""
        return sorted(self._rows)


def _are_plain(requests: Requests, client: _ClientResults) -> bool:
    """Return True if all are requests of this client whose results are their mutations' sequences, each under a
    sequence of its own that is not remembered."""
    sequences, results = requests.sequences, client.results
    if requests.results or requests.touched:
        return False
    is_kept = min(sequences) >= client.first_unacked and results.keys().isdisjoint(sequences)
    return is_kept and len(set(sequences)) == len(sequences)


def _left(client: _ClientResults, first_unacked: int) -> int:
    """Return how many results remain once the client has acknowledged all below `first_unacked`."""
    if first_unacked <= client.first_unacked:
        return client.count
    if client.left is None or client.left[0] != first_unacked:
        begun, left = client.left or (client.first_unacked, client.count)
        results = client.results
        if client.count == len(results) and begun < first_unacked <= begun + len(results):  # one for each sequence
            left -= sum(map(results.__contains__, range(begun, first_unacked)))
        else:
            left = _count_from(client, first_unacked)
        client.left = first_unacked, left
    return client.left[1]


def _count_from(client: _ClientResults, sequence: int) -> int:
    count = 0
    for each, first in client.results.items():
        link: _Chain | None = first if each >= sequence else None
        while link is not None:
            count, link = count + 1, link[4]
    return count


def _holds(link: _Chain | None, hash_of_key: int) -> bool:
    while link is not None:
        if link[0] == hash_of_key:
            return True
        link = link[4]
    return False


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_row(row: bytes) -> tuple[int, Requests]:
    """Decode a row that `RetryTable.row` has encoded. Returns its record time and request ids. Raises Corrupted, or
    WrittenByNewer for an unknown format."""
    row_format, time_ms = _row_head.unpack_from(row)
    if row_format != ROW_FORMAT:
        raise WrittenByNewer(f"expected request ids in format {ROW_FORMAT}, got format {row_format}")
    try:
        return time_ms, requests_of(entry_pb2.Requests.FromString(row[_row_head.size :]))
    except DecodeError as error:
        raise Corrupted(f"cannot read a row of request ids: {error}") from error
