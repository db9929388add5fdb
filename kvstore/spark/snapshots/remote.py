"""A place on a file system that is not mounted here: `s3://bucket/x`, `sftp://host/x`, `webhdfs://host/x` and whatever
else fsspec has a driver for. With those of pathlib's methods that snapshots use, and no others.

A driver finds its credentials and addresses as it always does: by its environment, fsspec's own configuration
(FSSPEC_S3_ENDPOINT_URL and so on) or its files. Executors need the same.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from kvstore.errors import ConfigError, Unavailable
from kvstore.extras import install_hint
from kvstore.os_errors import is_absent

BLOCK_BYTES = 8 << 20
"""What is read ahead."""
SETTLE_S = 0.5
"""Where a rename writes over what is there, those who began at the same time have all done it by then, and the last
one is in."""
COPIES, COPY_S = "kvstore-piece-", 86_400.0
"""How folders of local copies are called, and after what time without a write they belong to nobody."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/]*@")


class RemotePath:
    """A place; it need not be there. Pickled: the URL only. As text it goes into messages, the cluster's record and
    names, so a password in the URL is left out there."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return _told(self._url)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.rpartition("/")[0])

    def relative_to(self, folder: RemotePath) -> str:
        return self._url.removeprefix(f"{folder._url}/")

    # ── what is there ──

    def exists(self) -> bool:
        """Whether there is a file, or anything below a folder of this name."""
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) is not None

    def is_file(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "file"

    def is_dir(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "directory"

    def iterdir(self) -> Iterator[RemotePath]:
        """Raises FileNotFoundError; an object store knows no empty folder."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            own = path.rstrip("/")
            found = {each.rstrip("/") for each in fs.ls(path, detail=False)}
        return iter([self / each.rpartition("/")[2] for each in sorted(found) if each != own and each != f"/{own}"])

    def files_below(self) -> list[str]:
        """The names of all files below, with the folders between."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            own = path.strip("/")
            return sorted(each.strip("/").removeprefix(f"{own}/") for each in _found_below(fs, path))

    def size(self) -> int:
        """Raises FileNotFoundError."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

    def last_written_s(self, but: Container[str] = ()) -> float:
        """When a file directly below was last written, or any, by the store's clock; now, where the driver does not
        say. `but`: names directly below that do not count."""
        below = [each for each in self.files_below() if each not in but]
        names = [each for each in below if "/" not in each] or below
        try:
            with self._answered() as (fs, path):
                return max((float(fs.modified(f"{path}/{each}").timestamp()) for each in names), default=0.0)
        except NotImplementedError:
            return time.time()
        except FileNotFoundError:  # somebody removes it
            return time.time()

    # ── bytes ──

    def read_bytes(self) -> bytes:
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            return bytes(fs.cat_file(path))

    def open(self) -> BinaryIO:
        with self._answered() as (fs, path):
            return cast(BinaryIO, _RemoteFile(self, fs.open(path, "rb", block_size=BLOCK_BYTES)))

    def write(self, data: bytes) -> None:
        """There as a whole or not at all: by one put, or, where a put is seen while it is written, by a rename."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            if not _renames(fs):
                fs.pipe_file(path, data)
                return
            temporary = f"{path}.{uuid4().hex}.tmp"
            fs.pipe_file(temporary, data)
            _move_over(fs, temporary, path)

    def create(self, data: bytes) -> bool:
        """The same, unless something else is there already: False. Of several at once, one succeeds where the store can
        refuse a put (S3, Google's, Azure's) or a rename (HDFS); on others, whoever reads its own bytes back a moment
        later. What is there decides: an answer may have been lost, and then a client that asks again is refused by what
        it has put itself. So `data` must be no other's."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            if _kind_or_none(fs, path) is None:
                try:
                    _put_new(fs, path, data)
                except OSError:
                    if _kind_or_none(fs, path) is None:
                        raise
            fs.invalidate_cache()
            return bool(fs.cat_file(path) == data)

    def upload(self, source: Path) -> None:
        """A whole local file. Raises Unavailable if it has not come whole."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            fs.put_file(str(source), path)
        wanted, found = source.stat().st_size, self.size()
        if wanted != found:
            raise Unavailable(f"{self} has {found} bytes, {wanted} were sent: try again")

    def move_to(self, place: RemotePath) -> None:
        """By a rename where there is one, else by a copy that the store makes itself."""
        with self._answered() as (fs, path):
            target = _opened(place._url)[1]
            _make_folder(fs, target)
            if _renames(fs):
                fs.mv(path, target)
            else:
                fs.cp_file(path, target)
                fs.rm_file(path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._answered() as (fs, path):
                fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """With all that is below; what is not there is as good."""
        try:
            with self._answered() as (fs, path):
                if _kind_or_none(fs, path) is not None:
                    _remove_all(fs, path)
        except FileNotFoundError:
            return  # somebody else removes it too

    @contextmanager
    def _answered(self) -> Iterator[tuple[Any, str]]:
        """The driver's file system, and the path in it. An OSError of a driver names the place; what else it raises
        becomes Unavailable."""
        try:
            yield _opened(self._url)
        except OSError as error:
            raise _named(self, error) from error
        except (ConfigError, Unavailable, TypeError, NotImplementedError):
            raise
        except Exception as error:  # whatever a driver raises
            raise _failed(self, error) from error


Location = Path | RemotePath
"""Where files are."""


def location(text: str) -> Location:
    """A path, or a URL of fsspec's. Raises ConfigError for a URL that nobody here can read."""
    text = text.removeprefix("file://")
    if not _URL.fullmatch(text):
        return Path(text)
    found = RemotePath(text)
    _opened(text)
    return found


