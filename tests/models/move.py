"""A model of one key that moves from partition S to partition P while it is written, deleted and read. Each of the
rules M3 to M9 of docs/protocol.md can be removed.

S's log consists of the acknowledged records and of the records that its leader has sent in addition. A takeover of S
keeps a part of the latter. It leaves the former leader behind, which answers reads under its lease until the new
leader's wait ends. P's own log is modelled as atomic; a crash of P loses the page that it had only in memory. P learns
of RELEASE from S's log, or sooner from S's answer; its requests for RELEASE may be late. One client puts, then deletes.
An unanswered request is sent to S and to P again, and one request arrives late a second time. A freeze may end and be
tried again.

Promises: reads are linearizable; a request is applied once; acknowledged writes stay; a session sees its own writes at
every replica of S that answers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tests.models.search import Broken

REQUESTS, FREEZES, SENT_MAX = 2, 2, 2
PUT, DELETE = 1, 2
"""The client's requests, by number."""

WRITE, OTHER, FREEZE, UNFREEZE, RELEASE = "write", "write of another key", "FREEZE", "UNFREEZE", "RELEASE"
Record = tuple[str, int]
"""The kind, and the number of the request or the freeze."""
Log = tuple[Record, ...]


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    page_behind_pin: bool = True
    """M3: no page is older than the pin."""
    tail_from_pin: bool = True
    """M3: S's log is followed from the pin, not from the page."""
    tail_acknowledged: bool = True
    """M3: P reads S's log only up to the last acknowledged record."""
    wiped: bool = True
    """M3: IMPORT-BEGIN removes the remains of an earlier attempt."""
    results_move: bool = True
    """M4: the results of a key's requests move with the key."""
    frozen: bool = True
    """M5: FREEZE stops writes."""
    frozen_once_sent: bool = True
    """M5: writes stop as soon as FREEZE is sent."""
    release_by_serving: bool = True
    """M7: a leader that still waits for its predecessor's lease does not release."""
    silent_once_sent: bool = True
    """M7: S's leader stops reading before it sends RELEASE."""
    freeze_named: bool = True
    """M7: a request for RELEASE names its freeze."""
    one_decides: bool = True
    """M8: UNFREEZE and RELEASE exclude each other, including those in flight."""
    own_after_release: bool = True
    """M9: P owns after RELEASE, not after the flip."""
    sequence_raised: bool = True
    """M9: OWN raises P's sequence to S's at RELEASE, not only to the versions that were copied."""


class Phase(StrEnum):
    """The phase of P."""

    IDLE = "idle"
    COPYING = "copying"
    COPIED = "copied"
    FOLLOWING = "following"
    ENDED = "ended"
    OWNING = "owning"


class State(NamedTuple):
    """The whole state. The last fields bound the search: the number of times that an event may still happen."""

    log: Log = ()
    sent: Log = ()
    """Sent by S's leader and not acknowledged."""
    waiting: bool = False
    """S's leader waits for its predecessor's lease."""
    former: tuple[int, bool] | None = None
    """S's former leader while its lease lasts: the number of records it has applied, and True if it has sent
    RELEASE."""
    phase: Phase = Phase.IDLE
    end: int = 0
    """The freeze that P's IMPORT-END names."""
    data: tuple[int, ...] = ()
    """The requests that P has applied to the key."""
    results: frozenset[int] = frozenset()
    tail: int = 0
    """Number of records of S's log that P has read."""
    sequence: int = 0
    """The sequence of P."""
    pin: int = -1
    page: tuple[int, tuple[int, ...], frozenset[int]] | None = None
    """In P's memory: the position of the read, the data, the results."""
    asked: frozenset[int] = frozenset()
    """The freezes that requests for RELEASE name."""
    request: int = 0
    """The client's last request."""
    open: bool = False
    """True if the request is not answered yet."""
    token: int = 0
    """The token of the client's session."""
    seen: int = 0
    """The last request whose effect any reader has seen."""
    takeovers: int = 1
    crashes: int = 1
    late: int = 1


