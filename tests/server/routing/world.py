"""A model of three servers' routers with links, leaders and a changing ring. A seed determines a run.

The servers learn of changes late: a key moves to another partition first, then the ring is changed, and then one server
after the other reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, assert_never

from kvstore.errors import Moved, NotLeader, StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Code, Op, Sink
from kvstore.ring import Ring, plan, steps
from kvstore.ring.moves import MoveId
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.peer.refusals import UnreceivedRefusals
from kvstore.server.routing import events
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.large_reads import BYTES_AT_ONCE
from kvstore.server.routing.pending import PeerSink
from kvstore.server.routing.router import Router
from kvstore.types import PartitionId, ServerId
from tests.ring.rings import new_ring, unit_of

P1, P2 = PartitionId("p1"), PartitionId("p2")
NAMES = [ServerId(f"n{number}") for number in (1, 2, 3)]
WAITING_MAX = 1000
LARGE = BYTES_AT_ONCE // 4


@dataclass
class Truth:
    """The state according to the logs and the metadata store."""

    ring: Ring
    owner: dict[bytes, PartitionId]
    leader: dict[PartitionId, ServerId]
    done: dict[bytes, list[int]] = field(default_factory=dict)
    """The written values of each key, in order."""


class ClientSink(Sink):
    """Collects the results that a client receives, by the token of its write."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}

    def complete(self, token: int, result: Any) -> None:
        assert token not in self.results, "each operation ends once"
        self.results[token] = result

    def flush(self) -> None:
        """Do nothing: no operations are gathered."""


class Reader(Sink):
    """A client that reads, and may leave. Its results go to its interface."""

    def __init__(self, sink: ClientSink) -> None:
        self._sink, self.left = sink, False

    @property
    def is_gone(self) -> bool:
        return self.left

    def complete(self, token: int, result: Any) -> None:
        self._sink.complete(token, result)

    def flush(self) -> None:
        """Do nothing: no operations are gathered."""


class Value(NamedTuple):
    """The result of a read."""

    is_large: bool


class Replica:
    """A partition's replica, which executes submitted operations when the test says so."""

    def __init__(self, server: Server, partition: PartitionId) -> None:
        self._server, self._partition = server, partition
        self._queue: list[tuple[Op, Sink, int]] = []

    @property
    def serving(self) -> bool:
        return self._server.world.truth.leader[self._partition] == self._server.name

    def submit(self, op: Op, sink: Sink, token: int) -> None:
        assert self.serving
        self._queue.append((op, sink, token))

    def work(self) -> None:
        queue, self._queue = self._queue, []
        for op, sink, token in queue:
            truth = self._server.world.truth
            if truth.owner[op.key] != self._partition:
                self._server.handle(events.RejectedHere(op, sink, token, Moved("", 0)))
            elif op.code == Code.GET:
                sink.complete(token, Value(self._server.world.random.random() < self._server.world.large))
            else:
                truth.done.setdefault(op.key, []).append(int(op.value))
                sink.complete(token, len(truth.done[op.key]))

    def stop(self) -> None:
        """End its leadership: waiting operations are not executed."""
        queue, self._queue = self._queue, []
        for _, sink, token in queue:
            sink.complete(token, NotLeader(self._partition))

    def redirect_moved(self) -> None:
        staying = []
        for each in self._queue:
            if self._server.world.truth.owner[each[0].key] == self._partition:
                staying.append(each)
            else:
                self._server.handle(events.RejectedHere(*each, Moved("", 0)))
        self._queue = staying


class Session(PeerSink):
    """The answering end of a link, like `PeerConnection` without bytes."""

    def __init__(self, server: Server, link: Link) -> None:
        self._server, self._link = server, link
        self._refusals = UnreceivedRefusals()
        self._results: list[tuple[int, Any]] = []
        self._written = 0

    def take(self, frame: list[tuple[int, PartitionId, Op]], ring_version: int, heard: int) -> None:
        for number, partition, op in frame:
            error = self._refusals.of(partition, op, heard)
            if error is not None:
                self.reject(op, number, error)
            else:
                self._server.handle(events.SentByPeer(partition, op, self, number, ring_version))
        self._refusals.forget(heard)

    def complete(self, token: int, result: Any) -> None:
        if isinstance(result, NotLeader):
            self._refusals.partitions.refuse([PartitionId(result.partition)])
        self._results.append((token, result))

    def reject(self, op: Op, token: int, error: NotLeader | Moved) -> None:
        if isinstance(error, Moved):
            self._refusals.refuse(op)
        self.complete(token, error)

    def flush(self) -> None:
        """Do nothing: results are sent by `tell`."""

    def tell(self) -> None:
        if self._results:
            self._link.back.append(self._results)
            self._results = []
            self._written += 1
            self._refusals.note_sent(self._written)


