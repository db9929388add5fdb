"""How operators' commands ask a server of the cluster: any of them will do, the first that answers does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cli.endpoints import config_of
from kvstore.errors import MetadataUnavailable, MetadataUnknown, OutcomeUnknown, Retryable, StoreError, Unavailable

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")
TIMEOUT_S = 15.0
LOOK_S = 0.5
"""Between two looks at what a command waits for."""
AWAY_S = 600.0
"""A command that waits for what the cluster does by itself bears for so long that no server answers."""


def ask_admin(
    data_dir: Path,
    zookeeper: str | None,
    server: str | None,
    work: Callable[[Any, float], T],
    timeout_s: float = TIMEOUT_S,
    *,
    again: bool = False,
) -> T:
    """Return the result of `work(stub, timeout_s)` from the first server that answers. Raises StoreError. `again`: it
    is done once however often it is sent, so another server of the same cluster is also asked where the outcome at one
    is unknown."""
    import grpc

    from kvstore.proto import admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    failure: StoreError = Unavailable("no server can be reached")
    config = config_of(data_dir, zookeeper, server, timeout_s)
    cluster, is_checked = config.cluster, bool(config.cluster) or (again and len(config.endpoints) > 1)
    for address in config.endpoints:
        with open_channel(address, config.tls, login=config.login) as channel:
            try:
                cluster = _cluster_at(channel, cluster, address, timeout_s) if is_checked else ""
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
            if isinstance(failure, OutcomeUnknown | MetadataUnknown):  # that attempt may still be done
                raise OutcomeUnknown(f"{failure}; asked again: {found}") from found
            raise found
        elif isinstance(failure, Unavailable):  # what may be done stays so
            failure = found
    raise failure


def _cluster_at(channel: grpc.Channel, wanted: str, address: str, timeout_s: float) -> str:
    """As `check_cluster`. Raises StoreError, Unavailable where nothing is known: nothing has been asked for yet."""
    import grpc

    from kvstore.client.blocking.identity import check_cluster
    from kvstore.rpc.status import from_rpc_error

    try:
        return check_cluster(channel, wanted, address, timeout_s)
    except grpc.RpcError as error:
        found = from_rpc_error(error)
        raise (Unavailable(f"{address}: {found}") if isinstance(found, OutcomeUnknown) else found) from error


class Patience:
    """Bears that servers are away while a command waits for what the cluster does by itself: it goes on without them,
    and to fail would look as if it had not been done."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    def look(self, ask: Callable[[], T]) -> T | None:
        """Return what `ask` finds; None while no server answers, which is said once each time. Raises StoreError after
        AWAY_S of it, and for what does not pass."""
        try:
            found = ask()
        except (Retryable, OutcomeUnknown, MetadataUnavailable, MetadataUnknown) as error:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                said = str(error) or type(error).__name__
                print(f"kvstore: {said}: what was asked goes on, and is looked at again", file=sys.stderr, flush=True)
            elif now - self._away_since > AWAY_S:
                raise
            return None
        self._away_since = None
        return found
