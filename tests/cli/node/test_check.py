"""`kvstore node check`: every fault with its line, warnings for unsafe settings, and an exit code for scripts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore import config as toml
from kvstore.cli.main import build
from kvstore.cli.node.advice import advice
from kvstore.cli.node.toml_lines import line_of, lines_of
from kvstore.env.secret import make_secret
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig
from kvstore.server.processes import clashes
from tests.certificates import Files
from tests.env.namespaces import need_mounts, run_mounted

GOOD: dict[str, Any] = {"id": "n1", "zookeeper": "127.0.0.1:2181/kvstore", "data_dir": "/d", "secret_file": "/s"}


def checked(file: Path, *words: str) -> Result:
    return CliRunner().invoke(build(), ["node", "check", "--config", str(file), *words])


def node_file(folder: Path, more: str = "") -> Path:
    """Return a file without faults: four lines and `more`."""
    make_secret(folder / "secret")
    file = folder / "node.toml"
    file.write_text(
        f'id = "n1"\nzookeeper = "127.0.0.1:2181/kvstore"\ndata_dir = "{folder}/data"\n'
        f'secret_file = "{folder}/secret"\n{more}'
    )
    return file


def test_each_name_is_found_on_its_line() -> None:
    text = """# a comment

id = "a" # = b
text = \"\"\"
[not] a = "table"
x = 1
\"\"\"
list = [ # of
  "a = 1",

  "b",
]
inline = {one = 1, two = {three = 3}}
a.b = 1
"quoted name" = 2
[log] # here
roll_bytes = 1

