"""A workload of one's own: a class with a method for each operation, under the same timetable and in the same report.

from kvstore.loadtest.locustfile import *

class Shop(OwnUser):
    operations = {"look": 9, "buy": 1}  # with their weights

    @classmethod
    def prepare(cls, client, prefix):
        client.put_many({prefix + b"item/%d" % number: b"5" for number in range(1000)})

    def look(self):
        return self.client.get(self.prefix + b"item/%d" % self.random.randrange(1000)).value

    def buy(self):
        ...
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

from kvstore.client import Client
from kvstore.loadtest.generator.doors import Stopwatch
from kvstore.loadtest.generator.pacing import POISSON, Arrivals
from kvstore.loadtest.generator.users import PacedUser, Session


class OwnWay:
    """In the place of a door: the user's own class names it."""

    def __init__(self, name: str) -> None:
        self.name, self.watch = name, Stopwatch()

    def close(self) -> None:
        """The client belongs to the process."""


class OwnDeeds:
    """Draws methods by their weights, and calls them."""

    def __init__(self, user: OwnUser, random: Random) -> None:
        self.door = OwnWay(type(user).__name__)
        self.arrivals = user.arrivals
        self._random = random
        self._methods = {name: getattr(user, name) for name in user.operations}
        self._names, self._odds = list(user.operations), list(accumulate(user.operations.values()))

    def draw(self) -> str:
        return self._random.choices(self._names, cum_weights=self._odds)[0]

    def perform(self, operation: str) -> int:
        """Service time is the whole method's: what it computes too."""
        self.door.watch.sends()
        given = self._methods[operation]()
        self.door.watch.hears()
        return len(given) if isinstance(given, bytes) else int(given or 0)


class OwnUser(PacedUser):
    """A user with `rate_per_user` operations per second. A method may return bytes, or how many came or went. It
    fails by any error of `kvstore.errors`, OSError, or WrongValue, which fails the run; anything else is a broken user,
    which does too. All users of a process run in one thread: what waits must wait by gevent, as `client` does."""

    abstract = True
    operations: ClassVar[Mapping[str, int]] = {}
    """Names of methods, with their weights."""
    arrivals: ClassVar[Arrivals] = POISSON

    client: Client
    """Of this process, open: all its users share it."""
    prefix: bytes
    """What the keys should begin with: `--prefix`."""
    random: Random
    """Of this user: the same `--seed` draws the same again."""
    number: int
    """Of the users of this class in this process, from 0."""

    @classmethod
    def prepare(cls, client: Client, prefix: bytes) -> None:
        """Write what the run needs, once, before any user starts; with --no-preload not at all."""

    @classmethod
    def fault_or_none(cls) -> str | None:
        """Return the fault of `operations`, or None."""
        lacking = [name for name in cls.operations if not callable(getattr(cls, name, None))]
        if lacking:
            return f"{cls.__name__}.operations names what is no method of it: {', '.join(lacking)}"
        if not cls.operations or any(not isinstance(each, int) or each < 1 for each in cls.operations.values()):
            return f"{cls.__name__}.operations: want methods with weights from 1 on, got {dict(cls.operations)}"
        return None

    def deeds_of(self, session: Session, number: int, random: Random) -> OwnDeeds:
        assert session.client is not None, "whoever started the run has looked"
        self.client, self.prefix = session.client, session.keyspace.prefix
        self.random, self.number = random, number
        return OwnDeeds(self, random)


def own_users(classes: Any) -> list[type[OwnUser]]:
    return [each for each in classes if issubclass(each, OwnUser)]
