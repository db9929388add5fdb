"""`kvstore cluster …`: creates a cluster in an empty metadata store, for nodes that are started by hand; moves a
cluster to another metadata store; shows the cluster's version."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from kvstore.cli.cluster import LOCAL, ClusterOptions, Json, Tools, checked_address, checked_path, with_tools
from kvstore.cli.output import as_json, as_table
from kvstore.errors import ConfigError, MetadataDenied, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.address import MetadataKind, parse
from kvstore.meta.login import Acl, metadata_login_of_environment
from kvstore.ring.hashing import KeyHashName
from kvstore.server.config import PROCESSES_MAX, id_fault
from kvstore.server.processes import process_id
from kvstore.types import ServerId

SAFE_NODES_MIN = 3
DENIED_SHOWN = 5

SecretFile = Annotated[
    Path,
    typer.Option(
        callback=checked_path, help="File of the cluster's secret, created if missing; each node needs a copy"
    ),
]


MetadataFile = Annotated[Path, typer.Argument(callback=checked_path, help="The file")]
Address = Annotated[
    str,
    typer.Option(
        "--zookeeper",
        "--metadata",
        callback=checked_address,
        help="Metadata store: HOST:PORT,...[/CHROOT] for ZooKeeper, or etcd://HOST:PORT,...[/PREFIX]",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this branch."""
    cluster = typer.Typer(no_args_is_help=True, help="Manage a cluster that is not run by `kvstore up`")
    cluster.command("init")(init)
    cluster.command("version")(version)
    metadata = typer.Typer(no_args_is_help=True, help="Move, import and protect the metadata of a cluster")
    metadata.command("export")(export_metadata)
    metadata.command("import")(import_metadata)
    metadata.command("secure")(secure)
    metadata.command("open")(open_to_all)
    cluster.add_typer(metadata, name="metadata")
    app.add_typer(cluster, name="cluster")


def init(
    zookeeper: Address,
    node: Annotated[
        list[str], typer.Option(help="A node that will serve keys, as ID or ID=ZONE; repeat for each, at least three")
    ],
    processes: Annotated[
        int, typer.Option(help="Number of processes of each node: `processes` in its file", min=1, max=PROCESSES_MAX)
    ] = 1,
    partitions: Annotated[int, typer.Option(help="Number of partitions", min=1, max=1024)] = 3,
    replicas: Annotated[int, typer.Option(help="Number of replicas of each partition", min=1)] = 3,
    secret_file: SecretFile = Path("cluster.secret"),
    new_secret: Annotated[
        bool,
        typer.Option(
            "--new-secret",
            help="Create a secret for a cluster that was founded before secrets existed; all its nodes must be down",
        ),
    ] = False,
    key_hash: Annotated[
        KeyHashName, typer.Option(help="How keys become tokens; cannot be changed later")
    ] = KeyHashName.SLOTS,
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Allow 1 or 2 nodes")] = False,
    json: Json = False,
) -> None:
    """Create a cluster: BookKeeper's layout and the first ring in an empty metadata store, and the cluster's secret.

    Run again for the same cluster, given its secret, the command changes nothing and says so. It creates no secret for
    a cluster that has one. Copy the secret to each node, then start it with `kvstore node run`. Node ids must be those
    named here.
    """
    from kvstore.ring import Ring, hash_named
    from kvstore.ring.placement import machine_count
    from kvstore.server.cluster.bootstrap import found

    servers = zones_of(node, processes)
    machines = machine_count(map(ServerId, servers))
    if machines < SAFE_NODES_MIN and not unsafe:
        raise ConfigError(
            f"expected at least {SAFE_NODES_MIN} different --node, got {machines}: fewer nodes cannot lose one; "
            "add nodes, or pass --unsafe"
        )

    path = secret_file.absolute()

    async def work(tools: Tools) -> tuple[Ring, bool]:
        is_new = await _is_absent(tools)
        _secret_for(path, zookeeper, is_new=is_new or new_secret)
        ring = await found(
            tools.store,
            {ServerId(server): zone for server, zone in servers.items()},
            partitions=partitions,
            replicas=min(replicas, machines),
            instance_id=str(uuid.uuid4()),
            hash=hash_named(key_hash),
        )
        return ring, is_new

    ring, is_new = with_tools(ClusterOptions(metadata=zookeeper), work)
    there = {replica for each in ring.partitions.values() for replica in each.replicas}
    if not is_new and there.isdisjoint(servers):  # the ring may have moved to other nodes since
        raise ConfigError(f"a cluster already exists at {zookeeper}, with the nodes {', '.join(sorted(there))}")
    rows: list[dict[str, Any]] = [
        {"partition": each.id, "replicas": list(each.replicas)} for _, each in sorted(ring.partitions.items())
    ]
    if json:
        document = {"founded": is_new, "version": ring.version, "secret_file": str(path), "partitions": rows}
        print(as_json(document))
    else:
        print(as_table(rows))
        _explain_secret(path, is_new=is_new, is_secret_new=is_new or new_secret)


