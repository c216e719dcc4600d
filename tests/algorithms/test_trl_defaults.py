"""The defaults of TRL and Podium that docs/from-trl.md compares, and the settings there that make them equal."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from others_code import others_code

from podium.algorithms.advantages import group_advantages
from podium.config.schema import Config
from podium.run.resolve import resolve_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text()
SECTION = re.search(r"^## Defaults that differ\n(.*?)(?=^## )", PAGE, re.M | re.S)
assert SECTION is not None
ROWS = re.findall(r"^\| `(\w+)`[^|]* \| `([^`]+)` \| `([\w.]+)` \| `([^`]+)` \|$", SECTION[1], re.M)
PLAIN, WITH_VLLM = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", SECTION[1], re.S))


def config_with(**settings: Any) -> Config:
    return Config.model_validate({"model": "demo", "tasks": [{"name": "arithmetic"}], **settings})


def test_the_page_has_podiums_defaults() -> None:
    assert len(ROWS) == SECTION[1].count("\n| `")
    config = config_with()
    for _, _, key, expected in ROWS:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if key == "algorithm.correction":
            value = resolve_recipe(config).correction
        assert str(value) == expected, key


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # whatever TRL's own imports warn of
def test_the_page_has_trls_defaults(tmp_path: Path) -> None:
    others_code("torch")
    trl = others_code("trl")
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    for name, expected, _, _ in ROWS:
        value = getattr(theirs, name)
        assert str(getattr(value, "value", value)) == expected, name


def test_the_blocks_are_those_whose_losses_are_compared() -> None:
    """`tests/golden/record_losses.py` records TRL's loss at its defaults for the same recipes."""
    from test_trl_parity import recorder

    for block, case in ((PLAIN, "trl_defaults"), (WITH_VLLM, "trl_defaults_with_vllm")):
        ours, compared = (
            resolve_recipe(config_with(algorithm=algorithm))
            for algorithm in ({**block["algorithm"], "std_eps": None}, recorder.CASES[case].podium)
        )
        assert (ours.mean, ours.clip_low, ours.clip_high, ours.mask_truncated) == ("token", 0.2, 0.2, False)
        for field in ("loss", "old_logprobs", "correction", "correction_level", "correction_low", "correction_high"):
            assert getattr(ours, field) == getattr(compared, field), field


def test_advantages_have_trls_epsilon() -> None:
    recipe = resolve_recipe(config_with(**PLAIN))
    rewards = np.array([[0.0, 1.0, 1.0, 0.5], [0.2, 0.2, 0.3, 0.2]])
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(recipe.advantage(rewards, np.ones((2, 4))), expected, rtol=1e-5)
    assert recipe.advantage.func is group_advantages  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parity
@pytest.mark.parametrize("steps", [1, 5])
def test_an_optimizer_with_trls_settings_moves_weights_as_trls(steps: int) -> None:
    """AdamW with TRL's betas; the schedules differ as the page says, so each side's rates are checked by hand."""
    import jax
    import jax.numpy as jnp
    import optax
    import transformers

    from podium.config.optimizer import OptimizerConfig
    from podium.models.params import ParamSpec
    from podium.train.optimizer.transforms import make_optimizer

    torch = others_code("torch")
    settings = OptimizerConfig(learning_rate=1e-2, clip_norm=0.0, **PLAIN["train"]["optimizer"])
    specs = {"w": ParamSpec((3, 2), (None, None), 1.0)}
    optimizer = make_optimizer(settings, steps, specs)
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=(3, 2)), random.normal(size=(steps, 3, 2))
    ours, theirs = {"w": jnp.asarray(start, jnp.float32)}, torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    state = optimizer.init(ours)
    update = jax.numpy_dtype_promotion("standard")(optimizer.update)  # optax needs it
    adam = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    linear = transformers.get_scheduler("linear", adam, num_warmup_steps=0, num_training_steps=steps)
    for step, gradient in enumerate(gradients):
        before, old = np.asarray(ours["w"]), theirs.detach().numpy().copy()
        updates, state = update({"w": jnp.asarray(gradient, jnp.float32)}, state, ours)
        ours = optax.apply_updates(ours, updates)
        rate = adam.param_groups[0]["lr"]
        theirs.grad = torch.tensor(gradient, dtype=torch.float32)
        adam.step(), linear.step()
        assert rate == pytest.approx(1e-2 * (1 - step / steps))
        own_rate = 1e-2 * (1 - step / (steps - 1)) if steps > 1 else 1e-2
        moved = (np.asarray(ours["w"]) - before) * rate
        np.testing.assert_allclose(moved, (theirs.detach().numpy() - old) * own_rate, rtol=1e-3, atol=1e-9)
