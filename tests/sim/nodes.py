"""One node of a simulated cluster: the real composition (kvstore.server.composition) on a simulated machine, with
in-memory engines and a session of the simulated metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import pytest

from kvstore import versions
from kvstore.bookie.config import BookieConfig, StorageConfig
from kvstore.env import Env
from kvstore.env.secret import ClusterSecret
from kvstore.errors import ConfigError, MetadataError, MetadataUnavailable, MetadataUnknown
from kvstore.meta.history import verifier
from kvstore.meta.store import MetadataStore
from kvstore.os_errors import is_passing
from kvstore.partition.leading import evaluate, range_delete
from kvstore.partition.moves import mover
from kvstore.partition.partition import Partition
from kvstore.server import app, composition
from kvstore.server.config import NodeConfig, Role
from kvstore.server.routing.events import Command, Event
from kvstore.server.routing.router import Router
from kvstore.types import PartitionId, ServerId, machine_of
from kvstore.wal.config import BookieKind
from tests.sim.judges.probes import declare, probe
from tests.sim.judges.starts import Starts
from tests.sim.strikes.knobs import Knobs
from tests.sim.world.disk import Refusal, SimDisk
from tests.sim.world.engines import Engines
from tests.sim.world.env import SimWorld
from tests.sim.world.loop import Process
from tests.sim.world.metadata_client import SimStore

declare("node.start_failed", "node.started_again_in_its_process")

Connect = Callable[[], Awaitable[MetadataStore]]
"""Opens a new session for the calling process."""
Dirs = tuple[str, ...]
SECRET = ClusterSecret((bytes(range(32)),))
"""The secret of every simulated cluster."""
OVER_QUOTA = Refusal(EDQUOT, frozenset({"create", "allocate"}))
RESTART_S = 0.2
RAISE_S = 1.0
"""Seconds between high-water marks, short because runs are short."""
STOP_S_MAX = 20.0


class Node:
    """A machine with its disk and engines, and the process that runs on it, if any."""

    def __init__(
        self, world: SimWorld, name: str, knobs: Knobs, connect: Connect, starts: Starts, *, is_bookie: bool = False
    ) -> None:
        """`is_bookie`: the node is a standalone bookie."""
        self.name = name
        self.sim = world.node(name)
        self.engines = Engines(world.fork(f"engines/{name}"))
        self.served: app.Node | None = None
        """The running composition; None until it is up."""
        self.store: MetadataStore | None = None
        self.can = versions.LATEST
        """The highest cluster version that the process supports from its next start on."""
        self.starts = starts
        self.started_at = 0.0
        self._world, self._connect = world, connect
        self._stopping: asyncio.Event | None = None
        self.journal_dirs = ("bookie/journal", "disk2/journal", "disk3/journal")[: knobs.directories]
        self.lost_dirs: tuple[str, ...] = ()
        """The directories that the operator has declared lost."""
        self.zone = knobs.zones[(int(machine_of(name)[1:]) - 1) % len(knobs.zones)] if knobs.zones else ""
        self.config = NodeConfig(
            id=name,
            zone=self.zone,
            zookeeper="zk:2181",
            data_dir=Path("simulated"),
            secret_file=Path("simulated"),
            bookie=f"{name}:3181",
            resp=f"{name}:6401",
            grpc=f"{name}:7401",
            http=f"{name}:8401",
            insecure=True,
            partition=knobs.partition,
            log=replace(knobs.log, bookies=BookieKind.EXTERNAL) if knobs.bookies and not is_bookie else knobs.log,
            roles=(Role.BOOKIE,) if is_bookie else None,
            autorecovery=knobs.autorecovery,
            balance=knobs.balance,
            storage=StorageConfig(journal_dirs=self.journal_dirs) if knobs.directories > 1 else StorageConfig(),
        )

    # ── what others see ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def id(self) -> ServerId:
        return ServerId(self.name)

    @property
    def is_running(self) -> bool:
        """True if a process exists and is not stopped by SIGSTOP."""
        return self.sim.is_running and not self.is_paused

    @property
    def is_server(self) -> bool:
        return Role.SERVER in self.config.plays

    @property
    def is_serving(self) -> bool:
        """True if the process is up and hosts replicas."""
        return self.is_server and self.sim.is_running and self.served is not None

    @property
    def is_paused(self) -> bool:
        return self.sim.process is not None and self.sim.process.paused

    @property
    def disk(self) -> SimDisk:
        return self.sim.disk

    @property
    def endpoint(self) -> tuple[Process, Any] | None:
        """The process and its Backend, once clients can connect to it."""
        if not self.is_serving:
            return None
        assert self.sim.process is not None
        assert self.served is not None
        return self.sim.process, self.served.dispatcher

    def replica(self, partition: PartitionId) -> Partition | None:
        """The partition's replica on this node."""
        if not self.is_serving:
            return None
        assert self.served is not None
        return self.served.hosting._hosted.get(partition)

    def floor(self, partition: PartitionId) -> int:
        """Return the lowest sequence that a stale read may show here now: what the replica has applied, and what the
        others had published when the process started (docs/protocol.md, P27)."""
        replica = self.replica(partition)
        if replica is None:
            return 0
        applied = 0 if replica.state.position is None else replica.state.seq
        return max(applied, self.starts.floor(self.id, partition, self.started_at))

    @property
    def leads(self) -> list[PartitionId]:
        return self.served.hosting.leads if self.is_serving and self.served is not None else []

    # ── its life ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start a process unless one runs. If it cannot start it ends, and a supervisor starts another one a little
        later."""
        if not self.sim.is_running:
            self.served = None
            self.started_at = self._world.loop.time()
            self.sim.start(self._main)

    def crash(self, *, power: bool = False, silent: bool = False) -> None:
        """kill -9, or a power cut of the machine."""
        self.served = None
        self.sim.crash(power=power, silent=silent)

    async def stop(self) -> None:
        """SIGTERM: hand over and end. A process that hangs is killed."""
        if not self.sim.is_running or self._stopping is None:
            return
        ended = asyncio.Event()
        self.sim.on_death(ended.set)
        self._stopping.set()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await ended.wait()
        except TimeoutError:
            self.crash()

    def pause(self, *, hidden: bool = False) -> None:
        """Pause the process. With `hidden`, its clocks stop with it."""
        self.sim.pause(hidden=hidden)

    def block(self) -> None:
        """Block the event loop, and nothing else of the process, until `resume`."""
        self.sim.block()

    def resume(self) -> None:
        if self.sim.is_running:
            self.sim.resume()

    def wipe(self) -> None:
        """Replace the disk by an empty one. The process must be down."""
        assert not self.sim.is_running
        self.sim.disk = SimDisk(
            self._world.fork(f"disk/{self.name}/new"),
            self._world.disk_config,
            name=self.name,
            trace=self._world.trace,
        )
        self.engines.wipe()
        self.declare_lost(())

    def use_up_inodes(self) -> None:
        """Make file creation on the disk fail although bytes are free; `free_inodes` undoes it."""
        self.disk.has_inodes, self.engines.refusal = False, ENOSPC

    def free_inodes(self) -> None:
        self.disk.has_inodes, self.engines.refusal = True, 0

    def exceed_quota(self) -> None:
        """Make every file on the disk unable to take new blocks although bytes and inodes are free; `raise_quota`
        undoes it."""
        self.disk.refusals.append(OVER_QUOTA)
        self.engines.refusal = EDQUOT

    def raise_quota(self) -> None:
        self.disk.refusals[:] = [each for each in self.disk.refusals if each is not OVER_QUOTA]
        self.engines.refusal = 0

    def declare_lost(self, paths: tuple[str, ...]) -> None:
        """Declare directories of the bookie lost, as the operator would, from the next start on."""
        self.lost_dirs = paths
        self.config = replace(self.config, storage=replace(self.config.storage, lost_dirs=paths))

    async def _main(self, env: Env) -> None:
        """Run the node as kvstore.server.node does: wait in this process for transient failures, and end it for all
        others."""
        self._stopping = asyncio.Event()
        process = self.sim.process
        try:
            while not self._stopping.is_set():
                try:
                    await self._serve(env, self._stopping)
                except (MetadataUnavailable, MetadataUnknown, OSError) as error:
                    if isinstance(error, OSError) and not is_passing(error):
                        raise
                    probe("node.started_again_in_its_process")
                    self._world.trace.event(self.name, "start again", repr(error))
                    await asyncio.sleep(RESTART_S)
        except (MetadataError, OSError) as error:
            probe("node.start_failed")
            self._world.trace.event(self.name, "start failed", repr(error))
            self._world.network.at(self._world.loop.time() + RESTART_S, self._start_again, process)
        except ConfigError:
            if not self.disk.has_dead:
                raise
            self._world.trace.event(self.name, "waits for its operator")  # the operator does not know of the disk yet

    async def _serve(self, env: Env, stopping: asyncio.Event) -> None:
        self.store = store = await self._connect()
        assert isinstance(store, SimStore)
        store.liveness = env.liveness
        forget = env.liveness.add_session(store.give_up)
        context = composition.serve(
            self.config, env=env, store=store, secret=SECRET, engines=self.engines, can=self.can
        )
        try:
            # Not by `async with`: a killed process leaves no context.
            self.served = await context.__aenter__()
        except Exception:
            forget()
            await store.close()
            raise
        if self.is_server:
            check_after_each_event(self.served.dispatcher._router)
        await stopping.wait()
        self.served = None
        await context.__aexit__(None, None, None)
        forget()
        await store.close()

    def _start_again(self, process: Process | None) -> None:
        if self.sim.process is process:
            self.start()


def check_after_each_event(machine: Router) -> None:
    handle = machine.handle

    def checked(event: Event, now: float) -> list[Command]:
        commands = handle(event, now)
        machine.check()
        return commands

    machine.handle = checked  # type: ignore[method-assign]


@contextmanager
def small_journals(knobs: Knobs) -> Iterator[None]:
    """Let all nodes composed in the block use the bookie settings of the knobs, and wait as briefly as they say."""
    with pytest.MonkeyPatch.context() as patch:

        def small(
            *, name: str, id: str, listen: str, zone: str, journal_dirs: Dirs, lost_dirs: Dirs, **_: object
        ) -> BookieConfig:
            small = knobs.bookie(name, listen)
            return replace(small, id=id, zone=zone, journal_dirs=journal_dirs, lost_dirs=lost_dirs)

        patch.setattr(composition, "BookieConfig", small)
        patch.setattr(verifier, "RAISE_S", RAISE_S)
        patch.setattr(mover, "PAUSE_MAX_S", knobs.moves_rest_s)
        yield


@contextmanager
def short_ranges(knobs: Knobs) -> Iterator[None]:
    """Let range deletes take several entries if the knobs say so."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (range_delete, evaluate):
            patch.setattr(module, "RANGE_KEYS_MAX", knobs.range_keys)
        yield
