"""Records that a run is over, in its bucket, where every command looks before it rents or starts anything.

A label goes with its slice, so it does not reach a command that was asleep while the slice existed. A record is an
empty object, gs://BUCKET/podium-over/RUN.STATUS.WORD: a new one for each stop and each end, never deleted. A command
obeys the records that were not there when it began. Runs whose folder is in no bucket of Google's have no records.
"""

import tempfile
from collections.abc import Sequence

from podium.pods.gcloud import ApiAnswer, GcloudError
from podium.pods.inventory import LABEL_LENGTH, label_text
from podium.pods.slices import Slices

GOOGLE = "gs://"
FOLDER = "podium-over"


class Endings:
    """The records of one run."""

    def __init__(self, slices: Slices, bucket: str | None, run: str) -> None:
        """`bucket` is a bucket's name; None: the run has none."""
        self.known = bucket is not None
        """Whether it is known here that the run is over, if it is."""
        self._slices = slices
        self._prefix = f"{GOOGLE}{bucket}/{FOLDER}/{run}."
        self._before: set[str] = set()

    def begin(self) -> None:
        """Ignore the records that are there now: a later command overrides them."""
        self._before = set(self._names())

    def status(self) -> int | None:
        """The exit status with which the run ended or was stopped since `begin`; None: it is not over."""
        new = set(self._names()) - self._before
        return min((int(name.split(".")[-2]) for name in new), default=None)

    def add(self, status: int, word: str) -> None:
        """Record that the run is over."""
        with tempfile.NamedTemporaryFile(prefix="podium-") as empty:
            self._ask(self._slices.gcloud.argv.put(empty.name, f"{self._prefix}{status}.{word}"))

    def _names(self) -> list[str]:
        return [each["name"] for each in self._ask(self._slices.gcloud.argv.objects(self._prefix))]

    def _ask(self, argv: Sequence[str]) -> ApiAnswer:
        """The answer to a command about the bucket; without permission, say so and do without records from then on."""
        try:
            return self._slices.ask(argv) if self.known else []
        except GcloudError as error:
            if error.kind not in ("denied", "invalid", "not_found"):
                raise
            if error.kind != "not_found":  # otherwise there are no such objects
                self.known = False
                self._slices.say(
                    f"stops cannot be recorded in the run's bucket ({error.text}); another laptop may miss one"
                )
            return []


def bucket_label(runs_dir: str) -> str | None:
    """The bucket of a run's folder as the value of a label; None: it is in none, or its name does not fit."""
    bucket = runs_dir.removeprefix(GOOGLE).partition("/")[0] if runs_dir.startswith(GOOGLE) else ""
    return bucket if bucket and label_text(bucket) == bucket and len(bucket) <= LABEL_LENGTH else None
