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

from kvstore.cli.admin import ask_admin
from kvstore.cli.cluster import LOCAL, TIMEOUT_S_MAX, ClusterOptions, DataDir, Json, checked_address, checked_path
from kvstore.cli.node.check import Settings, settings_of
from kvstore.cli.output import as_json, as_table
from kvstore.cli.own_command import data_dir_option, own_command
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.meta.address import MetadataKind
from kvstore.ring.hashing import KeyHashName
from kvstore.wal.config import BookieKind

if TYPE_CHECKING:
    from kvstore.devcluster.layout import ClusterFile, UpOptions
    from kvstore.devcluster.secure_folder import SecureFolder

UNDRAIN_S = 60.0
"""Maximum seconds for a node to end its drain and open its replicas."""


NodeIds = Annotated[
    list[str], typer.Argument(metavar="NODE", help="Id of the node, for example n1, or of all processes of a machine")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    app.command()(up)
    app.command()(down)
    node = typer.Typer(no_args_is_help=True, help="Run and inspect one node of a cluster")
    node.command()(run)
    node.command()(drain)
    node.command()(undrain)
    app.add_typer(node, name="node")


def _checked_metadata(text: str | None) -> str | None:
    """Check --metadata, which is a kind of store or an address. Raises BadParameter."""
    return text if text in set(MetadataKind) else checked_address(text)


def up(
    nodes: Annotated[int | None, typer.Option(help="Number of nodes; default: 3", min=1, max=99)] = None,
    partitions: Annotated[int | None, typer.Option(help="Number of partitions; default: 3", min=1, max=1024)] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of each partition; default: 3", min=1)] = None,
    data_dir: DataDir = Path("data"),
    port_offset: Annotated[
        int | None, typer.Option(help="Offset added to every port; a new offset moves a cluster that is down")
    ] = None,
    zookeeper: Annotated[
        str | None, typer.Option(callback=checked_address, help="Use this ZooKeeper: HOST:PORT/CHROOT")
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option(
            callback=_checked_metadata,
            help="Metadata store to start, zookeeper or etcd; or the address of a running one: etcd://HOST:PORT/PREFIX",
        ),
    ] = None,
    bookies: Annotated[
        BookieKind | None, typer.Option(help="external: use the bookies that are registered in --metadata")
    ] = None,
    key_hash: Annotated[
        KeyHashName | None, typer.Option(help="How keys become tokens; cannot be changed later; default: slots")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the cluster serves")] = False,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Allow 1 or 2 nodes")] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Require TLS and users on every endpoint; creates a CA, certificates and an administrator"
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Write this setting into every node's node.toml"),
    ] = None,
    moved: Annotated[
        bool,
        typer.Option("--moved", help="Adjust the paths in a cluster folder that was moved here while it was down"),
    ] = False,
    json: Json = False,
) -> None:
    """Start the local cluster, or its nodes that are down, and wait until it serves"""
    from kvstore.devcluster.layout import UpOptions
    from kvstore.devcluster.settings import parse

    if moved:
        from kvstore.devcluster.moving import move_here

        move_here(data_dir.resolve())
    if zookeeper is not None and metadata is not None:
        raise ConfigError("expected --zookeeper or --metadata, got both")
    is_kind = metadata in set(MetadataKind)
    wish = UpOptions(
        data_dir=data_dir,
        nodes=nodes,
        partitions=partitions,
        replicas=replicas,
        port_offset=port_offset,
        zookeeper=zookeeper if metadata is None or is_kind else metadata,
        metadata=MetadataKind(metadata) if metadata is not None and is_kind else None,
        bookies=bookies,
        key_hash=key_hash,
        unsafe=unsafe,
        secure=secure or None,
        settings=tuple(map(parse, settings or ())),
    )
    _run_up(wish, detach=detach, json=json)


