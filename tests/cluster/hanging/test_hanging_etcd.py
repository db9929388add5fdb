"""A part of a node hangs while its process lives, in a cluster with metadata in etcd."""

from __future__ import annotations

import pytest

from kvstore.meta.address import MetadataKind
from tests.cluster.hanging.test_hanging import (
    cluster,
    started,
    test_others_lead_within_ten_seconds_when_a_disk_hangs,
    test_others_lead_within_ten_seconds_when_an_event_loop_is_blocked,
)

__all__ = [
    "cluster",
    "started",
    "test_others_lead_within_ten_seconds_when_a_disk_hangs",
    "test_others_lead_within_ten_seconds_when_an_event_loop_is_blocked",
]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def kind() -> MetadataKind:
    return MetadataKind.ETCD
