"""Records in a run's bucket that the run is over; every command checks these before it rents or starts anything.

A label is deleted with its slice, so a command that was asleep while the slice existed never sees it. A record is an
empty object, gs://BUCKET/podium-over/RUN.STATUS.WORD: each stop and each end adds one, and none is ever deleted. A
command obeys the records that did not exist when it began. Runs whose folder is not in a Google bucket have no records.
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
        """`bucket` is the bucket's name; None if the run's folder is in no bucket."""
        self.known = bucket is not None
        """Whether the end of the run can be read from the bucket."""
        self._slices = slices
        self._prefix = f"{GOOGLE}{bucket}/{FOLDER}/{run}."
        self._before: set[str] = set()
        self.heard: int | None = None
        """The exit status that the label of the run's slice has told; it is remembered when the slice is gone."""

    def begin(self) -> None:
        """Ignore the existing records, because a later command overrides them."""
        self._before = set(self._names())

    def status(self) -> int | None:
        """The exit status with which the run ended or was stopped since `begin`; None if it is not over."""
        new = set(self._names()) - self._before
        return min((int(name.split(".")[-2]) for name in new), default=self.heard)

    def add(self, status: int, word: str) -> None:
        """Record that the run is over."""
        with tempfile.NamedTemporaryFile(prefix="podium-") as empty:
            self._ask(self._slices.gcloud.argv.put(empty.name, f"{self._prefix}{status}.{word}"))

    def _names(self) -> list[str]:
        return [each["name"] for each in self._ask(self._slices.gcloud.argv.objects(self._prefix))]

    def _ask(self, argv: Sequence[str]) -> ApiAnswer:
        """Run a command about the bucket and return its answer. Without permission, print that, and ignore records from
        then on.
        """
        try:
            return self._slices.ask(argv) if self.known else []
        except GcloudError as error:
            if error.kind not in ("denied", "invalid", "not_found"):
                raise
            if error.kind != "not_found":  # otherwise the objects do not exist
                self.known = False
                self._slices.say(
                    f"stops cannot be recorded in the run's bucket ({error.text}), so commands on other laptops may "
                    "miss them"
                )
            return []


def bucket_label(runs_dir: str) -> str | None:
    """The bucket of a run's folder as a label's value; None if the folder is in no bucket, or the name does not fit."""
    bucket = runs_dir.removeprefix(GOOGLE).partition("/")[0] if runs_dir.startswith(GOOGLE) else ""
    return bucket if bucket and label_text(bucket) == bucket and len(bucket) <= LABEL_LENGTH else None
