"""One end of a simulated TCP connection: the asyncio transport that a handler sees, and the kernel's half below it.

Methods marked "kernel" run whatever the process does, as a kernel does for a stopped process. The handler's methods are
called only in handles of its own process. Data that arrive for a paused process wait, and their sender is held back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tests.sim.world.loop import Process
from tests.sim.world.pipe import Mark, Pipe

if TYPE_CHECKING:
    from kvstore.env import StreamHandler
    from tests.sim.world.network import SimNetwork


_LIMIT_BYTES = 64 * 1024


class SimStream:
    """One end of a connection. `out` leads to the other end."""

    def __init__(
        self, network: SimNetwork, process: Process, handler: StreamHandler | None, **names: tuple[str, int]
    ) -> None:
        self.network = network
        self.process = process
        self.context = process.context.copy()
        self.handler = handler
        self.out: Pipe
        self.is_open = True
        """The kernel's view: False once this side has closed it, it was reset, or its process has died."""
        self._names = names
        self._made = False
        self._closing = False
        self._lost_called = self._is_lost = False
        """The second one is False until the handler's `connection_lost` has returned."""
        self._reading = True
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._eof_told = False
        self._poked = False
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._high, self._low = _LIMIT_BYTES, _LIMIT_BYTES // 4
        self._writing_paused = False

    # Called by a handler

    def write(self, data: bytes) -> None:
        self._check_open()
        if not data or (self._closing and not self._backlog):
            return
        room = 0 if self._backlog else self.room
        if len(data) <= room:
            self.out.send(bytes(data))
            return
        if room > 0:
            self.out.send(bytes(data[:room]))
        self._backlog.append(bytes(data[max(room, 0) :]))
        self._backlog_bytes += len(data) - max(room, 0)
        self._hold_writer()

    @property
    def room(self) -> int:
        """Number of bytes that the kernels accept now."""
        return self.network.config.window_bytes - self.out.unread

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._poke()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def get_write_buffer_size(self) -> int:
        return self._backlog_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._check_open()
        if high is None:
            high = _LIMIT_BYTES if low is None else 4 * low
        self._high, self._low = high, high // 4 if low is None else low
        self._hold_writer()

    def _check_open(self) -> None:
        """Raise RuntimeError after `connection_lost`, as uvloop does."""
        if self._is_lost:
            raise RuntimeError("unable to perform operation on a stream that is closed")

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: StreamHandler) -> None:
        self.handler = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._names.get(name, default)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._backlog:
                self._finish()

    def abort(self) -> None:
        self._break(None, tell_peer=True)

    def names_of_peer(self) -> dict[str, tuple[str, int]]:
        """Return the addresses as the other end sees them."""
        return {"sockname": self._names["peername"], "peername": self._names["sockname"]}

    # Called in the process

    def start(self, ready: asyncio.Future[None] | None = None) -> None:
        """Notify the handler that the connection is made, unless it is already broken."""
        if self._closing:
            if ready is not None and not ready.done():
                ready.set_exception(ConnectionResetError("connection reset while it was made"))
            return
        self._made = True
        assert self.handler is not None
        self.handler.connection_made(self)
        self._poke()
        if ready is not None and not ready.done():
            ready.set_result(None)

    def _deliver(self) -> None:
        self._poked = False
        if self._closing or not self._reading or not self._made:
            return
        assert self.handler is not None
        try:
            if self._inbox:
                self._deliver_data(self.network.take(self._inbox))
            elif self._ended and not self._eof_told:
                self._eof_told = True
                if not self.handler.eof_received():
                    self.close()
        except Exception as error:  # noqa: BLE001 - as asyncio does: the connection breaks, the loop lives
            self.network.loop.call_exception_handler({"message": "error in a stream handler", "exception": error})
            self._break(error, tell_peer=True)

    def _deliver_data(self, data: bytes) -> None:
        if self._inbox or self._ended:
            self._poke()
        self.network.saw(self, data)
        self.out.other.out.taken(len(data))
        assert self.handler is not None
        self.handler.data_received(data)

    def pump(self) -> None:
        """Pass bytes to the kernel up to its capacity."""
        while self._backlog and self.room > 0 and self.is_open:
            data = self._backlog.popleft()
            if len(data) > self.room:
                self._backlog.appendleft(data[self.room :])
                data = data[: self.room]
            self._backlog_bytes -= len(data)
            self.out.send(data)
        if self._writing_paused and self._backlog_bytes <= self._low and not self._lost_called:
            self._writing_paused = False
            assert self.handler is not None
            self.handler.resume_writing()
        if self._closing and not self._backlog and self.is_open:
            self._finish()

    def _hold_writer(self) -> None:
        if self._backlog_bytes > self._high and not self._writing_paused:
            self._writing_paused = True
            assert self.handler is not None
            self.handler.pause_writing()

    def _lose(self, error: Exception | None) -> None:
        if not self._lost_called:
            self._lost_called = True
            if self._made:
                assert self.handler is not None
                self.handler.connection_lost(error)
            self._is_lost = True

    def _finish(self) -> None:
        """End the stream in order, once everything is with the kernel."""
        self.out.send(Mark.FIN)
        self._shut(None)

    def _break(self, error: Exception | None, *, tell_peer: bool) -> None:
        if not self.is_open:
            return
        self._backlog.clear()
        self._backlog_bytes = 0
        if tell_peer:
            self.out.send(Mark.RST)
        self._shut(error)

    def _shut(self, error: Exception | None) -> None:
        self._closing = True
        self.is_open = False
        self._inbox.clear()
        self.network.forget(self)
        self.network.loop.call_soon(self._lose, error, context=self.context)

    # Called in the kernel

    def arrive(self, item: bytes | Mark) -> None:
        """Kernel: take an item that the pipe has delivered."""
        if item is Mark.RST:
            self.reset(ConnectionResetError("connection reset by peer"))
        elif isinstance(item, bytes):
            if self.is_open:
                self._inbox.append(item)
                self._poke()
            else:
                self.out.send(Mark.RST)
        else:
            self._ended = True
            self._poke()

    def reset(self, error: OSError) -> None:
        """Kernel: end the connection; unread data are lost."""
        self._break(error, tell_peer=False)

    def vanish(self) -> None:
        """Kernel: the process has died."""
        self.is_open = False
        self._closing = True

    def _poke(self) -> None:
        if not self._poked and (self._inbox or self._ended):
            self._poked = True
            self.network.loop.call_soon(self._deliver, context=self.context)
