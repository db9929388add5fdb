import fcntl
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from kvstore.devcluster import zookeeper as module
from kvstore.devcluster.zookeeper import (
    ZooKeeperProcess,
    classpath,
    find_running,
    four_letters,
    free_ports,
    jars_folder,
    own_jars,
    restart,
    start_ensemble,
    start_standalone,
    unpack_jars,
)
from kvstore.errors import ConfigError, Unavailable
from tests.waiting import wait_until_blocking

needs_zookeeper = pytest.mark.needs_zookeeper


def with_jars(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_only_the_jars_of_a_server_are_on_the_classpath(tmp_path: Path) -> None:
    jars = ["zookeeper-3.9.5.jar", "zookeeper-jute-3.9.5.jar", "netty-common-4.2.jar", "jline-2.14.6.jar"]
    others = ["spark-core.jar", "zookeeper-hive-1.jar", "netty-tcnative-classes-2.0.jar", "jline-3.29.0-jdk8.jar"]
    assert [path.name for path in classpath(with_jars(tmp_path, *jars, *others))] == sorted(jars)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], "none"),
        (["zookeeper-3.6.3.jar"], "3.6.3"),
        (["zookeeper-3.9.4.jar"], "3.9.4"),
        (["zookeeper-3.9.5.jar", "zookeeper-3.10.0.jar"], "3.9.5, 3.10.0"),
    ],
)
def test_zookeeper_with_known_losses_is_refused(tmp_path: Path, names: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=f"3.9.5 or newer .* got {found}"):
        classpath(with_jars(tmp_path, *names))


@pytest.mark.parametrize("name", ["zookeeper-3.9.5.jar", "zookeeper-3.10.0.jar", "zookeeper-4.0.0.jar"])
def test_later_versions_are_taken(tmp_path: Path, name: str) -> None:
    assert classpath(with_jars(tmp_path, name))