class Link:
    """A link from one server to another. Each direction is in order, with any delay."""

    def __init__(self, asking: Server, answering: Server) -> None:
        self.asking = asking
        self.flight = Flight(answering.name, asking.world.room)
        self.session = Session(answering, self)
        self._lane: list[tuple[int, PartitionId, Op]] = []
        self._heard = 0
        self._there: list[tuple[list[tuple[int, PartitionId, Op]], int, int]] = []
        self.back: list[list[tuple[int, Any]]] = []

    def send(self, partition: PartitionId, number: int, op: Op) -> None:
        self._lane.append((number, partition, op))

    def flush(self) -> None:
        if self._lane:
            self._there.append((self._lane, self.asking.router.ring_version, self._heard))
            self._lane = []

    def arrive(self) -> None:
        if self._there:
            self.session.take(*self._there.pop(0))

    def hear(self) -> None:
        if not self.back:
            return
        results = self.back.pop(0)
        refused = sorted((each for each in results if isinstance(each[1], NotLeader | Moved)), key=lambda each: each[0])
        if refused:
            self.flush()
            self.asking.handle(events.RefusedByPeer(self.flight, refused))
        self._heard += 1
        reads = self.flight.reads
        for number, result in results:
            if isinstance(result, Value) and result.is_large and number in self.flight.pending:
                reads.note_large(self.flight.pending[number][1].sink.line, LARGE, self.asking.world.now)
            if reads.is_on and not isinstance(result, NotLeader | Moved):
                size = LARGE if isinstance(result, Value) and result.is_large else 0
                reads.ended(number, size, self.asking.world.now)
            found = self.flight.end(number)
            if found is not None:
                found[1].sink.complete(found[1].token, result)
        if reads.count:
            self.asking.handle(events.ReadsAnswered(self.flight))

    def lose(self) -> None:
        first = self._lane[0][0] if self._lane else self.flight.last_number + 1
        self._lane, self._there, self.back = [], [], []
        self.asking.handle(events.LinkLost(self.flight, first))


class Server:
    """A router with its replicas and links."""

    def __init__(self, world: World, name: ServerId) -> None:
        self.world, self.name, self.clients = world, name, ClientSink()
        self.replicas = {partition: Replica(self, partition) for partition in (P1, P2)}
        self.links: dict[ServerId, Link] = {}
        topology = ClusterTopology(world.truth.ring, world.leaders())
        self.router = Router(name, topology, self._serves, waiting_max=WAITING_MAX, bytes_max=1 << 30)
        for partition in self.replicas:
            self.handle(events.HostingChanged(partition, is_here=True))

    def submit(self, op: Op, sink: Sink, number: int) -> None:
        """Submit an operation as `Dispatcher.submit` does: directly where that is allowed."""
        partition = self.router.partition_of(op.key)
        if not self.router.redirects.keys:
            flight = self.router.routes.direct.get(partition)
            router = self.router
            if self._serves(partition) and not (partition in router.routes.sent_to or partition in router.waiting):
                return self.replicas[partition].submit(op, sink, number)
            is_scheduled = flight is not None and flight.reads.is_on and op.code == Code.GET
            if not self._serves(partition) and flight is not None and flight.has_capacity() and not is_scheduled:
                sent = self.router.follow(flight, partition, op, sink, number)
                return self.links[flight.server].send(partition, sent, op)
        self.handle(events.Submitted(op, sink, number))

    def learn(self) -> None:
        """Read the ring and the leaders."""
        topology = replace(self.router.topology, ring=self.world.truth.ring, leaders=self.world.leaders())
        for link in self.links.values():
            link.flush()
        self.handle(events.TopologyChanged(topology))
        self.handle(events.MovedRejected())

    def check_reads(self, link: Link) -> None:
        self.handle(events.ReadsAnswered(link.flight, is_check=True))

    def lose(self, server: ServerId) -> None:
        self.links.pop(server).lose()

    def handle(self, event: events.Event) -> None:
        for command in self.router.handle(event, self.world.now):
            self._perform(command)
        self.router.check()

    def _serves(self, partition: PartitionId) -> bool:
        return self.replicas[partition].serving

    def _perform(self, command: events.Command) -> None:
        match command:
            case events.SubmitHere(partition, op, sink, token):
                self.replicas[partition].submit(op, sink, token)
            case events.Send(server, partition, number, op):
                self.links[server].send(partition, number, op)
            case events.Connect(server):
                if server not in self.links:
                    link = self.links[server] = Link(self, self.world.servers[server])
                    self.handle(events.LinkOpened(link.flight))
            case events.Fail(sink, token, error):
                sink.complete(token, error)
            case events.RejectPeer(sink, op, token, moved):
                sink.reject(op, token, moved)
            case events.RejectMoved():
                for replica in self.replicas.values():
                    replica.redirect_moved()
            case events.ReadLeader() | events.ReadRing():
                pass  # servers learn of changes at random times
            case _:
                assert_never(command)


