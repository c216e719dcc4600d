"""S3 on loopback, by moto: as `fake_gcs`, the objects and the environment in which a process finds them."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_REGION": "us-east-1"}


class FakeS3:
    """One bucket."""

    def __init__(self, url: str) -> None:
        own = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing", "region_name": "us-east-1"}
        self._client: Any = boto3.client("s3", endpoint_url=url, **own)
        self._client.create_bucket(Bucket=BUCKET)

    @property
    def objects(self) -> Mapping[tuple[str, str], bytes]:
        """(bucket, name) -> bytes, now."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {
            (BUCKET, name): self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
            for name in names
            if not name.endswith("/")
        }

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Write an object."""
        self._client.put_object(Bucket=bucket, Key=name, Body=data)


@contextmanager
def running() -> Iterator[tuple[FakeS3, dict[str, str]]]:
    """The server, and the environment in which a process finds it instead of Amazon's."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        urlopen(f"{url}/moto-api/reset", b"").close()  # the objects of a process's servers are the same
        yield FakeS3(url), KEYS | {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
    finally:
        server.stop()