def fold(log: Log) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the key's content after this part of S's log: the applied requests, and the requests with known
    results."""
    data: tuple[int, ...] = ()
    for kind, number in log:
        if kind == WRITE and number not in data:
            data += (number,)
    return data, frozenset(data)


def version(log: Log) -> int:
    """Return the version of the key."""
    written = [place for place, record in enumerate(log, 1) if record[0] == WRITE and record not in log[: place - 1]]
    return written[-1] if written else 0


def freeze_in(log: Log) -> int:
    """Return the freeze in force, or 0 if there is none."""
    found = 0
    for kind, number in log:
        found = number if kind == FREEZE else 0 if kind == UNFREEZE else found
    return found


def has(log: Log, kind: str) -> bool:
    return any(each == kind for each, _ in log)


def is_released(log: Log, rules: Rules) -> bool:
    """Return True if S has given the range away. Without `one_decides` the last record counts."""
    words = [kind for kind, _ in log if kind in (RELEASE, UNFREEZE)]
    return RELEASE in words if rules.one_decides else words[-1:] == [RELEASE]


def is_there(data: tuple[int, ...]) -> bool:
    return data[-1:] not in ((), (DELETE,))


def explained(data: tuple[int, ...]) -> list[int]:
    """Return the requests after which the key has this content."""
    return [data[-1]] if is_there(data) else [0, DELETE]


Step = tuple[str, "State | Broken"]


def shown(state: State, data: tuple[int, ...], label: str) -> Step:
    """Answer a linearizable read with `data`."""
    if sorted(set(data)) != list(data):
        return label, Broken(f"requests were applied as {data}")
    fitting = [each for each in explained(data) if state.seen <= each <= state.request]
    if not fitting:
        return label, Broken(f"shows {data}, but request {state.seen} was acknowledged or shown before")
    return label, state._replace(seen=fitting[0])


def answered(state: State, request: int, sequence: int) -> State:
    """Answer the client: the request is done."""
    if not state.open or request != state.request:
        return state
    return state._replace(open=False, seen=max(state.seen, request), token=sequence)


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        yield from self._client(state)
        yield from self._acknowledgement(state)
        yield from self._source(state)
        yield from self._takeover(state)
        yield from self._follower(state)
        yield from self._copy(state)
        yield from self._follow(state)
        yield from self._ask(state)

    def _is_released(self, log: Log) -> bool:
        return is_released(log, self.rules)

    # ── the client, and who answers it ──

    def _client(self, state: State) -> Iterator[Step]:
        if not state.open and state.request < REQUESTS:
            yield f"the client asks {state.request + 1}", state._replace(request=state.request + 1, open=True)
        for request in range(1, state.request + 1):
            is_late = not (state.open and request == state.request)
            if not is_late or state.late:
                yield from self._request(state, request, is_late)

    def _request(self, state: State, request: int, is_late: bool) -> Iterator[Step]:
        rules, all_sent = self.rules, state.log + state.sent
        then = state._replace(late=0) if is_late else state
        name = f"{'late ' if is_late else ''}request {request}"
        frozen = rules.frozen and freeze_in(all_sent if rules.frozen_once_sent else state.log)
        written = (WRITE, request)
        if written in state.log:
            if not state.waiting and not is_late:
                yield f"S answers {name} again", answered(then, request, 1 + state.log.index(written))
        elif written not in state.sent and not frozen and not self._is_released(all_sent) and self._may_send(state):
            yield f"S sends {name}", then._replace(sent=(*state.sent, written))
        if state.phase is not Phase.OWNING:
            return
        if request in state.results:
            yield f"P answers {name} again", answered(then, request, state.sequence)
            return
        sequence = state.sequence + 1
        data, results = (*state.data, request), state.results | {request}
        applied = then._replace(data=data, results=results, sequence=sequence)
        yield f"P applies {name}", answered(applied, request, sequence)

    def _may_send(self, state: State) -> bool:
        return len(state.sent) < SENT_MAX

    # ── S ──

    def _acknowledgement(self, state: State) -> Iterator[Step]:
        if not state.sent:
            return
        record = state.sent[0]
        after = state._replace(log=(*state.log, record), sent=state.sent[1:])
        if record[0] == WRITE and not state.waiting:
            after = answered(after, record[1], len(after.log))
        yield f"S: {record} is acknowledged", after

    def _source(self, state: State) -> Iterator[Step]:
        rules, all_sent = self.rules, state.log + state.sent
        released = self._is_released(all_sent)
        if self._may_send(state):
            for record in self._records(state, all_sent, released):
                yield f"S sends {record}", state._replace(sent=(*state.sent, record))
        silent = released if rules.silent_once_sent else self._is_released(state.log)
        if not state.waiting and not silent:
            yield shown(state, fold(state.log)[0], "S answers a read")

    def _records(self, state: State, all_sent: Log, released: bool) -> Iterator[Record]:
        rules = self.rules
        if not has(all_sent, OTHER):
            yield OTHER, 0
        count, frozen = sum(kind == FREEZE for kind, _ in all_sent), freeze_in(all_sent)
        if count < FREEZES and not frozen and not released and state.phase in (Phase.FOLLOWING, Phase.ENDED):
            yield FREEZE, count + 1
        if frozen and not (released if rules.one_decides else self._is_released(state.log)):
            yield UNFREEZE, frozen
        may_release = frozen == freeze_in(state.log) != 0 and not released
        is_asked = frozen in state.asked or (state.asked and not rules.freeze_named)
        if may_release and is_asked and not (state.waiting and rules.release_by_serving):
            yield RELEASE, frozen

    def _takeover(self, state: State) -> Iterator[Step]:
        if state.takeovers:
            former = state.former if state.waiting else (len(state.log), has(state.sent, RELEASE))
            for kept in range(len(state.sent) + 1):
                yield (
                    f"S: a new leader recovers {state.sent[:kept]}",
                    state._replace(
                        log=state.log + state.sent[:kept],
                        sent=(),
                        waiting=True,
                        former=former,
                        takeovers=state.takeovers - 1,
                    ),
                )
        if state.waiting:
            yield "S: the wait and the former lease are over", state._replace(waiting=False, former=None)
        if state.former is not None:
            applied, has_sent = state.former
            is_silent = has(state.log[:applied], RELEASE) or (has_sent and self.rules.silent_once_sent)
            if not is_silent:
                yield shown(state, fold(state.log[:applied])[0], "S's former leader answers a read")

    def _follower(self, state: State) -> Iterator[Step]:
        """Yield the answers of a replica of S to a read of the client's session."""
        if not state.token or state.open:
            return
        for applied in range(state.token, len(state.log) + 1):
            data = fold(state.log[:applied])[0]
            if not has(state.log[:applied], RELEASE) and max(explained(data)) < state.request:
                yield f"a replica of S that stands at {applied} answers", Broken("the session's own write is missing")

    # ── P ──

    def _copy(self, state: State) -> Iterator[Step]:
        rules = self.rules
        if state.phase is Phase.IDLE:
            begun = state._replace(phase=Phase.COPYING, page=None, pin=max(0, len(state.log) - 1), tail=0)
            yield "P logs IMPORT-BEGIN", begun._replace(data=(), results=frozenset()) if rules.wiped else begun
        elif state.phase is Phase.COPYING and state.page is None:
            newest = len(state.log)
            for place in {newest, max(state.pin, newest - 1)} if rules.page_behind_pin else {max(0, newest - 2)}:
                yield f"P reads a page at {place}", state._replace(page=(place, *fold(state.log[:place])))
        elif state.phase is Phase.COPYING and state.page is not None:
            _, data, results = state.page
            results = state.results | results if rules.results_move else state.results
            copied = state._replace(phase=Phase.COPIED, results=results)
            yield "P logs the page", copied._replace(data=data) if is_there(data) else copied
        elif state.phase is Phase.COPIED:
            tail = state.pin if rules.tail_from_pin or state.page is None else state.page[0] + 1
            yield "P logs the end of the copy", state._replace(phase=Phase.FOLLOWING, tail=tail, page=None)
        if state.phase in (Phase.COPYING, Phase.COPIED) and state.crashes:
            crashed = state._replace(page=None, crashes=0)
            yield "P crashes and begins anew", crashed._replace(phase=Phase.IDLE)
            if state.phase is Phase.COPIED:
                crashed = crashed._replace(phase=Phase.FOLLOWING, tail=state.pin)
            yield "P crashes and goes on from its log", crashed

    def _follow(self, state: State) -> Iterator[Step]:
        log = state.log if self.rules.tail_acknowledged else state.log + state.sent
        if state.phase not in (Phase.FOLLOWING, Phase.ENDED) or state.tail >= len(log):
            return
        kind, number = record = log[state.tail]
        after = state._replace(tail=state.tail + 1)
        if kind == WRITE:
            moved = {number} if self.rules.results_move else set()
            after = after._replace(data=fold(log[: after.tail])[0], results=state.results | moved)
        elif kind == FREEZE:
            after = after._replace(phase=Phase.ENDED, end=number)
        elif kind == UNFREEZE:
            after = after._replace(phase=Phase.FOLLOWING)
        elif kind == RELEASE and state.phase is Phase.ENDED:
            after = self._owning(after, log, after.tail)
        yield f"P reads {record} in S's log and is {after.phase}", after

    def _owning(self, state: State, log: Log, release: int) -> State:
        """P logs OWN. RELEASE has the sequence `release`."""
        versions = version(log) if is_there(state.data) else 0
        return state._replace(phase=Phase.OWNING, sequence=release if self.rules.sequence_raised else versions)

    def _ask(self, state: State) -> Iterator[Step]:
        rules = self.rules
        if state.phase is Phase.ENDED:
            released = [(place, number) for place, (kind, number) in enumerate(state.log, 1) if kind == RELEASE]
            if released and (released[0][1] == state.end or not rules.freeze_named):
                yield "P hears of RELEASE and logs OWN", self._owning(state, state.log, released[0][0])
            if state.end not in state.asked:
                yield f"P asks, naming freeze {state.end}", state._replace(asked=state.asked | {state.end})
            if not rules.own_after_release:
                yield "P logs OWN after the flip", state._replace(phase=Phase.OWNING, sequence=99)
        elif state.phase is Phase.OWNING:
            yield shown(state, state.data, "P answers a read")
