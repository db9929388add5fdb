"""`kvstore snapshot` without a cluster and without Spark: the list of snapshots, checks, and errors of one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Self

import pytest

from kvstore.cli import snapshot_spark
from kvstore.cli.main import main
from kvstore.cli.snapshot_metrics import METRICS
from kvstore.cli.snapshot_options import moment
from kvstore.cli.snapshot_tools import cut_of, sentence
from kvstore.errors import ConfigError
from kvstore.spark.snapshots import local_tables
from kvstore.spark.snapshots.chains import Cut, complete_until_ms
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.legal_holds import LegalHold
from kvstore.spark.snapshots.manifest import NAME, Manifest, encode
from kvstore.spark.snapshots.planning import NotContinuable, SnapshotRequest
from kvstore.spark.snapshots.store import RESUMABLE_S
from tests.spark.snapshots.made import EPOCH_MS, HOUR_MS, full, incremental, manifest_of, some_log

Run = Callable[..., tuple[int, str, str]]
LOG = some_log(90)
NOBODY = "127.0.0.1:1"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line and return the exit code, standard output and standard error."""
    monkeypatch.setattr("kvstore.cli.snapshot_tools.FIND_S", 0.3)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvstore", "snapshot", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """Make a full snapshot and an incremental."""
    store = DirectoryStore(tmp_path / "snapshots")
    incremental(store, "b", full(store, "a", LOG[:60]), LOG)
    return store


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_list_shows_all_snapshots_and_which_are_usable(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    damage(store.root / "a" / NAME)
    store.work("c").mkdir()
    code, out, _ = run("list", store.root, "--json")
    found = json.loads(out)
    assert code == 0
    states = {row["id"]: row["state"] for row in found["snapshots"]}
    assert states["z"] == "usable"
    assert states["b"] == f"snapshot b continues a: {states['a']}"
    assert "checksum does not match" in states["a"]
    assert found["unfinished"] == [".work-c"]
    assert "full" in run("list", store.root)[1]


def test_list_reports_that_there_is_only_unfinished_work(run: Run, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "new")
    store.work("c").mkdir(parents=True)
    code, out, err = run("list", store.root)
    assert (code, out) == (0, f"no snapshots in {store.root}\n")
    assert err.startswith("unfinished: .work-c; ")


@pytest.mark.parametrize(("age_h", "limit", "code"), [(1, 2, 0), (3, 2, 1), (-9, 2, 1)])
def test_list_can_fail_by_age(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, age_h: int, limit: int, code: int
) -> None:
    newest_s = EPOCH_MS / 1000 + 3600
    monkeypatch.setattr("kvstore.cli.snapshots.time.time", lambda: newest_s + age_h * 3600)
    found, _, err = run("list", store.root, "--max-age-hours", limit)
    assert found == code
    assert err.count("\n") == code


@pytest.mark.parametrize("is_damaged", [False, True])
def test_list_fails_by_age_for_each_cluster(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """A new snapshot of one cluster does not hide the missing night of another."""
    made = full(store, "z", LOG)
    later = tuple(replace(each, time_ms=each.time_ms + 48 * HOUR_MS) for each in made.partitions)
    another = replace(made, cluster="cluster-2", partitions=later)
    (store.root / "z" / NAME).write_bytes(encode(another))
    monkeypatch.setattr("kvstore.cli.snapshots.time.time", lambda: complete_until_ms(another) / 1000 + 3600)
    if is_damaged:
        damage(store.root / "a" / NAME)
    code, _, err = run("list", store.root, "--max-age-hours", 26)
    assert code == 1
    assert "cluster cluster-1" in err
    assert ("does not exist" in err) == is_damaged
    assert run("list", store.root, "--max-age-hours", 99)[0] == int(is_damaged)


def test_verify_proves_a_chain(run: Run, store: DirectoryStore) -> None:
    code, out, _ = run("verify", store.root)
    assert (code, out.startswith("intact: a, b; ")) == (0, True)
    assert json.loads(run("verify", store.root / "a", "--json")[1])["snapshots"] == ["a"]


def test_damage_is_an_exit_code_and_a_line_that_names_the_file(run: Run, store: DirectoryStore) -> None:
    damage(store.root / "a/data/p1-00000.parquet")
    code, out, _ = run("verify", store.root, "b")
    assert code == 1
    assert "a/data/p1-00000.parquet its checksum differs from the manifest's" in out
    assert "take a new full snapshot" in out


def _future(store: DirectoryStore) -> None:
    path = store.root / "b" / NAME
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9'))


def _no_parent(store: DirectoryStore) -> None:
    rmtree(store.root / "a")


def _damaged(store: DirectoryStore) -> None:
    damage(store.root / "b" / NAME)


def _renamed(store: DirectoryStore) -> None:
    changed = replace(store.load("b"), id="c")
    (store.root / "b" / NAME).write_bytes(encode(changed))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_future, "expected format 2 or lower, got 9, written by a later version; upgrade kvstore"),
        (_no_parent, "b continues a, which is missing"),
        (_damaged, "damaged: its checksum does not match; restore it from a copy"),
        (_renamed, "belongs to snapshot c; snapshots cannot be renamed"),
    ],
)
def test_snapshot_that_cannot_be_used_is_one_line_for_every_command(
    run: Run, store: DirectoryStore, spoil: Callable[[DirectoryStore], None], message: str
) -> None:
    spoil(store)
    commands = [
        ("verify", store.root, "b", 3 if spoil is _future else 1),
        ("restore", store.root, "b", "--server", NOBODY, 1),
        ("diff", store.root, "b", "b", 3),
        ("prune", store.root, "--keep", 1, 1),
    ]
    for *command, wanted in commands:
        code, out, err = run(*command)
        assert (code, out) == (wanted, "")
        assert err.startswith("kvstore: ")
        assert message in err
        assert err.count("\n") == 1


def test_nothing_continues_a_broken_chain(run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot was made and could not be restored; the nightly job did not make a full one."""
    instance = store.load("b").cluster
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, instance))
    rmtree(store.root / "a")
    code, _, err = run("create", "--to", store.root, "--incremental", "--server", NOBODY)
    assert code == 1
    assert "b continues a, which is missing; restore its folder from a copy, or take a full snapshot" in err
    assert store.ids() == ["b"]


