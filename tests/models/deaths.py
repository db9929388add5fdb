"""A model of takeovers that skip the wait for a lease if the death of the leader's process is proven (docs/protocol.md,
P17, P32, G8, G28). Each part of it is a rule that can be removed.

Four processes run on two servers: 0 on server A, 1 on B, and 2 and 3 are the next processes on A and B. The log's list
is reduced to its version, the process that made the last ledger, and whether that ledger is fenced. Time passes in
ticks. A machine may hide a tick from its process, at most GUARD ticks within one lease. A process may be stopped, may
continue, and may die; a firewall may refuse connections to a server although its process lives. A candidate may appear
at any time, and two may compete.

Promise: no process answers a read under its lease after a later leader has acknowledged a write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tests.models.search import Broken

PROCESSES = range(4)
SERVER = (0, 1, 0, 1)
"""The server of each process."""
LEASE, GUARD = 2, 1
DEATHS_MAX, VERSIONS_MAX = 2, 2


class Life(IntEnum):
    UNBORN = 0
    RUNS = 1
    STOPPED = 2
    DEAD = 3


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    waits: bool = True
    """P17: without a proof, the successor waits for the lease."""
    waits_for_hidden_pauses: bool = True
    """P32: it also waits for pauses that the leader's clock does not show."""
    silence_is_no_proof: bool = True
    """G28: only the kernel proves a death. Without: a stopped process counts as dead."""
    refusal_is_no_proof: bool = True
    """G28: without: a refused connection counts as a proof."""
    certificate_names_process: bool = True
    """G28: a certificate is valid for one process. Without: for every process of the server."""
    ledger_names_process: bool = True
    """G28: the last ledger names the process that may have a lease. Without: the leader's znode does."""
    listed_after_wait: bool = True
    """G8: a ledger is listed after the wait. Without: before it, and only the answers wait."""
    list_is_checked: bool = True
    """G8: a listing fails if the list has changed since it was read."""


class Candidate(NamedTuple):
    """A process that has fenced the last ledger and not listed its own yet."""

    process: int
    version: int
    """The version of the list that it has read."""
    maker: int
    """The process that made the last ledger."""
    named: int
    """The process that the znode named before the claim."""
    waited: int = 0


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    version: int = 0
    maker: int = 0
    is_fenced: bool = False
    named: int = 0
    """The process that the leader's znode names."""
    life: tuple[Life, ...] = (Life.RUNS, Life.RUNS, Life.UNBORN, Life.UNBORN)
    epochs: tuple[int, ...] = (0, -1, -1, -1)
    """For each process, the version of the list that it wrote last, or -1."""
    leases: tuple[int, ...] = (0, 0, 0, 0)
    """For each process, the ticks of its lease that are left by its own clock."""
    hidden: tuple[int, ...] = (0, 0, 0, 0)
    """For each process, the ticks that its machine has hidden within its lease."""
    serves: bool = True
    """The maker of the last ledger serves."""
    acknowledged: int = 0
    """The highest epoch in which a write was acknowledged."""
    candidates: tuple[Candidate, ...] = ()
    certified: frozenset[int] = frozenset()
    """The processes whose certificates were published."""
    refusing: frozenset[int] = frozenset()
    """The servers whose addresses refuse connections although a process may live there."""
    deaths: int = DEATHS_MAX
    stops: int = 1
    firewalls: int = 1


