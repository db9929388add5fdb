"""The effect of cuts, clogs and host deaths on the connections of a network. tests/env/test_transport.py tests the
promises of streams, for TCP and the simulation alike."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.sim.judges import probes
from tests.sim.world.env import SimNode, SimWorld
from tests.sim.world.network import NetworkConfig
from tests.sim.world.peers import ADDRESS, CALM, Peer, Scene, play

pytestmark = pytest.mark.sim


def test_message_takes_its_latency() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        sent = scene.now
        peer.stream.write(b"x")
        await asyncio.sleep(1)
        assert 0.0001 < peer.times[0] - sent < 0.01

    play(scenario)


def test_bytes_of_one_instant_travel_together_and_are_sometimes_split() -> None:
    async def together(scene: Scene) -> None:
        peer = await scene.connect()
        for _ in range(10):
            peer.stream.write(b"0123456789")
        await asyncio.sleep(1)
        assert scene.accepted[0].sizes == [100]

    async def anew(scene: Scene) -> None:
        peer = await scene.connect()
        peer.stream.write(bytes(range(100)))
        await asyncio.sleep(1)
        assert scene.accepted[0].received == bytes(range(100))
        sizes.add(tuple(scene.accepted[0].sizes))

    sizes: set[tuple[int, ...]] = set()
    play(together)
    play(anew, network=NetworkConfig(recut_chance=0.5))
    assert len(sizes) > 5


def test_short_cut_only_delays() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.cut("c", "s")
        peer.stream.write(b"held")
        await asyncio.sleep(4)
        assert not scene.accepted[0].received
        scene.world.network.heal()
        peer.stream.write(b" back")
        await asyncio.sleep(1)
        assert peer.received == b"held back"
        await asyncio.sleep(60)
        assert peer.lost_at is None

    play(scenario)


def test_long_cut_breaks_side_that_awaits_acknowledgement_then_the_other() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.cut("c", "s")
        began = scene.now
        peer.stream.write(b"x")
        await asyncio.sleep(60)
        assert isinstance(peer.error, TimeoutError)
        assert peer.lost_at is not None
        assert 5 < peer.lost_at - began < 10.1
        accepted = scene.accepted[0]
        assert (accepted.received, accepted.lost_at) == (b"", None), "the other side has seen nothing"
        scene.world.network.heal()
        accepted.stream.write(b"y")
        await asyncio.sleep(1)
        assert isinstance(accepted.error, ConnectionResetError), "the other side learns it when it sends"

    play(scenario)


def test_idle_connection_does_not_notice_cut() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.cut("c", "s")
        await asyncio.sleep(60)
        scene.world.network.heal()
        peer.stream.write(b"x")
        await asyncio.sleep(1)
        assert peer.received == b"x"

    play(scenario)


def test_one_way_cut_lets_requests_through_and_drops_answers() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.cut_one_way("s", "c")
        peer.stream.write(b"x")
        await asyncio.sleep(1)
        assert scene.accepted[0].received == b"x"
        assert peer.received == b""
        await asyncio.sleep(60)
        assert isinstance(peer.error, TimeoutError), "its bytes were never acknowledged"
        assert isinstance(scene.accepted[0].error, TimeoutError)

    play(scenario)


def test_split_cuts_between_sides_and_spares_hosts_on_no_side() -> None:
    async def scenario(scene: Scene) -> None:
        peers = {name: await scene.connect(name) for name in ("a", "b", "c")}
        scene.world.network.split(["s"], ["a", "b"])
        for peer in peers.values():
            peer.stream.write(b"x")
        await asyncio.sleep(1)
        assert {name: peer.received for name, peer in peers.items()} == {"a": b"", "b": b"", "c": b"x"}
        scene.world.network.heal("a")
        await asyncio.sleep(1)
        assert (peers["a"].received, peers["b"].received) == (b"x", b"")
        scene.world.network.heal("b", "s")
        await asyncio.sleep(1)
        assert peers["b"].received == b"x"

    play(scenario)


def test_clog_delays_data_and_keeps_its_order() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.clog("c", "s", 3)
        began = scene.now
        peer.stream.write(b"1")
        await asyncio.sleep(1)
        peer.stream.write(b"2")
        await asyncio.sleep(3)
        peer.stream.write(b"3")
        await asyncio.sleep(1)
        assert peer.received == b"123"
        assert peer.times[0] - began > 3

    play(scenario)


def test_slow_link_is_slow_until_set_again() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        for extra_s in (0.5, 0):
            scene.world.network.slow("c", "s", extra_s)
            began = scene.now
            peer.stream.write(b"x")
            await asyncio.sleep(1)
            assert extra_s < peer.times[-1] - began < extra_s + 0.1

    play(scenario)


def test_reset_strikes_both_ends() -> None:
    async def scenario(scene: Scene) -> None:
        assert not scene.world.network.reset_random()
        peer = await scene.connect()
        assert scene.world.network.reset_random()
        await asyncio.sleep(1)
        assert isinstance(peer.error, ConnectionResetError)
        assert isinstance(scene.accepted[0].error, ConnectionResetError)
        assert not scene.world.network.reset_random()

    play(scenario)


def test_peers_of_crashed_process_get_reset_and_refusal_until_it_is_back() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        crashed = scene.now
        scene.server.crash()
        await asyncio.sleep(1)
        assert isinstance(peer.error, ConnectionResetError)
        assert peer.lost_at is not None
        assert peer.lost_at - crashed < 0.01
        assert scene.accepted[0].lost_at is None, "dead processes receive nothing"
        with pytest.raises(ConnectionRefusedError):
            await scene.connect()
        scene.server.restart()
        await asyncio.sleep(0.1)
        await scene.connect()

    play(scenario)


def test_answer_may_be_lost_in_crash_after_request_was_done() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        peer.stream.write(b"x")
        await scene.accepted[0].arrived.wait()
        scene.server.crash()
        await asyncio.sleep(1)
        answers.append(peer.received)

    answers: list[bytes] = []
    play(scenario)
    assert set(answers) == {b"", b"x"}, "both happen"


def test_host_that_dies_silently_answers_nothing_until_it_is_back() -> None:
    async def scenario(scene: Scene) -> None:
        idle, busy = await scene.connect(), await scene.connect("d")
        scene.server.crash(silent=True)
        busy.stream.write(b"x")
        attempt = asyncio.get_running_loop().create_task(scene.connect())
        await asyncio.sleep(20)
        assert isinstance(busy.error, TimeoutError)
        assert idle.lost_at is None
        assert not attempt.done(), "no host refuses it"
        scene.server.restart()
        await asyncio.sleep(3)
        assert attempt.done(), "the kernel repeats the attempt"
        idle.stream.write(b"x")
        await asyncio.sleep(1)
        assert isinstance(idle.error, ConnectionResetError), "the new process knows nothing of it"

    play(scenario)


def test_connecting_over_cut_hangs_until_it_heals_or_times_out() -> None:
    async def scenario(scene: Scene) -> None:
        scene.world.network.cut_one_way("s", "c")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await scene.connect()
        began = scene.now
        with pytest.raises(TimeoutError, match="no answer from s:1"):
            await scene.connect()
        assert scene.now - began > 127
        scene.world.network.heal()
        await scene.connect()

    play(scenario, seeds=5)


def test_cancelled_caller_leaves_no_connection() -> None:
    async def scenario(scene: Scene) -> None:
        for _ in range(20):
            peer = Peer(scene.world)
            client = scene.world.env("c")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(client.random.uniform(0, 0.002)):
                    (await client.transport.connect(ADDRESS, peer)).close()
            await asyncio.sleep(1)
            assert (peer.stream is None) == (peer.lost_at is None)
        assert all(each.lost_at is not None for each in scene.accepted)
        counts.append(len(scene.accepted))

    counts: list[int] = []
    play(scenario)
    assert 0 < sum(counts) < 20 * 20


def test_kernel_of_paused_process_accepts_connections_and_bytes() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.server.pause()
        peer.stream.write(b"x")
        other = await scene.connect("d")
        other.stream.write(b"y")
        await asyncio.sleep(60)
        assert len(scene.accepted) == 1, "the kernel has accepted, the process has not"
        assert peer.lost_at is other.lost_at is None
        assert peer.received == other.received == b""
        scene.server.resume()
        await asyncio.sleep(1)
        assert (peer.received, other.received) == (b"x", b"y")

    play(scenario)


def test_sender_to_paused_process_is_held_back() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        scene.server.pause()
        for _ in range(100):
            peer.stream.write(bytes(10_000))
            await asyncio.sleep(0.01)
        assert peer.stream.get_write_buffer_size() == 1_000_000 - CALM.window_bytes
        scene.server.resume()
        await asyncio.sleep(5)
        assert len(peer.received) == 1_000_000
        assert peer.stream.get_write_buffer_size() == 0

    play(scenario, seeds=3)


def test_error_in_handler_breaks_its_connection_and_fails_run(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Peer):
        def data_received(self, data: bytes) -> None:
            raise ValueError("cannot read that")

    async def scenario(world: SimWorld) -> None:
        bad, peer = Bad(world), Peer(world)
        await world.env("s").transport.listen(ADDRESS, lambda: bad)
        await world.env("c").transport.connect(ADDRESS, peer)
        peer.stream.write(b"x")
        await asyncio.sleep(1)
        assert isinstance(bad.error, ValueError)
        assert isinstance(peer.error, ConnectionResetError)

    with SimWorld(1, network=CALM) as world, pytest.raises(AssertionError, match="cannot read that"):
        world.run(scenario(world))


def test_handlers_are_called_in_context_of_their_node() -> None:
    async def scenario(scene: Scene) -> None:
        peer = await scene.connect()
        peer.stream.write(b"x")
        scene.server.pause()
        client: SimNode = scene.world.node("c")
        client.pause()
        await asyncio.sleep(1)
        assert not scene.accepted[0].received
        scene.server.resume()
        await asyncio.sleep(1)
        assert scene.accepted[0].arrived.is_set()
        assert not peer.arrived.is_set()
        client.resume()
        await asyncio.sleep(1)
        assert peer.received == b"x"

    play(scenario)


def test_address_belongs_to_its_node_and_is_free_again_after_crash() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(OSError, match="not an address of c"):
            await scene.world.env("c").transport.listen(ADDRESS, lambda: Peer(scene.world))
        for _ in range(3):
            scene.server.restart()
            await asyncio.sleep(0.1)
            await scene.connect()

    play(scenario, seeds=3)


def test_network_tests_have_taken_every_path_of_network() -> None:
    """Runs last, and covers all seeds of the tests above."""
    test_long_cut_breaks_side_that_awaits_acknowledgement_then_the_other()
    test_answer_may_be_lost_in_crash_after_request_was_done()
    test_connecting_over_cut_hangs_until_it_heals_or_times_out()
    test_peers_of_crashed_process_get_reset_and_refusal_until_it_is_back()
    test_bytes_of_one_instant_travel_together_and_are_sometimes_split()

    async def reset_in_cut(scene: Scene) -> None:
        peer = await scene.connect()
        scene.world.network.cut("c", "s")
        peer.stream.abort()
        await asyncio.sleep(1)
        assert scene.accepted[0].lost_at is None

    play(reset_in_cut)
    assert probes.missed("network.") == []
