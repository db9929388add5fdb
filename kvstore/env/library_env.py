"""The ports of a library that works inside somebody else's process: time, luck and tasks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random, SystemRandom

from kvstore.env.clock import SystemClock
from kvstore.env.nursery import TaskNursery
from kvstore.env.ports import Clock, Nursery


@dataclass(frozen=True, slots=True)
class LibraryEnv:
    clock: Clock
    random: Random
    """Its bytes make client ids: two processes must never draw the same, after a fork either."""
    nursery: Nursery


def library_env(name: str) -> LibraryEnv:
    """The real ones."""
    return LibraryEnv(SystemClock(), SystemRandom(), TaskNursery(name))
