"""A directory of snapshots that other accounts have changed: links, files that unpack without limit, forgeries."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvstore.client.pinned.arrow import SCHEMA
from kvstore.errors import ConfigError, Corrupted
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots import stored, verify
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import Manifest, decode, encode
from kvstore.spark.snapshots.places import open_store
from kvstore.spark.snapshots.signing import KEY, KEY_FILE, keys_of_environment
from tests.commands import kvstore
from tests.shell import run_by_shell
from tests.source import ROOT
from tests.spark.snapshots.made import full, incremental, some_log

LOG = some_log(300)
OWN, OTHER = (b"a" * 64,), (b"b" * 64,)
MEMORY_MAX = 700 << 20
DATA_MAX = 3 << 30
MEASURED = """
import atexit, pathlib, runpy
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text()))
runpy.run_module("kvstore", run_name="__main__", alter_sys=True)
"""
"""Runs a command, and prints its memory use. `wait4` would count the memory of the process that forked."""


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "snapshots")


# ── links and other kinds of files ──


def linked(path: Path, outside: Path) -> None:
    """Move the file or folder elsewhere, and put a symbolic link in its place."""
    os.rename(path, outside)
    path.symlink_to(outside)


def piped(path: Path, outside: Path) -> None:
    os.rename(path, outside)
    os.mkfifo(path)


READS: dict[str, Callable[[DirectoryStore, Manifest], object]] = {
    "load": lambda store, manifest: store.load(manifest.id),
    "check_files": lambda store, manifest: verify.check_files(store, [manifest], lambda _: None),
    "rows": lambda store, manifest: list(LocalTables().folded(store, [manifest], Cut()).batches()),
}


@pytest.mark.parametrize("replace_by", [linked, piped])
@pytest.mark.parametrize("name", ["data/p1-00000.parquet", "data", "manifest.json", ""])
def test_snapshot_is_refused_when_part_of_it_is_no_regular_file(
    store: DirectoryStore, tmp_path: Path, name: str, replace_by: Callable[[Path, Path], None]
) -> None:
    manifest = full(store, "a", LOG)
    replace_by(store.folder("a") / name if name else store.folder("a"), tmp_path / "outside")
    wanted = ("load",) if name == "manifest.json" else ("load", *READS) if not name else ("check_files", "rows")
    for read in wanted:
        with pytest.raises(Corrupted, match=r"expected a regular file, got|is missing"):
            READS[read](store, manifest)
    problems = [each.what for each in verify.problems_of(store, [manifest])]
    assert name == "manifest.json" or any("expected a regular file, got" in each for each in problems)


def test_link_to_the_directory_of_snapshots_itself_is_followed(store: DirectoryStore, tmp_path: Path) -> None:
    manifest = full(store, "a", LOG)
    (tmp_path / "link").symlink_to(store.root)
    linked_store = DirectoryStore(tmp_path / "link")
    assert linked_store.load("a") == manifest
    verify.check_files(linked_store, [manifest], lambda _: None)


def test_manifest_of_any_size_is_not_read_into_memory(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    full(store, "a", LOG)
    monkeypatch.setattr(stored, "DOCUMENT_BYTES_MAX", 1000)
    with pytest.raises(Corrupted, match="expected at most 1000 bytes, got 1001 or more"):
        store.load("a")


# ── files that unpack without limit ──


def bomb(path: Path, rows: int) -> None:
    """Write a small file with values of 1 MiB each; it contains one of them."""
    indices = pa.array([0] * rows, pa.int32())
    table = pa.table(
        {
            "partition": pa.array(["p1"] * rows),
            "key": pa.array([b"%d" % number for number in range(rows)]),
            "value": pa.DictionaryArray.from_arrays(indices, pa.array([bytes(1 << 20)])),
            **{name: pa.array([1] * rows) for name in ("version", "created_version")},
            **{name: pa.array([1] * rows, SCHEMA.field(name).type) for name in ("written_at", "expires_at")},
        },
        schema=SCHEMA.set(2, SCHEMA.field("value").with_type(pa.dictionary(pa.int32(), pa.binary()))),
    )
    pq.write_table(table, path, compression="zstd", store_schema=False, use_dictionary=["partition", "value"])


def test_verify_refuses_a_file_that_unpacks_to_8_gib_in_bounded_memory(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    path = store.folder("a") / manifest.files[0].path
    path.unlink()
    bomb(path, 8192)
    data = path.read_bytes()
    assert len(data) < 463_000
    file = replace(
        manifest.files[0], rows=8192, deletes=0, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    files = (file, *manifest.files[1:])
    forged = replace(
        manifest, files=files, rows=sum(f.rows for f in files), size_bytes=sum(f.size_bytes for f in files)
    )
    (store.folder("a") / manifests.NAME).write_bytes(encode(forged))
    child = subprocess.run(
        run_by_shell(
            f"ulimit -d {DATA_MAX >> 10}; ", [sys.executable, "-c", MEASURED, "snapshot", "verify", str(store.root)]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (child.returncode, "in column value, got" in child.stdout) == (1, True), child.stdout
    used_kib = int(child.stdout.rpartition("VmHWM:")[2].split()[0])
    assert used_kib * 1024 < MEMORY_MAX


# ── signatures ──


def test_manifest_is_accepted_with_its_key_and_without_any_key(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    data = encode(manifest, OWN)
    assert decode(data, what="m", keys=OWN) == decode(data, what="m", keys=OTHER + OWN) == decode(data, what="m")
    with pytest.raises(Corrupted, match="got one by another key"):
        decode(data, what="m", keys=OTHER)
    with pytest.raises(Corrupted, match=f"expected a signature by the key of {KEY_FILE}, got none"):
        decode(encode(manifest), what="m", keys=OWN)


def test_changed_signed_manifest_is_refused_though_its_checksum_matches(store: DirectoryStore) -> None:
    manifest = full(store, "a", LOG)
    genuine = encode(manifest, OWN)
    taken = genuine[genuine.index(b',\n "hmac_sha256"') : genuine.index(b',\n "sha256": "', -100)]
    forged = encode(replace(manifest, ring_version=8)).removesuffix(b"\n}\n")
    body = forged[: forged.rindex(b',\n "sha256"')] + taken
    sealed = body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
    assert decode(sealed, what="m").ring_version == 8
    with pytest.raises(Corrupted, match="got one by another key or for other content"):
        decode(sealed, what="m", keys=OWN)


def test_every_command_refuses_a_forged_snapshot_when_a_key_is_set(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(OWN[0] + b"\n")
    monkeypatch.setenv(KEY_FILE, str(key))
    signing = open_store(str(store.root))
    assert isinstance(signing, DirectoryStore)
    first = full(signing, "a", LOG[:200])
    incremental(signing, "b", first, LOG)
    environ = {KEY_FILE: str(key)}
    assert kvstore("snapshot", "verify", str(store.root), environ=environ).returncode == 0
    assert kvstore("snapshot", "list", str(store.root), environ=environ).stdout.count("usable") == 2
    (store.folder("b") / manifests.NAME).write_bytes(encode(store.load("b")))
    for words in (("verify",), ("prune", "--keep", "1"), ("list", "--max-age-hours", "1"), ("delta", "/nowhere")):
        command, *options = words
        done = kvstore("snapshot", command, str(store.root), *options, environ=environ)
        assert done.returncode == 1, words
        assert "expected a signature" in done.stderr + done.stdout, (words, done)


def test_key_of_snapshots_is_private_and_long_enough(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"a" * 32 + b"\n" + b"b" * 32)
    assert keys_of_environment({KEY_FILE: str(key)}) == (b"a" * 32, b"b" * 32)
    assert keys_of_environment({KEY: "c" * 32}) == (b"c" * 32,)
    assert keys_of_environment({}) == ()
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="other accounts can use this secret"):
        keys_of_environment({KEY_FILE: str(key)})
    for environ in ({KEY: "short"}, {KEY: "a" * 32, KEY_FILE: str(key)}):
        with pytest.raises(ConfigError, match="expected"):
            keys_of_environment(environ)


# ── modes ──


def test_snapshot_is_created_for_its_owner_alone(store: DirectoryStore) -> None:
    before = os.umask(0)
    try:
        store.begin()
        full(store, "a", LOG)
    finally:
        os.umask(before)
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
