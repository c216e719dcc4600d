"""Record what the real gcloud says in each case of gcloud_cases.py: python -m tests.pods.record_gcloud

Writes recorded_gcloud.json. Takes three minutes, two of them waiting for gcloud to give up.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from podium.pods.gcloud import Finished, run_process
from tests.pods.fake_tpu import FakeTpu, serve
from tests.pods.gcloud_cases import CASES, ZONE, Case, without_times
from tests.pods.hosts import gcloud_environment

RECORDED = Path(__file__).with_name("recorded_gcloud.json")


def real_answer(case: Case, folder: Path) -> tuple[Finished, FakeTpu]:
    """What the real gcloud answers, and the fake that it spoke to."""
    fake = FakeTpu(zones=(ZONE, "us-east5-b"), provision_s=0.6, operation_s=0.1)
    with serve(fake) as url:
        environment = gcloud_environment(folder, url)
        if not case.project:
            del environment["CLOUDSDK_CORE_PROJECT"]
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            for argv in case.before:
                done = run_process(argv, 120.0)
                assert done.returncode == 0, done
            case.prepare(fake)
            return run_process(case.argv, 120.0), fake
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    """Record all cases, or those that are named."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    version = subprocess.run(["gcloud", "version", "--format=json"], capture_output=True, text=True, check=True).stdout
    recorded["version"] = json.loads(version)["Google Cloud SDK"]
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or CASES:
            done, _ = real_answer(CASES[name], Path(folder))
            recorded[name] = {
                "argv": list(done.argv),
                "returncode": done.returncode,
                "stdout": without_times(done.stdout),
                "stderr": without_times(done.stderr),
            }
            print(name, done.returncode)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
