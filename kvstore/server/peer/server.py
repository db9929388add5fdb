"""The answering side of links between servers: operations for partitions led here, and calls to local replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore import versions
from kvstore.env import Env, Stream, StreamHandler
from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, Overloaded, StoreError
from kvstore.partition.election.peer_replicas import HOLD
from kvstore.partition.state.commands import Flag, Op, Put, Record
from kvstore.partition.state.rows import record_of
from kvstore.server.access.certificates import common_names
from kvstore.server.peer import frames
from kvstore.server.peer.abandoned import REASON, Abandoned
from kvstore.server.peer.calls import HOLDS_MAX
from kvstore.server.peer.flow_control import FlowControl
from kvstore.server.peer.frames import Answer, Call, FrameError, Frames, Goodbye, Operations, Ping, Results
from kvstore.server.peer.handshake import PeerHandshake, RefusedPeers, shown_on
from kvstore.server.peer.identity import host_of
from kvstore.server.peer.proof import Credentials, HandshakeRefused
from kvstore.server.peer.refusals import UnreceivedRefusals
from kvstore.server.peer.traced import TRACES, expected, sink_of
from kvstore.server.redis.plans import CommandError
from kvstore.server.routing.dispatch import Dispatcher
from kvstore.server.routing.pending import PeerSink
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

_INT = {int}
_RETURN_OLD = int(Flag.RETURN_OLD)

LINKS_MAX = 256
"""Maximum number of servers with a link to this one."""
CALLS_MAX = 128
"""Maximum number of concurrently answered calls from one server, in addition to HOLDS_MAX that wait for the end of a
leadership."""
OUTPUT_HIGH_BYTES = 4 << 20
"""Bytes of unread answers. Above this limit, no more operations are started for the other server and nothing more is
read from it."""
CLOSE_S = 1.0
"""Seconds for which a stop waits until the other servers have closed their links."""
CLOSE_CHECKS = 50
OUTDATED_S = 16.0
"""Time for which a link of a lower version may continue after the cluster version has risen. Its caller notices within
ten seconds and ends it itself when nothing is in progress (link.py); a caller that has not done so by then cannot."""
AT_ONCE_MAX = 1_024
"""Maximum number of GETs of a lane that may be answered out of turn; each has a small record."""
RESULT_BYTES = 4 << 20
"""Total size of values at which a result frame is sent."""

Handler = Callable[[ServerId, str, bytes], Awaitable[bytes]]
HandlerAtOnce = Callable[[ServerId, str, bytes], bytes]


class PeerServer:
    """Accepts links from other servers and answers their operations and calls."""

    def __init__(
        self,
        env: Env,
        credentials: Credentials,
        dispatcher: Dispatcher,
        operations_max: int,
        known: versions.Versions = versions.FIXED,
    ) -> None:
        """`known` provides the version that this server supports and the version of its cluster."""
        self.versions = known
        self.credentials, self.dispatcher, self.operations_max = credentials, dispatcher, operations_max
        self.now = env.clock.now
        self.on_proven: Callable[[ServerId, list[str]], None] = lambda server, names: None
        """Called with the common names in the certificate of each server that has proven its identity."""
        self._refused_peers = RefusedPeers(env.clock)
        self._hosts: dict[ServerId, str] = {}
        """Hosts at which servers are or were registered. A server that the metadata store no longer has may still be
        running."""
        self._forget_topology = dispatcher.on_topology(self._note_hosts)
        self._note_hosts()
        self._nursery = env.nursery.child("peer server")
        self._handlers: dict[PartitionId, Handler] = {}
        self._at_once: dict[PartitionId, HandlerAtOnce] = {}
        self.traces = env.traces
        if self.traces.is_on:
            self.serve_at_once(TRACES, self._expect_traced)
        self._connections: dict[ServerId, PeerConnection] = {}
        self.operations = 0

    def serve(self, partition: PartitionId, handler: Handler) -> None:
        """See kvstore.partition.ports.Peers."""
        self._handlers[partition] = handler

    def serve_at_once(self, partition: PartitionId, handler: HandlerAtOnce) -> None:
        """Register a handler that returns at once and is called often, so that it needs no task."""
        self._at_once[partition] = handler

    def forget(self, partition: PartitionId) -> None:
        self._handlers.pop(partition, None)

    async def answer(self, server: ServerId, partition: PartitionId, method: str, body: bytes) -> bytes:
        """Let the local replica answer a call, and return the answer. Raises StoreError."""
        handler = self._handlers.get(partition)
        if handler is None:
            raise NotLeader(partition)
        return await handler(server, method, body)

    def accept(self, words: list[bytes], stream: Stream, leave: Callable[[], None]) -> StreamHandler:
        """Return the handler of a connection that began with `KVSTORE.PEER …`. `leave` is called once the other side
        has proven its identity (docs/protocol.md H8) or is gone. Raises CommandError."""
        try:
            return PeerHandshake(self, words[1:], stream, leave)
        except HandshakeRefused as refused:
            self.note_refused(stream, refused)
            raise CommandError(f"ERR {refused.answer}") from None

    def open(self, server: ServerId, stream: Stream, answer: bytes, version: int) -> PeerConnection:
        """Start the link of a server that has proven its identity. A server has one link, so its previous link is
        closed. After a network failure, this server may not have noticed that the previous link was lost. Raises
        HandshakeRefused."""
        if version < (least := versions.link_version(self.versions.cluster)):
            raise HandshakeRefused(
                f"peer version: expected at least {least}, got {version}; the cluster version has risen"
            )
        self.on_proven(server, common_names(shown_on(stream)))
        former = self._connections.pop(server, None)
        if former is not None:
            former.close()
        if len(self._connections) >= LINKS_MAX:
            raise HandshakeRefused(f"max number of links reached: {LINKS_MAX}")
        connection = self._connections[server] = PeerConnection(self, server, stream, version)
        stream.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        stream.write(answer)
        return connection

    # docs/protocol.md V2
    def end_outdated(self) -> None:
        """Schedule the end of links of lower versions, because the cluster version has risen."""
        asyncio.get_running_loop().call_later(OUTDATED_S, self._end_outdated)

    def _end_outdated(self) -> None:
        least = versions.link_version(self.versions.cluster)
        for server, connection in sorted(self._connections.items()):
            if connection.version < least:
                log.warning(
                    "server=%s ending its link of version %d, because the cluster needs %d",
                    server,
                    connection.version,
                    least,
                )
                connection.close()

    def note_refused(self, stream: Stream, refused: HandshakeRefused) -> None:
        address = stream.get_extra_info("peername")
        self._refused_peers.note(str(address[0]) if address else "?", str(refused))

    def host_of(self, server: ServerId) -> str | None:
        """Return the host at which the server is registered or was last registered, or None."""
        return self._hosts.get(server)

    def _note_hosts(self) -> None:
        self._hosts.update((each, host_of(member.resp)) for each, member in self.dispatcher.topology.servers.items())

    def ended(self, connection: PeerConnection) -> None:
        if self._connections.get(connection.server) is connection:
            del self._connections[connection.server]

    def at_once(self, partition: PartitionId) -> HandlerAtOnce | None:
        return self._at_once.get(partition)

    def _expect_traced(self, server: ServerId, method: str, body: bytes) -> bytes:
        """Record the parent spans of sampled operations that will arrive on the server's link."""
        connection = self._connections.get(server)
        if connection is not None:
            connection.expected = expected(body, connection.expected)
        return b""

    def spawn_answer(self, connection: PeerConnection, call: Call) -> None:
        self._nursery.spawn(connection.answer(call), name=f"answer {call.method}")

    def statistics(self) -> dict[str, int]:
        return {
            "peer_sessions": len(self._connections),
            "peer_operations_total": self.operations,
            "peer_refused_total": self._refused_peers.count,
        }

    async def close(self) -> None:
        """Wait until the other servers have received their answers and closed their links. Close the remaining links
        after CLOSE_S seconds."""
        self._forget_topology()
        for connection in list(self._connections.values()):
            connection.send_goodbye()
        for _ in range(CLOSE_CHECKS):
            if not self._connections:
                break
            await asyncio.sleep(CLOSE_S / CLOSE_CHECKS)
        for connection in list(self._connections.values()):
            connection.close()
        await self._nursery.close()


