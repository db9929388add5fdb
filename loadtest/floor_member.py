"""One process of the floor; floor.py says what that is and is not. Between the processes, big endian:

frame = body's size u32 | kind u8 | body
ADD        last confirmed entry u64 | entry u64 | crc32c of the rest u32 | puts
               put = is the key new u8 | sizes of key and value u32 u32 | key | value
STORED     entry u64
ASKED      for each: token u32 | is it a SET u8 | sizes of key and value u32 u32 | key | value
ANSWERED   for each: token u32 | size u32 | reply
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from struct import Struct
from typing import Any, Protocol, cast

import hiredis
from crc32c import crc32c

from kvstore.env.real import best_syncs, end_process
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.ring.hashing import MURMUR3

PROCESSES = 3
ENTRY_PUTS_MAX = 1_024
IN_FLIGHT = 4
"""Maximum number of entries of a partition in flight, as in the store."""
JOURNAL_BYTES = 256 << 20
"""Size of the journal, which is a ring of four quarters. Before a quarter is reused, the rows are flushed to files,
so that its records are no longer needed."""
QUARTER = JOURNAL_BYTES // 4
ZEROES = bytes(1 << 20)
ROW_HEADER = 25
"""Number of bytes before a value, as in the store for a key that was written before."""

ADD, STORED, ASKED, ANSWERED = range(4)
_frame, _add, _put, _entry, _ask, _answer, _group = map(Struct, (">IB", ">QQI", ">BII", ">Q", ">IBII", ">II", ">II"))

OK, ABSENT = b"+OK\r\n", b"$-1\r\n"
GONE = b"-ERR the process that leads this key has ended\r\n"


class Sink(Protocol):
    """The receiver of a reply: a client's connection, or the process that has forwarded the request."""

    def answer(self, number: int, reply: bytes) -> None: ...
    def flush(self) -> None: ...


Put = tuple[bytes, bytes, Sink, int]
"""Key, value, and the sink and the number of its reply."""
Mark = tuple[int, int]
"""A record in the journal: its partition and entry."""


def _answer_all(replies: Iterable[tuple[Sink, int, bytes]]) -> None:
    sinks: dict[Sink, None] = {}
    for sink, number, reply in replies:
        sink.answer(number, reply)
        sinks[sink] = None
    for sink in sinks:
        sink.flush()