@pytest.mark.parametrize("here", ["nothing", "a broken chain", "what the logs do not reach back to"])
def test_full_snapshot_is_taken_instead_on_request(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: str
) -> None:
    root = tmp_path / "new" if here == "nothing" else store.root
    if here == "a broken chain":
        rmtree(store.root / "a")
    tried = list[str | None]()

    def job(_: object, wanted: SnapshotRequest, *rest: object) -> Manifest:
        tried.append(wanted.parent_id)
        if wanted.parent is not None:
            raise NotContinuable("the log does not reach back")
        return full(DirectoryStore(root), "z", LOG, hour=9)

    instance = store.load("b").cluster
    monkeypatch.setattr("kvstore.spark.snapshots.create.create", job)
    monkeypatch.setattr("kvstore.cli.snapshot_taking.in_session", lambda work, *_: work(None))
    monkeypatch.setattr("kvstore.spark.snapshots.runners.is_small", lambda _: False)
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, instance))
    words = ("create", "--to", root, "--incremental")
    assert run(*words, "--server", NOBODY)[0] == 1
    tried.clear()
    code, out, err = run(*words, "--or-full", "--server", NOBODY)
    assert (code, out.startswith(f"{root}/z: full snapshot")) == (0, True)
    assert err.startswith("kvstore: taking a full snapshot instead: ")
    assert tried == [*(["b"] if here.startswith("what") else []), None]


