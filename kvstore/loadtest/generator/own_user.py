"""Custom workloads: a class with a method per operation, with the same schedule and the same report as ours.

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
from kvstore.loadtest.generator.endpoints import Stopwatch
from kvstore.loadtest.generator.pacing import POISSON, Arrivals
from kvstore.loadtest.generator.users import PacedUser, RunContext


class OwnEndpoint:
    """The endpoint of a custom user, under the name of the user's class."""

    def __init__(self, name: str) -> None:
        self.name, self.watch = name, Stopwatch()

    def close(self) -> None:
        """Do nothing: the client belongs to the process."""


class OwnOperations:
    """Draws methods by their weights, and calls them."""

    def __init__(self, user: OwnUser, random: Random) -> None:
        self.endpoint = OwnEndpoint(type(user).__name__)
        self.arrivals = user.arrivals
        self._random = random
        self._methods = {name: getattr(user, name) for name in user.operations}
        self._names, self._odds = list(user.operations), list(accumulate(user.operations.values()))

    def draw(self) -> str:
        return self._random.choices(self._names, cum_weights=self._odds)[0]

    def perform(self, operation: str) -> int:
        """Call the method. Its service time includes its own computations."""
        self.endpoint.watch.mark_sent()
        given = self._methods[operation]()
        self.endpoint.watch.mark_received()
        return len(given) if isinstance(given, bytes) else int(given or 0)


class OwnUser(PacedUser):
    """A user with `rate_per_user` operations per second. A method returns bytes, or the number of bytes sent or
    received. It may raise an error of `kvstore.errors` or OSError, which counts as a failed operation, or WrongValue,
    which fails the run. Any other exception breaks the user and fails the run. All users of a process share one thread:
    code that waits must wait through gevent, as `client` does."""

    abstract = True
    operations: ClassVar[Mapping[str, int]] = {}
    """Names of methods, with their weights."""
    arrivals: ClassVar[Arrivals] = POISSON

    client: Client
    """The open client of this process, shared by all its users."""
    prefix: bytes
    """The prefix that keys should have: `--prefix`."""
    random: Random
    """The random generator of this user. The same `--seed` repeats its draws."""
    number: int
    """The number of this user among users of its class in this process, from 0."""

    @classmethod
    def prepare(cls, client: Client, prefix: bytes) -> None:
        """Write the data that the run needs. Called once, before any user starts; not with --no-preload."""

    @classmethod
    def fault_or_none(cls) -> str | None:
        """Return the fault of `operations`, or None."""
        lacking = [name for name in cls.operations if not callable(getattr(cls, name, None))]
        if lacking:
            return f"{cls.__name__}.operations names methods that do not exist: {', '.join(lacking)}"
        if not cls.operations or any(not isinstance(each, int) or each < 1 for each in cls.operations.values()):
            return f"{cls.__name__}.operations: expected methods with weights of at least 1, got {dict(cls.operations)}"
        return None

    def operations_of(self, session: RunContext, number: int, random: Random) -> OwnOperations:
        assert session.client is not None, "the start of the run checks this"
        self.client, self.prefix = session.client, session.keyspace.prefix
        self.random, self.number = random, number
        return OwnOperations(self, random)


def own_users(classes: Any) -> list[type[OwnUser]]:
    return [each for each in classes if issubclass(each, OwnUser)]