@contextmanager
def local_copy_of(place: Location) -> Iterator[Path]:
    """A local path to write a new file to: it is at `place` when the block has ended well."""
    if isinstance(place, Path):
        yield place
        return
    _sweep(time.time())
    with tempfile.TemporaryDirectory(prefix=COPIES) as folder:
        path = Path(folder) / place.name
        yield path
        place.upload(path)


class _RemoteFile(io.RawIOBase):
    """A file that is read. A driver that fails amid it says nothing about the bytes: Unavailable."""

    def __init__(self, place: RemotePath, file: Any) -> None:
        self._place, self._file = place, file

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:  # whatever a driver raises
            raise _failed(self._place, error) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _failed(place: RemotePath, error: Exception) -> Unavailable:
    """The error for what a driver has raised."""
    return Unavailable(f"{place}: {type(error).__name__}: {_told(str(error))}")


def _named(place: RemotePath, error: OSError) -> OSError:
    """The same error with the place in it, of the same kind: callers tell them apart."""
    text = _told(error.strerror or str(error) or type(error).__name__)
    what = text if str(place) in text else f"{place}: {text}"
    kind = type(error) if type(error).__module__ == "builtins" else OSError
    return kind(error.errno, what) if error.errno else kind(what)


def _told(text: str) -> str:
    """Without passwords of URLs."""
    return _PASSWORD.sub(r"\1:***@", text)


