"""One process of several: trains what its argument says, and writes down what it saw. Run by test_distributed.py."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium.config.schema import Config
from podium.hosts import distributed
from podium.job.job_context import alone, join_job
from podium.models.params import GATHERED_AXES
from podium.observe.writers import MetricWriter
from podium.rollout.engine import RolloutEngine
from podium.sharding import ShardingRules, make_mesh
from podium.train import loop
from tests.whole_slots import whole_slots

COUNT = 5 * 10**12
ROWS = 16


GRADED: list[int] = []
"""The answers that the reward function below has graded in this process."""


def fails_on_the_second(completions: list[str]) -> list[float]:
    """A reward function that raises on the second host after two steps, in which it graded 8 answers each."""
    GRADED.append(len(completions))
    if os.environ["PODRUN_WORKER"] == "1" and sum(GRADED) > 16:
        raise RuntimeError("a bug of the second host")
    return [1.0 for _ in completions]


def rows_of_host(mesh: str) -> list[int]:
    """The rows of a batch that this host's devices hold."""
    sharding = ShardingRules(make_mesh(mesh), GATHERED_AXES).sharding("batch")
    indices = sharding.addressable_devices_indices_map((ROWS,)).values()
    return sorted({row for (rows,) in indices for row in range(*rows.indices(ROWS))})


def losses(config: Config) -> list[dict[str, Any]]:
    """Train; the metrics of each step as this process has them."""
    seen: list[dict[str, Any]] = []
    write = MetricWriter.write

    def keep(self: MetricWriter, step: int, metrics: dict[str, Any]) -> None:
        seen.append({"step": step, **{name: float(value) for name, value in metrics.items()}})
        write(self, step, metrics)

    MetricWriter.write = keep
    try:
        with whole_slots():
            status = loop.train(config, plain=True, job=alone())
    finally:
        MetricWriter.write = write
    assert status == 0, status
    return seen


def failure_in_all() -> str:
    """What every process is told of an error that only the first one meets."""

    def fail() -> None:
        raise ValueError("the folder is in use")

    try:
        distributed.from_leader(fail)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def equal_runs(order: dict[str, Any]) -> dict[str, Any]:
    """Train each config that is ordered, in the same processes."""
    with join_job(os.environ) as job:
        configs = [Config.model_validate(config) for config in order["configs"]]
        job.agree(configs[0].document())
        with distributed.joined(job):
            found = {
                "counts": distributed.gather(COUNT + jax.process_index()),
                "sizes": [len(text) for text in distributed.gather("x" * 10 ** (jax.process_index() + 2))],
                "share": list(range(10))[distributed.share(10)],
                "failure": failure_in_all(),
                "rows": {config.mesh: rows_of_host(config.mesh) for config in configs},
                "metrics": {config.name: losses(config) for config in configs},
            }
            x = jax.jit(
                lambda: np.arange(ROWS), out_shardings=ShardingRules(make_mesh("auto"), GATHERED_AXES).sharding("batch")
            )()
            return found | {"whole": distributed.on_host(x).tolist()}


def slow_run(order: dict[str, Any]) -> int:
    """Train as the command does, but slowly."""
    generate = RolloutEngine.generate

    def slowly(self: RolloutEngine, requests: Any, on_group: Any, on_poll: Any, enough: Any) -> Any:
        return generate(self, requests, on_group, lambda: (time.sleep(order["poll_s"]), on_poll())[1], enough)

    RolloutEngine.generate = slowly
    config = Config.model_validate(order["slow"])
    with join_job(os.environ) as job:
        job.agree(config.document())
        return loop.train(config, plain=True, job=job)


def failure(order: dict[str, Any]) -> None:
    """Work together; then one process fails and the others wait for it."""
    distributed.HEARTBEAT_S = 2
    with join_job(os.environ) as job, distributed.joined(job), distributed.failing_fast(job):
        job.watchdog.phase("sums")
        assert sum(distributed.gather(1)) == jax.process_count()
        if jax.process_index() == order["fails"]:
            raise RuntimeError("a bug of one host")
        distributed.gather(2)


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    if "configs" in order:
        Path(os.environ["PODRUN_JOB_DIR"], "found.json").write_text(json.dumps(equal_runs(order)))
    elif "slow" in order:
        sys.exit(slow_run(order))
    else:
        failure(order)
