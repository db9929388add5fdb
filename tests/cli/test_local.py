"""The commands of the local cluster: their refusals and messages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from kvstore import config as toml
from kvstore.devcluster import layout
from kvstore.devcluster.layout import ClusterFile, UpOptions
from kvstore.devcluster.local import LocalCluster
from kvstore.devcluster.pages import http_ok, unsettled
from kvstore.devcluster.ports import is_free
from kvstore.devcluster.record import ClusterRecord
from kvstore.env.secret import read_secret
from kvstore.errors import ConfigError, Unavailable
from kvstore.ring.ring import Ring
from kvstore.server.app import VERSION
from kvstore.server.config import NodeConfig
from tests.beside import served
from tests.commands import kvstore
from tests.waiting import PATIENCE_S, wait_until_blocking


def as_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does, once for each kind of end."""
    command = [sys.executable, "-m", "kvstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--nodes", "2"), "--unsafe"),
        (("up", "--nodes", "99", "--replicas", "100"), "--replicas: expected 1 to 99"),
        (("up", "--partitions", "1024", "--replicas", "4"), "--replicas: expected 1 to 3"),
        (("up", "--port-offset", "150"), "--port-offset: expected 0 to 99, or a multiple of 100 from 20000"),
        (("up", "--replicas", "4"), "--replicas: expected 1 to 3"),
        (("up", "--set", "log.roll_bytes"), "expected SECTION.NAME=VALUE"),
        (("up", "--set", "resp=127.0.0.1:5"), "sets resp of each node itself"),
        (
            ("up", "--set", "autorecovery.lost_bookie_delay=5"),
            "unknown; did you mean lost_bookie_delay_s?",
        ),
        (("up", "--set", "autorecovery.lost_bookie_delay_s=-5"), "lost_bookie_delay_s: expected 0 to"),
        (
            ("ring", "show", "--zookeeper", "127.0.0.1:1"),
            "no ZooKeeper listens at 127.0.0.1:1; `kvstore status --server",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals_go_to_standard_error_with_a_code(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    answer = kvstore(*arguments, "--data-dir", str(tmp_path / "data"))
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert words in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--nodes", "0"), ("--nodes", "100"), ("--partitions", "0"), ("--partitions", "1025"), ("--replicas", "0")],
)
def test_number_out_of_range_is_wrong_usage(tmp_path: Path, option: str, value: str) -> None:
    answer = kvstore("up", option, value, "--data-dir", str(tmp_path / "data"))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"Invalid value for '{option}'" in answer.stderr
    assert not (tmp_path / "data").exists()


def test_status_of_no_cluster_is_no_health(tmp_path: Path) -> None:
    answer = as_process("status", "--data-dir", str(tmp_path / "data"))
    assert (answer.returncode, answer.stdout) == (3, "")
    assert "no cluster in" in answer.stderr
    assert "name one with --server or --metadata" in answer.stderr
    nobody = kvstore("status", "--server", "127.0.0.1:1")
    assert (nobody.returncode, nobody.stderr) == (2, "")
    assert nobody.stdout.startswith("down: no node answers: ")
    unknown = kvstore("status", "--zookeeper", "127.0.0.1:1")
    assert (unknown.returncode, unknown.stdout) == (3, "")


def test_down_without_a_cluster_is_no_error(tmp_path: Path) -> None:
    answer = as_process("down", "--data-dir", str(tmp_path), "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout) == {"stopped": []}


def test_down_reports_where_it_found_no_cluster(tmp_path: Path) -> None:
    assert kvstore("down", "--data-dir", str(tmp_path)).stdout == f"no cluster in {tmp_path}\n"


@pytest.mark.parametrize("content", ["", '{"zookeeper": "127.0.', "[]", "5", '{"nodes": 7}', "\0\0\0\0"])
def test_invalid_cluster_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "cluster.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/cluster.json is not a cluster file"):
        LocalCluster(tmp_path).load()


@pytest.mark.parametrize("settings", [(), ("--set", "log.roll_age_s=60")])
def test_first_up_that_fails_leaves_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    """It left a record, and the next command searched for nodes that had never been started."""
    offset = free_offset()

    def no_java(_: object) -> Path:
        raise ConfigError("no Java here")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.devcluster.zookeeper.find_java", no_java)
        answer = kvstore("up", "--detach", "--data-dir", str(tmp_path), "--port-offset", str(offset), *settings)
    assert (answer.returncode, "no Java here" in answer.stderr) == (1, True)
    assert not (tmp_path / "cluster.json").exists()
    assert not list(tmp_path.rglob("node.toml")), "the next `up` may have other options"
    put = kvstore("put", "k", "v", "--data-dir", str(tmp_path))
    assert put.returncode == 1
    assert put.stderr.startswith(f"kvstore: no cluster at {tmp_path}/cluster.json; start one with `kvstore up`")


def test_first_up_that_fails_keeps_files_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `cluster.json`, in a copied data directory, it deleted node.toml files that people had edited."""
    planned = layout.plan(UpOptions(data_dir=tmp_path, port_offset=free_offset()), None)
    paths = [Path(node.config) for node in planned.nodes]
    for node, path in zip(planned.nodes, paths, strict=True):
        path.parent.mkdir(parents=True)
        path.write_text('zone = "rack-7"\n' + toml.to_toml(layout.node_config(planned, node, tmp_path)))

    def no_java(_: object) -> Path:
        raise ConfigError("no Java here")

    monkeypatch.setattr("kvstore.devcluster.zookeeper.find_java", no_java)
    offset = str(planned.port_offset)
    answer = kvstore(
        "up", "--detach", "--data-dir", str(tmp_path), "--port-offset", offset, "--set", "log.roll_age_s=60"
    )
    assert (answer.returncode, "no Java here" in answer.stderr) == (1, True), answer.stderr
    assert not (tmp_path / "cluster.json").exists()
    assert all('zone = "rack-7"' in path.read_text() for path in paths)


def test_commands_say_at_once_that_no_node_of_a_cluster_listens(tmp_path: Path) -> None:
    """The commands waited for their timeout and printed messages of gRPC."""
    planned = layout.plan(UpOptions(data_dir=tmp_path, port_offset=free_offset()), None)
    ClusterRecord(tmp_path).save(planned)
    for command in (("put", "k", "v"), ("get", "k"), ("scan",), ("watch", "k")):
        answer = kvstore(*command, "--data-dir", str(tmp_path))
        addresses = ", ".join(node.grpc for node in planned.nodes)
        assert answer.returncode == 1
        said = f"kvstore: no node of the cluster in {tmp_path} listens at {addresses}; start it with: "
        assert answer.stderr.startswith(said), command
        assert answer.stderr.endswith(f" up --detach --data-dir {tmp_path}\n")


def free_offset() -> int:
    """Return an address without a listener on this machine."""
    return next(
        each
        for each in range(20_000, 24_000, 100)
        if all(is_free(address) for _, address in layout.listeners(_planned(each), {"n1", "n2", "n3"}))
        and is_free(_planned(each).store.hosts[0])
    )


def _planned(offset: int) -> ClusterFile:
    return layout.plan(UpOptions(data_dir=Path(), port_offset=offset), None)


@pytest.mark.parametrize("command", [("up", "--detach"), ("get", "k"), ("ledger", "list")])
def test_invalid_cluster_file_gives_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "cluster.json").write_text("[]")
    answer = kvstore(*command, "--data-dir", str(tmp_path))
    assert answer.returncode == 1
    assert f"{tmp_path}/cluster.json is not a cluster file" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("up", "--detach"), ("down",), ("status",)])
def test_copied_or_moved_cluster_starts_no_nodes_of_the_old_directory(tmp_path: Path, command: tuple[str, ...]) -> None:
    made = layout.plan(UpOptions(data_dir=tmp_path / "old", port_offset=24_000), None)  # no other test listens here
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "cluster.json").write_text(json.dumps(made.document()))
    answer = kvstore(*command, "--data-dir", str(tmp_path / "new"))
    assert answer.returncode == (3 if command == ("status",) else 1)
    assert f"was created in {tmp_path}/old; move it back" in answer.stderr
    assert sorted(each.name for each in tmp_path.rglob("*")) in (
        ["cluster.json", "new"],
        ["cluster.json", "new", "up.lock"],
    )
    (tmp_path / "old").symlink_to(tmp_path / "new")
    status = kvstore("status", "--data-dir", str(tmp_path / "new"))
    assert (status.returncode, status.stderr) == (2, ""), "found, and nothing of it runs"
    assert "is down" in status.stdout
    assert "To start everything that is down, run:" in status.stdout


def test_node_folder_may_be_on_another_disk(tmp_path: Path) -> None:
    made = layout.plan(UpOptions(data_dir=tmp_path / "data", port_offset=24_000), None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cluster.json").write_text(json.dumps(made.document()))
    (tmp_path / "disk").mkdir()
    (tmp_path / "data" / "n3").symlink_to(tmp_path / "disk")
    status = kvstore("status", "--data-dir", str(tmp_path / "data"))
    assert (status.returncode, status.stderr) == (2, ""), "found, and nothing of it runs"


def test_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("")
    for command in (("up", "--detach"), ("status",), ("get", "k")):
        answer = kvstore(*command, "--data-dir", str(path))
        assert (answer.returncode, answer.stdout) == (3 if command == ("status",) else 1, "")
        assert str(path) in answer.stderr
        assert answer.stderr.count("\n") == 1


def test_broken_configuration_names_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('id = "n1"\nresp = "0.0.0.0:6401"\nport = 5\n')
    answer = as_process("node", "run", "--config", str(path))
    assert answer.returncode == 1
    for fault in ("secret_file: missing", "data_dir: missing", "port: unknown"):
        assert fault in answer.stderr
    assert "Traceback" not in answer.stderr


def test_every_command_explains_itself() -> None:
    answer = kvstore("--help")
    assert answer.returncode == 0
    assert {"up", "down", "status", "node"} <= set(answer.stdout.split())
    for command in (["up"], ["down"], ["status"], ["node", "run"]):
        assert kvstore(*command, "--help").returncode == 0


def test_node_that_could_never_start_is_not_founded() -> None:
    arguments = ("cluster", "init", "--zookeeper", "127.0.0.1:1", "--node", "N 1", "--node", "n2", "--node", "n3")
    assert "--node 'N 1': expected lower-case letters" in kvstore(*arguments).stderr


def test_command_prints_its_version() -> None:
    assert as_process("--version").stdout == f"{VERSION}\n"


def test_wrong_option_is_wrong_usage() -> None:
    assert as_process("up", "--nonsense").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--zookeeper", ""), "'--zookeeper': expected host:port,host:port/chroot, or etcd:// before it, got ''"),
        (("cluster", "init", "--node", "n1", "--zookeeper", "zk"), "'--zookeeper' / '--metadata': expected host:port,"),
        (("get", "k", "--zookeeper", "127.0.0.1:99999"), "'--zookeeper' / '--metadata': expected host:port,"),
        (
            ("up", "--metadata", "mysql"),
            "'--metadata': expected host:port,host:port/chroot, or etcd:// before it, got 'mysql'",
        ),
        (
            ("get", "k", "--metadata", "etcd://x"),
            "expected host:port,host:port/chroot, or etcd:// before it, got 'etcd://x'",
        ),
        (("snapshot", "create", "--to", "/none", "--zookeeper", "zk:x"), "got 'zk:x'"),
        (("ring", "show", "--server", "127.0.0.1:99999"), "'--server': expected host:port"),
        (("get", "k", "--server", ""), "'--server': expected at least one endpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_address_that_is_none_is_wrong_usage(arguments: tuple[str, ...], words: str) -> None:
    answer = kvstore(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert words in answer.stderr.splitlines()[-1]


@pytest.mark.parametrize("word", ["real/n1/node.toml", "link/n1/node.toml", "./link/n1/node.toml"])
def test_node_is_known_by_every_path_to_its_file(tmp_path: Path, word: str) -> None:
    """Nodes can be started by hand, through a symbolic link or by a relative path."""
    (tmp_path / "real" / "n1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    planned = layout.plan(UpOptions(data_dir=tmp_path / "real"), None)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "node", "run", "--config", word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            wait_until_blocking(psutil.Process(process.pid).cmdline, what="the process' words")
            found = LocalCluster(tmp_path / "link")._with_those_that_run(planned)
            assert [node.pid for node in found.nodes] == [process.pid, None, None]
        finally:
            process.kill()


def test_node_that_ended_is_named_at_once_while_another_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path)
    planned = layout.plan(UpOptions(data_dir=tmp_path), None)
    monkeypatch.setattr(cluster, "load", lambda: planned)
    monkeypatch.setattr(cluster, "_runs", lambda node: node.id != "n2")
    monkeypatch.setattr("kvstore.devcluster.local.http_ok", lambda *_: False)  # another cluster can have these ports
    with pytest.raises(Unavailable, match="node n2 ended while starting"):
        cluster.wait_ready(timeout_s=1)


def test_up_repeats_only_the_output_of_the_process_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command printed the last lines of a process that had been stopped normally."""
    (tmp_path / "logs").mkdir()
    log, output = tmp_path / "logs" / "n1.log", tmp_path / "logs" / "n1.out"
    log.write_text("node=n1 stops\n")
    output.write_text("of an earlier day\n")

    class Failing(LocalCluster):
        def _spawn(self, name: str, command: list[str]) -> int:
            output.write_text("begun again\n")
            return os.getpid()

    cluster = Failing(tmp_path)
    ClusterRecord(tmp_path).save(layout.plan(UpOptions(data_dir=tmp_path), None))
    cluster.start_node("n1")
    monkeypatch.setattr("kvstore.devcluster.local.http_ok", lambda *_: False)
    with pytest.raises(Unavailable) as refused:
        cluster.wait_ready(timeout_s=1)
    assert str(refused.value) == "node n1 ended while starting; its last output:\nbegun again"


def test_up_starts_no_node_that_down_stops_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` reported every node as stopped, and `up`, which found them running, started them again."""
    started: list[str] = []

    class Idle(LocalCluster):
        def _spawn(self, name: str, command: list[str]) -> int:
            started.append(name)
            return os.getpid()

    cluster = Idle(tmp_path)
    ClusterRecord(tmp_path).save(layout.plan(UpOptions(data_dir=tmp_path), None))
    cluster._found_running = {"n1", "n2", "n3"}
    monkeypatch.setattr("kvstore.devcluster.local.http_ok", lambda *_: False)
    LocalCluster(tmp_path).down()
    with pytest.raises(Unavailable, match="node n1 was stopped by `kvstore down`"):
        cluster.wait_ready(timeout_s=1)
    assert not started


def test_up_reports_the_message_of_a_node_that_does_not_become_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` waited for a node that had been drained, without a message."""

    class Drained(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b"draining\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Drained)
    cluster, planned = LocalCluster(tmp_path), layout.plan(UpOptions(data_dir=tmp_path), None)
    nodes = tuple(replace(node, http=f"127.0.0.1:{server.server_port}") for node in planned.nodes)
    monkeypatch.setattr(cluster, "load", lambda: replace(planned, nodes=nodes))
    monkeypatch.setattr(cluster, "_runs", lambda _: True)
    monkeypatch.setattr("kvstore.devcluster.pages._TIMEOUT_S", PATIENCE_S)
    said = r"n1 is not ready after 0\.1 s, it reports: draining; see `kvstore stat"
    with served(server), pytest.raises(Unavailable, match=said):
        cluster.wait_ready(timeout_s=0.1)


def test_node_that_hangs_is_named_with_the_way_to_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, planned = LocalCluster(tmp_path), layout.plan(UpOptions(data_dir=tmp_path), None)
    nodes = tuple(replace(node, http="127.0.0.1:1", pid=4711) for node in planned.nodes)
    monkeypatch.setattr(cluster, "load", lambda: replace(planned, nodes=nodes))
    monkeypatch.setattr(cluster, "_runs", lambda _: True)
    with pytest.raises(Unavailable, match=r"n1 is not ready .* and answers nothing; if it hangs, run `kill -9 4711`"):
        cluster.wait_ready(timeout_s=0.1)


def test_node_whose_program_is_being_loaded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line is empty for a moment, or for longer on a full machine: the process was treated as ended."""
    node = replace(layout.plan(UpOptions(data_dir=tmp_path), None).nodes[0], pid=os.getpid())
    words = ["python", "-m", "kvstore", "node", "run", "--config", node.config]
    for command_lines, runs in (([*[[]] * 20, words], True), ([["another", "program"]], False)):
        answers = iter(command_lines)
        monkeypatch.setattr(psutil.Process, "cmdline", lambda _, answers=answers: next(answers))
        assert LocalCluster(tmp_path)._runs(node) is runs


def test_port_that_speaks_something_else_is_no_node_that_is_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other:

        def speak() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(65536)
                accepted.sendall(b"+OK\r\n")

        spoken = other.submit(speak)
        assert not http_ok(f"127.0.0.1:{listener.getsockname()[1]}", "/readyz")
        spoken.result(60)


# docs/protocol.md V1
@pytest.mark.parametrize(
    ("last", "said"), [("", []), ("it is held", ["the cluster's version has not risen: it is held"])]
)
def test_up_waits_for_the_version_and_clock_of_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, said: list[str]
) -> None:
    """The first command in a new cluster was refused for some seconds, and `status` right after `up` found a node with
    an unconfirmed clock."""
    messages: list[str] = []
    cluster, planned = LocalCluster(tmp_path, messages.append), layout.plan(UpOptions(data_dir=tmp_path), None)
    first, second, third = (node.http for node in planned.nodes)
    well = ("", "")
    answers = {
        first: [well] * 9,
        second: [("n3 is starting", ""), ("", "too few have confirmed it"), well, well],
        third: [("it rises within seconds", "")] * 2 + [(last, "")] * 2,
    }
    monkeypatch.setattr("kvstore.devcluster.local.unsettled", lambda address, _: answers[address].pop(0))
    cluster._wait_until_settled(planned)
    assert [len(answers[each]) for each in (first, second, third)] == [6, 1, 1]
    assert messages == said


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (
            {"cluster_version_waits_for": "n2 is starting", "date": {"doubt": "none yet"}},
            ("n2 is starting", "none yet"),
        ),
        ({"cluster_version_waits_for": None, "date": {"doubt": ""}}, ("", "")),
        (
            {
                "cluster_version": 3,
                "partitions": {
                    "p3": {"role": "serving", "log_version": 2},
                    "p1": {"role": "serving", "log_version": 1},
                    "p2": {"role": "serving", "log_version": 3},
                    "p4": {"role": "following", "log_version": 2},
                },
            },
            ("the logs of p1, p3 follow within seconds", ""),
        ),
        ({"date": None}, ("", "")),
        (["no page of ours"], ("", "")),
    ],
)
def test_first_page_of_a_node_shows_the_reason_it_waits(
    monkeypatch: pytest.MonkeyPatch, page: object, found: tuple[str, str]
) -> None:
    monkeypatch.setattr("kvstore.devcluster.pages._get", lambda *_: json.dumps(page).encode())
    assert unsettled("127.0.0.1:1") == found


