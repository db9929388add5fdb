"""`kvstore up`, `down` and `node run`: the local cluster, and one process of any cluster."""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.cluster import DataDir, Json, Server, ZooKeeper, checked_address, checked_path, tls_of_environment
from kvstore.cli.node.check import Settings, settings_of
from kvstore.cli.output import as_json, as_table
from kvstore.cli.own_command import data_dir_option, own_command
from kvstore.errors import ConfigError
from kvstore.meta.address import Kind
from kvstore.wal.config import BookieKind

if TYPE_CHECKING:
    from kvstore.devcluster.layout import ClusterFile, Wish
    from kvstore.devcluster.secure_folder import SecureFolder

UNDRAIN_S = 60.0
"""How long a node may take to end its drain and open its replicas."""
Where = tuple[Path, str | None, str | None]
"""--data-dir, --zookeeper, --server."""


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    app.command()(up)
    app.command()(down)
    node = typer.Typer(no_args_is_help=True, help="One process of a cluster.")
    node.command()(run)
    node.command()(drain)
    node.command()(undrain)
    app.add_typer(node, name="node")


def _checked_metadata(text: str | None) -> str | None:
    """Raises BadParameter."""
    return text if text in set(Kind) else checked_address(text)


def up(
    nodes: Annotated[int | None, typer.Option(help="How many nodes. Default 3.")] = None,
    partitions: Annotated[int | None, typer.Option(help="How many partitions. Default 3.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of each partition. Default 3.")] = None,
    data_dir: DataDir = Path("data"),
    port_offset: Annotated[
        int | None, typer.Option(help="Added to every port; another one moves a cluster that is down.")
    ] = None,
    zookeeper: Annotated[
        str | None, typer.Option(callback=checked_address, help="Use this ZooKeeper: HOST:PORT/CHROOT.")
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option(
            callback=_checked_metadata,
            help="zookeeper or etcd: the kind of metadata store to start. Or the address of one: etcd://HOST:PORT/PREFIX.",
        ),
    ] = None,
    bookies: Annotated[
        BookieKind | None, typer.Option(help="external: those that are registered in --metadata.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the cluster serves.")] = False,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Allow 1 or 2 nodes.")] = False,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS and users on every door; makes a CA, certificates and an administrator."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Write this setting into every node's node.toml."),
    ] = None,
    moved: Annotated[
        bool,
        typer.Option("--moved", help="Its folder was moved here, with nothing of it running: change the paths in it."),
    ] = False,
    json: Json = False,
) -> None:
    """Start the local cluster, or what is down of it, and wait until it serves."""
    from kvstore.devcluster.layout import Wish
    from kvstore.devcluster.settings import parse

    if moved:
        from kvstore.devcluster.moving import move_here

        move_here(data_dir.resolve())
    if zookeeper is not None and metadata is not None:
        raise ConfigError("want one of --zookeeper and --metadata, got both")
    is_kind = metadata in set(Kind)
    wish = Wish(
        data_dir=data_dir,
        nodes=nodes,
        partitions=partitions,
        replicas=replicas,
        port_offset=port_offset,
        zookeeper=zookeeper if metadata is None or is_kind else metadata,
        metadata=Kind(metadata) if metadata is not None and is_kind else None,
        bookies=bookies,
        unsafe=unsafe,
        secure=secure or None,
        settings=tuple(map(parse, settings or ())),
    )
    _run_up(wish, detach=detach, json=json)


def _run_up(wish: Wish, *, detach: bool, json: bool) -> None:
    from kvstore.devcluster.local import LocalCluster

    cluster, stop = LocalCluster(wish.data_dir, _say), f"{own_command()} down{data_dir_option(wish.data_dir)}"
    was_running = cluster.is_running()
    try:
        found = cluster.up(wish)
    except KeyboardInterrupt:
        _say(f"interrupted; what was started goes on. To stop it: {stop}")
        raise
    print(as_json(found.document()) if json else _welcome(found, wish.data_dir), flush=True)
    if was_running and not detach:
        _say(f"it ran before this command, and goes on. To stop it: {stop}")
    elif not detach:
        _wait_for_interrupt()
        cluster.down()


