"""A model of one session that reads and writes one key through replicas and leaders, while the key changes owner twice
and all servers learn of that at different times. Rule M16 of docs/protocol.md; each part of it can be removed.

It is given that exactly one partition owns the key at any time (tests/models/move.py). The ring's versions are 0, plan
1, flip 2, plan 3, flip 4; each even version routes the key to a new owner. All leaders are on one server, which another
server may succeed. All followers, one of each partition, are on a second server. A client asks either server, and the
servers ask each other.

Promise: a session reads nothing older than what it has read or written before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.search import Broken

MOVES = 2


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    sequence_raised: bool = True
    """M9: OWN raises the target's sequence to the source's."""
    client_goes_by_what_it_heard: bool = True
    """M16 (1): a client that knows of a ring later than its own asks the leader."""
    server_goes_by_the_same_ring: bool = True
    """M16 (1): a server with a ring other than the client's asks the leader."""
    follower_has_what_came: bool = True
    """M16 (2): a follower that is behind the last flip to its partition answers no session read."""
    follower_knows_the_plan: bool = True
    """M16 (3): a follower does not answer if it owns a range for which its server's ring has no plan."""
    leader_knows_the_plan: bool = True
    """M16 (3): a replica does not lead if it owns a range for which its server's ring has no plan."""
    leader_turns_away: bool = True
    """M16 (3): a leader's server refuses operations routed by a ring from before the last flip to the partition."""


class Stand(NamedTuple):
    """A partition after a part of its log."""

    sequence: int = 0
    owns: bool = False
    value: int = 0
    """The key's value: the number of its last write."""
    newest: int = 0
    """The last move that brought the key here."""


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    path: tuple[int, ...]
    """The owners of the key, in order."""
    logs: tuple[tuple[Stand, ...], ...] = ((Stand(0, True),), (Stand(),), (Stand(),))
    applied: tuple[int, ...] = (1, 1, 1)
    """By each partition's follower."""
    owned: int = 0
    """Number of moves that are done in the logs."""
    ring: int = 0
    owned_since: tuple[int, ...] = ()
    """By flip: the sequence of its target at that time."""
    leaders_ring: int = 0
    followers_ring: int = 0
    clients_ring: int = 0
    heard: int = 0
    token: tuple[int, ...] = (0, 0, 0)
    seen: int = 0
    successions: int = 1
    writes: int = 2


Step = tuple[str, "State | Broken"]


def routed(version: int) -> int:
    """Return the ring version from which on this version routes keys to their current owner."""
    return version // 2 * 2


def plans(version: int) -> int:
    """Return the number of moves that this version knows of."""
    return (version + 1) // 2