def test_java_reads_the_path_of_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its properties file is ISO 8859-1 with escapes, and its logging configuration is XML."""
    spawned: list[str] = []
    monkeypatch.setattr(module, "_spawn", lambda folder, address, **_: spawned.append(address))
    folder = tmp_path / "jörg & <文档> \\ 🦒"
    module._launch(folder, "127.0.0.1", 2181, "", detached=False, environ={})
    lines = (folder / "zoo.cfg").read_bytes().decode("latin-1").splitlines()
    (value,) = [line.partition("=")[2] for line in lines if line.startswith("dataDir=")]
    units = re.sub(r"\\(u[0-9a-f]{4}|.)", lambda found: _unescaped(found[1]), value)
    assert units.encode("utf-16", "surrogatepass").decode("utf-16") == str(folder / "data")
    appender = ElementTree.parse(folder / "log4j2.xml").find(".//RollingFile")
    assert appender is not None
    assert appender.get("fileName") == str(folder / "zookeeper.log")
    assert spawned == ["127.0.0.1:2181"]


def _unescaped(word: str) -> str:
    return chr(int(word[1:], 16)) if len(word) == 5 else word


def test_jars_that_java_could_not_name_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    with pytest.raises(ConfigError, match="Java ends a path at ':'"):
        classpath(with_jars(folder, "zookeeper-3.9.5.jar"))


@needs_zookeeper
@pytest.mark.parametrize("text", [None, "", "1 127.0.0.1:1\n"], ids=["missing", "empty", "of an earlier one"])
def test_server_is_found_whose_number_was_not_written_down(tmp_path: Path, text: str | None) -> None:
    """Its starter was just killed; a second ZooKeeper would write to the same data."""
    server = start_standalone(tmp_path)
    try:
        (tmp_path / "zookeeper.pid").unlink()
        if text is not None:
            (tmp_path / "zookeeper.pid").write_text(text)
        found = find_running(tmp_path)
        assert found is not None
        assert (found.pid, found.address) == (server.pid, server.address)
    finally:
        server.kill()
    assert find_running(tmp_path) is None


@needs_zookeeper
def test_server_serves_in_a_folder_of_any_name(tmp_path: Path) -> None:
    server = start_standalone(tmp_path / "jörg & 文档")
    try:
        assert (tmp_path / "jörg & 文档" / "data").is_dir()
        assert find_running(tmp_path / "jörg & 文档") is not None
    finally:
        server.kill()


def archive_with(folder: Path, *names: str) -> Path:
    """Return an archive with these files, laid out like the source archive of pyspark."""
    path = folder / "pyspark-4.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in names:
            info = tarfile.TarInfo(f"pyspark-4/{name}")
            info.size = len(name)
            packed.addfile(info, io.BytesIO(name.encode()))
    return path


def test_only_the_jars_of_a_server_are_unpacked_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    own_jars().mkdir(parents=True)
    (own_jars() / "zookeeper-3.9.4.jar").touch()  # of an earlier installation
    names = ["deps/jars/zookeeper-3.9.5.jar", "deps/jars/spark-core.jar", "deps/bin/jline-2.14.jar", "pyspark/sql.py"]
    unpack_jars(archive_with(tmp_path, *names))
    assert jars_folder() == own_jars()
    assert {path.name: path.read_text() for path in own_jars().iterdir()} == {"zookeeper-3.9.5.jar": names[0]}


def test_archive_without_zookeeper_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    unpack_jars(archive_with(tmp_path, "deps/jars/zookeeper-3.9.5.jar"))
    with pytest.raises(ConfigError, match=r"3\.9\.5 or newer in .*, got none"):
        unpack_jars(archive_with(tmp_path, "deps/jars/spark-core.jar"))
    assert [path.name for path in own_jars().parent.rglob("*.jar")] == ["zookeeper-3.9.5.jar"]


def test_without_jars_the_error_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyspark: run `make setup`"):
        jars_folder()


def test_free_ports_are_distinct_and_given_once() -> None:
    assert len({*free_ports(20), *free_ports(20)}) == 40


def test_ports_of_outgoing_connections_are_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "range"
    said.write_text("10000\t15000\n")
    monkeypatch.setattr(module, "_OUTGOING", said)
    assert all(15_000 < free_ports(1)[0] < 20_000 for _ in range(20))


def test_port_given_to_another_process_is_free_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port may be open only a moment later, or its server restart: another ZooKeeper there accepts its clients.
    The claims are the test's own: other tests are not given the port meanwhile."""
    first = free_ports(1)[0]
    claims = os.open(tmp_path / "claims", os.O_CREAT | os.O_RDWR)
    monkeypatch.setattr(module, "_claims", lambda: claims)
    monkeypatch.setattr(module, "_PORTS", (first, first + 1))
    monkeypatch.setattr(module, "_given", set[int]())
    assert module._is_claimed(first)
    code = (
        f"import os; from kvstore.devcluster import zookeeper; claims = os.open('{tmp_path}/claims', os.O_RDWR); "
        f"zookeeper._claims = lambda: claims; print(zookeeper._is_claimed({first})); input()"
    )

    def ask() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    with ask() as child:
        assert child.communicate("\n")[0] == "False\n", "it is this process's"
    fcntl.lockf(claims, fcntl.LOCK_UN, 1, first)
    with ask() as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        with pytest.raises(Unavailable, match="got 0"):
            free_ports(1)
        child.communicate("\n")
    assert free_ports(1) == [first]
    os.close(claims)


def test_free_port_has_no_listener() -> None:
    assert four_letters(f"127.0.0.1:{free_ports(1)[0]}", "ruok") == ""


def test_no_server_is_found_where_none_was_started(tmp_path: Path) -> None:
    assert find_running(tmp_path) is None
    (tmp_path / "zookeeper.pid").write_text("half")
    assert find_running(tmp_path) is None


def test_reused_process_id_is_not_mistaken_for_a_server(tmp_path: Path) -> None:
    (tmp_path / "zookeeper.pid").write_text(f"{os.getpid()} 127.0.0.1:1\n")
    assert find_running(tmp_path) is None
    ZooKeeperProcess(tmp_path, "127.0.0.1:1", os.getpid()).kill()
    assert psutil.pid_exists(os.getpid())


