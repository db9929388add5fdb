"""Pins for Spark jobs. A pin keeps one state of the store readable: each data frame has its own pin, or several data
frames share one.

    with hold({"servers": "host:7401"}) as pin:
        users = spark.read.format("kvstore").options(**pin.options).option("prefix", "user/").load()
        orders = spark.read.format("kvstore").options(**pin.options).option("prefix", "order/").load()
        ...                                       # both read the state of the store at one moment
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
"""Maximum seconds to wait at the end of a task for a renewal that is in progress."""
SHARES = 4
"""Number of times that a pin is renewed within its lifetime."""
REMEMBERED = 64
_renewed_at: dict[str, float] = {}
"""Wall-clock time at which this process last renewed each pin. It outlives a task, because a Spark worker process
runs one task after the other."""


@dataclass(frozen=True, slots=True)
class HeldPin:
    """A pin of the whole store that is kept alive until the end of the `hold` block."""

    store: PinnedStore
    options: dict[str, str]
    """Options for `spark.read.format("kvstore").options(...)`."""


def pin(config: ClientConfig, *, ttl_s: float, split_bytes: int) -> PinnedStore:
    """Pin the current state of the whole store under a unique name for `ttl_s` seconds. `split_bytes` is the
    approximate number of bytes that one task reads. Raises StoreError."""
    name = f"spark-{uuid4().hex[:16]}"
    try:
        return pin_store(config, ttl_s=ttl_s, id=name, split_bytes=split_bytes, timeout_s=config.timeout_s)
    except BaseException:  # some servers may have the pin, and nobody else knows its name
        release(config, name)
        raise


@contextmanager
def hold(where: Mapping[str, str], *, ttl_s: float = 600.0, split_bytes: int = 64 << 20) -> Iterator[HeldPin]:
    """Pin the store, keep it pinned during the block, and release it at the end.

    All data frames that use the pin's options read the state of the store at the moment of the pin:

        with hold({"servers": "127.0.0.1:7401"}) as pin:
            frame = spark.read.format("kvstore").options(**pin.options).load()

    Args:
        where: options that name the cluster: `servers`, `zookeeper` or `dataDir`, with TLS files and `timeout`.
        ttl_s: seconds for which the pin outlives a driver that dies. It prevents logs from being trimmed until then.
        split_bytes: approximate bytes of rows that one task reads.

    Raises ConfigError for wrong options, Overloaded if there are too many pins, Unavailable if no server answers. Costs
    one call to a leader of each partition, and one renewal each `ttl_s` / 4 seconds in a thread.
    """
    config = find(where)
    store = pin(config, ttl_s=ttl_s, split_bytes=split_bytes)
    try:
        with kept_alive(config, store.id, ttl_s, pinned_at=time.time()):
            yield HeldPin(store, {**where, "pin": encode(store), "pinTtl": f"{max(10.0, ttl_s):g}s"})
    finally:
        release(config, store.id)


@contextmanager
def kept_alive(config: ClientConfig, id: str, ttl_s: float, *, pinned_at: float) -> Iterator[None]:
    """Renew a pin in a background thread while the block runs. `pinned_at` is the wall-clock time at which the pin
    was made. If the pin is lost, the block continues, and the read that needs the pin raises the error."""
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
    """Return the seconds until this process should renew the pin. The time of the last renewal counts over all tasks
    of the process, because its tasks may all be short. The result is never more than one share of the pin's
    lifetime, even if the clock is set back."""
    while len(_renewed_at) > REMEMBERED:
        _renewed_at.pop(next(iter(_renewed_at)), None)
    share_s = ttl_s / SHARES
    return min(share_s, max(0.0, _renewed_at.get(id, pinned_at) + share_s - time.time()))


def renew_or_explain(config: ClientConfig, store: PinnedStore, ttl_s: float) -> None:
    """Renew the pin before an action of the data frame. Raises NoSuchPin with advice if the pin has expired."""
    partitions = [each.partition for each in store.partitions if each.spans]
    try:
        renew_pin(config, store.id, ttl_s=ttl_s, partitions=partitions, timeout_s=config.timeout_s)
    except NoSuchPin as error:
        raise explained(error, ttl_s) from None


def explained(error: NoSuchPin, ttl_s: float) -> NoSuchPin:
    return NoSuchPin(
        "the state of the store that this data frame reads is no longer kept; call load() again, with a new pin if it "
        f"was shared; pinTtl was {ttl_s:g}s ({error})"
    )


def release(config: ClientConfig, id: str) -> None:
    """Release a pin. If no server can be reached, the pin expires at its deadline."""
    try:
        unpin(config, id, timeout_s=min(5.0, config.timeout_s))
    except StoreError as error:
        logger.info("pin not released id=%s why=%s", id, error)
