"""Makes the packages that read and write buckets wait if a bucket does not respond (`podium.patience`), and name the
command that renews an expired login.

Everything of a run that is in a bucket goes through gcsfs or s3fs (records, what orbax writes in addition to arrays) or
through tensorstore (arrays). In gcsfs and s3fs, all requests pass through one method of a class; a subclass whose
method waits is registered instead. For tensorstore, the number of retries is set. So a save in the background waits in
its own thread, and its callers need not know.
"""

import asyncio
import functools
import importlib
from collections.abc import Mapping

from podium.patience import PATIENCE_S, BucketError, Patience, fault_of

_REQUESTS: Mapping[str, tuple[str, str, str]] = {
    "gs": ("gcsfs", "GCSFileSystem", "_call"),
    "s3": ("s3fs", "S3FileSystem", "_call_s3"),
}
"""For each kind of bucket, the package, its class, and the method that all requests pass through."""
ATTEMPTS = 70
"""Maximum attempts of one request, while others are answered."""
LONGEST_S = 32.0
RETRIES: Mapping[str, object] = {
    "max_retries": 5 + round(PATIENCE_S / LONGEST_S),  # after 1, 2, 4, 8, 16, and then each 32 seconds
    "initial_delay": "1s",
    "max_delay": f"{LONGEST_S:g}s",
}
"""Settings for how often tensorstore retries a request."""


@functools.cache
def wait_in_requests(kind: str) -> None:
    """Make the package for this kind of bucket (`gs`, `s3`) wait, and raise BucketError if the login has expired;
    does nothing if it is not installed.
    """
    package, of, method = _REQUESTS[kind]
    try:
        given = getattr(importlib.import_module(package), of)
    except ImportError:  # reported where the bucket is used
        return
    import fsspec
    from fsspec import asyn
    from fsspec import config as settings

    store = "gcs" if kind == "gs" else kind
    settings.conf.setdefault(store, {})["use_listings_cache"] = False  # other hosts write there too
    request = getattr(given, method)

    patience = Patience(f"the bucket ({kind}://)")  # of all requests: after half an hour without an answer, none waits

    async def patient(self: object, *arguments: object, **more: object) -> object:
        for left in reversed(range(ATTEMPTS)):
            try:
                answer = await request(self, *arguments, **more)
            except Exception as error:
                fault = fault_of(error)
                if fault == "login":
                    raise BucketError(f"{kind}://", error) from error
                if fault != "outage" or not left:
                    raise
                await asyncio.sleep(patience.next_s(error))
            else:
                patience.reset()
                return answer
        raise AssertionError("the last attempt returns or raises")

    both = {method: patient, method.removeprefix("_"): asyn.sync_wrapper(patient)}
    fsspec.register_implementation(store, type(f"Patient{of}", (given,), both), clobber=True)