def test_list_calls_no_snapshot_usable_that_lacks_a_file(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    (store.root / "z" / store.load("z").files[0].path).unlink()
    code, out, err = run("list", store.root, "--json", "--max-age-hours", 100_000)
    states = {row["id"]: row["state"] for row in json.loads(out)["snapshots"]}
    assert (code, states["a"], states["b"]) == (0, "usable", "usable")
    assert states["z"].endswith("/z/data/p1-00000.parquet is missing; restore the file from a copy")
    with open(store.root / "a" / store.load("a").files[0].path, "ab") as file:
        file.write(b"x")
    code, out, err = run("list", store.root, "--max-age-hours", 100_000)
    assert (code, "usable snapshot in" in err, "does not exist" in err) == (1, True, True)
    assert out.count("the manifest") == 2


@pytest.mark.parametrize("change", [damage, os.unlink])
def test_list_reports_why_a_parent_cannot_be_read(
    run: Run, store: DirectoryStore, change: Callable[[Path], None]
) -> None:
    change(store.root / "a" / NAME)
    states = {row["id"]: row["state"] for row in json.loads(run("list", store.root, "--json")[1])["snapshots"]}
    reason = "its checksum does not match" if change is damage else "manifest.json is missing"
    assert states["b"].startswith("snapshot b continues a: ")
    assert reason in states["b"]
    assert reason in states["a"]


def test_prune_removes_nothing_while_a_snapshot_that_stays_lacks_a_file(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    path = store.root / "z" / store.load("z").files[0].path
    path.rename(store.root.parent / "elsewhere")
    code, _, err = run("prune", store.root, "--keep", 1)
    assert (code, "is missing; restore the file from a copy" in err) == (1, True)
    assert store.ids() == ["a", "b", "z"]
    (store.root.parent / "elsewhere").rename(path)
    assert run("prune", store.root, "--keep", 1)[0] == 0
    assert store.ids() == ["z"]


def test_incremental_continues_no_snapshot_that_lacks_a_file(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, "cluster-1"))
    (store.root / "a" / store.load("a").files[0].path).unlink()
    code, _, err = run("create", "--to", store.root, "--incremental", "--server", NOBODY)
    assert (code, "is missing; restore the file from a copy" in err) == (1, True)


def test_restored_cluster_continues_in_the_old_directory(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was refused night after night."""
    taken = list[str | None]()

    def job(_: object, wanted: SnapshotRequest, *rest: object, **more: object) -> Manifest:
        taken.append(wanted.parent_id)
        return store.load("b")

    monkeypatch.setattr("kvstore.spark.snapshots.create.create", job)
    monkeypatch.setattr("kvstore.cli.snapshot_taking.in_session", lambda work, *_: work(None))
    monkeypatch.setattr("kvstore.spark.snapshots.runners.is_small", lambda _: False)
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, "another"))
    words = ("create", "--to", store.root, "--incremental", "--server", NOBODY)
    code, _, err = run(*words)
    assert (code, "no snapshot of this cluster in" in err) == (1, True)
    assert "belongs to another cluster" in run(*words, "--parent", "b")[2]
    assert run(*words, "--or-full")[0] == 0
    made = full(store, "z", LOG, hour=5)
    (store.root / "z" / NAME).write_bytes(encode(replace(made, cluster="another")))
    assert run(*words, "--or-full")[0] == 0
    assert taken == [None, "z"]


def test_damaged_manifest_leaves_the_snapshots_not_based_on_it(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    (store.root / "z" / NAME).write_bytes(b"")
    assert run("verify", store.root, "b")[0] == 0
    assert "no server of the cluster answers" in run("restore", store.root, "b", "--server", NOBODY)[2]
    code, _, err = run("verify", store.root)
    assert (code, err.count("\n")) == (1, 1)
    assert err.endswith("; restore it from a copy, or remove its folder and take a new snapshot\n")


class Filled:
    """A client of a cluster with three keys."""

    def __init__(self, _config: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def count(self) -> int:
        return 3


def test_restore_into_filled_cluster_is_refused_before_files_are_read(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused only after every file had been read and Spark had been started."""
    monkeypatch.setattr("kvstore.cli.snapshot_tools.cluster_of", lambda *_: (None, "instance"))
    monkeypatch.setattr("kvstore.spark.snapshots.restore.Client", Filled)
    damage(store.root / "a" / store.load("a").files[0].path)
    code, _, err = run("restore", store.root, "b")
    assert (code, err.count("\n")) == (1, 1)
    assert "expected an empty cluster, got one with 3 keys" in err


@pytest.mark.parametrize("command", ["list", "verify", "restore", "prune"])
def test_directory_that_holds_no_snapshot_is_one_line(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "letters").mkdir()
    options = ("--keep", 1) if command == "prune" else ()
    for path, message in ((tmp_path / "absent", "is not a directory of snapshots"), (tmp_path, "has no snapshots")):
        code, out, err = run(command, path, *options)
        assert (code, out, err.count("\n")) == (3 if command == "verify" else 1, "", 1)
        assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--server", NOBODY), "no server of the cluster answers at 127.0.0.1:1"),
        (("--data-dir", "/nonexistent"), "no cluster at /nonexistent/cluster.json; start one"),
    ],
)
def test_snapshot_that_fails_reports_one_line_and_leaves_nothing(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run("create", "--to", tmp_path / "to", *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--at", "2001-01-01T00:00:00Z"), "2001-01-01T00:00:00.000Z is before snapshot a"),
        (("--position", "p1=99999"), "partition p1: expected a sequence from"),
        (("--position", "p9=1"), "snapshot b has no partition p9"),
    ],
)
def test_cut_that_cannot_be_had_is_one_line(
    run: Run, store: DirectoryStore, options: tuple[str, ...], message: str
) -> None:
    code, _, err = run("restore", store.root, *options, "--server", NOBODY)
    assert (code, err.count("\n")) == (1, 1)
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("create --to {} --compression rar", "'--compression'"),
        ("create --to {} --rate nan", "'--rate'"),
        ("create --to {} --hold-hours 169", "'--hold-hours'"),
        ("create --to {} --or-full", "--or-full: expected together with --incremental"),
        (
            "create --to {} --incremental --or-full --parent b",
            "--or-full: expected together with --incremental, and without",
        ),
        ("create --to {} --conf x", "'--conf': expected NAME=VALUE, got 'x'"),
        ("list {} --max-age-hours nan", "'--max-age-hours'"),
        ("verify {} --at yesterday", "'--at': expected a moment like 2026-11-20T20:15:00Z, got 'yesterday'"),
        ("verify {} --at 0001-01-01T00:00:00+14:00", "'--at': expected a moment"),
        ("verify {} --position p1", "'--position': expected PARTITION=SEQUENCE, got 'p1'"),
        ("restore {} --at yesterday", "'--at': expected a moment"),
        ("restore {} --position p1=-1", "'--position': expected PARTITION=SEQUENCE"),
        ("restore {} --position p1=99999999999999999999", "'--position': expected PARTITION=SEQUENCE"),
        ("prune {}", "expected at least one of --keep, --daily, --weekly and --monthly"),
        ("legal-hold {} a", "--reason, --release: expected --reason or --release, and not both"),
        ("legal-hold {} a --reason x --release", "--reason, --release: expected --reason or --release, and not both"),
        ("diff {} a", "Missing argument"),
        ("diff {} a b --bogus", "No such option"),
        ("diff {} a b --conf =x", "'--conf': expected NAME=VALUE"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_touches_nothing(
    run: Run, store: DirectoryStore, words: str, message: str
) -> None:
    code, out, err = run(*words.format(store.root).split())
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(os.listdir(store.root)) == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["2026-11-20T20:15:00.123Z", "2026-11-20T20:15:00.123", "2026-11-20T21:15:00.123+01:00"]
)
def test_moment_without_a_zone_is_utc(text: str) -> None:
    assert cut_of(moment(text), None) == Cut(time_ms=1_795_205_700_123)


