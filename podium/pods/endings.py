"""Records in a run's bucket that the run is over; every command checks these before it rents or starts anything.

A label is deleted with its slice, so a command that was asleep while the slice existed never sees it. A record is an
empty object, gs://BUCKET/podium-over/RUN.STATUS.WORD: each stop and each end adds one, and none is ever deleted. A
command obeys the records that did not exist when it was given. Runs whose folder is not in a Google bucket have no
records.
"""

import datetime
import math
import tempfile
from collections.abc import Sequence

from podium.pods.gcloud import ApiAnswer, GcloudError
from podium.pods.inventory import LABEL_LENGTH, label_text
from podium.pods.slices import Slices

GOOGLE = "gs://"
FOLDER = "podium-over"
LATE_S = 60.0
"""Seconds within which a command that was just given looks at the records."""


class Endings:
    """The records of one run."""

    def __init__(self, slices: Slices, bucket: str | None, run: str) -> None:
        """`bucket` is the bucket's name; None if the run's folder is in no bucket."""
        self.known = bucket is not None
        """Whether the end of the run can be read from the bucket."""
        self._slices = slices
        self._folder = f"{GOOGLE}{bucket}/{FOLDER}"
        self._run = run
        self._before: set[str] = set()
        self.heard: int | None = None
        """The exit status that the label of the run's slice has told; it is remembered when the slice is gone."""

    def begin(self) -> None:
        """Ignore the records that existed when the command was given, because it overrides them.

        If it could not look at once, an object of its own tells Google's time, and so which records are older.
        """
        records = self._records(f"{self._run}.")
        self._before = set(records)
        if records and self._ago_s() > LATE_S:
            mark = f"now.{self._slices.random_word('WORD')}"
            self._put(mark)
            given = min(self._records(mark).values(), default=math.inf) - self._ago_s()
            self._before = {name for name, created in records.items() if created <= given}

    def _ago_s(self) -> float:
        """Seconds since the command was given."""
        return self._slices.clock.time() - self._slices.began

    def status(self) -> int | None:
        """The exit status with which the run ended or was stopped since the command was given; None if it is not
        over.
        """
        new = self._records(f"{self._run}.").keys() - self._before
        return min((int(name.split(".")[-2]) for name in new), default=self.heard)

    def add(self, status: int, word: str) -> None:
        """Record that the run is over."""
        self._put(f"{self._run}.{status}.{word}")

    def _put(self, name: str) -> None:
        with tempfile.NamedTemporaryFile(prefix="podium-") as empty:
            self._ask(self._slices.gcloud.argv.put(empty.name, f"{self._folder}/{name}"))

    def _records(self, start: str) -> dict[str, float]:
        """The objects whose names start like this, and when each was created, in Unix seconds by Google's clock."""
        found = self._ask(self._slices.gcloud.argv.objects(f"{self._folder}/{start}"))
        return {each["name"]: datetime.datetime.fromisoformat(each["creation_time"]).timestamp() for each in found}

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
