"""Real nodes publish the metrics that rules and boards name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstore.cli import snapshot_metrics
from tests.cluster.access.test_namespaces import command
from tests.cluster.harness import Cluster, running_cluster
from tests.monitoring.test_monitoring import OF_PROMETHEUS, alerts, expressions, metrics_in
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]
WHERE_THERE_IS_ONE = {
    "kvstore_process_snapshot_age_seconds",  # a snapshot
    "kvstore_process_tls_expires_seconds",  # a certificate
    "kvstore_process_tls_failing",
    *snapshot_metrics.METRICS,  # a nightly job, which writes them
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("metrics")) as started:
        started.wait_led()
        yield started


def given(cluster: Cluster) -> set[str]:
    """Return the metrics that at least one node publishes."""
    pages = [cluster.http(node, "/metrics").decode() for node in cluster.ids]
    return {name for page in pages for name in re.findall(r"^([a-z_0-9]+)[ {]", page, re.MULTILINE)}


def test_nodes_publish_every_metric_that_rules_and_boards_name(cluster: Cluster) -> None:
    named = metrics_in(" ".join([*alerts().values(), *expressions()]))
    assert named >= OF_PROMETHEUS
    missing = named

    def are_there() -> bool:
        nonlocal missing
        missing = named - {re.sub(r"_bucket$", "", name) for name in given(cluster)} - WHERE_THERE_IS_ONE
        return not missing

    cluster.wait_until(lambda: command(cluster, "cluster", "version")["version"] >= 2, "the cluster has risen")
    command(cluster, "namespace", "add", "shop", "shop/", "--server", cluster.file.nodes[0].grpc)
    with cluster.redis("n1") as client:
        client.set(b"key", b"value")  # a load to tell of
        with suppress(TimeoutError):
            wait_until_blocking(are_there, timeout_s=60)
    assert missing == set()