def put(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        yield from self._move(state)
        yield from self._learn(state)
        for partition, log in enumerate(state.logs):
            if state.applied[partition] < len(log):
                applied = put(state.applied, partition, state.applied[partition] + 1)
                yield f"the follower of {partition} applies", state._replace(applied=applied)
        if state.writes:
            owner = state.path[state.owned]
            yield "somebody else writes", self._written(state, owner)
        yield from self._by_leader(state, "the leaders' server", state.leaders_ring)
        yield from self._by_leader(state, "the followers' server", state.followers_ring)
        yield from self._session_read(state)

    # ── the key moves ──

    def _move(self, state: State) -> Iterator[Step]:
        is_planned, is_owned = state.ring % 2 == 1, state.owned > state.ring // 2
        if not is_planned and state.ring < 2 * MOVES:
            yield "a move is planned", state._replace(ring=state.ring + 1)
        elif is_planned and not is_owned and state.leaders_ring == state.ring:
            yield "RELEASE, OWN", self._owned(state)
        elif is_planned and is_owned:
            target = state.path[state.owned]
            flipped = state._replace(ring=state.ring + 1, leaders_ring=state.ring + 1)
            since = (*state.owned_since, state.logs[target][-1].sequence)
            yield "the ring flips", flipped._replace(owned_since=since)

    def _owned(self, state: State) -> State:
        source, target = state.path[state.owned : state.owned + 2]
        gives, gets = state.logs[source][-1], state.logs[target][-1]
        sequence = max(gets.sequence, gives.sequence) if self.rules.sequence_raised else gets.sequence
        after = Stand(sequence, True, gives.value, state.owned + 1)
        state = self._logged(state, source, gives._replace(owns=False))
        return self._logged(state, target, after)._replace(owned=state.owned + 1)

    def _logged(self, state: State, partition: int, stand: Stand) -> State:
        logs = state.logs
        return state._replace(
            logs=(*logs[:partition], (*logs[partition], stand), *logs[partition + 1 :]),
        )

    def _written(self, state: State, owner: int) -> State:
        last = state.logs[owner][-1]
        value = 1 + max(stand.value for log in state.logs for stand in log)
        after = last._replace(sequence=last.sequence + 1, value=value)
        return self._logged(state, owner, after)._replace(writes=state.writes - 1)

    # ── who knows what ──

    def _learn(self, state: State) -> Iterator[Step]:
        if state.leaders_ring < state.ring:
            yield "the leaders' server reads on", state._replace(leaders_ring=state.leaders_ring + 1)
        if state.followers_ring < state.ring:
            yield "the followers' server reads on", state._replace(followers_ring=state.followers_ring + 1)
        for version in {routed(state.leaders_ring), routed(state.followers_ring)}:
            if version > state.clients_ring:
                yield f"the client learns ring {version}", state._replace(clients_ring=version)
        newest = max(log[-1].newest for log in state.logs)
        for version in range(state.leaders_ring if state.successions else 0):
            if not self.rules.leader_knows_the_plan or newest <= plans(version):
                succeeded = state._replace(leaders_ring=version, successions=state.successions - 1)
                yield f"a server that knows ring {version} leads", succeeded

    def _last_flip_to(self, state: State, partition: int, version: int) -> int:
        """Return the number of the last move that brought the key to the partition by this version of the ring, or
        0."""
        return max((move for move in range(1, version // 2 + 1) if state.path[move] == partition), default=0)

    # ── the session ──

    def _by_leader(self, state: State, endpoint: str, version: int) -> Iterator[Step]:
        """Yield a write and a linearizable read that a server passes to the leader of the key's owner by its ring."""
        if not self._leader_answers(state, version):
            return
        owner = state.path[version // 2]
        yield f"reads by {endpoint}", self._answered(state, owner, version, state.logs[owner][-1])
        if state.writes:
            after = self._written(state, owner)
            yield f"writes by {endpoint}", self._answered(after, owner, version, after.logs[owner][-1])

    def _leader_answers(self, state: State, version: int) -> bool:
        owner, known = state.path[version // 2], state.leaders_ring
        if not state.logs[owner][-1].owns:
            return False
        if routed(known) == routed(version) or not self.rules.leader_turns_away:
            return True
        return state.path[known // 2] == owner and version >= 2 * self._last_flip_to(state, owner, known)

    def _session_read(self, state: State) -> Iterator[Step]:
        """Yield a session read that a follower answers. If no follower answers, a leader does, as above."""
        rules, version = self.rules, state.followers_ring
        if rules.client_goes_by_what_it_heard and state.heard > state.clients_ring:
            return
        if rules.server_goes_by_the_same_ring and state.clients_ring != routed(version):
            return
        owner = state.path[version // 2]
        stand = state.logs[owner][state.applied[owner] - 1]
        flip = self._last_flip_to(state, owner, version)
        since = state.owned_since[flip - 1] if flip and rules.follower_has_what_came else 0
        is_ahead = rules.follower_knows_the_plan and stand.newest > plans(version)
        wanted = state.token[state.path[state.clients_ring // 2]]
        if stand.owns and not is_ahead and stand.sequence >= max(wanted, since):
            yield "a follower answers a session read", self._answered(state, owner, version, stand)

    def _answered(self, state: State, owner: int, version: int, stand: Stand) -> State | Broken:
        if stand.value < state.seen:
            return Broken(f"the session has seen {state.seen}, and is shown {stand.value}")
        token = put(state.token, owner, max(state.token[owner], stand.sequence))
        return state._replace(token=token, seen=stand.value, heard=max(state.heard, routed(version)))