class World:
    """Keys of two partitions, one of which moves back and forth between them."""

    def __init__(self, seed: int, room: int = WAITING_MAX, reads: float = 0.0, large: float = 0.0) -> None:
        """`room`: operations in progress over one link; `reads`: how many of the operations read, and `large` how many
        of these find a large value."""
        self.random, self.now, self.room = Random(seed), 0.0, room
        self.reads, self.large = reads, large
        ring = new_ring([P1, P2], dict.fromkeys(NAMES, ""), len(NAMES))
        self.keys = [next(key for n in range(10_000) if ring.partition_of(key := b"key-%d" % n) == p) for p in (P1, P2)]
        self.truth = Truth(ring, {key: ring.partition_of(key) for key in self.keys}, {P1: NAMES[0], P2: NAMES[1]})
        self.servers: dict[ServerId, Server] = {}
        for name in NAMES:
            self.servers[name] = Server(self, name)
        self.readers = [Reader(self.servers[NAMES[0]].clients) for _ in range(5)]
        self.written: Counter[bytes] = Counter()
        self.asked: list[int] = []

    def leaders(self) -> dict[PartitionId, tuple[ServerId, int]]:
        return {partition: (server, 1) for partition, server in self.truth.leader.items()}

    # ── possible events ──

    def write(self) -> None:
        """Use one interface for all writes: writes through different interfaces have no order among each other."""
        key = self.random.choice(self.keys)
        self.asked.append(len(self.asked))
        server = self.servers[NAMES[0]]
        if self.reads and self.random.random() < self.reads:
            return server.submit(commands.Get(key), self.random.choice(self.readers), self.asked[-1])
        return server.submit(commands.Put(key, b"%d" % self.asked[-1]), server.clients, self.asked[-1])

    def leave(self) -> None:
        """Replace a client that reads by another."""
        place = self.random.randrange(len(self.readers))
        self.readers[place].left = True
        self.readers[place] = Reader(self.servers[NAMES[0]].clients)

    def move(self) -> None:
        """Move the key in the logs, and then in the ring."""
        key = self.keys[0]
        target = P2 if self.truth.owner[key] == P1 else P1
        self.truth.owner[key] = target
        ring = plan.shift_range(self.truth.ring, *unit_of(self.truth.ring.hash, key), target)
        (id_,) = ring.moves
        ring = steps.flip(steps.begin(ring, MoveId(id_), 1), MoveId(id_))
        self.truth.ring = steps.finish(ring, MoveId(id_))

    def elect(self) -> None:
        partition = self.random.choice((P1, P2))
        former, self.truth.leader[partition] = self.truth.leader[partition], self.random.choice(NAMES)
        self.servers[former].replicas[partition].stop()

    def learn(self) -> None:
        self.servers[self.random.choice(NAMES)].learn()

    def lose(self) -> None:
        server = self.servers[self.random.choice(NAMES)]
        if server.links:
            server.lose(self.random.choice(sorted(server.links)))

    def resume(self) -> None:
        """Advance something in transit by one step."""
        self.now += self.random.choice((0.0, 0.001, 0.02))
        steps_: list[Callable[[], None]] = [
            replica.work for server in self._servers() for replica in server.replicas.values()
        ]
        for server in self._servers():
            steps_.append(lambda server=server: server.handle(events.Ticked()))  # type: ignore[misc]
            for link in server.links.values():
                steps_ += [link.flush, link.arrive, link.session.tell, link.hear]
                if link.flight.reads.is_on:
                    steps_.append(lambda server=server, link=link: server.check_reads(link))  # type: ignore[misc]
        self.random.choice(steps_)()

    def run(self, steps_: int) -> None:
        """Apply random events, then let all servers learn everything and all operations end."""
        rare = [self.move, self.elect, self.learn, self.learn, self.lose, *([self.leave] if self.reads else [])]
        for _ in range(steps_):
            draw = self.random.random()
            (self.write if draw < 0.3 else self.random.choice(rare) if draw < 0.36 else self.resume)()
        for _ in range(60):
            for server in self._servers():
                server.learn()
                server.handle(events.Ticked())
                for link in list(server.links.values()):
                    link.flush()
                    link.arrive()
                for replica in server.replicas.values():
                    replica.work()
            for server in self._servers():
                for link in list(server.links.values()):
                    link.session.tell()
                    link.hear()
                    if link.flight.reads.is_on:
                        server.check_reads(link)
            self.now += 0.03

    def _servers(self) -> Iterator[Server]:
        yield from self.servers.values()

    def check(self) -> None:
        """Check that each write ended once, that writes of a key were executed in order, and that nothing is kept."""
        results = self.servers[NAMES[0]].clients.results
        assert sorted(results) == self.asked
        for key, values in self.truth.done.items():
            assert len(values) == len(set(values)), "a write was done twice"
            done = [value for value in values if isinstance(results[value], int)]
            assert done == sorted(done), f"writes of {key!r} were done as {done}"
        for server in self._servers():
            assert not server.router.is_waiting
            assert not any(link.flight.pending for link in server.links.values())

    def refused(self) -> list[StoreError]:
        return [each for each in self.servers[NAMES[0]].clients.results.values() if isinstance(each, StoreError)]