def _explain_secret(path: Path, *, is_new: bool, is_secret_new: bool) -> None:
    """Tell the user what to do with the secret. A file that existed before may hold another cluster's secret."""
    if not is_secret_new:
        print(f"\nthe cluster existed already\nIts nodes must have the secret in {path}; this was not checked.")
        return
    print("\nfounded" if is_new else "\nthe cluster existed already")
    print(
        f"Its secret is in {path}. Copy the file to each node, readable only by the node's user (mode 0600), name it\n"
        "there as secret_file, and keep a copy elsewhere. Then start each node: kvstore node run --config node.toml"
    )


def _secret_for(path: Path, address: str, *, is_new: bool) -> None:
    """Make sure that the file holds a secret. A new secret for a cluster that has one would lock out the nodes that get
    it. Raises ConfigError."""
    from kvstore.env.secret import make_secret, read_secret

    if is_new:
        make_secret(path)
    elif not path.exists():
        raise ConfigError(
            f"a cluster already exists at {address}, and its secret is not in {path}; copy it there from one of its "
            "nodes, or name its file with --secret-file; --new-secret creates one for a cluster from before secrets "
            "existed"
        )
    else:
        read_secret(path)


def version(
    cluster: ClusterOptions = LOCAL,
    hold: Annotated[bool, typer.Option("--hold", help="Keep the version, so that nodes can be downgraded")] = False,
    rise: Annotated[bool, typer.Option("--rise", help="Let the version rise again")] = False,
    json: Json = False,
) -> None:
    """Show the cluster's version, what each server supports, and what delays the next version.

    The version rises by itself once all servers support a higher one, and never falls. To be able to return to the
    older release after an upgrade, --hold the version before the last node is upgraded.
    """
    from kvstore import versions
    from kvstore.server.cluster.cluster_reader import ClusterReader
    from kvstore.server.cluster.cluster_version import ClusterVersionStore
    from kvstore.server.cluster.rising import what_holds_it
    from kvstore.server.placement.assign import replicas_held

    if hold and rise:
        raise ConfigError("expected --hold or --rise, got both")

    async def work(tools: Tools) -> dict[str, Any]:
        store, reader = ClusterVersionStore(tools.store), ClusterReader(tools.store)
        found = await store.hold(hold) if hold or rise else await store.read()
        members, wanted = await reader.servers(None), replicas_held(await reader.ring())
        return {
            "version": found.version,
            "held": found.is_held,
            "latest": versions.LATEST,
            "waits_for": what_holds_it(found, members, wanted, versions.LATEST, reader.undecodable_servers) or None,
            "servers": [
                {"server": each, "release": member.version, "can": member.can}
                for each, member in sorted(members.items())
            ],
        }

    document = with_tools(cluster, work)
    if json:
        print(as_json(document))
        return
    print(as_table(document["servers"]))
    held = ", held" if document["held"] else ""
    print(f"\nThe cluster is at version {document['version']} of {document['latest']}{held}.")
    if document["waits_for"]:
        print(f"It does not rise because {document['waits_for']}.")


def export_metadata(file: MetadataFile, zookeeper: Address, json: Json = False) -> None:
    """Write the metadata of a cluster to a new file of mode 0600, while none of its nodes runs. The file holds the
    passwords of ledgers and the hashes of users' passwords. The export takes one ledger id, to learn the next one;
    nothing else changes."""
    from kvstore.meta import dump
    from kvstore.meta.transfer import export

    async def work(tools: Tools) -> tuple[dict[str, bytes], str]:
        return await export(tools.store)

    with _private(file) as output:
        nodes, instance = with_tools(ClusterOptions(metadata=zookeeper), work)
        output.write(dump.encode(nodes, instance))
    _show_moved("exported", nodes, instance, json=json)


