"""An S3 server on this machine (moto's), which clients reach over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from s3fs import S3FileSystem

from kvstore.spark.snapshots import remote

BUCKET = "backups"


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of an empty bucket. The environment contains its address: for this process and for its children."""
    # Here, because its import takes half a second, and every worker collects the tests of this module.
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    where = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    before = {name: os.environ.get(name) for name in where}
    os.environ |= where
    _forget()
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _forget()
        server.stop()


def _forget() -> None:
    """Discard clients of another server than the one in the environment."""
    remote._shared.clear()
    S3FileSystem.clear_instance_cache()
