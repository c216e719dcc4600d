"""The environment variables of processes that run graders and environments: the trainer's variables, without API
keys.
"""

import os
import sys
from collections.abc import Sequence

from podium.config.judge import JudgeConfig

KEYS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")
"""Variables that are left out, in addition to the judges' keys: these processes handle text written by a model and do
not need secrets."""


def child_environment(judges: Sequence[JudgeConfig]) -> dict[str, str]:
    """Environment variables for a process with the same import path as this one, without any keys, including those of
    `judges`.
    """
    hidden = {*KEYS, *(judge.key_env for judge in judges)}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
