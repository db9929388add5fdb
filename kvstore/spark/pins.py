"""Pins for jobs: one that a data frame makes by itself, and one that several share, kept alive while they are used.

with hold({"servers": "host:7401"}) as pin:
    users = spark.read.format("kvstore").options(**pin.options).option("prefix", "user/").load()
    orders = spark.read.format("kvstore").options(**pin.options).option("prefix", "order/").load()
    ...                                       # both as the store was at one moment
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from kvstore.client.core.config import ClientConfig
from kvstore.client.pinned.pins import PinnedStore, pin_store, renew_pin, unpin
from kvstore.errors import NoSuchPin, StoreError
from kvstore.spark.cluster import find
from kvstore.spark.splits import encode

logger = logging.getLogger(__name__)
END_S = 5.0
"""A renewal that is under way at the end of a task is waited for so long."""
SHARES = 4
"""A pin is renewed so often within its time."""
REMEMBERED = 64
_renewed_at: dict[str, float] = {}
"""When this process last renewed pins, by the wall clock: workers of Spark run one task after the other."""


@dataclass(frozen=True, slots=True)
class HeldPin:
    """A pin that somebody keeps alive."""

    store: PinnedStore
    options: dict[str, str]
    """For `spark.read.format("kvstore").options(...)`."""


def pin(config: ClientConfig, *, ttl_s: float, split_bytes: int) -> PinnedStore:
    """A pin of the whole store under a name of its own. Raises StoreError."""
    name = f"spark-{uuid4().hex[:16]}"
    try:
        return pin_store(config, ttl_s=ttl_s, id=name, split_bytes=split_bytes, timeout_s=config.timeout_s)
    except BaseException:  # some servers may hold it, and nobody else knows its name
        release(config, name)
        raise


@contextmanager
def hold(where: Mapping[str, str], *, ttl_s: float = 600.0, split_bytes: int = 64 << 20) -> Iterator[HeldPin]:
    """Pin the store that the options name (servers, zookeeper or dataDir …), keep it pinned, and give it back at the
    end. `ttl_s`: how long it outlives a driver that dies."""
    config = find(where)
    store = pin(config, ttl_s=ttl_s, split_bytes=split_bytes)
    try:
        with kept_alive(config, store.id, ttl_s, pinned_at=time.time()):
            yield HeldPin(store, {**where, "pin": encode(store), "pinTtl": f"{max(10.0, ttl_s):g}s"})
    finally:
        release(config, store.id)


@contextmanager
def kept_alive(config: ClientConfig, id: str, ttl_s: float, *, pinned_at: float) -> Iterator[None]:
    """Renew a pin by a thread while the block runs, as often as it is due. `pinned_at`: when it was made, by the wall
    clock. A pin that is lost shows where it is read."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_due_s(id, ttl_s, pinned_at)):
            _renewed_at[id] = time.time()
            try:
                renew_pin(config, id, ttl_s=ttl_s, timeout_s=min(config.timeout_s, ttl_s / SHARES))
            except (OSError, StoreError) as error:
                logger.warning("pin not renewed id=%s why=%s", id, error)

    thread = threading.Thread(target=renew, name=f"pin {id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def _due_s(id: str, ttl_s: float, pinned_at: float) -> float:
    """Seconds until somebody in this process should renew the pin: its tasks may all be short. Never more than a share
    of what it has, also if the clock is set back."""
    while len(_renewed_at) > REMEMBERED:
        _renewed_at.pop(next(iter(_renewed_at)), None)
    share_s = ttl_s / SHARES
    return min(share_s, max(0.0, _renewed_at.get(id, pinned_at) + share_s - time.time()))


def renew_or_explain(config: ClientConfig, store: PinnedStore, ttl_s: float) -> None:
    """Called before each action. Raises NoSuchPin that says what to do."""
    partitions = [each.partition for each in store.partitions if each.spans]
    try:
        renew_pin(config, store.id, ttl_s=ttl_s, partitions=partitions, timeout_s=config.timeout_s)
    except NoSuchPin as error:
        raise explained(error, ttl_s) from None


def explained(error: NoSuchPin, ttl_s: float) -> NoSuchPin:
    return NoSuchPin(
        "the moment at which this data frame reads the store is not kept any more: call load() again, with a new pin "
        f"if it was shared; pinTtl was {ttl_s:g}s ({error})"
    )


def release(config: ClientConfig, id: str) -> None:
    """Give a pin back; one that cannot be given back ends at its deadline."""
    try:
        unpin(config, id, timeout_s=min(5.0, config.timeout_s))
    except StoreError as error:
        logger.info("pin not given back id=%s why=%s", id, error)
