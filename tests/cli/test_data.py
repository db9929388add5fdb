"""`kvstore get|put|del|scan|load-tree|verify-tree` against gRPC servers in front of a model."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.cli.main import build
from kvstore.cli.manifests import MAGIC, Chunked, Symlink, decode, encode, first_difference
from kvstore.client import AsyncClient, Client
from kvstore.errors import ConditionFailed, Corrupted, InvalidRequest, OutcomeUnknown, Unavailable
from kvstore.partition.state.commands import Code, Op
from kvstore.types import ServerId
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread
from tests.waiting import PATIENCE_S

Run = Callable[..., Result]


@pytest.fixture
def cluster() -> ModelCluster:
    return ModelCluster()


@pytest.fixture
def servers(cluster: ModelCluster) -> Iterator[Servers]:
    with serving_in_a_thread(cluster) as running:
        yield running


@pytest.fixture
def kvstore(servers: Servers) -> Run:
    """Run a command line against the cluster."""
    address = servers.url.removeprefix("kv://")
    app, runner = build(["data"]), CliRunner()

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        return runner.invoke(app, [*arguments, "--server", address, "--timeout", f"{PATIENCE_S:g}"], input=stdin)

    return run


def stored(cluster: ModelCluster) -> dict[bytes, bytes]:
    return {key: record.value for part in cluster.partitions.values() for key, record in part.data.items()}


def test_stored_value_is_printed_byte_for_byte(kvstore: Run) -> None:
    content = bytes(range(256))
    assert kvstore("put", "key", stdin=content).exit_code == 0
    assert kvstore("get", "key").stdout_bytes == content


def test_value_can_be_given_on_the_command_line_or_in_a_file(kvstore: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"from a file")
    kvstore("put", "a", "from the line")
    kvstore("put", "b", "--file", str(tmp_path / "file"))
    assert [kvstore("get", key).stdout for key in "ab"] == ["from the line", "from a file"]
    assert kvstore("put", "a", "x", "--file", str(tmp_path / "file")).exit_code == 2


def test_absent_key_is_an_error(kvstore: Run) -> None:
    result = kvstore("get", "nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "absent" in result.stderr
    assert json.loads(kvstore("get", "nothing", "--json").stdout) == {"key": "nothing", "found": False}


def test_json_loses_nothing(kvstore: Run) -> None:
    kvstore("put", "text", "grün")
    kvstore("put", "bytes", stdin=b"\xff\x00")
    assert json.loads(kvstore("get", "text", "--json").stdout)["value"] == "grün"
    assert json.loads(kvstore("get", "bytes", "--json").stdout)["value_base64"] == "/wA="


def test_condition_that_is_not_met_is_an_error_that_names_the_version(kvstore: Run) -> None:
    version = json.loads(kvstore("put", "key", "1", "--json").stdout)["version"]
    refused = kvstore("put", "key", "2", "--if-absent")
    assert isinstance(refused.exception, ConditionFailed)
    assert refused.exception.version == version
    assert kvstore("put", "key", "3", "--if-version", str(version)).exit_code == 0


def test_deleted_keys_are_counted(kvstore: Run) -> None:
    kvstore("put", "a", "1")
    assert kvstore("del", "a", "b").stdout.strip() == "1"


def test_scan_lists_keys_in_order(kvstore: Run) -> None:
    for key in ("b", "a", "c", "x"):
        kvstore("put", key, f"value of {key}")
    assert kvstore("scan", "--keys").stdout.split() == ["a", "b", "c", "x"]
    assert kvstore("scan", "--keys", "--start", "b", "--end", "x").stdout.split() == ["b", "c"]
    listed = json.loads(kvstore("scan", "--prefix", "a", "--json").stdout)
    assert [(each["key"], each["value"]) for each in listed] == [("a", "value of a")]
    assert "value of c" in kvstore("scan").stdout


def test_scan_continues_with_its_token_up_and_down(kvstore: Run) -> None:
    for key in ("a", "b", "c", "d", "x"):
        kvstore("put", key, "1")
    assert kvstore("scan", "--keys", "--reverse", "--end", "d").stdout.split() == ["c", "b", "a"]
    for options, pages in ((), (["a", "b"], ["c", "d"], ["x"])), (("--reverse",), (["x", "d"], ["c", "b"], ["a"])):
        more: tuple[str, ...] = options
        for page in pages:
            found = kvstore("scan", "--keys", "--limit", "2", *more)
            assert found.stdout.split() == page
            more = tuple(found.stderr.split()[-2:])
        assert found.stderr == ""
    assert isinstance(kvstore("scan", "--token", "nonsense").exception, InvalidRequest)
    assert json.loads(kvstore("scan", "--json", "--reverse", "--limit", "1").stdout)[0]["value"] == "1"


def test_keys_are_counted(kvstore: Run) -> None:
    for key in ("a1", "a2", "b"):
        kvstore("put", key, "1")
    assert kvstore("count").stdout == "3\n"
    assert kvstore("count", "--prefix", "a").stdout == "2\n"
    assert json.loads(kvstore("count", "--start", "a2", "--end", "c", "--json").stdout) == {"keys": 2}


def test_prefix_is_deleted_only_after_confirmation(kvstore: Run) -> None:
    for key in ("a", "a1", "a2", "b"):
        kvstore("put", key, "1")
    asked = kvstore("delete-prefix", "a")
    assert (asked.exit_code, "Delete 3 keys that begin with a" in asked.stderr) == (2, True)
    assert "expected --yes, because standard input is not a terminal" in asked.stderr
    assert kvstore("count").stdout == "4\n"
    done = kvstore("delete-prefix", "a", "--yes")
    assert (done.stdout, "3 of 3 keys deleted" in done.stderr) == ("3\n", True)
    assert kvstore("scan", "--keys").stdout == "b\n"


@pytest.mark.parametrize("words", [[], ["--yes"]], ids=str)
def test_empty_prefix_is_refused_without_a_question(kvstore: Run, words: list[str]) -> None:
    kvstore("put", "a", "1")
    done = kvstore("delete-prefix", "", *words)
    assert (done.exit_code, type(done.exception), done.stderr) == (1, InvalidRequest, "")
    assert kvstore("count").stdout == "1\n"


def test_scan_that_ends_at_its_limit_reports_more_rows(kvstore: Run) -> None:
    for key in "abc":
        kvstore("put", key, key)
    limited = kvstore("scan", "--keys", "--limit", "2")
    assert limited.stdout.split() == ["a", "b"]
    assert limited.stderr.startswith(
        "kvstore: there are more than 2 keys; list all with --limit 0, or continue with --token "
    )
    for limit in ("0", "3", "4"):
        assert kvstore("scan", "--keys", "--limit", limit).stderr == ""


def test_odd_keys_are_escaped_on_lines_and_unchanged_with_nuls_and_json(kvstore: Run, cluster: ModelCluster) -> None:
    odd = [b"a\nb", b"c\x1b[2J", b"d\xff"]
    for key in odd:
        kvstore("put", os.fsdecode(key), "1")
    assert kvstore("scan", "--keys").stdout == "a\\nb\nc\\x1b[2J\nd\\xff\n"
    assert "a\\nb" in kvstore("scan").stdout
    assert "\x1b" not in kvstore("scan").stdout
    assert kvstore("scan", "-0").stdout_bytes == b"".join(key + b"\0" for key in odd)
    listed = json.loads(kvstore("scan", "--json", "--keys").stdout)
    assert listed == [{"key": "a\nb"}, {"key": "c\x1b[2J"}, {"key_base64": "ZP8="}]
    assert json.loads(kvstore("scan", "--json", "--prefix", "none").stdout) == []
    assert kvstore("scan", "-0", "--json").exit_code == 2


def test_empty_value_is_stored_only_if_it_is_meant(kvstore: Run, cluster: ModelCluster) -> None:
    refused = kvstore("put", "key", stdin=b"")
    assert isinstance(refused.exception, InvalidRequest)
    assert stored(cluster) == {}
    assert kvstore("put", "key", "").exit_code == 0
    assert stored(cluster) == {b"key": b""}


def test_reader_that_closes_the_pipe_early_is_no_failure(servers: Servers) -> None:
    with Client(servers.patient_url) as client:
        client.put_many({b"%04d" % number: b"v" * 1_000 for number in range(200)})
    address = servers.url.removeprefix("kv://")
    listing = f"{sys.executable} -m kvstore scan --limit 0 --json --timeout 60 --server {address}"
    ran = subprocess.run(["bash", "-c", f"set -o pipefail; {listing} | head -2"], capture_output=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout == b"[\n  {\n"


def test_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", "up", "--data-dir", str(tmp_path / "file" / "data")], capture_output=True
    )
    assert ran.returncode == 1
    assert ran.stderr.decode().startswith(f"kvstore: {tmp_path / 'file' / 'data'}: ")


def test_missing_cluster_name_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["get", "key", "--data-dir", str(tmp_path)])
    assert "kvstore up" in str(result.exception)


def a_tree(root: Path) -> None:
    (root / "sub" / "deeper").mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "sub" / "small").write_bytes(b"small")
    (root / "sub" / "deeper" / "large").write_bytes(os.urandom(2_500))
    (root / "exact").write_bytes(b"e" * 1_000)
    (root / "like a manifest").write_bytes(MAGIC + b'{"format": 1}')
    (root / "odd\nname ü").write_bytes(b"odd")
    os.symlink("sub/small", root / "link")
    os.symlink("sub", root / "link to a folder")
    os.symlink("nowhere", root / "broken link")
    with open(os.fsencode(root) + b"/\xff\xfe", "wb") as file:
        file.write(b"no UTF-8")


def test_tree_is_stored_and_verified_byte_for_byte(kvstore: Run, cluster: ModelCluster, tmp_path: Path) -> None:
    a_tree(tmp_path)
    loaded = json.loads(kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000", "--json").stdout)
    assert loaded == {"files": 7, "bytes": 5 + 2_500 + 1_000 + len(MAGIC) + 13 + 3 + 8, "links": 3, "problems": []}
    assert stored(cluster)[b"sub/small"] == b"small"
    assert isinstance(decode(stored(cluster)[b"sub/deeper/large"]), Chunked)
    verified = kvstore("verify-tree", str(tmp_path), "--json")
    assert verified.exit_code == 0
    assert json.loads(verified.stdout) == loaded


def test_every_difference_is_named(kvstore: Run, tmp_path: Path) -> None:
    a_tree(tmp_path)
    kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000", "--prefix", "tree/")
    (tmp_path / "sub" / "small").write_bytes(b"smalL")
    large = tmp_path / "sub" / "deeper" / "large"
    large.write_bytes(large.read_bytes()[:1_500] + b"!" + large.read_bytes()[1_501:] + b"more")
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "link").unlink()
    os.symlink("elsewhere", tmp_path / "link")
    (tmp_path / "empty").unlink()
    os.symlink("x", tmp_path / "empty")
    result = kvstore("verify-tree", str(tmp_path), "--prefix", "tree/", "--json")
    problems = {each["path"]: each["what"] for each in json.loads(result.stdout)["problems"]}
    assert result.exit_code == 1
    assert problems.keys() == {"sub/small", "sub/deeper/large", "new", "link", "empty"}
    assert "byte 4" in problems["sub/small"]
    assert "byte 1500" in problems["sub/deeper/large"]
    assert "not stored" in problems["new"]


@pytest.mark.parametrize("change", [b"", b"longer and longer " * 100])
def test_file_that_grew_or_shrank_differs(kvstore: Run, tmp_path: Path, change: bytes) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1_200)
    kvstore("load-tree", str(tmp_path), "--chunk-bytes", "500")
    (tmp_path / "file").write_bytes(change)
    assert kvstore("verify-tree", str(tmp_path)).exit_code == 1


def test_replaced_file_leaves_no_chunks_behind(kvstore: Run, cluster: ModelCluster, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"a" * 2_500, b"b" * 1_700, b"small"):
        file.write_bytes(content)
        kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000")
        assert kvstore("verify-tree", str(tmp_path)).exit_code == 0
    assert stored(cluster) == {b"file": b"small"}


def test_load_with_other_chunks_that_is_broken_off_hurts_nothing(
    kvstore: Run, cluster: ModelCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are named by content: chunks of another size would be stored under the keys of the existing ones."""
    (tmp_path / "file").write_bytes(os.urandom(10_500))
    kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000")
    before, put = stored(cluster), AsyncClient.put

    async def once(self: AsyncClient, *words: Any, **more: Any) -> Any:
        await put(self, *words, **more)
        raise Unavailable("broken off")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncClient, "put", once)
        assert kvstore("load-tree", str(tmp_path), "--chunk-bytes", "2500").exit_code == 1
    assert kvstore("verify-tree", str(tmp_path)).exit_code == 0
    assert kvstore("load-tree", str(tmp_path), "--chunk-bytes", "2500").exit_code == 0
    assert stored(cluster) == before


