"""Nodes of a running cluster that are reconfigured to have no bookie, `[log] bookies = "external"`, although ledgers
are stored on their bookies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import ConfigError
from kvstore.server import composition
from kvstore.wal.config import BookieKind
from tests.sim.nodes import SECRET, Node
from tests.sim.stories.scenarios import Stage, knobs, play

pytestmark = pytest.mark.sim


async def starts_without_a_bookie(stage: Stage, node: Node) -> None:
    """Start its process once as with the other setting. Raises ConfigError."""
    config = replace(node.config, log=replace(node.config.log, bookies=BookieKind.EXTERNAL), roles=None)
    store = await stage.cluster.metadata.connect()
    env = stage.world.env(node.name)
    try:
        async with composition.serve(config, env=env, store=store, secret=SECRET, engines=node.engines):
            pass
    finally:
        await store.close()
        node.crash()


def test_bookie_that_others_depend_on_is_not_left_behind() -> None:
    """After two such restarts, no write quorum would have the acknowledged entries."""

    async def story(stage: Stage) -> None:
        await stage.put_until_done(stage.leader)
        node = stage.others(stage.leader)[0]
        assert node.served is not None
        assert node.served.bookie is not None
        bookie = node.served.bookie.id
        await node.stop()
        with pytest.raises(ConfigError, match=f"has the entries of bookie {bookie}"):
            await starts_without_a_bookie(stage, node)
        node.start()
        await stage.until(lambda: node.served is not None and node.served.is_open)
        await stage.put_until_done(stage.leader)

    play(story, knobs())
