"""The record of a local cluster that `up` writes: its `cluster.json`, and who may change it. Blocking."""

from __future__ import annotations

import fcntl
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.devcluster.layout import ClusterFile
from kvstore.env.files.private import private_opener, write_private
from kvstore.errors import ConfigError
from kvstore.places import is_within

Progress = Callable[[str], None]
"""Is told, in a line, what is being done."""


def replace_file(path: Path, text: str) -> None:
    """Write it as a whole, synced: a crash, of the machine too, leaves the former one or this."""
    write_private(path, text.encode())


class ClusterRecord:
    """The record of the cluster in one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._path = data_dir / "cluster.json"

    def load_or_none(self) -> ClusterFile | None:
        """None if there is no cluster here. Raises ConfigError for a record that cannot be read, and for a copy of
        another place's."""
        found = self.read_or_none()
        if found is not None:
            self._refuse_other_place(found)
        return found

    def read_or_none(self) -> ClusterFile | None:
        """The same of any place's."""
        try:
            found = ClusterFile.from_document(json.loads(self._path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, ConfigError) as error:
            raise ConfigError(
                f"{self._path} is not a cluster file: {error}. Remove it, and `kvstore up` with the options of the "
                "first time makes it anew; the data stays"
            ) from error
        return found

    def save(self, cluster: ClusterFile) -> None:
        replace_file(self._path, json.dumps(cluster.document(), indent=2) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, progress: Progress) -> Iterator[None]:
        """Two calls of `up` at once would start everything twice."""
        with open(self._data_dir / "up.lock", "w", opener=private_opener) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another `kvstore up` or `down` of {self._data_dir}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _refuse_other_place(self, cluster: ClusterFile) -> None:
        """A copy would start the nodes of the old place, under metadata of this one that may be older."""
        homes = [Path(node.data_dir) for node in cluster.nodes]
        if any(not is_within(home, self._data_dir) for home in homes):
            old, new = homes[0].parent, self._data_dir
            raise ConfigError(
                f"the cluster in {new} was made in {old}: move it back, or, if it was moved and nothing of it runs, "
                f"`kvstore up --moved --data-dir {shlex.quote(str(new))}`, which changes the paths in its files"
            )
