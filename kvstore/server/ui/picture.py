"""The numbers of the drawings: the arcs of the ring. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.server.status.health import to_serve
from kvstore.server.status.sizes import count, span
from kvstore.server.ui.words import rate

COLOURS = 8
LOAD_WIDTH_MAX = 22.0
CIRCLE = 1000.0
RADIUS, WIDTH = 100.0, 34.0


def ring_of(report: ClusterReport) -> dict[str, Any]:
    """Return the ring as a circle. Each partition that owns keys is an arc: its length is the share of keys, its
    colour is that of the leader, and the width of the band outside it is the load."""
    tones = tones_of(report)
    owners = [each for each in report.partitions if each.share > 0]
    most = max((each.lead.ops_per_s for each in owners), default=0.0)
    arcs, begun = [], 0.0
    for each in owners:
        length = each.share * CIRCLE
        gap = min(1.5, length / 4)
        width = LOAD_WIDTH_MAX * each.lead.ops_per_s / most if most else 0.0
        served = each.served and each.leader
        arcs.append(
            {
                "tone": tones.get(each.leader, "c7") if served else "bad",
                "length": f"{max(0.0, length - gap):.2f}",
                "offset": f"{-begun:.2f}",
                "title": f"{each.id}: {each.share:.1%} of keys, leader {each.leader or 'none'}"
                f"{'' if served else ', not served'}, {rate(each.lead.ops_per_s)}",
                "load_width": f"{width:.1f}" if width >= 0.5 else "",
                "load_radius": f"{RADIUS + WIDTH / 2 + 3 + width / 2:.1f}",
            }
        )
        begun += length
    partitions = to_serve(report)
    unserved = [each.id for each in partitions if not each.served]
    return {
        "arcs": arcs,
        "partitions": len(partitions),
        "version": report.ring.version,
        "age": span(report.ring.age_s),
        "label": f"Ring of {count(len(partitions), 'partition')}; not served: {', '.join(unserved) or 'none'}. "
        "The table of partitions has the same information.",
        "key": [
            {"name": node.id, "tone": tones[node.id], "leads": f"leads {len(node.leads)}"} for node in report.nodes
        ],
    }


def tones_of(report: ClusterReport) -> Mapping[str, str]:
    """Return the colour class of each node. It is the same on every page while the set of nodes is the same."""
    return {node.id: f"c{place % COLOURS}" for place, node in enumerate(report.nodes)}
