"""The record of a local cluster that `up` writes, `cluster.json`, and the lock for changing it. Blocking."""

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
from kvstore.places import is_same_place

Progress = Callable[[str], None]
"""Receives one line about the current step."""


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically and sync it. After a crash it has either the old or the new content."""
    write_private(path, text.encode())


class ClusterRecord:
    """The record of the cluster in one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._path = data_dir / "cluster.json"

    def load_or_none(self) -> ClusterFile | None:
        """Return the record, or None if there is no cluster here. Raises ConfigError for an unreadable record, and for
        a copy of a cluster from another directory."""
        found = self.read_or_none()
        if found is not None:
            self._refuse_other_place(found)
        return found

    def read_or_none(self) -> ClusterFile | None:
        """Return the record or None, without refusing a copy from another directory."""
        try:
            found = ClusterFile.from_document(json.loads(self._path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, ConfigError) as error:
            raise ConfigError(
                f"{self._path} is not a cluster file: {error}. Remove it and run `kvstore up` with the original "
                "options "
                "to create it again; the data stays"
            ) from error
        return found

    def save(self, cluster: ClusterFile) -> None:
        replace_file(self._path, json.dumps(cluster.document(), indent=2) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, progress: Progress) -> Iterator[None]:
        """Hold the lock of the record during the block, because two concurrent calls of `up` would start everything
        twice."""
        with open(self._data_dir / "up.lock", "w", opener=private_opener) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"waiting for another `kvstore up` or `down` of {self._data_dir}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _refuse_other_place(self, cluster: ClusterFile) -> None:
        """Raise ConfigError for a copy of a cluster. It would start the nodes of the original directory, with metadata
        from here that may be older."""
        old, new = cluster.data_dir, self._data_dir
        if not is_same_place(old, new):
            raise ConfigError(
                f"the cluster in {new} was created in {old}; move it back; or, if it was moved and none of its "
                "processes "
                f"runs, run `kvstore up --moved --data-dir {shlex.quote(str(new))}` to adjust the paths in its files"
            )
