"""Takes the pictures of the dashboard in docs/img, of a real cluster: `python -m tests.cluster.dashboard.pictures`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.browser import LEGEND, tab_of
from tests.cluster.dashboard.scenes import SCENES, Shown, fill
from tests.cluster.harness import TIMEOUT_S, Cluster, running_cluster

DARK = {"node-dead", "move-stuck"}
"""Scenes that are taken in the dark colour scheme."""


SCALE = 0.7
"""Size of the pictures, relative to the page."""


async def take(cluster: Cluster, shown: Shown, place: Path, *, is_dark: bool) -> None:
    async with tab_of(device_scale_factor=SCALE) as tab:
        await tab.open_until(f"http://{cluster.file.node(shown.node).http}/ui", shown.texts, TIMEOUT_S)
        await tab.page.wait_for_selector(LEGEND)
        await tab.picture(place, is_dark=is_dark)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs/img"))
    parser.add_argument("--only", choices=SCENES)
    wanted = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        running_cluster(Path(directory) / "cluster") as cluster,
    ):
        fill(cluster)
        for name, scene in SCENES.items():
            if wanted.only in (None, name):
                with scene(cluster) as shown:
                    place = wanted.directory / f"ui-{name}.png"
                    asyncio.run(take(cluster, shown, place, is_dark=name in DARK))
                    sys.stdout.write(f"{place}: {place.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