def test_spark_is_started_only_when_it_is_needed(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*modules: str) -> None:
        raise ConfigError(f"{modules[0]} is not installed: install the extra spark")

    monkeypatch.setattr("kvstore.cli.snapshot_tools.need_spark", absent)
    assert run("list", store.root)[0] == 0
    assert run("prune", store.root, "--keep", 1)[0] == 0
    code, _, err = run("verify", store.root)
    assert (code, err) == (3, "kvstore: not checked: pyarrow is not installed: install the extra spark\n")


def test_little_work_starts_no_spark_unless_requested(
    run: Run, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_spark(*_: object, **__: object) -> None:
        raise ConfigError("Spark was asked for")

    monkeypatch.setattr(snapshot_spark, "in_session", no_spark)
    monkeypatch.setattr("os.nice", lambda _: 0)
    code, out, _ = run("diff", store.root, "a", "a")
    assert (code, out.startswith("0 keys added, 0 removed, 0 changed, ")) == (0, True)
    code, out, _ = run("diff", store.root, "a", "b", "--show", 1)
    assert (code, out.count("key-")) == (1, 1)
    for asked in (("--conf", "a=b"), ("--master", "local[1]")):
        assert run("diff", store.root, "a", "b", *asked)[::2] == (3, "kvstore: not checked: Spark was asked for\n")
    monkeypatch.setattr(local_tables, "SMALL_ROWS", 10)
    assert run("diff", store.root, "a", "b")[0] == 3
    assert run("diff", store.root, "a", "b", "--master", "none")[0] == 1


def test_unusable_directory_is_reported_before_servers_are_asked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("create", "--to", tmp_path / "file", "--data-dir", "/nonexistent")
    assert (code, err.count("\n")) == (1, 1)
    assert "file is not a directory" in err, "not that there is no cluster"


def test_snapshots_of_two_clusters_are_not_confused(run: Run, store: DirectoryStore) -> None:
    """The newest snapshot of one cluster was restored as that of the other; the retention of one removed all of the
    other."""
    made = full(store, "z", LOG, hour=5)
    (store.root / "z" / NAME).write_bytes(encode(replace(made, cluster="another")))
    code, _, err = run("restore", store.root, "--server", NOBODY)
    assert (code, "expected snapshots of one cluster, got 2; choose one of b, z" in err) == (1, True)
    assert "no server of the cluster" in run("restore", store.root, "b", "--server", NOBODY)[2]
    assert run("verify", store.root)[1].startswith("intact: z; ")
    assert run("prune", store.root, "--keep", 1)[1] == "nothing to do\n"


def test_work_that_was_just_continued_is_not_removed(store: DirectoryStore) -> None:
    assert not store.remove("a")
    assert store.ids() == ["a", "b"]
    assert store.remains() == []
    assert store.remove("b")
    assert store.remove("a")
    assert store.ids() == []


def test_prune_keeps_chains_complete_and_removes_abandoned_work(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    stale, fresh = store.work("old"), store.work("new")
    for folder in (stale, fresh):
        folder.mkdir()
    age = stale.stat().st_mtime - RESUMABLE_S - 10
    os.utime(stale, (age, age))
    assert run("prune", store.root, "--keep", 2, "--dry-run")[1] == (
        "would remove .work-old\nwould keep a: needed by b\nwould keep b: newest\nwould keep z: newest\n"
    )
    assert run("prune", store.root, "--keep", 1)[1] == "removed b\nremoved a\nremoved .work-old\n"
    assert sorted(os.listdir(store.root)) == [".lock", ".work-new", "z"]


def test_prune_keeps_a_snapshot_under_a_legal_hold_and_its_parents(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    code, out, _ = run("legal-hold", store.root, "b", "--reason", "case 17")
    assert (code, out) == (0, "b: under a legal hold (case 17); prune keeps a, b\n")
    assert run("prune", store.root, "--keep", 1)[:2] == (0, "nothing to do\n")
    rows = {row["id"]: row for row in json.loads(run("list", store.root, "--json")[1])["snapshots"]}
    assert {name: row["legal_hold"] for name, row in rows.items()} == {"a": None, "b": "case 17", "z": None}
    assert "case 17" in run("list", store.root)[1]
    assert run("legal-hold", store.root, "b", "--release")[0] == 0
    code, _, err = run("legal-hold", store.root, "b", "--release")
    assert (code, "is not under a legal hold" in err) == (1, True)
    done = json.loads(run("prune", store.root, "--keep", 1, "--json")[1])
    assert done == {"removed": ["b", "a"], "remains": [], "busy": [], "kept": {"z": ["newest"]}, "dry_run": False}


def test_legal_hold_placed_during_a_prune_wins(store: DirectoryStore) -> None:
    """`prune` had decided before; the removal itself must look again."""
    store.hold("b", LegalHold(reason="case 17", placed_ms=1))
    assert not store.remove("b")
    assert not store.remove("a")
    assert store.ids() == ["a", "b"]


def test_legal_hold_that_cannot_be_read_holds(run: Run, store: DirectoryStore) -> None:
    full(store, "z", LOG, hour=5)
    (store.root / ".hold-b").write_bytes(b"{")
    assert run("prune", store.root, "--keep", 1)[1] == "nothing to do\n"
    assert not store.remove("b")
    assert "its file cannot be read" in run("list", store.root)[1]


def test_list_names_a_snapshot_that_is_missing_despite_its_legal_hold(run: Run, store: DirectoryStore) -> None:
    store.hold("b", LegalHold(reason="case 17", placed_ms=1))
    rmtree(store.root / "b")
    rows = {row["id"]: row for row in json.loads(run("list", store.root, "--json")[1])["snapshots"]}
    assert rows["b"] == {"id": "b", "state": "missing, although it is under a legal hold", "legal_hold": "case 17"}


def test_snapshot_without_its_parents_cannot_be_held(run: Run, store: DirectoryStore) -> None:
    rmtree(store.root / "a")
    code, _, err = run("legal-hold", store.root, "b", "--reason", "case 17")
    assert (code, "b continues a, which is missing" in err) == (1, True)
    assert run("legal-hold", store.root, "c", "--reason", "case 17")[0] == 1
    assert store.holds() == {}


def metrics_of(path: Path) -> dict[str, float]:
    lines = path.read_text().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def test_metrics_file_has_the_newest_usable_snapshot(run: Run, store: DirectoryStore, tmp_path: Path) -> None:
    made = full(store, "z", LOG, hour=5)
    store.hold("a", LegalHold(reason="case 17", placed_ms=1))
    path = tmp_path / "kvstore.prom"
    assert run("list", store.root, "--metrics-file", path)[0] == 0
    found = metrics_of(path)
    assert found.keys() == METRICS.keys()
    assert found["kvstore_snapshot_complete_timestamp_seconds"] == complete_until_ms(made) / 1000
    assert found["kvstore_snapshot_newest_bytes"] == made.size_bytes
    assert [found[f"kvstore_snapshot_{name}"] for name in ("usable", "unusable", "legal_holds")] == [3, 0, 1]
    assert path.stat().st_mode & 0o777 == 0o644
    (store.root / "z" / made.files[0].path).unlink()
    assert run("list", store.root, "--metrics-file", path, "--max-age-hours", 1)[0] == 1
    after = metrics_of(path)
    assert after["kvstore_snapshot_complete_timestamp_seconds"] == complete_until_ms(store.load("b")) / 1000
    assert (after["kvstore_snapshot_usable"], after["kvstore_snapshot_unusable"]) == (2, 1)


def test_metrics_without_a_usable_snapshot_have_no_age(run: Run, store: DirectoryStore, tmp_path: Path) -> None:
    rmtree(store.root / "a")
    path = tmp_path / "kvstore.prom"
    run("list", store.root, "--metrics-file", path)
    found = metrics_of(path)
    assert "kvstore_snapshot_complete_timestamp_seconds" not in found
    assert (found["kvstore_snapshot_usable"], found["kvstore_snapshot_unusable"]) == (0, 1)


def test_metrics_file_is_replaced_as_a_whole(
    run: Run, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvstore.prom"
    run("list", store.root, "--metrics-file", path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvstore.cli.snapshot_metrics.os.replace", full_disk)
    assert run("list", store.root, "--metrics-file", path)[0] == 1
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["kvstore.prom"]
    code, _, err = run("list", store.root, "--metrics-file", tmp_path / "kvstore.txt")
    assert (code, "a name that ends with .prom" in err) == (1, True)


@pytest.mark.parametrize(
    ("rows", "size_bytes", "said"),
    [
        (1, 40, "full snapshot, 1 row in 0 files, 40 B"),
        (12_000, 3 << 20, "full snapshot, 12,000 rows in 0 files, 3.0 MiB"),
    ],
)
def test_snapshot_is_described_in_the_unit_of_its_size(rows: int, size_bytes: int, said: str) -> None:
    """A small snapshot used to have 0.0 MiB."""
    assert sentence(replace(manifest_of("s", None, ()), rows=rows, size_bytes=size_bytes)) == said