def down(data_dir: DataDir = Path("data"), json: Json = False) -> None:
    """Stop every process of the local cluster. Its data stays."""
    from kvstore.devcluster.local import LocalCluster

    stopped = LocalCluster(data_dir, _say).down()
    if json:
        print(as_json({"stopped": stopped}))
    elif stopped:
        print(f"stopped {', '.join(stopped)}")
    else:
        there = (data_dir / "cluster.json").exists()
        print("nothing was running" if there else f"there is no cluster in {data_dir.absolute()}")


def run(
    config: Annotated[Path, typer.Option(callback=checked_path, help="The node's TOML file.")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners beyond loopback without TLS and users.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Run one node until it is told to stop (SIGTERM): it hands over what it leads, then exits."""
    from kvstore.server.node import run_node

    run_node(config, settings_of(settings, insecure=insecure))


def drain(
    node: Annotated[str, typer.Argument(help="The node's id, for example n1.")],
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    leads_only: Annotated[
        bool, typer.Option("--leads-only", help="Keep its replicas: it will be started again soon, or undrained.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all to be handed over.", min=0)] = 600,
    json: Json = False,
) -> None:
    """Take a node out of service, to replace its machine: its replicas move to other servers, and it hands over what it
    leads. Where no other server can take its replicas they stay, it says so, and the exit code is 1. `kvstore node
    undrain` undoes it."""
    kept = "" if leads_only else _move_replicas_off(node, (data_dir, zookeeper, server), timeout)
    handed_over = _hand_over(node, (data_dir, zookeeper, server), timeout, may_be_down=not leads_only and not kept)
    if json:
        print(as_json({"node": node, "handed_over": handed_over, "replicas_left": kept or None}))
    else:
        print(f"{node} has handed over {', '.join(handed_over)}" if handed_over else f"{node} leads nothing")
        if not leads_only:
            print(
                f"{node} {f'keeps its replicas: {kept}' if kept else 'holds no replicas and can be stopped for good'}"
            )
    if kept:
        raise typer.Exit(1)


def undrain(
    node: Annotated[str, typer.Argument(help="The node's id, for example n1.")],
    data_dir: DataDir = Path("data"),
    zookeeper: ZooKeeper = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Undo a drain, also one with `--leads-only`: the node may hold replicas again, and if it is up it takes operations
    and leads again. Replicas that have moved away do not come back by themselves: `kvstore partition
    even-replicas` moves some to it."""
    from kvstore.cli.replicas import change_replicas
    from kvstore.cli.ring_views import status_document, status_text
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    answer = change_replicas(ChangeReplicasRequest(undrain=node), data_dir, zookeeper, server)
    said = _serve_again(node, (data_dir, zookeeper, server))
    print(as_json({**status_document(answer), "node": said.name.lower()}) if json else status_text(answer))
    if not json:
        print(f"\n{node} {said.value}")


class _Undrained(Enum):
    """The end of a node's drain."""

    SERVES = "takes operations again"
    NOT_DRAINING = "was not draining"
    DOWN = "is not up: it takes operations once it is started"
    OLD = "is of a release that takes operations again only when it is started anew"


def _move_replicas_off(node: str, where: Where, timeout_s: float) -> str:
    """Empty once it is done; else why its replicas cannot go."""
    from kvstore.cli.operation import said_if_interrupted
    from kvstore.cli.replicas import change_replicas, wait_until_empty
    from kvstore.errors import InvalidRequest
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    try:
        change_replicas(ChangeReplicasRequest(drain=node), *where)
    except InvalidRequest as error:
        if "no other server can take" in str(error):
            return str(error)
        raise
    with said_if_interrupted(f"interrupted; {node}'s replicas go on moving: `kvstore ring status` shows them"):
        wait_until_empty(node, *where, timeout_s=timeout_s)
    return ""


def _hand_over(node: str, where: Where, timeout_s: float, *, may_be_down: bool) -> list[str]:
    found = _address_or_none(node, where)
    if found is None and not may_be_down:
        raise ConfigError(f"no node {node!r} is up")
    return _drain(found, timeout_s) if found else []


def _address_or_none(node: str, where: Where) -> str | None:
    """Where the node answers about the cluster; None if it is not up."""
    from kvstore.cli.cluster import Tools, with_tools
    from kvstore.errors import NoSuchNode
    from kvstore.meta import paths
    from kvstore.server.cluster.topology import Member
    from kvstore.types import ServerId

    async def address(tools: Tools) -> str | None:
        try:
            data, _ = await tools.store.get(paths.server(ServerId(node)))
        except NoSuchNode:
            return None
        return Member.decode(data).grpc

    data_dir, zookeeper, server = where
    return with_tools(data_dir, zookeeper, address, server)


def _serve_again(node: str, where: Where) -> _Undrained:
    import grpc

    from kvstore.proto import admin_pb2, admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    address = _address_or_none(node, where)
    if not address:
        return _Undrained.DOWN
    with open_channel(address, tls_of_environment()) as channel:
        try:
            answer = admin_pb2_grpc.AdminStub(channel).Undrain(admin_pb2.UndrainRequest(), timeout=UNDRAIN_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return _Undrained.OLD
            raise from_rpc_error(error) from error
    return _Undrained.SERVES if answer.was_draining else _Undrained.NOT_DRAINING


def _drain(address: str, timeout_s: float) -> list[str]:
    import grpc

    from kvstore.proto import admin_pb2, admin_pb2_grpc
    from kvstore.rpc.channels import open_channel
    from kvstore.rpc.status import from_rpc_error

    with open_channel(address, tls_of_environment()) as channel:
        try:
            request = admin_pb2.DrainRequest(timeout_s=timeout_s)
            answer = admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=timeout_s + 5)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    return list(answer.handed_over)


def _welcome(found: ClusterFile, data_dir: Path) -> str:
    from kvstore.devcluster.local import secure_folder

    where = data_dir_option(data_dir)
    store = f"{found.store.kind.shown} {found.zookeeper}"
    rows = [
        {
            "node": node.id,
            "redis": node.resp,
            "grpc": node.grpc,
            "http": f"{'https' if found.secure else 'http'}://{node.http}",
        }
        | ({"bookie": node.bookie} if found.bookies is BookieKind.NODES else {})
        for node in found.nodes
    ]
    kvstore = own_command()
    folder = secure_folder(found)
    return "\n".join(
        [
            "",
            as_table(rows),
            f"\n{store}; data and logs in {data_dir}; stop with: {kvstore} down{where}\n",
            *([] if folder is None else _how_to_get_in(folder, data_dir)),
            "Try:",
            f"  {kvstore} put{where} greeting hello && {kvstore} get{where} greeting",
            f"  {kvstore} ring locate{where} greeting",
            f"  {kvstore} fsck{where}",
            "Or any of the nodes with what you have:",
            *(_plain_clients(found) if folder is None else _secure_clients(found, folder, data_dir)),
        ]
    )


def _how_to_get_in(folder: SecureFolder, data_dir: Path) -> list[str]:
    """Say what comes first in each shell."""
    place = data_dir / folder.path.name
    return [
        f"Its doors speak TLS, want a certificate and ask who you are: {folder.login().user}, by the files in {place}.",
        "First, in each shell:",
        f"  . {shlex.quote(str(place / folder.environment.name))}",
    ]


def _plain_clients(found: ClusterFile) -> list[str]:
    first, servers = found.nodes[0], ",".join(node.grpc for node in found.nodes)
    return [
        f"  redis-cli -p {first.resp.rpartition(':')[2]} set answer 42",
        f"  curl http://{first.http}/",
        f"  Python: with kvstore.client.Client('kv://{servers}') as client: client.put(b'answer', b'42')",
    ]


def _secure_clients(found: ClusterFile, folder: SecureFolder, data_dir: Path) -> list[str]:
    """None of them has a password on its command line, where whoever lists processes would read it."""
    first, url = found.nodes[0], folder.url([node.grpc for node in found.nodes])
    own = '--cacert "$KVSTORE_TLS_CA" --cert "$KVSTORE_TLS_CERT"'
    netrc = shlex.quote(str(data_dir / folder.path.name / folder.netrc.name))
    redis = f'redis-cli -p {first.resp.rpartition(":")[2]} --tls {own} --key "$KVSTORE_TLS_KEY"'
    return [
        f'  REDISCLI_AUTH=$(cat "$KVSTORE_PASSWORD_FILE") {redis} --user {folder.login().user} set answer 42',
        f"  curl {own} --netrc-file {netrc} https://{first.http}/",
        f"  Python: with kvstore.client.Client({url!r}) as client: client.put(b'answer', b'42')",
    ]


def _wait_for_interrupt() -> None:
    _say("\nrunning; Ctrl-C stops it (or use --detach)")
    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # else SIGTERM would end this process, and nothing else
    with suppress(KeyboardInterrupt):
        signal.sigwait(ends)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