def _opened(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
        from fsspec.dircache import DirCache
    except ImportError:
        raise ConfigError(f"{_told(url)}: a URL needs fsspec: {install_hint('node', 'remote')}") from None
    place = (os.getpid(), *url.split("/")[:3])
    if (fs := _shared.get(place)) is not None:
        return fs, str(fs._strip_protocol(url))
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{_told(url)}: {_told(str(error))}") from None
    # A listing that one thread begins before another writes would hide what was written, as if it had been lost.
    fs.dircache = DirCache(use_listings_cache=False)
    if getattr(fs, "async_impl", False):
        _shared[place] = fs
    return fs, str(path)


_shared: dict[tuple[object, ...], Any] = {}
"""File systems that any thread may use, by process and server: fsspec would make one for each thread, and a client of
S3's takes half a second to make."""


def _renames(fs: Any) -> bool:
    """Whether files are written in place and renamed, as on a disk. Object stores show a file when it is whole, and
    have no rename of their own: there fsspec's copies and removes."""
    from fsspec.spec import AbstractFileSystem

    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return type(fs).mv is not AbstractFileSystem.mv and not protocols & OBJECT_STORES


OBJECT_STORES = {"s3", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "obs", "tos", "oci", "swift"}
"""They put files whole, whatever their drivers call a move."""


def _sweep(now_s: float) -> None:
    """Remove the copies of processes that were killed: nobody writes to one for so long."""
    for folder in Path(tempfile.gettempdir()).glob(f"{COPIES}*"):
        with suppress(OSError):  # another's, or just going
            if now_s - max(each.stat().st_mtime for each in (folder, *folder.iterdir())) > COPY_S:
                shutil.rmtree(folder, ignore_errors=True)


def _kind_or_none(fs: Any, path: str) -> str | None:
    """`file`, `directory`, or None where the store says that there is nothing. fsspec's own `exists`, `isfile` and
    `isdir` take every failure for a no: a connection that was cut would make a snapshot one that is not there."""
    fs.invalidate_cache()
    try:
        return str(fs.info(path)["type"])
    except OSError as error:
        if is_absent(error):
            return None
        raise
    except RuntimeError as error:  # HDFS by its REST interface, of what would stand below a file
        if "is not a directory" in str(error):
            return None
        raise


def _found_below(fs: Any, path: str) -> list[str]:
    """All files below. fsspec's own search leaves out what it cannot list, unless it is told not to."""
    from fsspec.spec import AbstractFileSystem

    is_told = not getattr(fs, "async_impl", False) and type(fs).find is AbstractFileSystem.find
    try:
        return list(fs.find(path, on_error="raise") if is_told else fs.find(path))
    except FileNotFoundError:
        return []


def _move_over(fs: Any, temporary: str, path: str) -> None:
    """Rename over what is there, if there is anything. Some drivers refuse that by an error, others, as those of HDFS,
    by doing nothing."""
    try:
        fs.mv(temporary, path)
    except OSError:
        if _kind_or_none(fs, temporary) is None:
            raise
    if _kind_or_none(fs, temporary) is None:
        return
    with suppress(FileNotFoundError):
        fs.rm_file(path)
    fs.mv(temporary, path)
    if _kind_or_none(fs, temporary) is not None:
        raise OSError(errno.EIO, f"{path}: could not be written: its driver does not rename {temporary}")


def _put_new(fs: Any, path: str, data: bytes) -> None:
    """Raises OSError if the store refuses it, as far as it can."""
    if not _renames(fs):
        try:
            fs.pipe_file(path, data, mode="create")
        except (TypeError, NotImplementedError):  # a driver that does not know the mode
            fs.pipe_file(path, data)
            time.sleep(SETTLE_S)
        return
    temporary = f"{path}.{uuid4().hex}.tmp"
    fs.pipe_file(temporary, data)
    try:
        fs.mv(temporary, path)
    finally:
        if fs.exists(temporary):
            fs.rm_file(temporary)
    time.sleep(SETTLE_S)


def _remove_all(fs: Any, path: str) -> None:
    """To fsspec's own removal a name with * or [ in it is a pattern, which may fit others, too."""
    from fsspec.core import has_magic

    if not has_magic(path):
        fs.rm(path, recursive=True)
        return
    for each in sorted(fs.find(path, withdirs=True), reverse=True):  # what is in a folder before it
        if fs.isdir(each):
            with suppress(FileNotFoundError):  # of an object store, which had no more than its files
                fs.rmdir(each)
        else:
            fs.rm_file(each)
    if fs.isdir(path):
        fs.rmdir(path)


def _make_folder(fs: Any, path: str) -> None:
    """Object stores have none, and would make a bucket."""
    if _renames(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
