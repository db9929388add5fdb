"""Faults between machines: the network and the metadata store."""

from __future__ import annotations

from random import Random

from tests.sim.damaged.strangers import WAYS, Stranger
from tests.sim.judges.probes import probe
from tests.sim.strikes.chaos import Chaos, fault

CLIENTS = tuple(f"{kind}{number}" for kind in ("register", "counter", "bank", "reader") for number in range(2))

# ── network ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _two(chaos: Chaos) -> tuple[str, str]:
    names = [node.name for node in chaos.cluster.nodes]
    one = chaos.random.choice(names)
    others = [*names, *CLIENTS] if chaos.random.random() < 0.3 else names
    return one, chaos.random.choice([name for name in others if name != one])


@fault
async def cut_a_link(chaos: Chaos) -> None:
    """Two nodes, or a node and a client, do not reach each other, sometimes in one direction only. All other links
    work."""
    one, other = _two(chaos)
    probe("fault.cut_a_link")
    network = chaos.cluster.world.network
    if chaos.random.random() < 0.5:
        network.cut(one, other)
    else:
        network.cut_one_way(one, other)
    await chaos.a_pause(0.1, 8.0)
    network.heal(one, other)


@fault
async def isolate(chaos: Chaos) -> None:
    """A node is cut from the other nodes, but neither from clients nor from the metadata store."""
    node = chaos.random.choice(chaos.cluster.nodes)
    probe("fault.isolate")
    network = chaos.cluster.world.network
    others = [each.name for each in chaos.cluster.nodes if each is not node]
    network.split([node.name], others)
    await chaos.a_pause(0.2, 8.0)
    for other in others:
        network.heal(node.name, other)


@fault
async def hidden_address(chaos: Chaos) -> None:
    """Some nodes, or all, cannot connect to a server because its name is stale or its port is closed. The server
    reaches all nodes and the metadata store."""
    node = chaos.random.choice(chaos.cluster.servers)
    others = [each.name for each in chaos.cluster.nodes if each is not node]
    probe("fault.hidden_address")
    callers = (
        others if chaos.random.random() < 0.5 else chaos.random.sample(others, chaos.random.randint(1, len(others)))
    )
    chaos.cluster.network.hide(node.config.resp, callers, refuses=chaos.random.random() < 0.5)
    await chaos.a_pause(0.5, 12.0)
    chaos.cluster.network.show(node.config.resp)


@fault
async def swizzle_clog(chaos: Chaos) -> None:
    """Links are clogged one by one and freed in another order."""
    probe("fault.swizzle_clog")
    network, random = chaos.cluster.world.network, chaos.random
    names = [node.name for node in chaos.cluster.nodes]
    links = [(one, other) for one in names for other in names if one != other]
    chosen = random.sample(links, random.randint(1, len(links)))
    for one, other in chosen:
        network.cut_one_way(one, other)
        await chaos.a_pause(0.0, 0.3)
    for one, other in random.sample(chosen, len(chosen)):
        await chaos.a_pause(0.0, 0.3)
        network.heal(one, other)


@fault
async def slow_links(chaos: Chaos) -> None:
    """Everything to and from a node takes longer."""
    probe("fault.slow_links")
    node = chaos.random.choice(chaos.cluster.nodes).name
    others = [each.name for each in chaos.cluster.nodes if each.name != node]
    network, extra_s = chaos.cluster.world.network, chaos.random.uniform(0.005, 0.3)
    for other in others:
        network.slow(node, other, extra_s)
        network.slow(other, node, extra_s)
    await chaos.a_pause(0.5, 4.0)
    for other in others:
        network.slow(node, other, 0.0)
        network.slow(other, node, 0.0)


@fault
async def resets(chaos: Chaos) -> None:
    """A few connections break."""
    probe("fault.resets")
    for _ in range(chaos.random.randint(1, 4)):
        chaos.cluster.world.network.reset_random()
        await chaos.a_pause(0.0, 0.2)


@fault
async def forged_frames(chaos: Chaos) -> None:
    """Unauthenticated peers connect to the servers, claim to be servers, and send what servers send: rings, writes,
    versions. None of it may have any effect."""
    probe("fault.forged_frames")
    for _ in range(chaos.random.randint(1, 4)):
        node = chaos.random.choice(chaos.cluster.nodes)
        stranger = Stranger(chaos.cluster, Random(chaos.random.getrandbits(64)))
        await stranger.attempt(node, chaos.random.choice(sorted(WAYS)))


# ── the metadata store ────────────────────────────────────────────────────────────────────────────────────────────────


@fault
async def metadata_down(chaos: Chaos) -> None:
    """The metadata store crashes and comes back; sessions do not age meanwhile."""
    probe("fault.metadata_down")
    metadata = chaos.cluster.metadata
    if metadata.is_up and not metadata.is_frozen:
        metadata.stop()
        await chaos.a_pause(0.2, 8.0)
        metadata.start()


@fault
async def metadata_frozen(chaos: Chaos) -> None:
    """The metadata store is stopped by SIGSTOP, perhaps for longer than a session."""
    probe("fault.metadata_frozen")
    metadata = chaos.cluster.metadata
    if metadata.is_up and not metadata.is_frozen:
        metadata.freeze()
        await chaos.a_pause(0.2, 8.0)
        metadata.thaw()


@fault
async def metadata_cut(chaos: Chaos) -> None:
    """One node does not reach the metadata store, sometimes for longer than its session."""
    if (node := chaos.a_node(leading=chaos.random.random() < 0.7)) is not None:
        probe("fault.metadata_cut")
        chaos.cluster.metadata.cut(node.name, silently=chaos.random.random() < 0.5)
        await chaos.a_pause(0.2, 10.0)
        chaos.cluster.metadata.mend(node.name)


@fault
async def session_expiry(chaos: Chaos) -> None:
    """The metadata store ends the session of one node or of all nodes at once."""
    probe("fault.session_expiry")
    nodes = chaos.cluster.nodes
    for node in nodes if chaos.random.random() < 0.3 else [chaos.random.choice(nodes)]:
        chaos.cluster.metadata.expire(node.name)


@fault
async def metadata_trouble(chaos: Chaos) -> None:
    """Connections to the metadata store break while calls are in flight."""
    probe("fault.metadata_trouble")
    chaos.cluster.metadata.trouble(chaos.random.choice((0.02, 0.1, 0.3)))
    await chaos.a_pause(0.5, 4.0)
    chaos.cluster.metadata.trouble(0.0)
