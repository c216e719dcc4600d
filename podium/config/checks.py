"""What a config says about things outside it: the tasks' code and data, and the model where it is already on disk.

Asked for before anything heavy starts. Nothing is downloaded, and nothing here imports jax.
"""

from podium.config.errors import ConfigError, Problem
from podium.config.load import Loaded


def check_tasks(loaded: Loaded) -> None:
    """Raises ConfigError where a task is not known, or does not take its options or its data."""
    from podium.tasks.registry import make_task

    problems = []
    for index, task in enumerate(loaded.config.tasks):
        try:
            make_task(task)
        except (ValueError, OSError) as error:
            key = f"tasks.{index}"
            named = [option for option in task.options if f"options.{option}:" in str(error)]
            path = f"{key}.options.{named[0]}" if named else f"{key}.name"
            problems.append(Problem(key=key, message=str(error), places=_places(loaded, path)))
    if problems:
        raise ConfigError(problems)


def check_model(loaded: Loaded) -> None:
    """Raises ConfigError where the model is on disk and cannot be used, or is too short for the rollout's lengths."""
    from podium.models.architecture import ModelError
    from podium.models.source import on_disk, read_architecture, resolve

    folder = on_disk(loaded.config.model)
    if folder is None:
        return
    try:
        longest = read_architecture(resolve(folder)).max_positions
    except ModelError as error:
        raise ConfigError([Problem(key="model", message=str(error), places=_places(loaded, "model"))]) from None
    rollout = loaded.config.rollout
    asked = rollout.max_prompt_tokens + rollout.max_new_tokens
    if asked > longest:
        message = (
            f"{rollout.max_new_tokens}, with rollout.max_prompt_tokens {rollout.max_prompt_tokens}, makes sequences of "
            f"{asked} tokens, and {loaded.config.model} knows {longest} positions; lower one by {asked - longest}"
        )
        keys = ("rollout.max_new_tokens", "rollout.max_prompt_tokens")
        places = tuple(place for key in keys for place in _places(loaded, key))
        raise ConfigError([Problem(key=keys[0], message=message, places=places)])


def _places(loaded: Loaded, key: str) -> tuple[str, ...]:
    return (loaded.provenance[key],) if key in loaded.provenance else ()
