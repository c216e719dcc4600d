"""Checkpoints in buckets. orbax treats gs:// paths as buckets and every other path as a local folder, although
tensorstore has an S3 driver; this module makes orbax use it, and wait for either kind (`podium.buckets`).

It replaces three private functions of orbax 0.12.8 that distinguish buckets from folders. It does so only in processes
with a path in S3, so no other run depends on these functions.
The endpoint is Amazon's, or the one in AWS_ENDPOINT_URL (MinIO, R2), as for the packages that read and write records.
"""

import contextlib
import functools
import os

import orbax.checkpoint as ocp

from podium.buckets import RETRIES
from podium.train.checkpoints.step_files import CheckpointError

S3 = "s3://"


@functools.cache
def take_s3_for_a_bucket() -> None:
    """Make orbax write and read s3:// paths through tensorstore's driver.

    Raises CheckpointError if the installed orbax does not have the functions that this replaces.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils

        of_gcs = gcs_utils.get_kvstore_for_gcs
        is_gcs = tensorstore_utils._use_gcs_driver
        normalized = tensorstore_utils._normalize_path
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"orbax-checkpoint {ocp.__version__} cannot write to S3 ({error}); install orbax-checkpoint 0.12.8, or use "
            "a folder or a gs:// bucket"
        ) from error
    gcs_utils.get_kvstore_for_gcs = lambda path: s3_store(path) if path.startswith(S3) else of_gcs(path)
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(S3) or is_gcs(path)
    tensorstore_utils._normalize_path = lambda path: normalized(path).replace("s3:/", S3)


@functools.cache
def wait_for_gcs() -> None:
    """Make orbax's requests for gs:// paths wait as long as other requests; an orbax without the patched function waits
    less.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.path import gcs_utils

        of_gcs = gcs_utils.get_kvstore_for_gcs
        gcs_utils.get_kvstore_for_gcs = lambda path: of_gcs(path) | {"gcs_request_retries": RETRIES}


def s3_store(path: str) -> dict[str, object]:
    """The tensorstore specification of a folder in a bucket."""
    bucket, _, folder = path.removeprefix(S3).partition("/")
    store: dict[str, object] = {"driver": "s3", "bucket": bucket, "path": folder.rstrip("/") + "/"}
    store["s3_request_retries"] = RETRIES
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # or else Amazon's library logs that there are no files of credentials
        store["aws_credentials"] = {"type": "environment"}
    if endpoint:
        store |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return store