def _run_up(wish: UpOptions, *, detach: bool, json: bool) -> None:
    from kvstore.devcluster.local import LocalCluster

    cluster, stop = LocalCluster(wish.data_dir, _print), f"{own_command()} down{data_dir_option(wish.data_dir)}"
    was_running = cluster.is_running()
    try:
        found = cluster.up(wish)
    except KeyboardInterrupt:
        _print(f"interrupted; processes that were started keep running. To stop them, run: {stop}")
        raise
    print(as_json(found.document()) if json else _welcome(found, wish.data_dir), flush=True)
    if was_running and not detach:
        _print(f"the cluster was already running and keeps running. To stop it, run: {stop}")
    elif not detach:
        _wait_for_interrupt()
        cluster.down()


def down(data_dir: DataDir = Path("data"), json: Json = False) -> None:
    """Stop every process of the local cluster; its data stays"""
    from kvstore.devcluster.local import LocalCluster

    stopped = LocalCluster(data_dir, _print).down()
    if json:
        print(as_json({"stopped": stopped}))
    elif stopped:
        print(f"stopped {', '.join(stopped)}")
    else:
        there = (data_dir / "cluster.json").exists()
        print("nothing was running" if there else f"no cluster in {data_dir.absolute()}")


def run(
    config: Annotated[Path, typer.Option(callback=checked_path, help="The node's TOML file")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listeners beyond loopback without TLS and users")
    ] = False,
    settings: Settings = None,
) -> None:
    """Run one node, or the processes of one machine, until SIGTERM; they then hand over their leaderships and exit"""
    from kvstore.cli.node.starting import start

    start(config, settings_of(settings, insecure=insecure))


def drain(
    nodes: NodeIds,
    cluster: ClusterOptions = LOCAL,
    leads_only: Annotated[
        bool,
        typer.Option("--leads-only", help="Keep its replicas, because the node will be restarted or undrained soon"),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait until everything is handed over", min=0, max=TIMEOUT_S_MAX)
    ] = 600,
    json: Json = False,
) -> None:
    """Take a node out of service: move its replicas to other servers and hand over its leaderships.

    Use this to replace its machine. If no other server can take its replicas, they stay, the command says so, and the
    exit code is 1. Several nodes are drained together, so that no replica moves from one to another. `kvstore node
    undrain` undoes a drain.
    """
    kept = "" if leads_only else _move_replicas_off(nodes, cluster, timeout)
    found = []
    for node in nodes:
        handed_over = _hand_over(node, cluster, timeout, may_be_down=not leads_only and not kept)
        found.append({"node": node, "handed_over": handed_over, "replicas_left": kept or None})
        if json:
            continue
        print(f"{node} has handed over {', '.join(handed_over)}" if handed_over else f"{node} leads nothing")
        if not leads_only:
            print(
                f"{node} {f'keeps its replicas: {kept}' if kept else 'holds no replicas and can be stopped for good'}"
            )
    if json:
        print(as_json(found if len(found) > 1 else found[0]))
    if kept:
        raise typer.Exit(1)


def undrain(nodes: NodeIds, cluster: ClusterOptions = LOCAL, json: Json = False) -> None:
    """Undo a drain, also one with --leads-only: the nodes may hold replicas and lead again.

    A node that is up accepts operations at once. Replicas that were moved away do not return on their own; move
    some back with `kvstore partition even-replicas`.
    """
    from kvstore.cli.replicas import change_replicas
    from kvstore.cli.ring_views import status_document, status_text
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    answers = [change_replicas(ChangeReplicasRequest(undrain=node), cluster) for node in nodes]
    outcomes = {node: _serve_again(node, cluster) for node in nodes}
    if json:
        states = {node: each.name.lower() for node, each in outcomes.items()}
        print(as_json({**status_document(answers[-1]), "nodes": states}))
    else:
        print(status_text(answers[-1]), "", *(f"{node} {each.value}" for node, each in outcomes.items()), sep="\n")