[ log . quorum ]
ack = 2
[[many]]
x = 1
[[many]]
x = 2
"""
    assert lines_of(text) == {
        "id": 3,
        "text": 4,
        "list": 8,
        **dict.fromkeys(("inline", "inline.one", "inline.two", "inline.two.three"), 13),
        **dict.fromkeys(("a", "a.b"), 14),
        "quoted name": 15,
        "log": 16,
        "log.roll_bytes": 17,
        "log.quorum": 19,
        "log.quorum.ack": 20,
        "many": 21,
        "many.x": 22,
    }
    assert lines_of(text.replace("\n", "\r\n")) == lines_of(text)
    found = lines_of(text)
    assert [line_of(name, found) for name in ("log.quorum.write", "log.roll_age_s", "tls", "")] == [19, 16, None, None]


def test_every_fault_is_reported_with_its_line(tmp_path: Path) -> None:
    more = "repair_after_s = -1\nrols = []\n[partition]\nlease_ms = 1.5\n\n[storage]\nlost_dirs = [\n 'a', 7]\n"
    answer = checked(node_file(tmp_path, more))
    assert answer.exit_code == 1
    said = [line.removeprefix(f"{tmp_path}/node.toml") for line in answer.stdout.splitlines()]
    assert said[1].startswith(":6: fault: rols: unknown; did you mean roles? known are id, ")
    assert said[:1] + said[2:] == [
        ":5: fault: repair_after_s: expected 0 to 1000000000, got -1.0",
        ":8: fault: partition.lease_ms: expected a whole number, got 1.5",
        ":11: fault: storage.lost_dirs[1]: expected a string, got 7",
        ": 4 faults, no warnings",
    ]
    answer = checked(node_file(tmp_path, "repair_after_s = -1\nroles = []\n"), "--json")
    assert [(each["line"], each["name"]) for each in json.loads(answer.stdout)["findings"]] == [
        (5, "repair_after_s"),
        (6, "roles"),
    ]


def test_file_without_faults_is_reported_valid_and_its_paths_are_checked(tmp_path: Path) -> None:
    file = node_file(tmp_path)
    answer = checked(file, "--strict")
    assert answer.stdout == f"{file}: node n1, bookie and server: no faults, no warnings\n"
    assert (answer.exit_code, (tmp_path / "data").exists()) == (0, False)
    (tmp_path / "secret").chmod(0o644)
    (tmp_path / "data").write_text("a file")
    file.write_text(file.read_text() + f'log_dir = "{tmp_path}/node.toml/logs"\n')
    answer = checked(file)
    assert answer.exit_code == 1
    for line in (
        f":3: fault: data_dir: {tmp_path}/data: expected to read the directory, got ENOTDIR",
        f":4: fault: secret_file: {tmp_path}/secret: the cluster's secret cannot be used: other accounts can use",
        f":5: fault: log_dir: {tmp_path}/node.toml: expected to read the directory, got ENOTDIR",
    ):
        assert line in answer.stdout
    assert checked(file, "--only-file").exit_code == 0


def test_certificates_that_do_not_serve_are_faults(tmp_path: Path) -> None:
    files = Files.issue(tmp_path)

    def found(tls: Any) -> Result:
        return checked(node_file(tmp_path, f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n'))

    assert found(files.bookie).exit_code == 0
    assert ":5: fault: tls: the certificate" in found(files.expired).stdout
    assert found(replace(files.bookie, key=files.client.key)).exit_code == 1
    assert found(replace(files.bookie, cert=tmp_path / "none.pem")).exit_code == 1


def test_invalid_toml_is_reported_with_its_line(tmp_path: Path) -> None:
    answer = checked(node_file(tmp_path, "zone = \n"))
    assert isinstance(answer.exception, ConfigError)
    assert "not TOML" in str(answer.exception)
    assert "line 5" in str(answer.exception)
    answer = checked(tmp_path / "none.toml")
    assert "none.toml: cannot be read: No such file" in str(answer.exception)
    (tmp_path / "long.toml").write_bytes(b"#" * ((1 << 20) + 1))
    assert "expected at most 1048576 bytes, got 1048577" in str(checked(tmp_path / "long.toml").exception)


def test_warnings_count_only_if_they_are_to(tmp_path: Path) -> None:
    file = node_file(tmp_path, "[partition]\nlease_ms = 0\n")
    answer = checked(file)
    assert (answer.exit_code, checked(file, "--strict").exit_code) == (0, 1)
    assert f"{file}:6: warning: partition.lease_ms: every read waits for an append\n" in answer.stdout


OPEN = {"resp": "10.0.0.1:6401"}
WARNED: list[tuple[str, dict[str, Any]]] = [
    ("insecure", {"insecure": True, **OPEN}),
    ("insecure", {"insecure": True}),
    ("tls.mode", {"tls": {"cert": "/c", "key": "/k", "mode": "prefer"}}),
    ("advertise", {**OPEN, "advertise": "127.0.0.1", "tls": {"cert": "/c", "key": "/k"}}),
    ("http", {"http": "127.0.0.1:0"}),
    ("zookeeper", {"zookeeper": "127.0.0.1:1,127.0.0.1:2"}),
    ("zookeeper", {"zookeeper": "zk1:2181"}),
    ("metadata.user", {"zookeeper": "a:1,b:1,c:1", "metadata": {"user": "u", "password_file": "/p"}}),
    ("metadata.acl", {"metadata": {"user": "u", "password_file": "/p", "acl": "open"}}),
    ("storage.admit_raw_adds", {"storage": {"admit_raw_adds": True}}),
    ("storage.scrub_bytes_per_s", {"storage": {"scrub_bytes_per_s": 0}}),
    ("storage.reserve_bytes", {"storage": {"reserve_bytes": 1 << 20}}),
    ("storage.lost_dirs", {"storage": {"journal_dirs": ["a", "b"], "lost_dirs": ["b"]}}),
    ("log.quorum.ack", {"log": {"unsafe": True, "quorum": {"ensemble": 1, "write": 1, "ack": 1}}}),
    ("log.quorum", {"log": {"quorum": {"ensemble": 3, "write": 3, "ack": 3}}}),
    ("log.unsafe", {"log": {"unsafe": True}}),
    ("log.digest", {"log": {"digest": 4}}),
    ("partition.hidden_pause_ms", {"partition": {"hidden_pause_ms": 0}}),
    ("partition.lease_ms", {"partition": {"lease_ms": 0, "hidden_pause_ms": 0}}),
    ("partition.expiry_sweep_s", {"partition": {"expiry_sweep_s": 0}}),
    ("partition.write_buffer_bytes", {"partition": {"write_buffer_bytes": 200 << 20}}),
    ("autorecovery.lost_bookie_delay_s", {"autorecovery": {"lost_bookie_delay_s": 5}}),
    ("autorecovery.check_interval_s", {"autorecovery": {"check_interval_s": 0}}),
    ("repair_after_s", {"repair_after_s": 5}),
    ("data_dir", {"data_dir": "data"}),
    ("secret_file", {"secret_file": "s"}),
    ("log_output.level", {"log_output": {"level": "DEBUG"}}),
]


@pytest.mark.parametrize(("name", "table"), WARNED, ids=[name for name, _ in WARNED])
def test_unsafe_or_unusual_settings_give_a_warning(name: str, table: dict[str, Any]) -> None:
    config = toml.from_table({**GOOD, **table}, NodeConfig)
    assert [each.name for each in advice(config)] == [name]


def test_plain_file_causes_no_warning() -> None:
    assert advice(toml.from_table(GOOD, NodeConfig)) == []
    server = {**GOOD, "roles": ["server"], "storage": {"scrub_bytes_per_s": 0}}
    assert advice(toml.from_table(server, NodeConfig)) == [], "of disks that it does not have"


def test_two_listeners_cannot_share_an_address() -> None:
    config = toml.from_table({**GOOD, "grpc": "127.0.0.1:8401"}, NodeConfig)
    assert [each.name for each in clashes([config])] == ["grpc"]
    assert clashes([toml.from_table({**GOOD, "grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}, NodeConfig)]) == []
    assert clashes([toml.from_table({**GOOD, "roles": ["bookie"], "grpc": "127.0.0.1:8401"}, NodeConfig)]) == []


@pytest.mark.parametrize(
    ("one", "other", "do_meet"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("10.0.0.1", "0.0.0.0", True),
        ("localhost", "127.0.0.1", True),
        ("[::1]", "localhost", True),
        ("0.0.0.0", "localhost", True),
        ("[::]", "[::1]", True),
        ("0.0.0.0", "node-1.example", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("[::]", "10.0.0.1", True),  # gRPC accepts an IPv4 address too
        ("10.0.0.1", "[::]", False),  # Redis does not
        ("0.0.0.0", "[::1]", False),
    ],
)
def test_address_is_shared_under_two_names_too(one: str, other: str, do_meet: bool) -> None:
    listeners = {"insecure": True, "advertise": "node-1.example", "grpc": f"{one}:7401", "resp": f"{other}:7401"}
    found = clashes([toml.from_table({**GOOD, **listeners}, NodeConfig)])
    assert [each.name for each in found] == (["grpc"] if do_meet else [])
    assert all(f"resp covers with {other}:7401" in each.text for each in found)
    assert clashes([toml.from_table({**GOOD, **listeners, "grpc": f"{one}:7402"}, NodeConfig)]) == []


def test_requirements_of_traces_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = f'[tracing]\nendpoint = "https://collector:4317"\nca = "{tmp_path}/ca.pem"\n'
    file = node_file(tmp_path, traces)
    assert ":7: fault: tracing.ca: " in (said := checked(file).stdout)
    assert "ca.pem cannot be read: No such file" in said
    (tmp_path / "made").mkdir()
    made = Files.issue(tmp_path / "made").bookie
    assert made.ca is not None
    (tmp_path / "ca.pem").write_text("no certificate")
    assert ":7: fault: tracing.ca: expected a PEM certificate" in checked(file).stdout
    (tmp_path / "ca.pem").write_bytes(Path(made.ca).read_bytes())
    assert checked(file).exit_code == 0
    for name in ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter",):
        monkeypatch.setitem(sys.modules, name, None)
    assert ":6: fault: tracing.endpoint: import" in checked(file).stdout
    assert checked(file, "--only-file").exit_code == 0
    assert checked(node_file(tmp_path)).exit_code == 0, "who wants no traces needs nothing for them"


def test_obsolete_setting_is_only_a_warning(tmp_path: Path) -> None:
    file = node_file(tmp_path, "unsafe = true\n")
    answer = checked(file)
    assert (answer.exit_code, checked(file, "--strict").exit_code) == (0, 1)
    assert f"{file}:5: warning: unsafe: has no effect" in answer.stdout
    assert toml.read(file, NodeConfig) == toml.read(node_file(tmp_path), NodeConfig)


@pytest.mark.parametrize("name", ["retired_keep_s", "repair_after_s", "partition.lead_back_s"])
def test_never_is_a_number(tmp_path: Path, name: str) -> None:
    answer = checked(node_file(tmp_path), "--set", f"{name}=inf")
    assert (
        f"fault: {name}: expected 0 to 1000000000, got inf, which is not a number; for never, use 0 or 1e9"
        in answer.stdout
    )
    assert checked(node_file(tmp_path), "--set", f"{name}=1e9").exit_code == 0


def test_disks_that_are_one_are_warned_of(tmp_path: Path) -> None:
    answer = checked(node_file(tmp_path, '[storage]\njournal_dirs = ["a", "b"]\n'))
    assert "journal_dirs: b is on the same file system as a, so both are lost together" in answer.stdout


def test_settings_of_the_command_line_are_checked_before_the_file(tmp_path: Path) -> None:
    file = node_file(tmp_path)
    answer = checked(file, "--set", "id=n7", "--set", "partition.lease_ms=-1", "--set", "http=127.0.0.1:8500")
    assert f"{file}: fault: partition.lease_ms: expected 0 to 120000, got -1\n" in answer.stdout
    assert f"{file}: node n7, bookie and server: no faults, no warnings\n" == checked(file, "--set", "id=n7").stdout


def test_disk_that_is_lost_keeps_no_node_down(tmp_path: Path) -> None:
    """The unit runs the check before the start: a file that names the lost disk must let the node start without it."""
    gone = tmp_path / "node.toml" / "gone"  # a directory cannot be below a file
    more = f'[storage]\njournal_dirs = ["bookie/journal", "{gone}"]\n'
    file = node_file(tmp_path, more)
    assert checked(file).exit_code == 1
    file.write_text(f'{file.read_text()}lost_dirs = ["{gone}"]\n')
    answer = checked(file)
    assert (answer.exit_code, "on the same file system as" in answer.stdout) == (0, False), answer.stdout


CHECK = """
import sys
from kvstore.__main__ import main
sys.argv = ["kvstore", "node", "check", "--config", f"{sys.argv[1]}/node.toml"]
main()
"""
MOUNTED = [
    ("data", "data_dir", "mount -o remount,ro", "fault"),
    ("data/partitions", "data_dir", "mount -o remount,ro", "fault"),
    ("data/bookie/journal", "storage.journal_dir", "mount -o remount,ro", "fault"),
    ("data/bookie/index", "storage.index_dir", "mount -o remount,ro", "fault"),
    ("logs", "log_dir", "mount -o remount,ro", "fault"),
    ("data/bookie/journal", "storage.journal_dir", "mount -o remount,size=4k", "warning"),
]


@pytest.mark.parametrize(("place", "name", "change", "weight"), MOUNTED)
def test_node_check_writes_where_the_node_would(
    tmp_path: Path, place: str, name: str, change: str, weight: str
) -> None:
    """Permissions, above all those of root, do not show a read-only file system. A full disk does not prevent a start:
    the node serves its existing data."""
    need_mounts(tmp_path)
    node_file(tmp_path, f'log_dir = "{tmp_path}/logs"\n')
    mount = f'mkdir -p "$1/{place}"\nmount -t tmpfs -o size=4k tmpfs "$1/{place}"\n'
    if weight == "warning":
        mount += f'head -c 4096 /dev/zero > "$1/{place}/all"\n'
    found = run_mounted(f'{mount}{change} "$1/{place}"', CHECK, tmp_path)
    assert found.returncode == (weight == "fault"), found.stdout + found.stderr
    assert f": {weight}: {name}: {tmp_path}/{place}: expected to " in found.stdout


def test_unreadable_disk_is_listed_with_the_other_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, look = tmp_path / "disk2", Path.stat

    def stat(path: Path, **more: Any) -> Any:
        if path == disk:
            raise OSError(EIO, "Input/output error", str(path))
        return look(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    more = f'log_dir = "{tmp_path}/node.toml"\n[storage]\njournal_dirs = ["bookie/journal", "{disk}"]\n'
    answer = checked(node_file(tmp_path, more))
    unreadable = "expected to read the directory, got"
    assert f":7: fault: storage.journal_dirs: {disk}: {unreadable} EIO (Input/output error)" in answer.stdout
    assert f":5: fault: log_dir: {tmp_path}/node.toml: {unreadable} ENOTDIR" in answer.stdout