def test_replaced_chunks_are_removed_though_an_answer_was_lost(
    kvstore: Run, cluster: ModelCluster, tmp_path: Path
) -> None:
    """The second attempt gets the result of the first one, with the value that was replaced."""
    (tmp_path / "file").write_bytes(b"a" * 2_500)
    kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000")
    (tmp_path / "file").write_bytes(b"b" * 1_700)
    lost: list[Op] = []

    def lose_first_answer(op: Op, answer: Any) -> bool:
        if op.code != Code.PUT or op.key != b"file" or lost:
            return False
        lost.append(op)
        cluster.partitions[cluster.ring.partition_of(op.key)].run(op)
        asyncio.get_running_loop().call_soon(answer, OutcomeUnknown("lost"))
        return True

    for each in cluster.servers:
        each.intercept = lose_first_answer
    assert kvstore("load-tree", str(tmp_path), "--chunk-bytes", "1000").exit_code == 0
    assert lost
    assert len(stored(cluster)) == 3


def test_files_that_cannot_be_stored_are_named_and_the_rest_is_stored(kvstore: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    result = kvstore("load-tree", str(tmp_path), "--json")
    assert [each["path"] for each in json.loads(result.stdout)["problems"]] == ["pipe"]
    assert kvstore("get", "file").stdout == "x"


def test_tree_is_loaded_while_a_server_is_gone(kvstore: Run, servers: Servers, tmp_path: Path) -> None:
    servers.kill_from_outside(ServerId("n1"))
    for partition in servers.cluster.partitions:
        servers.cluster.leaders[partition] = ServerId("n2")
    for number in range(50):
        (tmp_path / f"{number}").write_bytes(b"%d" % number)
    assert kvstore("load-tree", str(tmp_path)).exit_code == 0
    assert kvstore("verify-tree", str(tmp_path)).exit_code == 0


def test_manifests_are_pinned() -> None:
    chunked = Chunked(2_500, "ab" * 32, 1_000)
    assert chunked.chunks == 3
    assert chunked.key(b"path", 2) == b"path\x00abababababababab\x0000000002"
    sha = "ab" * 32
    pinned = MAGIC + b'{"format":1,"type":"file","size":2500,"sha256":"%b","chunk_bytes":1000}' % sha.encode()
    assert encode(chunked) == pinned
    assert encode(Symlink(b"x\xff")) == MAGIC + b'{"format":1,"type":"symlink","target":"78ff"}'
    assert [decode(encode(each)) for each in (chunked, Symlink(b"x\xff"), b"plain")] == [
        chunked,
        Symlink(b"x\xff"),
        b"plain",
    ]


@pytest.mark.parametrize("rest", [b"", b"{}", b'{"format":2}', b'{"format":1,"type":"file","size":1}'])
def test_manifest_that_is_none_is_corrupt(rest: bytes) -> None:
    with pytest.raises(Corrupted):
        decode(MAGIC + rest)


def test_first_difference_is_where_they_part() -> None:
    assert first_difference(b"abc", b"abd") == 2
    assert first_difference(b"ab", b"abc") == 2
