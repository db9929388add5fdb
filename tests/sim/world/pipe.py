"""Links between nodes, and the pipes that carry one direction of a connection over a link."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from math import log
from random import Random
from typing import TYPE_CHECKING

from tests.sim.judges.probes import declare, probe

if TYPE_CHECKING:
    from tests.sim.world.network import SimNetwork
    from tests.sim.world.stream import SimStream

declare("network.reset_overtakes_data", "network.reset_lost_in_cut", "network.stalled_connection_breaks")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Durations in seconds. Values are drawn uniformly from the ranges."""

    latency_s: tuple[float, float] = (0.00005, 0.0005)
    """Latency of a link, drawn once."""
    jitter_s: float = 0.0002
    """Mean extra delay of each segment (exponential)."""
    spike_chance: float = 0.005
    spike_s: tuple[float, float] = (0.005, 0.05)
    recut_chance: float = 0.1
    """Probability that a delivery is split in two at a random byte."""
    window_bytes: int = 256 * 1024
    """Capacity of both kernels for one direction; more stays in the buffer of the stream."""
    stall_s: tuple[float, float] = (5.0, 20.0)
    """Seconds that unacknowledged bytes wait before their sender breaks the connection."""
    connect_timeout_s: float = 127.0


class Mark(Enum):
    """The items in a pipe besides bytes."""

    FIN = auto()
    RST = auto()


class Link:
    """One direction between two nodes."""

    def __init__(self, source: str, target: str, random: Random, config: NetworkConfig) -> None:
        self.source = source
        self.target = target
        self.is_cut = False
        self.clogged_until = 0.0
        """Nothing arrives before this time."""
        self.extra_s = 0.0
        self.stalled: dict[Pipe, None] = {}
        """Pipes that wait for this direction, for their bytes or for acknowledgements."""
        self._random = random
        self._config = config
        self._base_s = random.uniform(*config.latency_s)

    def delay(self) -> float:
        """Return the delay of the next segment in seconds."""
        config, draw = self._config, self._random.random
        delay = self._base_s + self.extra_s - log(1.0 - draw()) * config.jitter_s
        if draw() < config.spike_chance:
            delay += self._random.uniform(*config.spike_s)
        return delay


class Pipe:
    """One direction of a connection. It runs in the kernel: outside of all processes."""

    def __init__(self, network: SimNetwork, connection: int, source: SimStream, other: SimStream) -> None:
        self.connection = connection
        self.other = other
        self.unread = 0
        """Bytes sent that the other process has not read."""
        self._network = network
        self._source = source
        self._there = network.link(source.process.name, other.process.name)
        self._back = network.link(other.process.name, source.process.name)
        self._items: deque[tuple[float, float, list[bytes] | Mark]] = deque()
        """(arrival time, send time, item). An item arrives at its time or with the item before it, whichever is
        later."""
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def send(self, item: bytes | Mark) -> None:
        """Send an item. Bytes of one instant travel together."""
        now = self._network.loop.time()
        if isinstance(item, bytes):
            self.unread += len(item)
            if self._items and self._items[-1][1] == now and isinstance(chunks := self._items[-1][2], list):
                chunks.append(item)
                return
        at = max(now + self._there.delay(), self._there.clogged_until)
        if item is Mark.RST and self._items and self._network.random.random() < 0.5:
            probe("network.reset_overtakes_data")
            self.drop()
        self._items.append((at, now, [item] if isinstance(item, bytes) else item))
        if len(self._items) == 1 and self._timer is None:
            self._timer = self._network.at(at, self._arrive)

    def taken(self, size: int) -> None:
        """Record that the other process has read `size` bytes, which frees capacity."""
        self.unread -= size
        if self._source.get_write_buffer_size():
            loop = self._network.loop
            loop.call_later(self._back.delay(), self._source.pump, context=self._source.context)

    def drop(self) -> None:
        """Forget the items in transit."""
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def retry(self) -> None:
        """Try again: a direction that this pipe waits for is open again."""
        if self._there_is_open() and self._back_is_open():
            self._forgive()
        if self._items and self._timer is None:
            self._timer = self._network.at(self._network.loop.time() + self._there.delay(), self._arrive)

    def _there_is_open(self) -> bool:
        return self._network.is_open(self._there)

    def _back_is_open(self) -> bool:
        return self._network.is_open(self._back)

    def _arrive(self) -> None:
        self._timer = None
        now = self._network.loop.time()
        if self._stall is not None and self._there_is_open() and self._back_is_open():
            self._forgive()
        while self._items and self._items[0][0] <= now:
            item = self._items[0][2]
            if item is Mark.RST and not self._there_is_open():
                probe("network.reset_lost_in_cut")
                self._items.popleft()
                continue
            if not self._there_is_open():
                self._wait_for(self._there)
                return
            if item is not Mark.RST and not self._back_is_open():
                self._wait_for(self._back)
            self._items.popleft()
            self.other.arrive(b"".join(item) if isinstance(item, list) else item)
        if self._items and self._timer is None:
            self._timer = self._network.at(self._items[0][0], self._arrive)

    def _wait_for(self, link: Link) -> None:
        link.stalled[self] = None
        if self._stall is None:
            network = self._network
            patience = network.random.uniform(*network.config.stall_s)
            self._stall = network.at(network.loop.time() + patience, self._give_up)

    def _give_up(self) -> None:
        probe("network.stalled_connection_breaks")
        self._forgive()
        self.drop()
        self._network.trace.event(self._source.process.name, "stall", self.connection)
        self._source.reset(TimeoutError("no acknowledgement for too long"))

    def _forgive(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._there.stalled.pop(self, None)
        self._back.stalled.pop(self, None)
