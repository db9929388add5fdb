"""A whole cluster whose bookies have ids of the form `host:port` (docs/protocol.md, B27)."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.meta.registration import RegistrationClient
from kvstore.server.config import NodeConfig
from tests.sim import nodes
from tests.sim.stories.scenarios import Stage, knobs, play

pytestmark = pytest.mark.sim


def with_given_id(**settings: Any) -> NodeConfig:
    return NodeConfig(bookie_id=settings["bookie"], **settings)


def test_leaders_and_bookies_come_and_go_under_given_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NodeConfig", with_given_id)

    async def story(stage: Stage) -> None:
        store = await stage.cluster.metadata.connect()
        client = RegistrationClient(store)
        for _ in range(3):
            await stage.put_until_done(stage.leader)
            former = stage.leader
            assert former.served is not None
            assert former.served.bookie is not None
            assert former.served.bookie.id == f"{former.name}:3181"
            former.crash()
            await stage.put_until_done(stage.others(former)[0])
            former.start()
            await stage.until(lambda former=former: former.served is not None and former.served.is_open)
        found = (await client.bookies()).all
        assert {bookie == address for bookie, address in found.items()} == {True}
        assert len(found) == 3
        await store.close()

    play(story, knobs(roll_entries=4))
