"""The internals of the simulated metadata store: a lagging follower and a client's connection with it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.errors import MetadataError
from kvstore.meta.memory_tree import TreeNode, find
from kvstore.meta.store import Stat
from tests.sim.judges.probes import declare, probe

if TYPE_CHECKING:
    from tests.sim.world.metadata import SimMetadata
    from tests.sim.world.metadata_client import SimStore

declare(
    "metadata.lost_then_done",
    "metadata.lost_done_late",
    "metadata.lost_never_done",
    "metadata.answer_lost",
    "metadata.stale_read",
)


class Follower:
    """A member of the ensemble: the tree as it was a moment ago, and the watches of its clients."""

    def __init__(self, server: SimMetadata, nodes: dict[str, TreeNode]) -> None:
        self.applied = 0
        """Number of transactions applied."""
        self._server = server
        self._nodes = nodes
        self._behind: deque[dict[str, TreeNode | None]] = deque()
        self._due = 0.0
        self._watches: dict[str, list[Callable[[], None]]] = {}

    def get(self, path: str) -> tuple[bytes, Stat]:
        self._note_staleness()
        node = find(self._nodes, path)
        return node.data, node.stat()

    def children(self, path: str) -> list[str]:
        self._note_staleness()
        return sorted(find(self._nodes, path).children)

    def arm(self, path: str, fire: Callable[[], None]) -> None:
        """Call `fire` once, when this follower applies a change of the node or of its set of children."""
        self._watches.setdefault(path, []).append(fire)

    def commit(self, touched: dict[str, TreeNode | None]) -> None:
        """Take a transaction, to be applied a little later."""
        self._behind.append(touched)
        self._due = max(self._due, self._server.loop.time() + self._server.random.uniform(*self._server.config.lag_s))
        number = self.applied + len(self._behind)
        self._server.at(self._due, lambda: self.apply_up_to(number))

    def apply_up_to(self, number: int) -> None:
        while self.applied < number and self._behind:
            touched = self._behind.popleft()
            self.applied += 1
            for path, node in touched.items():
                if node is None:
                    self._nodes.pop(path, None)
                else:
                    self._nodes[path] = node
            for path in touched:
                for fire in self._watches.pop(path, []):
                    fire()

    def catch_up(self) -> None:
        """Apply all committed transactions."""
        self.apply_up_to(self.applied + len(self._behind))

    def _note_staleness(self) -> None:
        if self._behind:
            probe("metadata.stale_read")


Operation = Callable[["Connection"], Any]


class Call:
    """One request in flight."""

    __slots__ = ("answer", "is_executed", "operation")

    def __init__(self, operation: Operation, answer: asyncio.Future[Any]) -> None:
        self.operation, self.answer = operation, answer
        self.is_executed = False


class Connection:
    """A client's connection with a follower. It delivers in order, both ways, until it breaks."""

    def __init__(self, server: SimMetadata, client: SimStore, follower: Follower, session: int) -> None:
        self.follower, self.session = follower, session
        self.is_open = True
        """True while the server and the network keep it. After that, the client may not have noticed yet."""
        self.is_replaced = False
        """The session has another connection: the server refuses later messages of this one."""
        self._server, self._client = server, client
        self._calls: deque[Call] = deque()
        self._parked: list[Call] = []
        """Requests that arrived while the server was frozen."""
        self._last_arrival = self._last_answer = 0.0

    def send(self, call: Call) -> None:
        self._calls.append(call)
        self._last_arrival = max(self._last_arrival, self._server.loop.time() + self._server.latency())
        self._server.at(self._last_arrival, lambda: self._arrive(call))

    def write(self, change: Callable[[int], Any]) -> Any:
        """Commit a change at the leader. This connection's follower applies it before the answer leaves."""
        try:
            return change(self.session)
        finally:
            self.follower.catch_up()

    def hint(self, deliver: Callable[[], None]) -> None:
        """Send a watch's call to the client, in order with the answers."""
        if self.is_open:
            self._deliver(deliver)

    def lose(self, *, silently: bool) -> None:
        """Break the connection. The client notices soon, or with `silently` only after its pings fail."""
        if not self.is_open:
            return
        self.is_open = False
        for call in [call for call in self._calls if not call.is_executed]:
            self._decide_fate(call)
        notice = self._server.random.uniform(*self._server.config.notice_s) if silently else self._server.latency()
        self._client.at(self._server.loop.time() + notice, lambda: self._client.lost(self))

    def give_up(self) -> list[Call]:
        """Let the client forget the connection. Returns the calls without an answer."""
        self.lose(silently=False)
        unanswered = [call for call in self._calls if not call.answer.done()]
        self._calls.clear()
        return unanswered

    def thaw(self) -> None:
        """Resume the server: it serves everything that has arrived, also on connections abandoned since."""
        parked, self._parked = self._parked, []
        for call in parked:
            if self.is_open or self._server.random.random() < 0.5:
                self._execute(call)

    def _arrive(self, call: Call) -> None:
        if call.is_executed or not self.is_open:
            return
        if self._server.is_frozen:
            self._parked.append(call)
        else:
            self._execute(call)

    def _decide_fate(self, call: Call) -> None:
        draw = self._server.random.random()
        if self._server.is_frozen or draw < 0.4:
            probe("metadata.lost_never_done")
        elif draw < 0.8:
            probe("metadata.lost_then_done")
            self._execute(call)
        else:
            late = self._server.loop.time() + self._server.random.uniform(0, self._server.config.late_s)
            self._server.at(late, lambda: self._execute_late(call))

    def _execute_late(self, call: Call) -> None:
        if not self.is_replaced and self._server.is_up and not self._server.is_frozen:
            probe("metadata.lost_done_late")
            self._execute(call)

    def _execute(self, call: Call) -> None:
        if call.is_executed or self.is_replaced:
            return
        call.is_executed = True
        value: Any = None
        error: MetadataError | ValueError | None = None
        try:
            value = call.operation(self)
        except (MetadataError, ValueError) as refusal:
            error = refusal
        seen = self.follower.applied
        self._deliver(lambda: self._answer(call, value, error, seen))

    def _deliver(self, message: Callable[[], None]) -> None:
        self._last_answer = max(self._last_answer, self._server.loop.time() + self._server.latency())

        def arrive() -> None:
            if self.is_open:
                message()
            else:
                probe("metadata.answer_lost")

        self._client.at(self._last_answer, arrive)

    def _answer(self, call: Call, value: Any, error: Exception | None, seen: int) -> None:
        self._client.seen = max(self._client.seen, seen)
        while self._calls and (self._calls[0] is call or self._calls[0].answer.done()):
            self._calls.popleft()
        if call.answer.done():
            return
        if error is None:
            call.answer.set_result(value)
        else:
            call.answer.set_exception(error)
