"""Breadth-first search through all states of a model: every order of every event, within the model's bounds.

A model is a first state and a function from a state to the possible (label, next state). A step that breaks a promise
leads to a Broken instead. The first Broken found is at the end of a shortest path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, TypeVar


class Broken(NamedTuple):
    """A broken promise."""

    what: str


class Found(NamedTuple):
    """`way`: the labels from the first state to a broken promise; empty if no state breaks one."""

    states: int
    way: list[str]


S = TypeVar("S", bound=Hashable)
Steps = Callable[[S], Iterator[tuple[str, S | Broken]]]


def search(first: S, steps: Steps[S], *, states_max: int, above: Callable[[S], S] | None = None) -> Found:
    """Search all states. Raises AssertionError if there are more than `states_max`. `above` returns, for a state, one
    in which at least the same can happen; a state is left out if that one has been found."""
    before: dict[S, tuple[S, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if above is not None and above(state) in before:
            continue
        for label, after in steps(state):
            if isinstance(after, Broken):
                return Found(len(before), [*_way(before, state), f"{label}: {after.what}"])
            if after not in before:
                before[after] = state, label
                waiting.append(after)
        assert len(before) <= states_max, f"more than {states_max} states: the model grew, or its bounds did"
    return Found(len(before), [])


def _way(before: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    labels = []
    while (step := before[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]
