"""The ports of a library inside an application's process: time, randomness and tasks."""

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
    """Source of client ids: two processes must never draw the same bytes, also after a fork."""
    nursery: Nursery


def library_env(name: str) -> LibraryEnv:
    """Return the production ports."""
    return LibraryEnv(SystemClock(), SystemRandom(), TaskNursery(name))