def said(server: ZooKeeperProcess, command: str) -> str:
    """Return its answer without a time limit: `four_letters` waits for a second, and a JVM can be delayed that long."""
    answers: list[str] = []

    def is_there() -> bool:
        answers.append(four_letters(server.address, command))
        return bool(answers[-1])

    wait_until_blocking(is_there, what=f"an answer to {command}")
    return answers[-1]


@needs_zookeeper
def test_server_serves_on_loopback_only_and_keeps_its_files_together(tmp_path: Path) -> None:
    process = start_standalone(tmp_path / "zk")
    try:
        process.wait_ready()
        assert said(process, "ruok") == "imok"
        assert "3.9.5" in said(process, "srvr")
        listening = {each.laddr.ip for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        settings = dict(line.split("=", 1) for line in said(process, "conf").splitlines() if "=" in line)
        assert settings["tickTime"] == "500"
        assert int(settings["minSessionTimeout"]) <= 6000 <= int(settings["maxSessionTimeout"])
        assert (tmp_path / "zk" / "zookeeper.log").stat().st_size > 0
    finally:
        process.stop()
    assert not process.is_running()
    assert not process.is_ready()
    assert not (tmp_path / "zk" / "zookeeper.pid").exists()


@needs_zookeeper
def test_killed_server_restarts_at_its_address_and_a_paused_one_can_stop(tmp_path: Path) -> None:
    process = start_standalone(tmp_path / "zk")
    process.kill()
    assert not process.is_running()
    again = restart(process)
    try:
        again.wait_ready()
        assert again.address == process.address
        again.pause()
        assert four_letters(again.address, "ruok") == ""
        again.stop()
        assert not again.is_running()
    finally:
        again.kill()


@needs_zookeeper
def test_detached_server_outlives_its_starter_and_is_found_by_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvstore.devcluster.zookeeper import start_standalone\n"
        "print(start_standalone(Path(sys.argv[1]), detached=True).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "zk")], capture_output=True, text=True, check=True
    )
    found = find_running(tmp_path / "zk")
    assert found is not None
    try:
        assert found.pid == int(started.stdout)
        found.wait_ready()
        assert os.getpgid(found.pid) != os.getpgid(0)
        assert started.stderr == ""
    finally:
        found.stop()
    assert find_running(tmp_path / "zk") is None


@needs_zookeeper
def test_server_that_cannot_start_reports_why(tmp_path: Path) -> None:
    process = start_standalone(tmp_path / "zk")
    try:
        with pytest.raises(Unavailable, match="Address already in use"):
            start_standalone(tmp_path / "second", int(process.address.rpartition(":")[2]))
        assert find_running(tmp_path / "second") is None
    finally:
        process.kill()


@needs_zookeeper
def test_ensemble_has_one_leader(tmp_path: Path) -> None:
    members = start_ensemble(tmp_path)
    try:

        def modes() -> list[str]:
            return [said(member, "srvr").partition("Mode: ")[2].partition("\n")[0] for member in members]

        roles = ["follower", "follower", "leader"]
        wait_until_blocking(lambda: sorted(modes()) == roles, what="a leader, and two who follow it")
    finally:
        for member in members:
            member.kill()


@pytest.mark.needs_zookeeper
def test_server_does_not_inherit_the_logins_of_its_starter(tmp_path: Path) -> None:
    secrets = {"KVSTORE_PASSWORD": "s3cret", "KVSTORE_METADATA_PASSWORD": "s3cret"}
    process = start_standalone(tmp_path, environ=os.environ | secrets | {"KVSTORE_OTHER": "kept"})
    try:
        environ = psutil.Process(process.pid).environ()
        assert "s3cret" not in environ.values()
        assert environ["KVSTORE_OTHER"] == "kept"
    finally:
        process.kill()
