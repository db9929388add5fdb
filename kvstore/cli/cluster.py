"""Finds the cluster of a command, and connects commands that read metadata and ledgers themselves."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from kvstore.errors import ConfigError, Unavailable
from kvstore.places import fault_of

if TYPE_CHECKING:
    from kvstore.env import Env
    from kvstore.env.tls import Tls
    from kvstore.meta.store import MetadataStore


def checked_address(text: str | None) -> str | None:
    """Check the address in an option. Raises BadParameter."""
    from kvstore.meta.address import address_fault

    if text is not None and (fault := address_fault(text)):
        raise typer.BadParameter(fault)
    return text


def checked_server(text: str | None) -> str | None:
    """Check the servers in an option. Raises BadParameter."""
    from kvstore.client.core.config import parse_url

    try:
        if text is not None and "@" in text:
            raise typer.BadParameter(
                "expected no user or password here, because process lists show it; set KVSTORE_USER and "
                "KVSTORE_PASSWORD_FILE or KVSTORE_PASSWORD in the environment"
            )
        if text is not None:
            parse_url(f"kv://{text}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def checked_path(place: Path | None) -> Path | None:
    """Check a path in an option or argument; every path has this callback (tests/cli/test_main_paths.py). Raises
    BadParameter."""
    if place is not None and (fault := fault_of(place)):
        raise typer.BadParameter(fault)
    return place


def confirm(question: str) -> None:
    """Ask on a terminal, and end the command unless the answer is yes. Raises BadParameter without a terminal."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"expected --yes, because standard input is not a terminal: {question}")
    typer.confirm(question, abort=True, err=True)


