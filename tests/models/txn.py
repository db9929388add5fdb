"""A model of transactions over partitions. Each of the rules Tx1 to Tx15 of docs/protocol.md can be removed, in parts
(tests/models/txn_rules.py).

Partitions A, B and C each have a log: the acknowledged records and, beside them, what the leader has sent. A takeover
keeps a part of what was sent and leaves the former leader behind, which answers reads under its lease until the new
leader's wait is over. The new leader answers nothing before that. Key a begins at A, b at B and c at C, unless the
scope says otherwise. The home of a transaction is the owner of its first written key. Home's leader asks the others to
PREPARE, and they log intents; home checks its own part in the step that sends DECIDE, which is the commit; the others
RESOLVE. If home owns all keys, DECIDE alone does it. A message is never used up: it may come at any time, again and
again, or never. So may a client's request. `late` is the number of times that a PREPARE makes a second intent of one
attempt on a key.

Promises, checked at each step: `truth` changes for all keys of a transaction at one moment, when DECIDE is acknowledged
(or, if it was recovered, when the new leader serves). Each linearizable read, of former leaders too, shows the truth. A
transaction that commits has read the truth, and a reported failed CHECK is one. A request commits once. A read
transaction shows a truth from its time. A snapshot of all partitions shows one truth, old or new, and so do the changes
up to it over an earlier snapshot. A session behind its own commit sees all of it. Where nothing more can happen but
a takeover, no intent and no decision is left.

Left out: UNFREEZE and failures within a move (tests/models/move.py), leases tick by tick, several keys of a transaction
at one participant, results that were forgotten (P14, P15), and the change feed. The owner of a key is found at once.
RELEASE and OWN are one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from tests.models.search import Broken
from tests.models.txn_log import (
    ABSENT,
    EXPIRED,
    FIRST,
    PLAIN,
    Attempt,
    Decide,
    End,
    Folded,
    Freeze,
    Intent,
    Log,
    Mark,
    Names,
    Own,
    Record,
    Release,
    Resolve,
    Txn,
    Write,
    apply,
    written,
)
from tests.models.txn_rules import Rules

A, B, C = 0, 1, 2
SENT_MAX = 2
WRITTEN = 1
"""The key of plain writes and of expiry: b."""
LOST = A
"""The partition that may be lost for good."""


class Prepare(NamedTuple):
    """PREPARE of an attempt. Messages begin with the number of the sender's last pin."""

    mark: int
    attempt: Attempt
    keys: tuple[int, ...]
    kind: str = "PREPARE"


class Prepared(NamedTuple):
    """PREPARED: the attempt's intent on the key has this name."""

    mark: int
    attempt: Attempt
    key: int
    name: int
    kind: str = "PREPARED"


class Outcome(NamedTuple):
    """COMMITTED or ABORTED of an intent."""

    mark: int
    attempt: Attempt
    key: int
    name: int
    commit: bool
    kind: str = "OUTCOME"


class Resolved(NamedTuple):
    """RESOLVED: the attempt's intent on the key is gone, with its effect."""

    mark: int
    attempt: Attempt
    key: int
    kind: str = "RESOLVED"


Message = Prepare | Prepared | Outcome | Resolved


class Running(NamedTuple):
    """An attempt in the memory of home's leader."""

    attempt: Attempt
    own: tuple[int, ...]
    """The keys that home owned when the attempt began."""


class Look(NamedTuple):
    """A read transaction's look at a key."""

    key: int
    value: int
    again: bool
    """True if a second look has found the key unchanged."""


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    logs: tuple[Log, ...]
    sent: tuple[Log, ...]
    running: tuple[frozenset[Running], ...]
    """Per partition, its leader's attempts."""
    former: tuple[frozenset[Running], ...]
    """Per partition, the attempts of deposed leaders that never sent their DECIDE."""
    waiting: tuple[int | None, ...]
    """Per partition, the number of records that the former leader has applied, while the new one waits for its
    lease."""
    deposed: tuple[tuple[tuple[int, int], ...], ...]
    """Per partition, where the log ended when each leader was deposed, and what its successor recovered."""
    truth: tuple[int | None, ...]
    """Per key its value. None if home was lost for good before the key's intent had gone: then either value is."""
    reads: tuple[tuple[int | None, ...] | None, ...]
    """Per transaction the versions that its client has read. None if it has not begun."""
    tries: tuple[int, ...]
    """Per transaction the number of attempts."""
    net: frozenset[Message] = frozenset()
    done: frozenset[int] = frozenset()
    looks: tuple[Look, ...] = ()
    past: frozenset[tuple[int | None, ...]] = frozenset()
    """Former truths: since the beginning if there are pins, and since the first look of a read transaction."""
    is_planned: bool = False
    """True if the next move has been planned. Only with pins."""
    spoiled: frozenset[int] = frozenset()
    """The pins during which a move was planned."""
    is_lost: bool = False
    """Partition A is lost for good."""
    takeovers: int = 0
    unsaid: frozenset[tuple[int, Prepared]] = frozenset()
    """Partition and PREPARED that its leader has not sent. Only if PREPARED may be withheld."""
    writes: int = 0
    expiries: int = 0
    late: int = 0
    pins: int = 0
    losses: int = 0
    moves: tuple[tuple[int, int], ...] = ()
    """The moves to come, in order: key and target."""