@contextmanager
def _private(path: Path) -> Iterator[BinaryIO]:
    """Create a new file that only its owner can read, and sync it and its folder. Remove the file if the block fails.
    Raises OSError."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def import_metadata(file: MetadataFile, zookeeper: Address, json: Json = False) -> None:
    """Import an exported file into an empty metadata store, and verify that all of it is there.

    Then set metadata.uri of every node to the new store. Start no node with the old store again: that would be a second
    cluster on the same bookies.
    """
    from kvstore.meta import dump
    from kvstore.meta.transfer import restore

    try:
        nodes, instance = dump.decode(file.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None

    async def work(tools: Tools) -> None:
        await restore(tools.store, nodes, instance)

    with_tools(ClusterOptions(metadata=zookeeper), work)
    _show_moved("imported and checked", nodes, instance, json=json)


def secure(zookeeper: Address, json: Json = False) -> None:
    """Restrict the whole tree in ZooKeeper to the user that KVSTORE_METADATA_USER names. Nodes may be running.

    Each node must log in as that user before (metadata.user, metadata.password_file); nodes that do not are locked out.
    """
    _set_acls(zookeeper, Acl.CREATOR, json=json)


def open_to_all(zookeeper: Address, json: Json = False) -> None:
    """Open the whole tree in ZooKeeper to everybody who can reach it. Run this as the user who owns the tree.

    Each node must have metadata.acl = "open" before. Afterwards nodes need no login.
    """
    _set_acls(zookeeper, Acl.OPEN, json=json)


def _set_acls(address: str, acl: Acl, *, json: bool) -> None:
    from kvstore.meta.zookeeper.acls import AclOutcome, set_acls
    from kvstore.meta.zookeeper.store import ZooKeeperStore

    if parse(address).kind is not MetadataKind.ZOOKEEPER:
        raise ConfigError("etcd has no per-node ACLs; give its users roles on the prefix (`etcdctl role`)")
    login = metadata_login_of_environment()
    if login is None:
        raise ConfigError(
            "expected KVSTORE_METADATA_USER, and KVSTORE_METADATA_PASSWORD_FILE or KVSTORE_METADATA_PASSWORD, in the "
            "environment: the user who owns the tree, or will own it"
        )

    async def work(tools: Tools) -> AclOutcome:
        assert isinstance(tools.store, ZooKeeperStore), "its address names a ZooKeeper"
        return await set_acls(tools.store, acl)

    outcome = with_tools(ClusterOptions(metadata=address), work)
    document = {
        "acl": acl.value,
        "user": login.user,
        "nodes": outcome.nodes,
        "changed": outcome.changed,
        "denied": outcome.denied,
    }
    print(as_json(document) if json else as_table([{**document, "denied": len(outcome.denied)}]))
    if outcome.denied:
        raise MetadataDenied(
            f"{len(outcome.denied)} nodes belong to another user; they and all nodes below them are unchanged: "
            f"{', '.join(outcome.denied[:DENIED_SHOWN])}"
        )


def _show_moved(done: str, nodes: dict[str, bytes], instance: str, *, json: bool) -> None:
    from kvstore.meta import dump, paths

    document = {
        "instance": instance,
        "nodes": len(nodes),
        "ledgers": sum(paths.ledger_of(path) is not None for path in nodes),
        "bytes": sum(map(len, nodes.values())),
        "sha256": dump.digest(nodes),
    }
    print(as_json(document) if json else f"{done}\n{as_table([document])}")


async def _is_absent(tools: Tools) -> bool:
    try:
        await tools.store.get(paths.RING)
    except NoSuchNode:
        return True
    return False


def zones_of(nodes: list[str], processes: int = 1) -> dict[str, str]:
    """Return zones by server id, from ID or ID=ZONE, for this number of processes of each. Raises ConfigError."""
    found: dict[str, str] = {}
    for each in nodes:
        server, _, zone = each.partition("=")
        if not server or server in found:
            raise ConfigError(f"--node {each!r}: expected each id once, as ID or ID=ZONE")
        for number in range(1, processes + 1):
            if fault := id_fault(process_id(server, number)):
                raise ConfigError(f"--node {each!r}: {fault}")
            found[process_id(server, number)] = zone
    return found
