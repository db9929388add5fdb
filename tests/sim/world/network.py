"""A simulated network of byte streams between nodes: latency, cuts, clogs, resets, and how TCP reacts to them.

A cut holds bytes back and lets them through after it heals. A side without acknowledgements for too long breaks its end
with TimeoutError, and the other end learns that only when it sends. Nothing is lost or reordered within a live
connection; everything may be lost at its end. A request can therefore be done although its answer is lost.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import copy_context
from errno import EADDRINUSE, EADDRNOTAVAIL
from random import Random

from kvstore.env import Listener, Prelude, Stream, StreamHandler
from tests.sim.judges.probes import declare, probe
from tests.sim.trace import Trace
from tests.sim.world.loop import Process, SimLoop
from tests.sim.world.pipe import Link, Mark, NetworkConfig, Pipe
from tests.sim.world.stream import SimStream

__all__ = ["NetworkConfig", "SimListener", "SimNetwork", "SimTransport"]

declare("network.recut", "network.connect_refused", "network.connect_held_by_cut")

_FIRST_PORT = 40_000
_SYN_RETRY_S = 1.0


class SimListener:
    """A bound address."""

    def __init__(
        self, network: SimNetwork, address: str, process: Process, factory: Callable[[], StreamHandler]
    ) -> None:
        self.address = address
        self.process = process
        self._network = network
        self._factory = factory

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    def accept(self, stream: SimStream) -> None:
        """Give the connection a handler, in the process."""
        stream.handler = self._factory()
        stream.start()


class SimTransport:
    """The Transport port of one process. A node's host name is the node's name; port 0 means any free port."""

    def __init__(self, network: SimNetwork, process: Process) -> None:
        self._network = network
        self._process = process

    async def listen(
        self,
        address: str,
        factory: Callable[[], StreamHandler],
        *,
        is_vital: bool = False,
        is_lenient: bool = False,
        prelude: Callable[[], Prelude] | None = None,
    ) -> Listener:
        self._process.check_alive()
        return self._network.listen(address, self._process, factory)

    async def connect(
        self, address: str, handler: StreamHandler, *, prelude: Callable[[], Prelude] | None = None
    ) -> Stream:
        self._process.check_alive()
        ready: asyncio.Future[None] = self._network.loop.create_future()
        stream = self._network.dial(address, self._process, handler, ready)
        try:
            await ready
        except BaseException:
            self._network.hang_up(stream)
            raise
        return stream

    def statistics(self) -> dict[str, int]:
        return {}


class SimNetwork:
    """All links, listeners and connections, and the faults that strike them. Arguments are names of nodes, not of
    processes."""

    def __init__(
        self, loop: SimLoop, fork: Callable[[str], Random], trace: Trace, config: NetworkConfig | None = None
    ) -> None:
        self.loop = loop
        self.trace = trace
        self.config = config or NetworkConfig()
        self.random = fork("network")
        self.listeners: dict[str, SimListener] = {}
        self._fork = fork
        self._context = copy_context()
        self._links: dict[tuple[str, str], Link] = {}
        self._down: set[str] = set()
        self._hidden: dict[tuple[str, str], bool] = {}
        """By caller and address: True if connections are refused, False if they are not answered."""
        self._streams: dict[SimStream, None] = {}
        self._ports: dict[str, int] = {}
        self._connections = 0

    # Faults

    def cut(self, one: str, other: str) -> None:
        """Cut both directions between two nodes."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, source: str, target: str) -> None:
        """Cut the direction from `source` to `target`. Data in the other direction arrive but are never
        acknowledged."""
        assert source != target
        self.trace.event(source, "cut", target)
        self.link(source, target).is_cut = True

    def split(self, *sides: Iterable[str]) -> None:
        """Cut every pair of nodes on different sides. A node on no side reaches all others: a partial cut."""
        groups = [list(side) for side in sides]
        for index, group in enumerate(groups):
            for other in groups[index + 1 :]:
                for one in group:
                    for two in other:
                        self.cut(one, two)

    def heal(self, one: str | None = None, other: str | None = None) -> None:
        """Undo all cuts and hidden addresses, or the cuts of one node, or the cuts between two nodes."""
        wanted = {name for name in (one, other) if name is not None}
        if not wanted:
            self._hidden.clear()
        for link in self._links.values():
            if link.is_cut and wanted <= {link.source, link.target}:
                self.trace.event(link.source, "heal", link.target)
                link.is_cut = False
                self._retry(link)

    def clog(self, source: str, target: str, seconds: float) -> None:
        """Delay data sent from now on by at least `seconds`."""
        self.link(source, target).clogged_until = self.loop.time() + seconds

    def slow(self, source: str, target: str, extra_s: float) -> None:
        """Add `extra_s` to the latency of a link, until set again."""
        self.link(source, target).extra_s = extra_s

    def hide(self, address: str, callers: Iterable[str], *, refuses: bool) -> None:
        """Stop these nodes from connecting to the address, as a stale name or a firewall does; their connections to
        it break. All other traffic passes, also from the node that listens there."""
        for caller in callers:
            self.trace.event(caller, "hide", address)
            self._hidden[caller, address] = refuses
            for stream in list(self._streams):
                if stream.process.name == caller and "{}:{}".format(*stream.get_extra_info("peername")) == address:
                    for end in (stream, stream.out.other):
                        end.reset(ConnectionResetError("connection reset"))

    def show(self, address: str) -> None:
        """Undo `hide`."""
        self._hidden = {where: refuses for where, refuses in self._hidden.items() if where[1] != address}

    def reset_random(self) -> bool:
        """Break one connection at both ends. Returns False if there is none."""
        if not self._streams:
            return False
        stream = self.random.choice(list(self._streams))
        self.trace.event(stream.process.name, "reset", stream.out.connection)
        for end in (stream, stream.out.other):
            end.reset(ConnectionResetError("connection reset"))
        return True

    def process_died(self, process: Process, *, silent: bool) -> None:
        """Close everything that `process` had open. With `silent`, its host answers nothing until `host_up`."""
        for listener in [each for each in self.listeners.values() if each.process is process]:
            listener.close()
        for stream in [each for each in self._streams if each.process is process]:
            stream.vanish()
            self.forget(stream)
            if silent:
                stream.out.drop()
            else:
                stream.out.send(Mark.RST)
        if silent:
            self._down.add(process.name)

    def host_up(self, name: str) -> None:
        """Let the host answer again. It has forgotten its connections."""
        if name in self._down:
            self._down.discard(name)
            for link in self._links.values():
                if name in (link.source, link.target):
                    self._retry(link)

    # Used by transports, streams and pipes

    def listen(self, address: str, process: Process, factory: Callable[[], StreamHandler]) -> SimListener:
        host, _, port = address.rpartition(":")
        if host != process.name:
            raise OSError(EADDRNOTAVAIL, f"{address} is not an address of {process.name}")
        if port == "0":
            address = f"{host}:{self._free_port(host)}"
        if address in self.listeners:
            raise OSError(EADDRINUSE, f"{address} is taken")
        self.listeners[address] = listener = SimListener(self, address, process, factory)
        return listener

    def dial(self, address: str, process: Process, handler: StreamHandler, ready: asyncio.Future[None]) -> SimStream:
        """Begin to connect. `ready` completes when the connection is made, or with an OSError."""
        host, _, port = address.rpartition(":")
        here = (process.name, self._free_port(process.name))
        stream = SimStream(self, process, handler, sockname=here, peername=(host, int(port)))
        link = self.link(process.name, host)
        arrival = max(self.loop.time() + link.delay(), link.clogged_until)
        self.at(arrival, self._syn, stream, address, ready, self.loop.time())
        return stream

    def hang_up(self, stream: SimStream) -> None:
        """Abandon a connection attempt: the caller of connect was cancelled."""
        if stream in self._streams:
            stream.abort()
        else:
            stream.vanish()

    def forget(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)

    def link(self, source: str, target: str) -> Link:
        link = self._links.get((source, target))
        if link is None:
            random = self._fork(f"network/{source}>{target}")
            link = self._links[source, target] = Link(source, target, random, self.config)
        return link

    def is_open(self, link: Link) -> bool:
        return not (link.is_cut or link.source in self._down or link.target in self._down)

    def at(self, when: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call in the kernel: outside of all processes."""
        return self.loop.call_at(when, callback, *args, context=self._context)

    def take(self, inbox: deque[bytes]) -> bytes:
        """Return what one read gets from the arrived data: all of it, or occasionally less."""
        data = inbox[0] if len(inbox) == 1 else b"".join(inbox)
        inbox.clear()
        if len(data) > 1 and self.random.random() < self.config.recut_chance:
            probe("network.recut")
            cut = self.random.randrange(1, len(data))
            inbox.append(data[cut:])
            data = data[:cut]
        return data

    def saw(self, stream: SimStream, data: bytes) -> None:
        """Trace a read."""
        self.trace.event(stream.process.name, "receive", stream.out.connection, len(data), zlib.crc32(data))

    def _syn(self, stream: SimStream, address: str, ready: asyncio.Future[None], began: float) -> None:
        if stream.is_closing() or not stream.process.alive:
            return
        now = self.loop.time()
        caller, host = stream.process.name, address.rpartition(":")[0]
        back = self.link(host, caller)
        is_held = self._hidden.get((caller, address)) is False
        if is_held or not (self.is_open(self.link(caller, host)) and self.is_open(back)):
            probe("network.connect_held_by_cut")
            if now - began < self.config.connect_timeout_s:
                self.at(now + _SYN_RETRY_S, self._syn, stream, address, ready, began)
            else:
                self._refuse(stream, ready, TimeoutError(f"no answer from {address}"), now)
            return
        answer = now + back.delay()
        listener = self.listeners.get(address)
        if listener is None or (caller, address) in self._hidden:
            probe("network.connect_refused")
            self._refuse(stream, ready, ConnectionRefusedError(f"nobody listens at {address}"), answer)
            return
        server = SimStream(self, listener.process, None, **stream.names_of_peer())
        self._connections += 1
        self.trace.event(caller, "connect", address, self._connections)
        stream.out = Pipe(self, self._connections, stream, server)
        server.out = Pipe(self, self._connections, server, stream)
        self._streams[stream] = self._streams[server] = None
        self.loop.call_soon(listener.accept, server, context=server.context)
        self.loop.call_at(answer, stream.start, ready, context=stream.context)

    def _refuse(self, stream: SimStream, ready: asyncio.Future[None], error: OSError, at: float) -> None:
        def refuse() -> None:
            if not ready.done():
                ready.set_exception(error)

        self.loop.call_at(at, refuse, context=stream.context)

    def _retry(self, link: Link) -> None:
        for pipe in list(link.stalled):
            pipe.retry()

    def _free_port(self, host: str) -> int:
        self._ports[host] = self._ports.get(host, _FIRST_PORT) + 1
        return self._ports[host]