DataDir = Annotated[
    Path, typer.Option(callback=checked_path, help="Directory of the local cluster, made by `kvstore up`")
]
Metadata = Annotated[
    str | None,
    typer.Option(
        "--zookeeper",
        "--metadata",
        callback=checked_address,
        help="Metadata store of the cluster: HOST:PORT,...[/CHROOT] for ZooKeeper, or etcd://HOST:PORT,...[/PREFIX]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
TIMEOUT_S_MAX = 1e8
"""Maximum seconds of a timeout, three years. A client and a sleep refuse much longer times."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options by which a command finds its cluster: the parameter `cluster: ClusterOptions = LOCAL`."""

    data_dir: DataDir = Path("data")
    metadata: Metadata = None
    server: Annotated[
        str | None, typer.Option(callback=checked_server, help="gRPC address of one or more servers: HOST:PORT,...")
    ] = None


LOCAL = ClusterOptions()


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with one option per field in place of each parameter whose type is a dataclass, for example
    ClusterOptions. The parameter's default has the options' defaults."""
    shown = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in shown if is_dataclass(each.annotation)}
    if not groups:
        return command

    def called(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        return command(**given)

    parameters: list[inspect.Parameter] = []
    for each in shown:
        parameters += _options(each) if each.name in groups else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(called)["__signature__"] = inspect.Signature(parameters)
    return called


def _options(group: inspect.Parameter) -> list[inspect.Parameter]:
    hints = get_type_hints(group.annotation, include_extras=True)
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group.default, name), annotation=annotation
        )
        for name, annotation in hints.items()
    ]


T = TypeVar("T")
SERVER_TIMEOUT_S = 5.0
PATIENCE_S = 5.0
"""Seconds to wait for the metadata store before a command reports that it is unavailable."""
LOOKUP_S = 1.0
"""Seconds of PATIENCE_S to find out which hosts of the metadata store accept connections."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The connections of commands that read the cluster without a server."""

    env: Env
    store: MetadataStore


def metadata_of(cluster: ClusterOptions) -> str:
    """Return the address of the cluster's metadata store. Raises ConfigError if nothing names one, Unavailable if the
    server does not answer."""
    if cluster.metadata is not None:
        return cluster.metadata
    if cluster.server is not None:
        return _reported_by(cluster.server)
    return str(recorded(cluster.data_dir, lambda document: document["zookeeper"], or_by="--data-dir or --metadata"))


def recorded(data_dir: Path, wanted: Callable[[Any], T], *, or_by: str) -> T:
    """Read something from a local cluster's record. Raises ConfigError if there is no record, or if the cluster is
    secure and the environment has no credentials."""
    path = data_dir / "cluster.json"
    try:
        document = json.loads(path.read_bytes())
        found, is_secure = wanted(document), document.get("secure", False)
    except FileNotFoundError:
        raise ConfigError(f"no cluster at {path}; start one with `kvstore up`, or name one with {or_by}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a cluster file: {error!r}") from error
    if is_secure and tls_of_environment() is None:
        files = shlex.quote(str(data_dir / "secure" / "client.env"))
        raise ConfigError(
            f"the cluster in {data_dir} is secure, and this shell has no credentials for it; run `. {files}`"
        )
    return found


def recorded_instance(cluster: ClusterOptions) -> str:
    """Return the recorded id of the local cluster. Empty if another option names the cluster, or if the cluster was
    last started by a release that did not record it. Raises ConfigError."""
    if cluster.metadata is not None or cluster.server is not None:
        return ""
    return recorded(
        cluster.data_dir, lambda document: str(document.get("instance", "")), or_by="--data-dir, --server or --metadata"
    )


def _reported_by(servers: str) -> str:
    """Return the metadata store's address, `host:port,…`, from the first server that answers."""
    import grpc

    from kvstore.client.core.config import parse_url
    from kvstore.proto import admin_pb2, admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    failure = ""
    for address in parse_url(f"kv://{servers}").endpoints:
        with open_channel(address, tls_of_environment()) as channel:
            try:
                stub = admin_pb2_grpc.AdminStub(channel)
                return stub.Status(admin_pb2.StatusRequest(), timeout=SERVER_TIMEOUT_S).zookeeper
            except grpc.RpcError as error:
                failure = str(from_rpc_error(error))
    raise Unavailable(f"--server {servers}: {failure}")


def tls_of_environment(prefix: str = "KVSTORE_TLS") -> Tls | None:
    """Return the TLS files for clusters with TLS endpoints, which KVSTORE_TLS_CA, KVSTORE_TLS_CERT and KVSTORE_TLS_KEY
    name. The prefix KVSTORE_METADATA_TLS selects those for the metadata store. None if no variable is set. Raises
    ConfigError."""
    from kvstore.env.tls import Tls

    ca, cert, key = (os.environ.get(f"{prefix}_{name}") for name in ("CA", "CERT", "KEY"))
    if not (ca or cert or key):
        return None
    try:
        return Tls(ca=Path(ca) if ca else None, cert=Path(cert) if cert else None, key=Path(key) if key else None)
    except ValueError as error:
        raise ConfigError(f"{prefix}_…: {error}") from None


def metadata_tls() -> Tls | None:
    """Return the TLS files for the metadata store, or None. Raises ConfigError."""
    return tls_of_environment("KVSTORE_METADATA_TLS") or tls_of_environment("KVSTORE_ZOOKEEPER_TLS")


def with_tools(cluster: ClusterOptions, work: Callable[[Tools], Awaitable[T]]) -> T:
    """Run `work` connected to the cluster's metadata, which may take PATIENCE_S to answer. Raises StoreError;
    Unavailable if the metadata belongs to a cluster other than the folder's."""
    from kvstore.env.real import run

    address, instance = metadata_of(cluster), recorded_instance(cluster)

    async def main() -> T:
        async with _tools(await _reachable(address)) as tools:
            if instance:
                await _refuse_other(tools.store, instance, address)
            return await work(tools)

    return run(main())


async def cluster_id(store: MetadataStore) -> str:
    """Return the id of the cluster, which bookies check (docs/protocol.md B32); empty if the store does not have it."""
    from kvstore.meta.layout import LayoutStore

    return await LayoutStore(store).instance_id_seen() or ""


async def _refuse_other(store: MetadataStore, instance: str, address: str) -> None:
    """Raise Unavailable if the metadata belongs to a cluster other than `instance`. All names may still be equal."""
    from kvstore.meta.layout import LayoutStore

    if (found := await LayoutStore(store).instance_id()) != instance:
        raise Unavailable(
            f"the metadata store at {address} belongs to another cluster: expected {instance}, got {found}"
        )


async def _reachable(address: str) -> str:
    """Return the address without hosts that do not accept connections, because the driver would spend its time on them.
    If no host accepts but some may be slow, return all. Raises Unavailable if every host refuses connections or has a
    name that cannot be resolved, because the driver would retry."""
    from kvstore.meta.address import parse

    found = parse(address)
    answers = await asyncio.gather(*map(takes_connections, found.hosts))
    answered = list(zip(found.hosts, answers, strict=True))
    nameless = [f"{host} ({answer.strerror})" for host, answer in answered if isinstance(answer, socket.gaierror)]
    if all(answer is False or isinstance(answer, socket.gaierror) for answer in answers):
        refusing = [host for host, answer in answered if answer is False]
        problems = [f"cannot resolve {', '.join(nameless)}"] if nameless else []
        if refusing:
            problems.append(
                f"no {found.kind.shown} listens at {','.join(refusing)}; "
                "`kvstore status --server HOST:PORT` shows the cluster without it"
            )
        raise Unavailable("; ".join(problems))
    hosts = [host for host, answer in answered if answer is True]
    return address.replace(",".join(found.hosts), ",".join(hosts)) if hosts else address


async def takes_connections(address: str) -> bool | socket.gaierror | None:
    """Return True if an address of the host accepts connections, False if all refuse, the error if the host cannot be
    resolved, and None if neither is known in time."""
    from kvstore.env.dns.names import NAMES, NoAnswer

    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOKUP_S):
            answers: list[bool | None] = []
            for place in await NAMES.find_soon(host.strip("[]")):
                answers.append(await _connects(place, int(port)))
                if answers[-1]:
                    return True
    except socket.gaierror as error:
        return error
    except (NoAnswer, TimeoutError):
        return None
    return None if None in answers else False


async def _connects(host: str, port: int) -> bool | None:
    """Return True if the address accepts connections, False if it refuses, None if it does neither."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    writer.close()
    return True


@asynccontextmanager
async def _tools(address: str) -> AsyncIterator[Tools]:
    from kvstore.env.real import real_env
    from kvstore.meta.connect import connect
    from kvstore.meta.login import metadata_login_of_environment

    env = real_env(Path.cwd(), name="tool", tls=tls_of_environment())
    login, timeout_s = metadata_login_of_environment(), PATIENCE_S - LOOKUP_S
    store = await connect(address, tls=metadata_tls(), login=login, timeout_s=timeout_s)
    try:
        yield Tools(env, store)
    finally:
        await env.nursery.close()
        await store.close()