class Journal:
    """One file, synced in groups."""

    def __init__(self, path: Path, stored: Callable[[list[Mark]], None], quarter: Callable[[], None]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        for at in range(0, JOURNAL_BYTES, len(ZEROES)):
            os.pwrite(self._fd, ZEROES, at)  # blocks written once sync faster, in the store's journal too
        os.fsync(self._fd)
        self._syncs, self._report, self._quarter = best_syncs(), stored, quarter
        self._at, self._records, self._marks, self._syncing = 0, list[bytes](), list[Mark](), list[Mark]()

    def append(self, record: bytes, mark: Mark) -> None:
        self._records.append(record)
        self._marks.append(mark)

    def flush(self) -> None:
        """Begin a group, unless one is in progress."""
        if self._syncing or not self._marks:
            return
        data = b"".join(self._records)
        self._syncing, self._marks, self._records = self._marks, [], []
        end = self._at + _group.size + len(data)
        if end > JOURNAL_BYTES:
            self._at, end = 0, _group.size + len(data)
        os.pwrite(self._fd, _group.pack(len(data), crc32c(data)) + data, self._at)
        if self._at // QUARTER != end // QUARTER:
            self._quarter()
        self._at = end
        self._syncs.submit(self._fd, self._synced)

    def _synced(self, error: OSError | None) -> None:
        if error is not None:
            end_process(f"the journal cannot be synced: {error}")
        marks, self._syncing = self._syncing, []
        self.flush()
        self._report(marks)


class Rows:
    """A partition's rows in one process, and the records that are not confirmed yet."""

    def __init__(self, folder: Path) -> None:
        self.engine = RocksEngine(str(folder))
        self.waiting: deque[tuple[int, bytes]] = deque()
        self._seq = 0

    def reply(self, key: bytes) -> bytes:
        row = self.engine.get(b"d" + key)
        return ABSENT if row is None else b"$%d\r\n%b\r\n" % (len(row) - ROW_HEADER, row[ROW_HEADER:])

    def are_new(self, puts: list[Put]) -> list[bool]:
        return [row is None for row in self.engine.multi_get([b"d" + put[0] for put in puts])]

    def confirm(self, confirmed: int) -> None:
        while self.waiting and self.waiting[0][0] <= confirmed:
            self.apply(*_read(*self.waiting.popleft()))

    def apply(self, entry: int, news: list[bool], puts: Iterable[tuple[Any, ...]]) -> None:
        batch = self.engine.batch()
        put, seq = batch.put, self._seq
        for is_new, each in zip(news, puts, strict=True):
            seq += 1
            if is_new:
                put(b"o" + each[0], b"")
            put(b"d" + each[0], seq.to_bytes(ROW_HEADER, "big") + each[1])
        self._seq = seq
        put(b"m", _entry.pack(entry))
        self.engine.write(batch)


def _read(entry: int, record: bytes) -> tuple[int, list[bool], list[tuple[bytes, bytes]]]:
    news, puts, at = [], [], _add.size
    while at < len(record):
        is_new, key_size, size = _put.unpack_from(record, at)
        middle = at + _put.size + key_size
        puts.append((record[at + _put.size : middle], record[middle : middle + size]))
        news.append(bool(is_new))
        at = middle + size
    return entry, news, puts


class Lead:
    """The write side of the partition that this process leads: it collects puts into entries, replicates each entry
    to two of three processes, applies it to the rows, and replies."""

    def __init__(self, member: Member, *, is_looking_up: bool) -> None:
        self._number, self._links, self._journal = member.number, member.links, member.journal
        self._rows, self._is_looking_up = member.rows[member.number], is_looking_up
        self._queue, self._is_due = list[Put](), False
        self._flights: deque[tuple[int, list[bool], list[Put]]] = deque()
        self._entry, self._confirmed = 0, 0
        self._stored = [0] * PROCESSES
        """The last entry that each process has synced."""

    def put(self, key: bytes, value: bytes, sink: Sink, number: int) -> None:
        self._queue.append((key, value, sink, number))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def stored(self, process: int, entry: int) -> None:
        self._stored[process] = entry
        self._confirmed = sorted(self._stored)[-2]
        while self._flights and self._flights[0][0] <= self._confirmed:
            entry, news, puts = self._flights.popleft()
            self._rows.apply(entry, news, puts)
            _answer_all((sink, number, OK) for _, _, sink, number in puts)
        if self._queue:
            self._turn()

    def _turn(self) -> None:
        self._is_due = False
        if not self._queue or len(self._flights) >= IN_FLIGHT:
            return
        puts, self._queue = self._queue[:ENTRY_PUTS_MAX], self._queue[ENTRY_PUTS_MAX:]
        news = self._rows.are_new(puts) if self._is_looking_up else [False] * len(puts)
        self._entry += 1
        parts: list[bytes] = []
        for is_new, (key, value, _, _) in zip(news, puts, strict=True):
            parts += (_put.pack(is_new, len(key), len(value)), key, value)
        body = b"".join(parts)
        record = _add.pack(self._confirmed, self._entry, crc32c(body)) + body
        self._flights.append((self._entry, news, puts))
        for link in self._links.values():
            link.send(ADD, record)
            link.flush()
        self._journal.append(record, (self._number, self._entry))
        self._journal.flush()


class Connection(asyncio.Protocol):
    """A client's connection. Replies written in one turn of the event loop are sent together."""

    def __init__(self, member: Member) -> None:
        self._member, self._out = member, list[bytes]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(out))

    def close(self) -> None:
        self._transport.close()


