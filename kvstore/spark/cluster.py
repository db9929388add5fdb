"""Finds the cluster that a job's options name. The driver does this once; tasks receive the addresses of the
servers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvstore.client.blocking.client import Client
from kvstore.client.core.config import ClientConfig
from kvstore.errors import ConfigError, MetadataError, NoSuchNode, StoreError, Unavailable
from kvstore.extras import install_hint
from kvstore.server.cluster.addresses import addresses
from kvstore.spark.options import Cluster, client_config, cluster_of

FIND_S = 8.0
"""Seconds for which a driver waits for any server of the cluster to answer."""


def find(options: Mapping[str, str]) -> ClientConfig:
    """Return the client configuration for the cluster that the options name, after one of the cluster's servers has
    answered.

    Raises ConfigError for wrong options, Unavailable if no server answers within FIND_S.
    """
    cluster = cluster_of(options, os.environ)
    _check_files(cluster)
    config = client_config(cluster, *_place(cluster))
    try:
        with Client(replace(config, timeout_s=min(FIND_S, config.timeout_s))):
            return config
    except StoreError as error:
        raise Unavailable(
            f"no server of the cluster answers at {', '.join(config.endpoints)} ({error}); check `kvstore status`, "
            "and that this machine can reach the servers"
        ) from None


def time_of(config: ClientConfig) -> int:
    """Return the cluster's time in milliseconds since 1970. Use it instead of the local clock, because the clock of
    a machine that runs jobs may be wrong. Raises Unavailable."""
    with Client(config) as client:
        time_ms = client.cluster.time_ms()
    if not time_ms:
        raise Unavailable(f"no server at {', '.join(config.endpoints)} reports the time; retry")
    return time_ms


def _check_files(cluster: Cluster) -> None:
    try:
        if cluster.tls is not None:
            cluster.tls.client_context()
    except OSError as error:
        raise ConfigError(f"tlsCa, tlsCert, tlsKey: {error.filename}: {error.strerror}") from None


def _place(cluster: Cluster) -> tuple[tuple[str, ...], str]:
    """Return the servers' addresses and the id of their cluster. The id is empty if any cluster is accepted."""
    if cluster.servers:
        return cluster.servers, ""
    if cluster.zookeeper:
        return _of_zookeeper(cluster), ""
    path = Path(cluster.data_dir).absolute() / "cluster.json"
    try:
        document = json.loads(path.read_bytes())
        return tuple(node["grpc"] for node in document["nodes"]), str(document.get("instance", ""))
    except FileNotFoundError:
        raise ConfigError(
            f"dataDir: no cluster at {path}; start one with `kvstore up`, or set the option servers"
        ) from None
    except OSError as error:
        raise ConfigError(f"dataDir: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"dataDir: {path} is not a cluster file: {error!r}") from None


def _of_zookeeper(cluster: Cluster) -> tuple[str, ...]:
    try:
        from kvstore.env.real import run
        from kvstore.meta.connect import connect
        from kvstore.meta.login import metadata_login_of_environment
    except ImportError as error:
        hint = install_hint("node", "spark")
        raise ConfigError(
            f"zookeeper: no module {error.name}; on the driver {hint}, or set the option servers"
        ) from None

    async def read() -> tuple[str, ...]:
        store = await connect(cluster.zookeeper, login=metadata_login_of_environment())
        try:
            return await addresses(store)
        finally:
            await store.close()

    try:
        with ThreadPoolExecutor(1, "zookeeper") as thread:  # a notebook's thread already runs an event loop
            found = thread.submit(run, read()).result()
    except ValueError as error:
        raise ConfigError(f"zookeeper: {error}") from None
    except NoSuchNode:
        raise ConfigError(f"zookeeper: no cluster at {cluster.zookeeper}; expected HOST:PORT,.../CHROOT") from None
    except MetadataError as error:
        raise Unavailable(f"zookeeper: {cluster.zookeeper} does not answer: {error}") from None
    if not found:
        raise Unavailable(f"zookeeper: no server of the cluster at {cluster.zookeeper} is up")
    return found
