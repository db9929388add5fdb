"""How a command finds its cluster, and what it needs to read the cluster's metadata and ledgers itself."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvstore.env import Env
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError, Unavailable
from kvstore.meta.store import MetadataStore

DataDir = Annotated[Path, typer.Option(help="Where `kvstore up` keeps the cluster; names its ZooKeeper.")]
ZooKeeper = Annotated[str | None, typer.Option(help="The cluster's ZooKeeper instead: HOST:PORT,...[/CHROOT].")]
Server = Annotated[str | None, typer.Option(help="gRPC address of a server, or several: HOST:PORT,...")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

T = TypeVar("T")
SERVER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Tools:
    """What commands that read the cluster by themselves work with."""

    env: Env
    store: MetadataStore


def zookeeper_of(data_dir: Path, zookeeper: str | None, server: str | None = None) -> str:
    """The connection string of the cluster's ZooKeeper. Raises ConfigError if nothing names one, Unavailable if the
    server does not answer."""
    if zookeeper:
        return zookeeper
    if server:
        return _as_told_by(server)
    path = data_dir / "cluster.json"
    try:
        return str(json.loads(path.read_bytes())["zookeeper"])
    except FileNotFoundError:
        raise ConfigError(f"no cluster at {path}: start one with `kvstore up`, or name one with --zookeeper") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not a cluster file: {error!r}") from error


def _as_told_by(servers: str) -> str:
    """What the first of the servers that answers says; `host:port,…`."""
    import grpc

    from kvstore.proto import admin_pb2, admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    failure = "want HOST:PORT,..."
    for address in filter(None, servers.split(",")):
        with open_channel(address, tls_of_environment()) as channel:
            try:
                stub = admin_pb2_grpc.AdminStub(channel)
                return stub.Status(admin_pb2.StatusRequest(), timeout=SERVER_TIMEOUT_S).zookeeper
            except grpc.RpcError as error:
                failure = str(from_rpc_error(error))
    raise Unavailable(f"--server {servers}: {failure}")


def tls_of_environment() -> Tls | None:
    """How commands reach a cluster whose doors speak TLS: by the files that KVSTORE_TLS_CA, KVSTORE_TLS_CERT and
    KVSTORE_TLS_KEY name. None if none is set. Raises ConfigError."""
    ca, cert, key = (os.environ.get(f"KVSTORE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    if not (ca or cert or key):
        return None
    try:
        return Tls(ca=Path(ca) if ca else None, cert=Path(cert) if cert else None, key=Path(key) if key else None)
    except ValueError as error:
        raise ConfigError(f"KVSTORE_TLS_…: {error}") from None


def with_tools(
    data_dir: Path, zookeeper: str | None, work: Callable[[Tools], Awaitable[T]], server: str | None = None
) -> T:
    """Run `work` connected to the cluster's metadata. Raises StoreError."""
    from kvstore.env.real import run

    address = zookeeper_of(data_dir, zookeeper, server)

    async def main() -> T:
        async with _tools(address) as tools:
            return await work(tools)

    return run(main())


@asynccontextmanager
async def _tools(address: str) -> AsyncIterator[Tools]:
    from kvstore.env.real import real_env
    from kvstore.meta.zookeeper import ZooKeeperStore

    env = real_env(Path.cwd(), name="tool", tls=tls_of_environment())
    store = await ZooKeeperStore.connect(address)
    try:
        yield Tools(env, store)
    finally:
        await env.nursery.close()
        await store.close()
