"""The settings of a critic: a model that learns to estimate the rewards to come, for recipe ppo."""

from podium.config.section import NotNegative, Positive, PositiveFloat, Section


class CriticConfig(Section):
    """The critic of recipe ppo: its first weights, and how it learns (docs/algorithms.md)."""

    model: str | None = None
    """The model that it starts from, named like `model`: a language model, which gets a new head, or a critic or reward
    model with one label. Its tokenizer must be the policy's, token by token. Unset: the policy's `model`."""
    learning_rate: PositiveFloat = 1e-5
    """Its peak learning rate; all other settings are those of `train.optimizer`."""
    warmup_steps: NotNegative = 0
    """Steps at the start of the run in which it learns alone, and the policy stays as it is."""
    updates: Positive = 1  # verl: critic.ppo_epochs
    """How often it learns from each of a step's minibatches."""
    clip: PositiveFloat | None = 0.5  # verl: critic.cliprange_value
    """How far an estimate may move in a step before its gradient stops, in units of the reward; null: without bound."""