class _Undrained(Enum):
    """The result of undraining a node."""

    SERVES = "accepts operations again"
    NOT_DRAINING = "was not draining"
    DOWN = "is not up; it accepts operations once it is started"
    OLD = "runs a release that accepts operations again only after a restart"


def _move_replicas_off(nodes: list[str], cluster: ClusterOptions, timeout_s: float) -> str:
    """Move all replicas off the nodes. Return "", or the reason why they cannot be moved. Then no node is draining."""
    from kvstore.cli.operation import reporting_interrupt
    from kvstore.cli.replicas import change_replicas, wait_until_empty
    from kvstore.proto.admin_pb2 import ChangeReplicasRequest

    draining: list[str] = []
    for node in nodes:
        try:
            change_replicas(ChangeReplicasRequest(drain=node), cluster)
        except InvalidRequest as error:
            if "no other server can take" not in str(error):
                raise
            for each in draining:
                change_replicas(ChangeReplicasRequest(undrain=each), cluster)
            return str(error)
        draining.append(node)
    named = ", ".join(nodes)
    with reporting_interrupt(f"interrupted; the replicas of {named} are still moving: see `kvstore ring status`"):
        for node in nodes:
            wait_until_empty(node, cluster, timeout_s=timeout_s)
    return ""


def _hand_over(node: str, cluster: ClusterOptions, timeout_s: float, *, may_be_down: bool) -> list[str]:
    found = _address_or_none(node, cluster)
    if found is None and not may_be_down:
        raise ConfigError(f"node {node!r} is not up")
    return _drain(found, timeout_s) if found else []


def _address_or_none(node: str, cluster: ClusterOptions) -> str | None:
    """Return the gRPC address of the node, or None if it is not up."""
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

    return with_tools(cluster, address)


def _serve_again(node: str, cluster: ClusterOptions) -> _Undrained:
    from kvstore.proto.admin_pb2 import UndrainRequest

    address = _address_or_none(node, cluster)
    if not address:
        return _Undrained.DOWN
    try:
        answer = ask_admin(
            ClusterOptions(server=address),
            lambda stub, seconds: stub.Undrain(UndrainRequest(), timeout=seconds),
            UNDRAIN_S,
        )
    except InvalidRequest:  # the node does not know the call
        return _Undrained.OLD
    return _Undrained.SERVES if answer.was_draining else _Undrained.NOT_DRAINING


def _drain(address: str, timeout_s: float) -> list[str]:
    from kvstore.proto.admin_pb2 import DrainRequest

    request = DrainRequest(timeout_s=timeout_s)
    answer = ask_admin(
        ClusterOptions(server=address), lambda stub, seconds: stub.Drain(request, timeout=seconds), timeout_s + 5
    )
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
            f"\nDashboard: {rows[0]['http']}/ui",
            f"{store}; data and logs in {data_dir}; stop with: {kvstore} down{where}\n",
            *([] if folder is None else _how_to_get_in(folder, data_dir)),
            "Try:",
            f"  {kvstore} put{where} greeting hello && {kvstore} get{where} greeting",
            f"  {kvstore} ring locate{where} greeting",
            f"  {kvstore} fsck{where}",
            "Or use any client with any node:",
            *(_plain_clients(found) if folder is None else _secure_clients(found, folder, data_dir)),
        ]
    )


def _how_to_get_in(folder: SecureFolder, data_dir: Path) -> list[str]:
    """Return the lines about credentials, which are needed first in each shell."""
    place = data_dir / folder.path.name
    return [
        f"Its endpoints require TLS, a client certificate and a user: {folder.login().user}, by the files in {place}.",
        "First, in each shell, run:",
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
    """Return example commands without a password on the command line, which process lists would show."""
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
    _print("\nrunning; stop it with Ctrl-C (--detach returns instead)")
    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # otherwise SIGTERM would end only this process
    with suppress(KeyboardInterrupt):
        signal.sigwait(ends)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _print(line: str) -> None:
    print(line, file=sys.stderr)
