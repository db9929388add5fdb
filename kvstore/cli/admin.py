"""Calls to the admin service: the command uses the first server of the cluster that answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvstore.cli.cluster import ClusterOptions
from kvstore.cli.endpoints import config_of
from kvstore.errors import MetadataUnavailable, MetadataUnknown, OutcomeUnknown, Retryable, StoreError, Unavailable

if TYPE_CHECKING:
    import grpc

    from kvstore.proto.admin_pb2_grpc import AdminStub

T = TypeVar("T")
TIMEOUT_S = 15.0
POLL_S = 0.5
"""Seconds between polls for what a command waits for."""
OUTAGE_S_MAX = 600.0
"""Seconds for which a command that waits for the cluster tolerates that no server answers."""


def ask_admin(
    cluster: ClusterOptions,
    work: Callable[[AdminStub, float], T],
    timeout_s: float = TIMEOUT_S,
    *,
    again: bool = False,
) -> T:
    """Return the result of `work(stub, timeout_s)` from the first server that answers. Raises StoreError. Pass `again`
    if the request is idempotent: then another server of the same cluster is also asked when the outcome is unknown."""
    import grpc

    from kvstore.proto import admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    failure: StoreError = Unavailable("no server can be reached")
    config = config_of(cluster, timeout_s)
    instance, is_checked = config.cluster, bool(config.cluster) or (again and len(config.endpoints) > 1)
    for address in config.endpoints:
        with open_channel(address, config.tls, login=config.login) as channel:
            try:
                instance = _cluster_at(channel, instance, address, timeout_s) if is_checked else ""
            except StoreError as error:
                found = error
            else:
                try:
                    return work(admin_pb2_grpc.AdminStub(channel), timeout_s)
                except grpc.RpcError as error:
                    found = from_rpc_error(error)
        if isinstance(found, OutcomeUnknown | MetadataUnknown) and again:
            failure = found
        elif not isinstance(found, Unavailable):
            if isinstance(failure, OutcomeUnknown | MetadataUnknown):  # that attempt may still take effect
                raise OutcomeUnknown(f"{failure}; retried: {found}") from found
            raise found
        elif isinstance(failure, Unavailable):  # an unknown outcome stays unknown
            failure = found
    raise failure


def _cluster_at(channel: grpc.Channel, wanted: str, address: str, timeout_s: float) -> str:
    """Call `check_cluster`. Raises StoreError; Unavailable if the outcome is unknown, because nothing was requested."""
    import grpc

    from kvstore.client.blocking.identity import check_cluster
    from kvstore.rpc.status import from_rpc_error

    try:
        return check_cluster(channel, wanted, address, timeout_s)
    except grpc.RpcError as error:
        found = from_rpc_error(error)
        raise (Unavailable(f"{address}: {found}") if isinstance(found, OutcomeUnknown) else found) from error


def wait_until(ask: Callable[[], T | str], unknown: str, *, timeout_s: float) -> T:
    """Poll until `ask` returns a result instead of a text about what is still missing. `unknown` is that text while no
    server answers. Raises Unavailable with the text after `timeout_s`; other StoreErrors as OutageTolerance does."""
    deadline, tolerance = time.monotonic() + timeout_s, OutageTolerance()
    while True:
        found = tolerance.poll(ask) or unknown
        if not isinstance(found, str):
            return found
        if time.monotonic() > deadline:
            raise Unavailable(f"{found} within {timeout_s:g} s")
        time.sleep(POLL_S)


class OutageTolerance:
    """Tolerates unavailable servers while a command waits for the cluster. The cluster continues on its own, and an
    error would look as if the change had failed."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    def poll(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, or None while no server answers, which is reported once. Raises StoreError after
        OUTAGE_S_MAX without an answer, and for permanent errors."""
        try:
            found = ask()
        except (Retryable, OutcomeUnknown, MetadataUnavailable, MetadataUnknown) as error:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                message = str(error) or type(error).__name__
                print(f"kvstore: {message}: the change continues; retrying", file=sys.stderr, flush=True)
            elif now - self._away_since > OUTAGE_S_MAX:
                raise
            return None
        self._away_since = None
        return found
