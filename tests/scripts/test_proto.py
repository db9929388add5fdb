"""The generated modules match the present .proto files."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def generated_under(root: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (root / "kvstore/proto").glob("*_pb2*")}


def test_regenerating_protobuf_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kvstore/proto").mkdir(parents=True)
    subprocess.run([ROOT / "scripts/proto.sh", tmp_path], check=True, timeout=60)
    committed, fresh = generated_under(ROOT), generated_under(tmp_path)
    assert committed.keys() == fresh.keys()
    assert [name for name in fresh if committed[name] != fresh[name]] == []