class Link(Connection):
    """A connection to another process, in both directions. It is also the sink of requests that this process has
    forwarded."""

    def __init__(self, member: Member, peer: int = -1) -> None:
        """Without `peer`, the first byte of the other end names it."""
        super().__init__(member)
        self._peer, self._rest = peer, b""
        self._asked, self._answers, self._is_due = list[bytes](), list[bytes](), False
        self._token, self._waiting = 0, dict[int, tuple[Sink, int]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._peer >= 0:
            self._transport.write(bytes((self._member.number,)))
            self._member.linked(self._peer, self)

    def connection_lost(self, error: Exception | None) -> None:
        self._member.links.pop(self._peer, None)
        _answer_all((sink, number, GONE) for sink, number in self._waiting.values())

    def send(self, kind: int, body: bytes) -> None:
        self._out += (_frame.pack(len(body), kind), body)

    def ask(self, key: bytes, value: bytes | None, sink: Sink, number: int) -> None:
        """Send a SET, or a GET if there is no value. Requests of one turn of the event loop are sent together."""
        self._token = token = self._token + 1 & 0xFFFFFFFF
        self._waiting[token] = sink, number
        self._asked += (_ask.pack(token, value is not None, len(key), len(value or b"")), key, value or b"")
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def answer(self, number: int, reply: bytes) -> None:
        self._answers += (_answer.pack(number, len(reply)), reply)

    def flush(self) -> None:
        if self._asked:
            asked, self._asked, self._is_due = self._asked, [], False
            self.send(ASKED, b"".join(asked))
        if self._answers:
            answers, self._answers = self._answers, []
            self.send(ANSWERED, b"".join(answers))
        super().flush()

    def data_received(self, data: bytes) -> None:
        if self._peer < 0:
            self._peer, data = data[0], data[1:]
            self._member.linked(self._peer, self)
        data = self._rest + data if self._rest else data
        at, confirmed = 0, 0
        while len(data) - at >= _frame.size:
            size, kind = _frame.unpack_from(data, at)
            begin, end = at + _frame.size, at + _frame.size + size
            if end > len(data):
                break
            body, at = data[begin:end], end
            if kind == ADD:
                confirmed = self._added(body)
            elif kind == STORED:
                self._member.lead.stored(self._peer, *_entry.unpack(body))
            elif kind == ASKED:
                self._be_asked(body)
            else:
                _answer_all(self._replies(body))
        self._rest = data[at:]
        self._member.journal.flush()  # before the rows are written: meanwhile the disk works
        self._member.rows[self._peer].confirm(confirmed)
        self.flush()

    def _added(self, body: bytes) -> int:
        confirmed, entry, crc = _add.unpack_from(body)
        if crc32c(memoryview(body)[_add.size :]) != crc:
            end_process(f"entry {entry} of partition {self._peer} came damaged")
        self._member.rows[self._peer].waiting.append((entry, body))
        self._member.journal.append(body, (self._peer, entry))
        return int(confirmed)

    def _be_asked(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            token, is_set, key_size, size = _ask.unpack_from(body, at)
            middle = at + _ask.size + key_size
            key, at = body[at + _ask.size : middle], middle + size
            if is_set:
                self._member.lead.put(key, body[middle:at], self, token)
            else:
                self.answer(token, self._member.rows[self._member.number].reply(key))

    def _replies(self, body: bytes) -> Iterable[tuple[Sink, int, bytes]]:
        at = 0
        while at < len(body):
            token, size = _answer.unpack_from(body, at)
            begin, at = at + _answer.size, at + _answer.size + size
            yield (*self._waiting.pop(token), body[begin:at])


def _rare(words: object) -> bytes:
    match words:
        case [b"PING"]:
            return b"+PONG\r\n"
        case [b"CONFIG", b"GET", bytes(name)]:  # redis-benchmark asks before it begins
            return b"*2\r\n$%d\r\n%b\r\n$0\r\n\r\n" % (len(name), name)
        case _:
            return b"-ERR expected SET key value, GET key or PING, in capitals\r\n"


class Endpoint(Connection):
    """A connection to a client. Replies leave in the order of the commands."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._reader, self._asked, self._answered, self._early = hiredis.Reader(), 0, 0, dict[int, bytes]()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        gets = self._reader.gets
        try:
            while (words := gets()) is not False:
                number = self._asked
                self._asked = number + 1
                size = len(words) if type(words) is list else 0
                if size == 3 and words[0] == b"SET" and type(words[1]) is type(words[2]) is bytes:
                    self._put(words[1], words[2], number)
                elif size == 2 and words[0] == b"GET" and type(words[1]) is bytes:
                    self._get(words[1], number)
                else:
                    self.answer(number, _rare(words))
        except hiredis.ProtocolError as error:
            self._transport.write(b"-ERR Protocol error: %b\r\n" % str(error).encode())
            self.close()
        self.flush()

    def _put(self, key: bytes, value: bytes, number: int) -> None:
        partition = MURMUR3.token_of(key) % PROCESSES
        if partition == self._member.number:
            self._member.lead.put(key, value, self, number)
        elif (link := self._member.links.get(partition)) is not None:
            link.ask(key, value, self, number)
        else:
            self.answer(number, GONE)

    def _get(self, key: bytes, number: int) -> None:
        partition = MURMUR3.token_of(key) % PROCESSES
        if partition == self._member.number:
            self.answer(number, self._member.rows[partition].reply(key))
        elif (link := self._member.links.get(partition)) is not None:
            link.ask(key, None, self, number)
        else:
            self.answer(number, GONE)

    def answer(self, number: int, reply: bytes) -> None:
        if number != self._answered:
            self._early[number] = reply
            return
        self._out.append(reply)
        self._answered += 1
        while self._early and (early := self._early.pop(self._answered, None)) is not None:
            self._out.append(early)
            self._answered += 1


class Member:
    """The state that all connections of a process share."""

    def __init__(self, number: int, folder: Path, *, is_looking_up: bool) -> None:
        folder.mkdir(parents=True)
        self.number, self.links = number, dict[int, Link]()
        self.has_links = asyncio.Event()
        self.rows = [Rows(folder / f"partition-{partition}") for partition in range(PROCESSES)]
        self.journal = Journal(folder / "journal", self._stored, self._flush_rows)
        self.lead = Lead(self, is_looking_up=is_looking_up)

    def linked(self, peer: int, link: Link) -> None:
        self.links[peer] = link
        if len(self.links) == PROCESSES - 1:
            self.has_links.set()

    def _stored(self, marks: list[Mark]) -> None:
        for partition, entry in dict(marks).items():  # of each partition the last
            if partition == self.number:
                self.lead.stored(self.number, entry)
            elif (link := self.links.get(partition)) is not None:
                link.send(STORED, _entry.pack(entry))
                link.flush()

    def _flush_rows(self) -> None:
        for rows in self.rows:
            rows.engine.flush(lambda error: end_process(f"rows cannot be written: {error}") if error else None)
