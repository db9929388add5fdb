"""A locustfile with a custom workload, as in docs/how-to/run-load-tests.md."""

from __future__ import annotations

from kvstore.client import Client
from kvstore.loadtest.locustfile import *  # noqa: F403
from kvstore.loadtest.locustfile import OwnUser, WrongValue

ITEMS = 50


class Shop(OwnUser):
    """Views items and buys some: the stock of an item never exceeds the initial one."""

    operations = {"look": 4, "buy": 1}  # noqa: RUF012

    @classmethod
    def prepare(cls, client: Client, prefix: bytes) -> None:
        client.put_many({prefix + b"item/%d" % number: b"1000000" for number in range(ITEMS)})

    def item(self) -> bytes:
        return self.prefix + b"item/%d" % self.random.randrange(ITEMS)

    def look(self) -> bytes:
        found = self.client.get(self.item())
        if found is None or int(found.value) > 1_000_000:
            raise WrongValue(f"an item is {found}")
        return found.value

    def buy(self) -> None:
        self.client.increment(self.item(), -1)


class Careless(OwnUser):
    """Names an operation that it does not have."""

    operations = {"look": 1, "steal": 1}  # noqa: RUF012

    def look(self) -> None:
        """Does nothing."""