Step = tuple[str, "State | Broken"]


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.wait = LEASE + (GUARD if rules.waits_for_hidden_pauses else 0) if rules.waits else 0

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        for label, after in self._steps(state):
            yield label, after if isinstance(after, Broken) else _judged(after)

    def _steps(self, state: State) -> Iterator[Step]:
        yield from self._lives(state)
        yield from self._time(state)
        yield from self._leads(state)
        for process in PROCESSES:
            if state.life[process] is Life.RUNS:
                yield from self._stands(state, process)

    # ── processes and networks ──

    def _lives(self, state: State) -> Iterator[Step]:
        for process, life in enumerate(state.life):
            if life is Life.RUNS and state.stops:
                yield f"{process} is stopped", _lived(state, process, Life.STOPPED)._replace(stops=state.stops - 1)
            if life is Life.STOPPED:
                yield f"{process} continues", _lived(state, process, Life.RUNS)
            if life in (Life.RUNS, Life.STOPPED) and state.deaths:
                yield f"{process} dies", _lived(state, process, Life.DEAD)._replace(deaths=state.deaths - 1)
            if life is Life.UNBORN and state.life[process - 2] is Life.DEAD:
                yield f"{process} starts", _lived(state, process, Life.RUNS)
            is_ended = life is Life.DEAD or (life is Life.STOPPED and not self.rules.silence_is_no_proof)
            if is_ended and process not in state.certified:
                yield f"the end of {process} is published", state._replace(certified=state.certified | {process})
        if state.firewalls and not self.rules.refusal_is_no_proof:  # refusals influence nothing else
            for server in set(SERVER):
                refusing = state.refusing | {server}
                yield f"server {server} refuses", state._replace(refusing=refusing, firewalls=state.firewalls - 1)

    def _time(self, state: State) -> Iterator[Step]:
        candidates = tuple(each._replace(waited=min(each.waited + 1, self.wait)) for each in state.candidates)
        yield "a tick passes", self._ticked(state, None)._replace(candidates=candidates)
        for process, lease in enumerate(state.leases):
            if lease and state.hidden[process] < GUARD:
                yield (
                    f"a tick passes, hidden from {process}",
                    self._ticked(state, process)._replace(candidates=candidates),
                )

    def _ticked(self, state: State, unseen_by: int | None) -> State:
        leases = tuple(max(0, lease - (process != unseen_by)) for process, lease in enumerate(state.leases))
        hidden = tuple(count + (process == unseen_by) for process, count in enumerate(state.hidden))
        hidden = tuple(count if lease else 0 for count, lease in zip(hidden, leases, strict=True))
        return state._replace(leases=leases, hidden=hidden)

    # ── the leader ──

    def _leads(self, state: State) -> Iterator[Step]:
        leader = state.maker
        if state.life[leader] is not Life.RUNS or state.is_fenced or not state.serves:
            return
        if state.leases[leader] < LEASE or state.acknowledged < state.version:
            renewed = state._replace(
                leases=_with(state.leases, leader, LEASE),
                hidden=_with(state.hidden, leader, 0),
                acknowledged=state.version,
            )
            yield f"{leader} acknowledges a write", renewed

    # ── candidates ──

    def _stands(self, state: State, process: int) -> Iterator[Step]:
        own = next((each for each in state.candidates if each.process == process), None)
        others = tuple(each for each in state.candidates if each.process != process)
        if own is None:
            is_leader = state.maker == process and state.epochs[process] == state.version and not state.is_fenced
            if state.version < VERSIONS_MAX and not is_leader and len(others) < 2:
                candidate = Candidate(process, state.version, state.maker, state.named)
                candidates = tuple(sorted((*others, candidate)))
                named = 0 if self.rules.ledger_names_process else process  # the znode influences nothing else
                yield f"{process} claims and fences", state._replace(candidates=candidates, is_fenced=True, named=named)
            return
        is_free = own.waited >= self.wait or self._is_proven(state, own)
        if state.version != own.version and self.rules.list_is_checked:
            yield f"{process} finds another list", state._replace(candidates=others)
        elif is_free:
            yield f"{process} lists a ledger", self._listed(state, process, others)
        if not self.rules.listed_after_wait and not is_free and state.version == own.version:
            listed = self._listed(state, process, others)
            yield f"{process} lists a ledger and waits", listed._replace(serves=False)

    def _listed(self, state: State, process: int, others: tuple[Candidate, ...]) -> State:
        version = state.version + 1
        return state._replace(
            version=version,
            maker=process,
            is_fenced=False,
            epochs=_with(state.epochs, process, version),
            serves=True,
            candidates=others,
        )

    def _is_proven(self, state: State, candidate: Candidate) -> bool:
        """Return True if the candidate takes the former leader's process for dead."""
        former = candidate.maker if self.rules.ledger_names_process else candidate.named
        if not self.rules.refusal_is_no_proof and SERVER[former] in state.refusing:
            return True
        if self.rules.certificate_names_process:
            return former in state.certified
        return any(SERVER[former] == SERVER[each] for each in state.certified)


def _judged(state: State) -> State | Broken:
    for process, lease in enumerate(state.leases):
        if lease and state.life[process] is Life.RUNS and state.epochs[process] < state.acknowledged:
            epoch, later = state.epochs[process], state.acknowledged
            return Broken(f"{process} answers reads in epoch {epoch}, and a write of epoch {later} is acknowledged")
    return state


def _lived(state: State, process: int, life: Life) -> State:
    """Return the state after a change of a process. A process that dies is no candidate and has no lease any more."""
    lives = (*state.life[:process], life, *state.life[process + 1 :])
    if life is not Life.DEAD:
        return state._replace(life=lives)
    return state._replace(
        life=lives,
        candidates=tuple(each for each in state.candidates if each.process != process),
        leases=_with(state.leases, process, 0),
        hidden=_with(state.hidden, process, 0),
    )


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