class PeerConnection(PeerSink):
    """The link from one other server: a StreamHandler, and the Sink of the operations that arrive on it."""

    def __init__(
        self, owner: PeerServer, server: ServerId, stream: Stream, version: int = versions.LINK_LATEST
    ) -> None:
        self.server, self.version = server, version
        self._owner, self._stream = owner, stream
        self._frames = Frames()
        self._flow = FlowControl()
        self._abandoned = Abandoned(self._flow, owner.now, self._begin)
        self._calls = self._holds = 0
        self._in_flight = 0
        self._asked: dict[PartitionId, None] = {}
        """Partitions with unanswered operations."""
        self._sent_progress: dict[PartitionId, tuple[int, int]] = {}
        """The progress of each partition that was last sent to the other server. Links deliver reliably, so no frame
        repeats it."""
        self._results = 0
        """Number of result frames written."""
        self.expected: dict[int, str] = {}
        """Parents of sampled operations that are about to arrive, by number."""
        self._refusals = UnreceivedRefusals()
        self._refused_partitions = self._refusals.partitions.frame_of
        self._refused_keys = self._refusals.keys.frame_of
        self._is_flush_due = False
        self._is_lost = False
        self._unsent, self._unsent_bytes = Results(), 0
        """The content of the next result frame, and the bytes of its values."""

    @property
    def is_gone(self) -> bool:
        return self._is_lost

    # ── the connection ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Stream) -> None:
        raise AssertionError("the connection existed before the handshake")

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except FrameError as error:
            log.warning("server=%s sent a malformed frame, closing the link: %s", self.server, error)
            self.close()

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._flow.clear()
        self._abandoned.end()
        self._owner.ended(self)

    def pause_writing(self) -> None:
        """Stop reading from the other server, because it reads its answers too slowly."""
        self._flow.is_held = True
        self._stream.pause_reading()

    def resume_writing(self) -> None:
        self._flow.is_held = False
        self._stream.resume_reading()
        self._begin()

    def close(self) -> None:
        self._is_lost = True
        self._stream.abort()

    def send_goodbye(self) -> None:
        """Ask the other server to send no more operations."""
        self._write(frames.encode(Goodbye()))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, message: frames.Message) -> None:
        match message:
            case Operations(ring_version, lanes, received):
                have_answered = False
                for lane in lanes:
                    if lane.gets and not lane.others and self._answer_gets(lane, ring_version):
                        have_answered, lane.gets = True, []
                        if not lane.puts:
                            continue
                    are_puts = lane.puts and not (lane.gets or lane.others)
                    ops, refused = (lane.puts, []) if are_puts else lane.in_order()
                    self._submit(PartitionId(lane.partition), ops, refused, ring_version, received)
                if have_answered:
                    self._send_results()
                if self.expected and not self._flow.waiting:
                    self.expected = {}  # the announced operations have arrived or were refused
            case Call():
                self._take_call(message)
            case Ping():
                self._write(frames.encode(message))
            case _:
                raise FrameError(f"unexpected {type(message).__name__} from the asking side")

    def _answer_gets(self, lane: frames.Lane, ring_version: int) -> bool:
        """Answer the GETs of a lane at once, if no earlier operation waits here or at the leader and each GET takes
        only a lookup. Return False if they must be queued. The answers are sent together with the other answers to
        the frame."""
        partition, gets = PartitionId(lane.partition), lane.gets
        if self._must_wait() or len(gets) > AT_ONCE_MAX:
            return False
        numbers, ops = zip(*gets, strict=True)
        keys = [op.key for op in ops]
        if any(op.level or op.seq for op in ops):
            return False
        replica = self._owner.dispatcher.replica_here(partition, ring_version)
        if replica is None:
            return False
        tokens = self._owner.dispatcher.topology.ring.hash.tokens_of(keys)
        rows = replica.read_now(keys, tokens, self._owner.now(), in_turn=True)
        if not isinstance(rows, list):
            return False
        self._asked[partition] = None
        self._owner.operations += len(gets)
        for number, row in zip(numbers, rows, strict=True):
            self._unsent_bytes += _add_read(self._unsent, number, None if row is None else record_of(row))
        if self._unsent_bytes > RESULT_BYTES:
            self._send_results()
        return True

    def _submit(
        self,
        partition: PartitionId,
        ops: list[tuple[int, Any]],
        refused: list[tuple[int, Any]],
        ring_version: int,
        received: int,
    ) -> None:
        self._owner.operations += len(ops)
        if self._in_flight + self._flow.waiting + len(ops) > self._owner.operations_max:
            refused += [(number, Overloaded("too many operations on one link; retry")) for number, _ in ops]
            ops = []
        if refused:
            self._unsent.others += refused
            self._send_results()
        self._asked[partition] = None
        if not self._must_wait() and _are_plain_puts(ops):
            numbers, puts = zip(*ops, strict=True)
            replica = self._owner.dispatcher.replica_here(partition, ring_version)
            if replica is not None and replica.serving:
                self._in_flight += len(ops)
                return replica.submit(puts, self, numbers)
        self._flow.arrive(partition, ((partition, op, number, ring_version, received) for number, op in ops))
        self._begin()
        if self._refused_partitions or self._refused_keys:
            self._refusals.forget(self._flow.oldest(received))

    def _begin(self) -> None:
        """Start waiting operations as far as flow control allows it."""
        submit = self._owner.dispatcher.submit_here
        partitions, keys = self._refused_partitions, self._refused_keys
        for partition, op, number, ring_version, received in self._flow.take():
            self._in_flight += 1
            error = self._refusals.of(partition, op, received) if partitions or keys else None
            if number <= self._flow.abandoned:
                self.reject(op, number, REASON)
            elif error is None:
                sink = self if not self.expected else sink_of(self, op, number, self.expected, self._owner.traces)
                submit(partition, op, sink, number, ring_version)
            else:
                self.reject(op, number, error)
        if self._flow.waiting:
            self._abandoned.watch()

    def reject(self, op: Op, token: int, error: NotLeader | Moved | Overloaded) -> None:
        if isinstance(error, Moved):
            self._refusals.refuse(op)
        self.complete(token, error)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _take_call(self, call: Call) -> None:
        is_hold = call.method == HOLD
        if (handler := self._owner.at_once(PartitionId(call.partition))) is not None:
            self._answer_at_once(call, handler)
            return
        if (self._holds >= HOLDS_MAX) if is_hold else (self._calls >= CALLS_MAX):
            self._write(frames.encode(Answer(call.number, b"", Overloaded("too many concurrent calls; retry"))))
            return
        self._holds += is_hold
        self._calls += not is_hold
        self._owner.spawn_answer(self, call)

    def _answer_at_once(self, call: Call, handler: HandlerAtOnce) -> None:
        try:
            reply = Answer(call.number, handler(self.server, call.method, call.body))
        except StoreError as error:
            reply = Answer(call.number, b"", error)
        self._write(frames.encode(reply))

    async def answer(self, call: Call) -> None:
        """Answer a call with the answer of the local replica."""
        try:
            body = await self._owner.answer(self.server, PartitionId(call.partition), call.method, call.body)
            if len(body) > frames.BODY_BYTES_MAX:
                raise InvalidRequest(f"expected an answer of at most {frames.BODY_BYTES_MAX} bytes, got {len(body)}")
            reply = Answer(call.number, body)
        except StoreError as error:
            reply = Answer(call.number, b"", error)
        except Exception:  # the root of a task: another server's message must not end this process
            log.exception("server=%s failed to answer a call: %s", self.server, call.method)
            return self.close()
        finally:
            self._holds -= call.method == HOLD
            self._calls -= call.method != HOLD
        self._write(frames.encode(reply))

    # ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, token: int, result: Any) -> None:
        self._in_flight -= 1
        kind = result.__class__
        if self._flow.in_flight:
            self._flow.end(token, len(result[0]) if kind is Record else 0)
        if kind is int:
            self._unsent.numbers.append((token, result))
        elif kind is Record or result is None:
            self._unsent_bytes += _add_read(self._unsent, token, result)
            if self._unsent_bytes > RESULT_BYTES:
                self._send_results()
        else:
            if kind is NotLeader:
                self._refusals.partitions.refuse([PartitionId(result.partition)])
            self._unsent.others.append((token, result))

    def complete_all(self, tokens: Sequence[int], results: Sequence[Any]) -> None:
        if set(map(type, results)) == _INT and not self._flow.in_flight:
            self._in_flight -= len(tokens)
            self._unsent.numbers += zip(tokens, results, strict=True)
        else:
            super().complete_all(tokens, results)

    def flush(self) -> None:
        self._is_flush_due = False
        self._send_results()
        if self._flow.waiting:
            self._begin()

    def _send_results(self) -> None:
        results = self._unsent
        if not (results.numbers or results.records or results.absent or results.others):
            return
        self._unsent, self._unsent_bytes = Results(), 0
        # docs/protocol.md P22: no answer may arrive before the progress of its partition
        for partition in self._asked:
            progress = self._owner.dispatcher.progress(partition)
            if self._sent_progress.get(partition) != progress:
                self._sent_progress[partition] = progress
                results.progress.append((str(partition), *progress))
        if not (self._in_flight or self._flow.waiting):
            self._asked.clear()
        try:
            self._write_results(results)
        except FrameError:
            others, results.others = results.others, []
            self._write_results(results)
            for number, result in others:
                self._send_singly(number, result)
        if self._refused_partitions or self._refused_keys:
            self._refusals.note_sent(self._results)

    def _send_singly(self, number: int, result: Any) -> None:
        try:
            self._write_results(Results(others=[(number, result)]))
        except FrameError as error:
            # Not refused, because the operation was carried out.
            self._write_results(
                Results(
                    others=[
                        (number, OutcomeUnknown(f"the operation has ended, but its result cannot be sent: {error}"))
                    ]
                )
            )

    def _write_results(self, results: Results) -> None:
        self._write(frames.encode(results))
        self._results += 1

    def _write(self, data: bytes) -> None:
        if self._is_lost:
            return
        self._stream.write(data)

    def _must_wait(self) -> bool:
        """Return True if operations that arrive now must queue and be checked one by one."""
        flow = self._flow
        return bool(flow.waiting or flow.is_held or self._refused_partitions or self._refused_keys or self.expected)


def _add_read(results: Results, number: int, record: Record | None) -> int:
    """Add the result of a GET. Return the size of its value in bytes."""
    if record is None:
        results.absent.append(number)
        return 0
    results.records.append((number, record))
    return len(record[0])


def _are_plain_puts(ops: list[tuple[int, Op]]) -> bool:
    """Return True if there is at least one operation and all are puts whose results contain no values."""
    return bool(ops) and not [op for _, op in ops if op.__class__ is not Put or op.flags & _RETURN_OLD]
