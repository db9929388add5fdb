"""Finds the cluster of a command that reads and writes keys: --server, --zookeeper or --data-dir."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvstore.cli.cluster import (
    ClusterOptions,
    Tools,
    recorded,
    recorded_instance,
    takes_connections,
    tls_of_environment,
    with_tools,
)
from kvstore.cli.own_command import how_to_start
from kvstore.client.core.config import ClientConfig, parse_url
from kvstore.errors import Unavailable

T = TypeVar("T")


def config_of(cluster: ClusterOptions, timeout_s: float) -> ClientConfig:
    """Return the client configuration. Raises ConfigError if nothing names a cluster, Unavailable if no server is
    up."""
    if cluster.server is not None:
        endpoints = parse_url(f"kv://{cluster.server}").endpoints
    else:
        endpoints = _of_data_dir(cluster.data_dir) if cluster.metadata is None else _of_zookeeper(cluster.metadata)
    instance = recorded_instance(cluster)
    return ClientConfig(endpoints=endpoints, timeout_s=timeout_s, tls=tls_of_environment(), cluster=instance)


def _of_data_dir(data_dir: Path) -> tuple[str, ...]:
    """Return the nodes of a local cluster. Raises Unavailable at once if all refuse, because a client would retry."""
    found = recorded(
        data_dir,
        lambda document: tuple(str(node["grpc"]) for node in document["nodes"]),
        or_by="--data-dir, --server or --metadata",
    )
    if run(lambda: _all_refuse(found)):
        raise Unavailable(
            f"no node of the cluster in {data_dir} listens at {', '.join(found)}; "
            f"start it with: {how_to_start(data_dir)}"
        )
    return found


async def _all_refuse(addresses: Sequence[str]) -> bool:
    """Return True if every address refuses connections. An address that does not answer may be up."""
    return all(answer is False for answer in await asyncio.gather(*map(takes_connections, addresses)))


def _of_zookeeper(address: str) -> tuple[str, ...]:
    from kvstore.server.cluster.addresses import addresses

    async def read(tools: Tools) -> tuple[str, ...]:
        return await addresses(tools.store)

    found = with_tools(ClusterOptions(metadata=address), read)
    if not found:
        raise Unavailable(f"no server of the cluster at ZooKeeper {address} is up")
    return found


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a command's work on its own event loop."""
    from kvstore.env.real import run as run_loop

    async def main() -> T:
        return await work()

    return run_loop(main())
