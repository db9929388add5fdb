"""Takes the pictures of the dashboard in docs/img, of a real cluster: `python -m tests.cluster.dashboard.pictures`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from random import Random

from kvstore.client import Client
from kvstore.errors import StoreError
from tests.beside import beside
from tests.browser import LEGEND, tab_of
from tests.cluster.dashboard.scenes import KEYS, SCENES, Shown
from tests.cluster.harness import TIMEOUT_S, Cluster, running_cluster

DARK = {"node-dead", "move-stuck"}
"""Scenes that are taken in the dark colour scheme."""
SCALE = 0.7
"""Size of the pictures, relative to the page."""
LOADED_S = 180.0
"""Seconds of load before the first picture. The charts have a point every 15 s."""
STEP_S, PAUSES_S = 15.0, (0.002, 0.02)
"""The load's pause between operations changes every STEP_S, between PAUSES_S."""
HOT, WRITES = 0.2, 0.3
"""The shares of operations on one key, and of writes."""


async def take(cluster: Cluster, shown: Shown, place: Path, *, is_dark: bool) -> None:
    async with tab_of(device_scale_factor=SCALE) as tab:
        await tab.open_until(f"http://{cluster.file.node(shown.node).http}/ui", shown.texts, TIMEOUT_S)
        await tab.page.wait_for_selector(LEGEND)
        await tab.picture(place, is_dark=is_dark)


def load(cluster: Cluster, over: threading.Event) -> None:
    """Read and write keys at a rate that varies, one of them often."""
    random = Random(1)
    with Client(cluster.url) as client:
        while not over.is_set():
            pause_s, until = random.uniform(*PAUSES_S), time.monotonic() + STEP_S
            while time.monotonic() < until and not over.wait(pause_s):
                key = b"cart" if random.random() < HOT else b"k%d" % random.randrange(KEYS)
                try:
                    client.put(key, random.randbytes(200)) if random.random() < WRITES else client.get(key)
                except StoreError:  # a scene has stopped what serves the key
                    continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs/img"))
    parser.add_argument("--only", choices=SCENES)
    wanted = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        running_cluster(Path(directory) / "cluster") as cluster,
        beside(partial(load, cluster)),
    ):
        loaded = time.monotonic() + LOADED_S
        cluster.wait_until(lambda: time.monotonic() > loaded, "the charts have points", 2 * LOADED_S)
        for name, scene in SCENES.items():
            if wanted.only in (None, name):
                with scene(cluster) as shown:
                    place = wanted.directory / f"ui-{name}.png"
                    asyncio.run(take(cluster, shown, place, is_dark=name in DARK))
                    sys.stdout.write(f"{place}: {place.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
