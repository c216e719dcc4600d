"""The environment variables of processes that run graders and environments: those of the trainer, without its keys."""

import os
import sys
from collections.abc import Sequence

from podium.config.judge import JudgeConfig

KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")
"""Left out, beside the keys of judges: these processes handle what a model has written, and need none of them."""


def child_environment(judges: Sequence[JudgeConfig]) -> dict[str, str]:
    """The variables of a process that imports as this one does; without keys, those of `judges` included."""
    hidden = {*KEYS, *(judge.key_env for judge in judges)}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