class Row(NamedTuple):
    """A key's value in a snapshot."""

    version: int
    value: int


Places = tuple[int | None, ...]
"""Per partition, a number of records of its log. None: the partition has no such place."""
Step = tuple[str, "State | Broken"]
T = TypeVar("T")


def put(row: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*row[:place], value, *row[place + 1 :])


class Model:
    """The steps of some transactions that a set of rules allows."""

    def __init__(
        self,
        txns: tuple[Txn, ...],
        rules: Rules,
        *,
        partitions: int = 2,
        owners: tuple[int, ...] = (A, B, C),
        values: tuple[int, ...] = (FIRST, FIRST, FIRST),
        tries: tuple[int, ...] | None = None,
        readonly: bool = False,
        session: bool = False,
        withholds: bool = False,
        **bounds: Any,
    ) -> None:
        """`owners` and `values` are those of the keys at first; `tries` bounds the attempts of each transaction.
        `readonly` adds a read transaction, `session` reads at the replicas of B, and with `withholds`, PREPARED is
        sent some time after the intent is acknowledged. The other arguments are bounds of State."""
        self.txns, self.rules, self.partitions = txns, rules, range(partitions)
        self.keys = range(len(txns[0].parts))
        self.owners, self.values = owners, values
        self.readonly, self.session, self.withholds = readonly, session, withholds
        self.tries_max = tries or (1,) * len(txns)
        self.has_pins = bounds.get("pins", 0) > 0
        answers = rules.resolved_behind and rules.aborted_proved and rules.raised
        self.forgets = answers and rules.unsent_only and rules.dropped_with_lead and not self.has_pins
        """True if a deposed leader says nothing that its successor does not say too, once that serves."""
        nothing: tuple[frozenset[Running], ...] = (frozenset(),) * partitions
        self.first = State(
            ((),) * partitions,
            ((),) * partitions,
            nothing,
            nothing,
            (None,) * partitions,
            ((),) * partitions,
            values[: len(self.keys)],
            (None,) * len(txns),
            (0,) * len(txns),
            **bounds,
        )
        self.fold = lru_cache(maxsize=200_000)(self._fold)

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps. Where there are none but takeovers, nothing may be left over."""
        is_at_rest = True
        for label, after in self._steps(state):
            settled = after if isinstance(after, Broken) else self.settled(after)
            if settled != state:
                is_at_rest = False
                yield label, settled
        if is_at_rest and any(here.intents or here.rows for here in (self.applied(state, p) for p in self._up(state))):
            yield "nothing can happen any more", Broken("an intent or a decision is left forever")
        for p in self._up(state):
            for label, after in self._takeover(state, p):
                yield label, self.settled(after)

    @staticmethod
    def above(state: State) -> State:
        """Return a state that has all steps of this one and more: one more takeover is to come."""
        return state._replace(takeovers=state.takeovers + 1)

    def settled(self, state: State) -> State:
        """Return the state after all answers that can be given, without what no step depends on any more. A message
        only makes steps possible, and an answer that can be given now can be given later. So no step is lost if it is
        given at once."""
        state = self._inquiries(state)
        for message in state.net:
            if isinstance(message, Outcome) and message.commit:
                state = self._say_resolved(state, message)
        if self.forgets:
            for p in self.partitions:
                if state.waiting[p] is None and state.deposed[p]:
                    state = state._replace(deposed=put(state.deposed, p, ()), former=put(state.former, p, frozenset()))
        return state

    def _steps(self, state: State) -> Iterator[Step]:
        up = self._up(state)
        for p in up:
            yield from self._acknowledgement(state, p)
            yield from self._wait(state, p)
        yield from self._withheld(state)
        for number in range(len(self.txns)):
            yield from self._client(state, number)
        for p in up:
            if state.waiting[p] is None:
                yield from self._home(state, p)
                yield from self._prepare(state, p)
                yield from self._resolve(state, p)
                yield from self._refuse(state, p)
                yield from self._plain(state, p)
                yield from self._mark(state, p)
        if state.pins and any(isinstance(record, Mark) for log in state.logs for record in log):
            yield "the pinner dies", state._replace(pins=0)
        yield from self._reads(state)
        yield from self._session(state)
        yield from self._move(state)
        yield from self._lose(state)

    # ── what the logs say ──

    def _fold(self, p: int, log: Log) -> Folded:
        if log:
            return apply(self.fold(p, log[:-1]), log[-1], self.txns, self.rules)
        return Folded(tuple(self.values[key] if self.owners[key] == p else None for key in self.keys))

    def applied(self, state: State, p: int) -> Folded:
        return self.fold(p, state.logs[p])

    def whole(self, state: State, p: int) -> Folded:
        """Return the state with everything that was sent."""
        return self.fold(p, state.logs[p] + state.sent[p])

    def foreseen(self, state: State, p: int) -> Folded:
        """Return the state against which the leader decides."""
        return self.whole(state, p) if self.rules.count_sent else self.applied(state, p)

    def _up(self, state: State) -> list[int]:
        return [p for p in self.partitions if not (state.is_lost and p == LOST)]

    def owner(self, state: State, key: int) -> int | None:
        """Return the partition that owns the key and serves."""
        for p in self._up(state):
            if self.applied(state, p).owns(key):
                return p if state.waiting[p] is None else None
        return None

    def may_log(self, state: State, p: int, key: int) -> bool:
        """Return True if fewer than SENT_MAX records are in flight, and the key's range takes writes."""
        whole = self.whole(state, p)
        frozen = key in whole.frozen and self.rules.frozen
        return len(state.sent[p]) < SENT_MAX and whole.owns(key) and not frozen

    def fits(self, here: Folded, state: State, attempt: Attempt, key: int) -> bool:
        """Return True if the key is as it was read, and no intent conflicts."""
        part = self.txns[attempt.txn].parts[key]
        assert part is not None
        if self.rules.exclude and any(
            each.attempt != attempt and (each.exclusive or part.writes) for each in here.on(key)
        ):
            return False
        return not part.reads or not self.rules.compare or here.values[key] == self._read(state, attempt.txn, key)

    def _read(self, state: State, number: int, key: int) -> int | None:
        reads = state.reads[number]
        return reads[key] if reads is not None else None

    # ── records and messages ──

    def send(self, state: State, p: int, record: Record) -> State:
        state = state._replace(sent=put(state.sent, p, (*state.sent[p], record)))
        mark = self.applied(state, p).mark
        if isinstance(record, Intent) and not self.rules.prepared_acked:
            name = self.whole(state, p).sequence
            state = self.say(state, Prepared(mark, record.attempt, record.key, name))
        if isinstance(record, Decide) and not self.rules.commit_acked:
            state = self.say_committed(state, record, mark)
        return state

    def say(self, state: State, message: Message) -> State:
        """Add a message. One with an earlier pin says more, so it replaces one with a later pin."""
        rest = message[1:]
        if any(each[1:] == rest and each.mark <= message.mark for each in state.net):
            return state
        return state._replace(net=frozenset(each for each in state.net if each[1:] != rest) | {message})

    def say_committed(self, state: State, decided: Decide, mark: int) -> State:
        for key, name in decided.names:
            state = self.say(state, Outcome(mark, decided.attempt, key, name, True))
        return state

    def change(self, state: State, truth: tuple[int | None, ...]) -> State:
        if (self.has_pins or state.looks) and truth != state.truth:
            state = state._replace(past=state.past | {state.truth})
        return state._replace(truth=truth)

    def acknowledged(self, state: State, p: int, place: int) -> State | Broken:
        """Return the state after a record is acknowledged and its leader may speak of it."""
        record, here = state.logs[p][place], self.fold(p, state.logs[p][: place + 1])
        match record:
            case Decide():
                return self._committed(state, record, here.mark)
            case Write(key, value):
                return self.change(state, put(state.truth, key, value))
            case Intent(attempt, key):
                prepared = Prepared(here.mark, attempt, key, here.sequence)
                if self.withholds:
                    return state._replace(unsaid=state.unsaid | {(p, prepared)})
                return self.say(state, prepared)
            case Resolve(key, attempt, name, commit):
                state = state._replace(unsaid=frozenset(each for each in state.unsaid if each[1][2:4] != (key, name)))
                if state.truth[key] is None:
                    state = self.change(state, put(state.truth, key, here.values[key]))
                return self.say(state, Resolved(here.mark, attempt, key)) if commit else state
            case Mark(pin, _):
                return self._pinned(state, pin)
        return state

    def _committed(self, state: State, decided: Decide, mark: int) -> State | Broken:
        number, truth = decided.attempt.txn, state.truth
        if number in state.done:
            return Broken(f"transaction {number + 1} is done twice")
        for key, part in enumerate(self.txns[number].parts):
            if part and part.reads and state.truth[key] != self._read(state, number, key):
                return Broken(f"transaction {number + 1} commits, having read another value than {state.truth[key]}")
            if part and part.writes:
                truth = put(truth, key, written(number, part))
        state = self.change(state, truth)._replace(done=state.done | {number})
        return self.say_committed(state, decided, mark)

    def _pinned(self, state: State, pin: int) -> State | Broken:
        """Read the snapshot as soon as all partitions keep the pin, and the changes up to it since the beginning and
        since each earlier pin."""
        places = self._places(state, pin)
        found = None if places is None else self._snapshot(state, places)
        if places is None or found is None:
            return state  # not complete, or pinned again
        if found not in {*state.past, state.truth}:
            return Broken(f"snapshot {pin} shows {list(found)}, which never was")
        for since in range(pin):
            base = self._places(state, since) if since else (0,) * len(places)
            if base is not None and self._snapshot(state, base) is not None:
                values = self._folded(state, base, places)
                if values != found:
                    return Broken(f"snapshot {pin} shows {list(found)}, the changes since {since} lead to {values}")
        return state

    def _places(self, state: State, pin: int) -> Places | None:
        """Return how many records of each log are before the pin, or None if the pin is not complete. A partition that
        owns no key is the target of a move."""
        if pin in state.spoiled and self.rules.none_planned:
            return None
        found: list[int | None] = []
        for p in self.partitions:
            acknowledged = state.logs[p][: state.waiting[p]]
            place = next((place for place, each in enumerate(acknowledged, 1) if each == Mark(pin, True)), None)
            if place is None and self.rules.targets_pinned:
                return None
            found.append(place)
        return tuple(found)

    def _views(self, state: State, places: Places) -> list[Folded]:
        return [self.fold(p, state.logs[p][:place]) for p, place in enumerate(places) if place is not None]

    def _snapshot(self, state: State, places: Places) -> tuple[int | None, ...] | None:
        """Return the values that a snapshot shows, or None if a key has not one owner."""
        views = self._views(state, places)
        found = []
        for key in self.keys:
            owning = [view for view in views if view.owns(key)]
            if len(owning) != 1 and self.rules.one_owner:
                return None
            view = owning[0] if owning else views[key]
            rows = [row for place, row in self._decided_rows(views, view) if place == key]
            found.append(rows[-1].value if rows else view.values[key])
        return tuple(found)

    def _folded(self, state: State, base: Places, places: Places) -> tuple[int, ...]:
        """Return the values to which the changes between two pins lead, over those up to the first pin."""
        rows = [Row(0, value) for value in self.values]
        nothing = (0,) * len(places)
        for key, row in (*self._changes(state, nothing, base), *self._changes(state, base, places)):
            rows[key] = max(rows[key], row)
        return tuple(rows[key].value for key in self.keys)

    def _changes(self, state: State, base: Places, places: Places) -> Iterator[tuple[int, Row]]:
        """Yield the changes between two pins: those of the logs, and those of intents that are committed at the second
        one."""
        for p, (first, last) in enumerate(zip(base, places, strict=True)):
            for place in range(first or 0, last or 0):
                before, after = (self.fold(p, state.logs[p][:end]) for end in (place, place + 1))
                for key, value in enumerate(after.values):
                    if value is not None and before.owns(key) and before.values[key] != value:
                        yield key, Row(after.sequence, value)
        if self.rules.changes_resolved:
            views = self._views(state, places)
            for view in views:
                yield from self._decided_rows(views, view)

    def _decided_rows(self, views: list[Folded], view: Folded) -> Iterator[tuple[int, Row]]:
        """Yield what the intents of a pinned view write that are committed by home's pinned view."""
        for key, attempt, is_exclusive, name in view.intents:
            home, part = self.txns[attempt.txn].home, self.txns[attempt.txn].parts[key]
            is_decided = any(
                row.attempt == attempt and (key, name) in row.names
                for each in views
                if each.owns(home)
                for row in each.rows
            )
            if part and is_exclusive and is_decided and self.rules.view_resolves:
                yield key, Row(name, written(attempt.txn, part))

    def _acknowledgement(self, state: State, p: int) -> Iterator[Step]:
        if state.sent[p]:
            first, *others = state.sent[p]
            after = state._replace(
                logs=put(state.logs, p, (*state.logs[p], first)), sent=put(state.sent, p, tuple(others))
            )
            yield f"{'ABC'[p]}: {first} is acknowledged", self.acknowledged(after, p, len(state.logs[p]))

    def _withheld(self, state: State) -> Iterator[Step]:
        """Yield the sending of PREPARED, also by leaders that are deposed and do not know it."""
        for p, prepared in state.unsaid:
            after = self.say(state, prepared)
            if self.rules.sending_noted:
                after = after._replace(unsaid=state.unsaid - {(p, prepared)})
            yield f"{'ABC'[p]}: sends PREPARED {prepared.attempt} of {'abc'[prepared.key]}", after

    def _assumed_sent(self, state: State, p: int, keys: Iterable[int]) -> State:
        """Return the state after PREPARED of intents on these keys is counted as sent, because another leader answers
        for them."""
        for at, prepared in state.unsaid:
            if at == p and prepared.key in keys:
                state = self.say(state, prepared)._replace(unsaid=state.unsaid - {(at, prepared)})
        return state

    # ── takeovers ──

    def _takeover(self, state: State, p: int) -> Iterator[Step]:
        if not state.takeovers or state.waiting[p] is not None:
            return
        rules, log = self.rules, state.logs[p]
        stopped = state.running[p]
        if not rules.unsent_only:
            stopped |= {Running(each.attempt, each.own) for each in state.sent[p] if isinstance(each, Decide)}
        former = state.former[p] | stopped
        for count in range(len(state.sent[p]) + 1):
            kept, lost = state.sent[p][:count], ()
            if not rules.shared_logged:
                intents = self.fold(p, log + kept).intents
                lost = tuple(
                    Resolve(each.key, each.attempt, each.name, False) for each in intents if not each.exclusive
                )
            after = state._replace(
                logs=put(state.logs, p, log + kept + lost),
                sent=put(state.sent, p, ()),
                running=put(state.running, p, frozenset()),
                former=put(state.former, p, former),
                waiting=put(state.waiting, p, len(log)),
                deposed=put(state.deposed, p, (*state.deposed[p], (len(log), len(log) + count))),
                takeovers=state.takeovers - 1,
            )
            yield f"{'ABC'[p]}: a new leader recovers {kept}, the former one lives on", after
            if former and not rules.dropped_with_lead:
                yield f"{'ABC'[p]}: a former leader leads again", after._replace(running=put(state.running, p, former))

    def _wait(self, state: State, p: int) -> Iterator[Step]:
        began = state.waiting[p]
        if began is None:
            return
        after: State | Broken = state._replace(waiting=put(state.waiting, p, None))
        for place in range(began, len(state.logs[p])):
            if not isinstance(after, Broken):
                after = self.acknowledged(after, p, place)
        if self.withholds and not isinstance(after, Broken):
            after = self._assumed_sent(after, p, self.keys)
            if not self.rules.assumed_sent:
                here = self.applied(state, p)
                standing = {(p, Prepared(here.mark, each.attempt, each.key, each.name)) for each in here.intents}
                after = after._replace(unsaid=after.unsaid | standing)
        yield f"{'ABC'[p]}: the wait and the former lease are over", after
        old = self.fold(p, state.logs[p][:began])
        for key in self.keys:
            if old.owns(key):
                yield from self._look(state, p, old, key)
                yield from self._show(state, p, old, key, f"{'ABC'[p]}'s former leader")
        if self.rules.silent_in_wait:
            return
        for place in range(began, len(state.logs[p])):
            record, here = state.logs[p][place], self.fold(p, state.logs[p][: place + 1])
            if isinstance(record, Decide):
                yield f"{'ABC'[p]}: says COMMITTED in its wait", self.say_committed(state, record, here.mark)
            if isinstance(record, Intent):
                prepared = Prepared(here.mark, record.attempt, record.key, here.sequence)
                yield f"{'ABC'[p]}: says PREPARED in its wait", self.say(state, prepared)

    def _say_resolved(self, state: State, committed: Outcome) -> State:
        """Return the state after the answers of leaders that do not have the intent of an outcome. The leases of
        deposed leaders may be over."""
        mark, attempt, key, name, _, _ = committed
        for p in self._up(state):
            here, whole = self.applied(state, p), self.whole(state, p)
            serves = state.waiting[p] is None and here.owns(key) and whole.owns(key)
            is_behind = mark <= whole.mark or not self.rules.mark_resolve
            if serves and is_behind and not any(each.name == name for each in here.on(key)):
                state = self.say(state, Resolved(here.mark, attempt, key))
            for end, _ in state.deposed[p]:
                old = self.fold(p, state.logs[p][:end])
                has_applied = old.sequence >= name or not self.rules.resolved_behind
                has_intent = any(each.name == name for each in old.on(key))
                if old.owns(key) and old.mark >= mark and has_applied and not has_intent:
                    state = self.say(state, Resolved(old.mark, attempt, key))
        return state

    # ── clients and home ──

    def _client(self, state: State, number: int) -> Iterator[Step]:
        txn = self.txns[number]
        keys = [key for key, part in enumerate(txn.parts) if part]
        if state.reads[number] is None:
            read = [key for key in keys if txn.parts[key].reads]  # type: ignore[union-attr]
            if all(self._is_known(state, key) for key in read):
                reads = tuple(state.truth[key] if key in read else None for key in self.keys)
                yield (
                    f"client {number + 1} reads {reads} and asks",
                    state._replace(reads=put(state.reads, number, reads)),
                )
            return
        p = self.owner(state, txn.home)
        if p is None or state.tries[number] >= self.tries_max[number] or self._is_under_way(state, p, number):
            return
        attempt, here = Attempt(number, state.tries[number] + 1), self.foreseen(state, p)
        own = tuple(key for key in keys if here.owns(key))
        after = state._replace(tries=put(state.tries, number, attempt.number))
        if len(own) == len(keys):
            if all(self.may_log(state, p, key) and self.fits(here, state, attempt, key) for key in keys):
                yield f"{'ABC'[p]}: request {number + 1} is one entry", self.send(after, p, Decide(attempt, (), own))
            return
        if not self.rules.home_checks and not all(self.fits(here, state, attempt, key) for key in own):
            return
        after = after._replace(running=put(state.running, p, state.running[p] | {Running(attempt, own)}))
        others = tuple(key for key in keys if key not in own)
        yield f"{'ABC'[p]}: request {number + 1} begins attempt {attempt}", self.say(after, Prepare(0, attempt, others))

    def _is_known(self, state: State, key: int) -> bool:
        """Return True if a client may know the key's value: from a read, or from the answer of the transaction that
        wrote it."""
        p, truth = self.owner(state, key), state.truth[key]
        return truth is not None and (
            truth - 1 in state.done or (p is not None and self._may_read(state, p, self.applied(state, p), key))
        )

    def _is_under_way(self, state: State, p: int, number: int) -> bool:
        """Return True if a request is answered from the table of results, or joins an attempt."""
        if number in self.applied(state, p).results:
            return True
        is_sent = any(isinstance(each, Decide) and each.attempt.txn == number for each in state.sent[p])
        is_running = any(each.attempt.txn == number for each in state.running[p])
        return self.rules.attempt_joined and (is_sent or is_running)

    def _home(self, state: State, p: int) -> Iterator[Step]:
        name = "ABC"[p]
        for each in state.running[p]:
            attempt, own = each
            dropped = state._replace(running=put(state.running, p, state.running[p] - {each}))
            yield f"{name}: home drops attempt {attempt}", dropped
            here, home = self.foreseen(state, p), self.txns[attempt.txn].home
            if not all(self.may_log(state, p, key) for key in (own if self.rules.home_owns else (home,))):
                continue
            if self.rules.home_checks and not all(self.fits(here, state, attempt, key) for key in own):
                continue
            names = self._names(state, p, each)
            if names is not None:
                yield f"{name}: home sends DECIDE {attempt}", self.send(dropped, p, Decide(attempt, names, own))
        yield from self._end(state, p)

    def _names(self, state: State, p: int, each: Running) -> Names | None:
        """Return the intents that DECIDE names, or None if a participant has not prepared."""
        rules, mark = self.rules, self.whole(state, p).mark
        names: Names = ()
        for key, part in enumerate(self.txns[each.attempt.txn].parts):
            if not part or key in each.own:
                continue
            prepared = [
                message.name
                for message in state.net
                if isinstance(message, Prepared)
                and message.key == key
                and message.attempt.txn == each.attempt.txn
                and (message.attempt == each.attempt or not rules.prepared_named)
                and (message.mark <= mark or not rules.mark_decide)
            ]
            if prepared:
                names += ((key, max(prepared)),)
            elif rules.all_prepared:
                return None
        return names

    def _end(self, state: State, p: int) -> Iterator[Step]:
        mark = self.whole(state, p).mark
        for attempt, names in self.applied(state, p).rows:
            is_sent = End(attempt) in state.sent[p]
            if is_sent or not self.may_log(state, p, self.txns[attempt.txn].home):
                continue
            resolved = {
                each.key
                for each in state.net
                if isinstance(each, Resolved)
                and each.attempt == attempt
                and (each.mark <= mark or not self.rules.mark_end)
            }
            if not self.rules.end_last or all(key in resolved for key, _ in names):
                yield f"{'ABC'[p]}: home sends END {attempt}", self.send(state, p, End(attempt))

    # ── participants ──

    def _prepare(self, state: State, p: int) -> Iterator[Step]:
        whole = self.whole(state, p)
        for message in state.net:
            if not isinstance(message, Prepare):
                continue
            attempt = message.attempt
            if any(isinstance(each, Intent) and each.attempt == attempt for each in state.sent[p]):
                continue
            for key in message.keys:
                if not self.may_log(state, p, key) or any(each.attempt == attempt for each in whole.on(key)):
                    continue
                before = sum(each == Intent(attempt, key) for log in (*state.logs, *state.sent) for each in log)
                if before <= state.late and self.fits(self.foreseen(state, p), state, attempt, key):
                    after = state._replace(late=state.late - before)
                    label = f"{'ABC'[p]}: sends intent {before + 1} of {attempt} on {'abc'[key]}"
                    yield label, self.send(after, p, Intent(attempt, key))

    def _resolve(self, state: State, p: int) -> Iterator[Step]:
        rules, here, whole = self.rules, self.applied(state, p), self.whole(state, p)
        for message in state.net:
            if not isinstance(message, Outcome):
                continue
            mark, attempt, key, name, commit, _ = message
            if not whole.owns(key) or (mark > whole.mark and rules.mark_resolve):
                continue
            for each in here.on(key):
                if each.attempt == attempt and (each.name == name or not rules.outcome_named):
                    yield from self._resolving(state, p, Resolve(key, attempt, each.name, commit))
        for each in here.intents:
            gives_up = not rules.home_word or self._is_abandoned(state, each.attempt)
            if gives_up:
                yield from self._resolving(state, p, Resolve(each.key, each.attempt, each.name, False))

    def _resolving(self, state: State, p: int, record: Resolve) -> Iterator[Step]:
        is_sent = any(isinstance(each, Resolve) and each.name == record.name for each in state.sent[p])
        if self.may_log(state, p, record.key) and not is_sent:
            yield f"{'ABC'[p]}: sends {record}", self.send(state, p, record)

    def _is_abandoned(self, state: State, attempt: Attempt) -> bool:
        """Return True if an operator may abandon the attempt because home is lost for good. Without the rule, it is
        enough that home has no leader."""
        if not self.first.losses or self.owners[self.txns[attempt.txn].home] != LOST:
            return False
        return state.is_lost or (not self.rules.abandoned_when_lost and state.waiting[LOST] is not None)

    def _refuse(self, state: State, p: int) -> Iterator[Step]:
        """Yield a report of a failed CHECK that did not fail."""
        here = self.applied(state, p) if self.rules.refusal_acked else self.whole(state, p)
        asked = [(each.attempt, each.keys) for each in state.net if isinstance(each, Prepare)]
        for attempt, keys in asked + [(each.attempt, each.own) for each in state.running[p]]:
            for key in keys:
                part, read = self.txns[attempt.txn].parts[key], self._read(state, attempt.txn, key)
                fails = part and part.reads and here.owns(key) and here.values[key] != read
                if fails and state.truth[key] == read and not (here.is_exclusive(key) and self.rules.intents_first):
                    yield f"{'ABC'[p]}: refuses {attempt}", Broken(f"the CHECK of {'abc'[key]} does not fail")

    def _inquiries(self, state: State) -> State:
        """Return the state after the answers to participants that ask about an intent, and the notices of leaders that
        drop their own attempts."""
        up = self._up(state)
        for p in up:
            for key, attempt, _, name in self.applied(state, p).intents:
                aborted = Outcome(0, attempt, key, name, False)
                for h in up:
                    if self.rules.asked:
                        state = self._answer(state, h, aborted)
                    if self.rules.dropped_with_lead and any(each.attempt == attempt for each in state.former[h]):
                        mark = self.fold(h, state.logs[h][: state.deposed[h][-1][0]]).mark
                        state = self.say(state, aborted._replace(mark=mark))
        return state

    def _answer(self, state: State, h: int, aborted: Outcome) -> State:
        rules, attempt, name = self.rules, aborted.attempt, (aborted.key, aborted.name)
        home, here = self.txns[attempt.txn].home, self.applied(state, h)
        serves = state.waiting[h] is None and (here.owns(home) or not rules.owner_says)
        is_sent = any(isinstance(each, Decide) and each.attempt == attempt for each in state.sent[h])
        is_running = any(each.attempt == attempt for each in state.running[h])
        is_silent = not (is_sent and rules.sent_is_not_absent) and not (is_running and rules.dropped_first)
        if serves and is_silent and self._is_absent(here, attempt, name):
            state = self.say(state, aborted._replace(mark=here.mark))
        for end, recovered in () if rules.aborted_proved else state.deposed[h]:
            old = self.fold(h, state.logs[h][:end])
            was_sent = any(
                isinstance(each, Decide) and each.attempt == attempt for each in state.logs[h][end:recovered]
            )
            if old.owns(home) and self._is_absent(old, attempt, name) and not was_sent:
                state = self.say(state, aborted._replace(mark=old.mark))
        return state

    @staticmethod
    def _is_absent(here: Folded, attempt: Attempt, name: tuple[int, int]) -> bool:
        return not any(row.attempt == attempt and name in row.names for row in here.rows)

    def _plain(self, state: State, p: int) -> Iterator[Step]:
        here, key, rules = self.foreseen(state, p), WRITTEN, self.rules
        is_held = bool(here.on(key))
        if state.expiries and is_held and not rules.expired_reads_wait and not here.is_exclusive(key):
            after = self.change(state, put(state.truth, key, EXPIRED))
            yield f"{'ABC'[p]}: a read finds b expired", after._replace(expiries=state.expiries - 1)
        if not self.may_log(state, p, key):
            return
        if state.writes and not (is_held and rules.writes_wait):
            after = state._replace(writes=state.writes - 1)
            yield f"{'ABC'[p]}: sends a plain write of b", self.send(after, p, Write(key, PLAIN))
        if state.expiries and not (is_held and rules.expiry_waits):
            after = state._replace(expiries=state.expiries - 1)
            yield f"{'ABC'[p]}: b expires", self.send(after, p, Write(key, EXPIRED))

    def _mark(self, state: State, p: int) -> Iterator[Step]:
        whole, all_sent = self.whole(state, p), state.logs[p] + state.sent[p]
        if len(state.sent[p]) >= SENT_MAX:
            return
        for pin in range(1, state.pins + 1):
            is_new = not any(isinstance(each, Mark) and each.pin == pin for each in all_sent)
            if is_new and (pin > whole.mark or not self.rules.mark_rises):
                yield f"{'ABC'[p]}: sends MARK {pin}", self.send(state, p, Mark(pin, True))
        for pin in {each.mark for each in state.net}:
            if pin > whole.mark:
                yield f"{'ABC'[p]}: has waited for pin {pin}", self.send(state, p, Mark(pin, False))

    # ── reads ──

    def _may_read(self, state: State, p: int, here: Folded, key: int) -> bool:
        return not self.rules.reads_wait or not self._is_in_the_way(state, p, here, key)

    @staticmethod
    def _is_in_the_way(state: State, p: int, here: Folded, key: int) -> bool:
        """Return True if there is an exclusive intent whose PREPARED may have been sent."""
        unsaid = {each.name for at, each in state.unsaid if at == p and each.key == key}
        return any(each.exclusive and each.name not in unsaid for each in here.on(key))

    def _show(self, state: State, p: int, here: Folded, key: int, reader: str) -> Iterator[Step]:
        truth, value = state.truth[key], here.values[key]
        if self._may_read(state, p, here, key) and truth is not None and value != truth:
            yield f"{reader} answers a read of {'abc'[key]}", Broken(f"shows {value}, but it is {truth}")

    def _look(self, state: State, p: int, here: Folded, key: int) -> Iterator[Step]:
        """Yield a read transaction's first or second look at a key. A look that does not fit waits or fails, which is
        one in the model."""
        rules, looks, value = self.rules, state.looks, here.values[key]
        if not self.readonly or value is None:
            return
        mine = [each for each in looks if each.key == key]
        if not mine and self._may_read(state, p, here, key):
            look = Look(key, value, not rules.ro_twice)
            yield (
                f"a read transaction reads {'abc'[key]} = {value}",
                state._replace(looks=tuple(sorted((*looks, look)))),
            )
        if not mine or mine[0].again or mine[0].value != value or (rules.ro_all_first and len(looks) < len(self.keys)):
            return
        if rules.ro_absent and (value == ABSENT or any(each.value == ABSENT and not each.again for each in looks)):
            return  # the absent keys come first
        if not (rules.ro_minds and self._is_in_the_way(state, p, here, key)):
            again = tuple(each._replace(again=True) if each.key == key else each for each in looks)
            yield f"a read transaction finds {'abc'[key]} unchanged", state._replace(looks=again)

    def _look_at_absent(self, state: State) -> Iterator[Step]:
        """Yield a read transaction's second look at all absent keys, at one moment."""
        absent = [each.key for each in state.looks if each.value == ABSENT and not each.again]
        if not absent or not self.rules.ro_absent or len(state.looks) < len(self.keys):
            return
        for key in absent:
            p = self.owner(state, key)
            if p is None or not self._may_read(state, p, self.applied(state, p), key):
                return
            if self.applied(state, p).values[key] != ABSENT:
                return
        again = tuple(each._replace(again=each.again or each.key in absent) for each in state.looks)
        yield f"a read transaction finds {absent} absent", state._replace(looks=again)

    def _reads(self, state: State) -> Iterator[Step]:
        for key in self.keys:
            p = self.owner(state, key)
            if p is not None:
                here = self.applied(state, p)
                yield from self._show(state, p, here, key, "ABC"[p])
                yield from self._look(state, p, here, key)
        yield from self._look_at_absent(state)
        if len(state.looks) == len(self.keys) and all(each.again for each in state.looks):
            found = tuple(each.value for each in state.looks)
            if found not in {*state.past, state.truth}:
                yield "the read transaction ends", Broken(f"it shows {found}, which never was in its time")

    def _session(self, state: State) -> Iterator[Step]:
        """Yield the answers of a replica of B to the client of a transaction whose home is A."""
        if not self.session or state.waiting[A] is not None:
            return
        end = state.waiting[B] if state.waiting[B] is not None else len(state.logs[B])
        for decided in state.logs[A]:
            if not isinstance(decided, Decide):
                continue
            token = dict(decided.names)[WRITTEN] if self.rules.token_of_prepare else 0
            for place in range(token, end + 1):
                log = state.logs[B][:place]
                if self.rules.replica_minds and self.fold(B, log).is_exclusive(WRITTEN):
                    continue
                if not any(isinstance(r, Resolve) and r.attempt == decided.attempt and r.commit for r in log):
                    yield f"a replica of B that stands at {place} answers", Broken("the session's own write is missing")

    # ── moves, and a loss ──

    def _move(self, state: State) -> Iterator[Step]:
        if not state.moves:
            return
        rules, (key, target) = self.rules, state.moves[0]
        p = next(p for p in self.partitions if self.applied(state, p).owns(key))
        here, log = self.applied(state, p), state.logs[p]
        if state.waiting[p] is not None:
            return
        if self.has_pins and not state.is_planned:
            logs = (*state.logs, *state.sent)
            begun = {each.pin for log in logs for each in log if isinstance(each, Mark) and each.keeps}
            planned = state._replace(is_planned=True, spoiled=state.spoiled | begun)
            yield f"a move of {'abc'[key]} is planned", planned
            return
        if key not in self.whole(state, p).frozen:
            if len(state.sent[p]) < SENT_MAX:
                yield f"{'ABC'[p]}: sends FREEZE of {'abc'[key]}", self.send(state, p, Freeze(key))
            return
        is_idle = not state.sent[p] and state.waiting[target] is None and not state.sent[target]
        if key not in here.frozen or not is_idle:
            return
        place = max(place for place, each in enumerate(log, 1) if each == Freeze(key))
        view = self.fold(p, log[:place])
        value = view.values[key]
        assert value is not None
        own = Own(
            key,
            value,
            view.on(key) if rules.intents_move else (),
            frozenset(r for r in view.rows if self.txns[r.attempt.txn].home == key and rules.decisions_move),
            frozenset(number for number in view.results if self.txns[number].home == key and rules.results_move),
            here.sequence + 1,
        )
        ended = frozenset(each for each in state.running[p] if self.txns[each.attempt.txn].home == key)
        running = state.running[p] - ended if rules.die_at_release else state.running[p]
        moved = self._assumed_sent(state, p, (key,))
        state = moved if rules.forgotten_at_release else moved._replace(unsaid=state.unsaid)
        yield (
            f"{'ABC'[p]}: RELEASE of {'abc'[key]}; {'ABC'[target]}: OWN",
            state._replace(
                logs=put(put(state.logs, p, (*log, Release(key))), target, (*state.logs[target], own)),
                running=put(state.running, p, running),
                moves=state.moves[1:],
                is_planned=False,
            ),
        )

    def _lose(self, state: State) -> Iterator[Step]:
        """Yield the loss of partition A. A committed transaction whose intent is elsewhere may then show either
        value."""
        if not state.losses or state.is_lost:
            return
        standing = [each for p in self._up(state) if p != LOST for each in self.applied(state, p).intents]
        truth = state.truth
        for each in standing:
            if each.exclusive and each.attempt.txn in state.done:
                truth = put(truth, each.key, None)
        yield "A is lost for good", state._replace(is_lost=True, losses=0, truth=truth)
