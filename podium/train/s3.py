"""Checkpoints in s3:// buckets. orbax hands gs:// paths to tensorstore as buckets and takes all others for folders of
this machine; tensorstore itself has a driver for S3, and here orbax is told of it.

Of orbax 0.12.8 this replaces three functions by which it tells the two apart, and changes nothing for other paths. The
endpoint is Amazon's, or another's (MinIO, R2) that AWS_ENDPOINT_URL names, as for the packages that read and write the
records.
"""

import os
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

S3 = "s3://"


def take_s3_for_a_bucket() -> None:
    """Have orbax write and read s3:// paths through tensorstore's driver; once in a process."""
    of_gcs, is_gcs, normalized = (
        gcs_utils.get_kvstore_for_gcs,
        tensorstore_utils._use_gcs_driver,
        tensorstore_utils._normalize_path,
    )
    gcs_utils.get_kvstore_for_gcs = lambda path: s3_store(path) if path.startswith(S3) else of_gcs(path)
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(S3) or is_gcs(path)
    tensorstore_utils._normalize_path = lambda path: normalized(path).replace("s3:/", S3)


def s3_store(path: str) -> dict[str, Any]:
    """What tensorstore calls the folder of a bucket."""
    bucket, _, folder = path.removeprefix(S3).partition("/")
    store = {"driver": "s3", "bucket": bucket, "path": folder.rstrip("/") + "/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        store |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return store