class Started(LocalCluster):
    """A cluster whose processes are only counted."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir)
        self.spawned: list[str] = []

    def _refuse_taken_ports(self, cluster: ClusterFile) -> None:
        pass

    def _spawn(self, name: str, command: list[str]) -> int:
        self.spawned.append(name)
        return 1 << 30

    def _start(self, cluster: ClusterFile) -> Ring:
        self._record.save(cluster)
        for node in cluster.nodes:
            self.start_node(node.id)
        raise Unavailable("there are no processes")


def secrets_of(cluster: Started) -> list[Path]:
    with pytest.raises(Unavailable):
        cluster.up(UpOptions(data_dir=cluster.data_dir))
    return [toml.read(Path(node.config), NodeConfig).secret_file for node in cluster.load().nodes]


def test_nodes_of_a_local_cluster_have_one_secret_that_is_made_once(tmp_path: Path) -> None:
    cluster, path = Started(tmp_path), tmp_path / "cluster.secret"
    assert secrets_of(cluster) == [path] * 3
    made = read_secret(path)
    assert secrets_of(cluster) == [path] * 3
    assert read_secret(path) == made
    path.unlink()
    with pytest.raises(ConfigError, match=r"cluster\.secret: the cluster's secret is missing"):
        cluster.up(UpOptions(data_dir=tmp_path))


def test_local_cluster_from_before_there_were_secrets_gets_one(tmp_path: Path) -> None:
    cluster, path = Started(tmp_path), tmp_path / "cluster.secret"
    secrets_of(cluster)
    path.unlink()
    document = json.loads((tmp_path / "cluster.json").read_text())
    del document["secret_file"]
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    for node in cluster.load().nodes:
        config = Path(node.config)
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "secret_file" not in line) + "[limits]\nwaiting_max = 7\n")
    assert secrets_of(cluster) == [path] * 3
    assert path.exists()
    assert toml.read(Path(cluster.load().nodes[0].config), NodeConfig).limits.waiting_max == 7


def test_older_secure_cluster_names_the_clients_of_its_bookies(tmp_path: Path) -> None:
    cluster = Started(tmp_path)
    with pytest.raises(Unavailable):
        cluster.up(UpOptions(data_dir=tmp_path, secure=True))
    configs = [Path(node.config) for node in cluster.load().nodes]
    for config in configs:
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "bookie_clients" not in line))
    with pytest.raises(Unavailable):
        cluster.up(UpOptions(data_dir=tmp_path))
    wanted = ("n1", "n2", "n3", "bookie-tools")
    assert [toml.read(config, NodeConfig).bookie_clients for config in configs] == [wanted] * 3


def test_node_file_left_empty_by_a_power_failure_is_written_again(tmp_path: Path) -> None:
    """A file that was not synced is empty after a power failure; only a secret was written into it, and no node
    started."""
    cluster = Started(tmp_path)
    secrets_of(cluster)
    whole = {config: config.read_text() for config in (Path(node.config) for node in cluster.load().nodes)}
    for config in whole:
        config.write_bytes(b"")
    assert secrets_of(cluster) == [tmp_path / "cluster.secret"] * 3
    assert {config: config.read_text() for config in whole} == whole
