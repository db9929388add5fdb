"""Every rule about operations at every endpoint of a real cluster, as docs/reference/rules.md shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import running_cluster
from tests.cluster.rules.endpoints import Endpoints, endpoints_of
from tests.cluster.rules.table import ENDPOINTS, RULES, Ask

OF_CLIENTS = {"python": ("asyncio", "blocking")}
HERE = [endpoint for endpoint in ENDPOINTS if endpoint != "spark"]
"""Endpoints of this test. tests/spark/end_to_end/test_rules.py tests Spark."""


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    folder = tmp_path_factory.mktemp("rules")
    with running_cluster(folder / "cluster") as cluster, endpoints_of(cluster, folder) as found:
        yield found


@pytest.mark.cluster
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
def test_request_that_breaks_a_rule_gets_the_reply_of_the_table(endpoints: Endpoints, rule: tuple[Ask]) -> None:
    endpoints.store(b"7 of what is stored")
    answers, expected = {}, {}
    for endpoint in HERE:
        ask: Ask | None = getattr(rule, endpoint)
        for face in OF_CLIENTS.get(endpoint, (endpoint,)) if ask is not None else ():
            assert ask is not None
            answers[face], expected[face] = getattr(endpoints, face)(ask.request), ask.answer
    assert answers == expected
    assert endpoints.stored() == (b"7 of what is stored", 0), "it changes nothing"
    assert endpoints.others() == []


def test_every_reply_of_the_table_is_a_refusal() -> None:
    """No endpoint may accept what another one refuses."""
    for rule in RULES:
        asked = [ask for endpoint in ENDPOINTS if (ask := getattr(rule, endpoint)) is not None]
        assert asked, rule.rule
        assert all(ask.answer not in ("OK", "200", "exit code 0") for ask in asked), rule.rule
